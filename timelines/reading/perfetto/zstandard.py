"""Unpacks what is compressed with zstd, which Python 3.11 has no module for.

pyarrow can do it, but takes 0.2 s of CPU and 40 MB to import. So children only import it if a trace needs it: the trace
is then read again by children that call `load` before they lose the right to open files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_FRAME = bytes.fromhex("28b52ffd200421000061626364")  # "abcd"
_open: Callable[[bytes], Any] | None = None


def load() -> None:
    """Imports the code that unpacks."""
    global _open
    import pyarrow as pa

    def opened(packed: bytes) -> Any:
        return pa.CompressedInputStream(pa.BufferReader(packed), "zstd")

    _open = opened
    unpacked(_FRAME, 4)  # so that libraries are loaded before the sandbox forbids it


def is_loaded() -> bool:
    """Whether this process can unpack."""
    return _open is not None


def unpacked(packed: bytes, most: int) -> tuple[bytes, bool]:
    """Returns the unpacked bytes, and whether these are all.

    Args:
        packed: frames of zstd.
        most: bytes to return at most. Memory is used for these and for the window of a frame only.

    Raises:
        ValueError: the bytes are not zstd, or damaged.
    """
    assert _open is not None
    try:
        with _open(packed) as stream:
            found: bytes = stream.read(most + 1)
    except (OSError, ValueError) as error:  # pyarrow.ArrowException is a ValueError, or an OSError
        raise ValueError(str(error)) from None
    return found[:most], len(found) <= most
