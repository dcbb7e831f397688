"""The arguments of events as they were imported: JSON texts, which a trace does not hold in memory.

They are written to a temporary file, which the kernel pages in and out: outputs need them in order of time, and a
capture has them in the order of its files.
"""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.texts import escaped_json
from iaprof.sandbox.worker import Closing

_EMPTY, _NEW_LINE = (pa.scalar(text, pa.large_string()) for text in ("", "\n"))
_TAKEN_AT_ONCE = 1 << 20  # rows, whose pages stay in memory
_MOST = 1 << 40  # follows the end of every text
_decode = msgspec.json.Decoder(msgspec.Raw).decode
_decode_lines = msgspec.json.Decoder(msgspec.Raw).decode_lines


def members_of(text: str | None) -> dict[str, Any]:
    """Returns the members of an event's arguments, as `Arguments` has them; none if the text is damaged."""
    try:
        members: dict[str, Any] = json.loads(f"{{{text or ''}}}")
    except (ValueError, RecursionError):
        return {}
    return members


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
            coded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
            members = escaped_json(_members(coded.dictionary.cast(pa.large_string())))
            plain = pc.fill_null(members.take(coded.indices), _EMPTY)
            of_chunk, content = _content(plain)
            ends.append(of_chunk + size)
            self._file.write(content)
            size += len(content)
        self._file.flush()
        self._mapped = mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
        self._taken = 0
        offsets = np.concatenate(ends)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._mapped)]
        self._texts = pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)

    def close(self) -> None:
        """Removes the file, once the texts are no longer used."""
        self._file.close()

    def take(self, rows: NDArray[np.int64]) -> pa.StringArray:
        """Returns the members of the objects of rows, without braces; null for those without members and rows < 0."""
        self._taken += len(rows)
        if self._taken >= _TAKEN_AT_ONCE and isinstance(self._mapped, mmap.mmap):
            self._taken = 0
            self._mapped.madvise(mmap.MADV_DONTNEED)  # the kernel keeps them, but not as memory of this process
        found = self._texts.take(pa.array(rows, mask=(rows < 0) | (rows >= len(self._texts)))).cast(pa.string())
        return pc.if_else(pc.equal(found, _EMPTY.cast(pa.string())), pa.scalar(None, pa.string()), found)


def _members(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Returns objects without their braces; what is not an object as a member `args`, so that any JSON stays JSON.

    Captures are untrusted: a text may end one object and begin another one, or make one together with the next text.
    """
    trimmed = pc.ascii_trim_whitespace(texts)
    are_objects = pc.and_(pc.starts_with(trimmed, "{"), pc.ends_with(trimmed, "}"))
    are_objects = _are_each_one_value(trimmed, pc.fill_null(are_objects, fill_value=False))
    inside = pc.binary_replace_slice(trimmed, start=-1, stop=_MOST, replacement="")
    inside = pc.ascii_trim_whitespace(pc.binary_replace_slice(inside, start=0, stop=1, replacement=""))
    odd = texts.filter(pc.invert(are_objects)).to_pylist()
    others = pa.array([f'"args":{json.dumps(text)}' if text else None for text in odd], pa.large_string())
    return pc.replace_with_mask(inside, pc.invert(are_objects), others)


def _are_each_one_value(texts: pa.LargeStringArray, are_objects: pa.BooleanArray) -> pa.BooleanArray:
    """Tells which of the texts that begin and end as objects are valid JSON.

    The texts are decoded together, one in each line. If there are as many values as texts, each text has one: a string
    cannot continue in the next line, and nothing of a value follows its closing brace.
    """
    chosen = texts.filter(are_objects)
    _, lines = _content(pc.binary_join_element_wise(chosen, _NEW_LINE, _EMPTY))
    try:
        if len(_decode_lines(lines)) == len(chosen):
            return are_objects
    except (msgspec.MsgspecError, RecursionError):
        pass
    found = are_objects.to_numpy(zero_copy_only=False).copy()
    found[found] = [_is_json(text) for text in chosen.to_pylist()]
    return pa.array(found)


def _content(texts: pa.LargeStringArray) -> tuple[NDArray[np.int64], memoryview]:
    """Returns the offsets at which texts end, and the bytes of all texts, concatenated."""
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    if data is None or not len(texts):
        return np.zeros(len(texts), np.int64), memoryview(b"")
    return places[1:] - places[0], memoryview(data)[int(places[0]) : int(places[-1])]


def _is_json(text: str) -> bool:
    try:
        _decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
