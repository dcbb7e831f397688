"""What programs in Python need to launch, and to tell each launch's frames.

OUTPUT gets lines of

TID	[[FILE, QUALIFIED NAME, LINE], ...]   the innermost first
"""

import ctypes
import json
import os
import sys
import threading
import time

_lock = threading.Lock()


def prepare(library, elf, kernel, output):
    """From now on `launch` works."""
    global _calls, _told
    _calls = ctypes.CDLL(library)  # which releases the GIL
    assert not _calls.prepare(elf.encode(), kernel.encode())
    _told = open(output, "w")


def wait_for(file):
    while not os.path.exists(file):
        time.sleep(0.01)


def launch():
    _tell(), _calls.launch()


def call_in_a_thread(function):
    """Calls it in a thread that is not Python's, as long as it gives something else than 0."""
    _calls.call_in_a_thread(ctypes.CFUNCTYPE(ctypes.c_int)(function))


def call_between_launches(function, launches, keeps_state):
    """The same, after so many launches each time, 3, that this thread does itself, perhaps with a state of its own."""

    def called():
        for _ in range(launches):
            _tell(of_python=False)
        return function()

    _calls.call_between_launches(ctypes.CFUNCTYPE(ctypes.c_int)(called), keeps_state)


def _tell(of_python=True):
    frame, found = sys._getframe(1) if of_python else None, []
    while frame is not None:
        found.append([frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno])
        frame = frame.f_back
    with _lock:
        _told.write(f"{threading.get_native_id()}\t{json.dumps(found)}\n")
        _told.flush()
