"""The arguments of events as they were imported: JSON texts, which a trace does not hold in memory.

They are written to a temporary file, which the kernel pages in and out: outputs need them in order of time, and a
capture has them in the order of its files.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.sandbox.closing import Closing

_EMPTY = pa.scalar("", pa.large_string())
_TAKEN_AT_ONCE = 1 << 20  # rows, whose pages stay in memory
_MOST = 1 << 40  # behind the end of every text


class Arguments(Closing):
    """Texts by row number; also a context manager."""

    def __init__(self, texts: Iterable[pa.Array]) -> None:
        """Writes texts to a temporary file.

        Args:
            texts: of the rows from 0 on, in chunks: string, binary or dictionary arrays; nulls are empty.
        """
        self._file = tempfile.TemporaryFile()
        ends = [np.zeros(1, np.int64)]
        size = 0
        for chunk in texts:
            plain = chunk.dictionary_decode() if pa.types.is_dictionary(chunk.type) else chunk
            plain = _members(plain.cast(pa.large_string()))
            _, offsets, data = plain.buffers()
            starts = np.frombuffer(offsets, np.int64)[plain.offset : plain.offset + len(plain) + 1]
            ends.append(starts[1:] - starts[0] + size)
            if data is not None:
                self._file.write(data[int(starts[0]) : int(starts[-1])])
            size += int(starts[-1] - starts[0]) if len(plain) else 0
        self._file.flush()
        self._mapped = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
        self._taken = 0
        offsets = np.concatenate(ends)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._mapped)]
        self._texts = pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)

    def close(self) -> None:
        """Removes the file, once nobody uses the texts any more."""
        self._file.close()

    def take(self, rows: NDArray[np.int64]) -> pa.StringArray:
        """Returns the members of the objects of rows, without braces; null for those without members and rows < 0."""
        self._taken += len(rows)
        if self._taken >= _TAKEN_AT_ONCE and isinstance(self._mapped, mmap.mmap):
            self._taken = 0
            self._mapped.madvise(mmap.MADV_DONTNEED)  # the kernel keeps them, but not as memory of this process
        found = self._texts.take(pa.array(rows, mask=(rows < 0) | (rows >= len(self._texts)))).cast(pa.string())
        return pc.if_else(pc.equal(found, _EMPTY.cast(pa.string())), pa.scalar(None, pa.string()), found)


def _members(objects: pa.LargeStringArray) -> pa.LargeStringArray:
    """Returns objects without their braces; empty for null and for what is no object."""
    trimmed = pc.ascii_trim_whitespace(objects)
    are_objects = pc.and_(pc.starts_with(trimmed, "{"), pc.ends_with(trimmed, "}"))
    inside = pc.binary_replace_slice(trimmed, start=-1, stop=_MOST, replacement="")
    inside = pc.ascii_trim_whitespace(pc.binary_replace_slice(inside, start=0, stop=1, replacement=""))
    return pc.if_else(pc.fill_null(are_objects, fill_value=False), inside, _EMPTY)
