"""The entry point of `iaprof`: from here on, Ctrl-C ends it without a traceback.

Standard files that are closed become /dev/null, and stdout has a buffer.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
import time
from types import FrameType

from iaprof.basics.libraries import restrict_libraries, use_one_thread

_STANDARD_FILES = 3
_CALLBACK_S = 0.01  # longer than a destructor or a callback usually takes


def open_standard_files() -> None:
    """Opens /dev/null as each of descriptors 0, 1 and 2 that is closed; the programs that are started inherit it.

    Otherwise a file that is opened later would get what is written to stderr.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < _STANDARD_FILES:
        os.set_inheritable(fd, True)
    os.close(fd)


def main() -> None:
    """Imports the command and runs it."""
    open_standard_files()
    handler = signal.getsignal(signal.SIGINT)
    at_once = handler if handler == signal.SIG_IGN else signal.SIG_DFL  # shells have background commands ignore it
    signal.signal(signal.SIGINT, at_once)  # during the slow imports
    gc.disable()  # until a verb runs: what is imported stays
    use_one_thread()
    restrict_libraries()
    _buffer_stdout()
    from iaprof.cli.main import main as run

    sys.unraisablehook = _interrupt_again
    try:
        signal.signal(signal.SIGINT, handler)
        run()
    except KeyboardInterrupt:  # typer handles it only while a verb runs
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, at_once)  # while Python cleans up, too
        gc.freeze()  # which otherwise looks at all objects twice, 20 ms after a report


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Repeats Ctrl-C that Python ignored, as it came while a destructor or a callback ran; prints other errors."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    try:
        threading.Thread(target=_interrupt_soon, daemon=True).start()
    except RuntimeError:  # no memory for a thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next Ctrl-C ends it


def _interrupt_soon() -> None:
    """Interrupts the main thread, once it is no longer in the function above: Python would ignore that again."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    frame: FrameType | None
    while True:
        time.sleep(_CALLBACK_S)
        frame = sys._current_frames().get(main_thread)
        while frame is not None and frame.f_code is not _interrupt_again.__code__:
            frame = frame.f_back
        if frame is None:
            break
    signal.pthread_kill(main_thread, signal.SIGINT)


def _buffer_stdout() -> None:
    """Gives stdout a buffer if PYTHONUNBUFFERED took it away.

    Without one, Python drops what a short write leaves: of a full disk or a closed pipe nobody would know.
    """
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and isinstance(out.buffer, io.RawIOBase):
        encoding, errors, in_lines = out.encoding, out.errors, out.isatty()
        buffer = io.BufferedWriter(out.detach())
        sys.stdout = io.TextIOWrapper(buffer, encoding, errors, line_buffering=in_lines)
        sys.__stdout__ = sys.stdout  # type: ignore[misc]  # shutil asks it for the size of the terminal
