"""The messages between a sandboxed child and its parent. The child imports no more of the parent's side than this."""

from __future__ import annotations

import select
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iaprof.sandbox.deadline import Deadline

REQUEST = struct.Struct("<QQ")  # length of the JSON and of the data that follow
ANSWER = struct.Struct("<Q")  # length of what follows: JSON, or bytes if IS_BYTES is set
IS_BYTES = 1 << 63
LONGEST_DATA = 256 << 20  # bytes
_MOST_AT_ONCE = 1000  # parts of an answer, which a hostile child may send byte by byte


def receive(channel: socket.socket, length: int, deadline: Deadline | None = None) -> bytearray:
    """Receives `length` bytes of a stream.

    Args:
        channel: a stream socket.
        length: number of bytes.
        deadline: of the other end; None to wait without a limit.

    Raises:
        ConnectionResetError: the other end was closed.
        OSError: the deadline has passed, or the other end is dead.
    """
    received = bytearray(length)
    view = memoryview(received)
    waiting = select.poll()
    waiting.register(channel, select.POLLIN)
    if deadline is not None:
        channel.settimeout(0)
    number = 0
    while view:
        number += 1
        try:
            count = channel.recv_into(view)
        except BlockingIOError:  # what has come is taken in any case: we may have been stopped, too
            assert deadline is not None
            waiting.poll(1000 * deadline.left())
            continue
        if count == 0:
            raise ConnectionResetError
        view = view[count:]
        if deadline is not None and number % _MOST_AT_ONCE == 0:
            deadline.left()
    return received
