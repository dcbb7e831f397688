"""Signals while a query runs: DuckDB looks for them between its tasks only, and one task can take minutes."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interrupting(interrupt: Callable[[], None]) -> Iterator[None]:
    """Calls `interrupt` in a thread when a signal that ends the verb comes within the block.

    The signal's own handler is called as ever: when the main thread is back in Python.
    """
    if threading.current_thread() is not threading.main_thread():  # only there are signals handled
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    waiting = threading.Thread(target=_wait, args=(reader, interrupt), daemon=True)
    before = signal.set_wakeup_fd(-1)
    try:
        with contextlib.suppress(RuntimeError):  # no memory for a thread: DuckDB's own look has to do
            waiting.start()
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        if waiting.ident is not None:
            waiting.join()
        reader.close()


def _wait(reader: socket.socket, interrupt: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):  # Ctrl-C ended the block before this began
        while number := reader.recv(1):
            if number[0] in _ENDING:
                interrupt()
