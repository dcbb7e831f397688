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
    with reader, writer:
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        waiting = threading.Thread(target=_wait, args=(reader, interrupt), daemon=True)
        waiting.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            writer.close()
            waiting.join()


def _wait(reader: socket.socket, interrupt: Callable[[], None]) -> None:
    while number := reader.recv(1):
        if number[0] in _ENDING:
            interrupt()
