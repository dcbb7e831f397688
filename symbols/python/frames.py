"""The Python frames of `stack` rows: name, file and line of each, and CPython's own frames, which they replace.

Python frames are named `py::function:file`, as CPython itself names them in perf maps. Between two of them are C
functions of the interpreter, and before the first one the C functions that started it.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import combined
from iaprof.formats.header.stack_counts import DEEPEST, NO_CODE, Completeness
from iaprof.formats.ranges import ranges
from iaprof.symbols.names.names import Module, ModuleKind

PYTHON_FUNCTION = "py::"
NOT_COPIED = "[unknown]"
"""Replaces the name of a Python function whose code object could not be read."""
_DELETED = " (deleted)"
# The executable and the library, also of debug (d), free-threaded (t) and old (m) builds.
_INTERPRETER = re.compile(r"python(3(\.\d{1,3}[dmt]{0,2})?)?|libpython3\.\d{1,3}[dmt]{0,2}\.so[0-9.]*")

_MISSING = {
    Completeness.DEEP: "[Python cut: too many functions]",
    Completeness.DAMAGED: "[Python cut: what follows is not a function]",
}


class StackFrame(Protocol):
    """What `without_interpreter` needs to know about a frame."""

    @property
    def is_python(self) -> bool:
        """Whether it is a Python function."""

    @property
    def is_of_interpreter(self) -> bool:
        """Whether its code is CPython's own."""


AnyFrame = TypeVar("AnyFrame", bound=StackFrame)


def without_interpreter(frames: list[AnyFrame]) -> list[AnyFrame]:
    """Returns the frames without CPython's own if there are Python functions among them; else all frames.

    C and C++ functions of other files stay, whether Python calls them or they call Python.
    """
    if True not in [frame.is_python for frame in frames]:
        return frames
    return [frame for frame in frames if frame.is_python or not frame.is_of_interpreter]


def python_function(frame: str) -> str | None:
    """Returns the name of the Python function in a frame's text, without its file; None if there is none."""
    if not frame.startswith(PYTHON_FUNCTION):
        return None
    name = frame.removeprefix(PYTHON_FUNCTION).partition(":")[0]
    return name if name != NOT_COPIED else None


def is_interpreter(module: Module | None) -> bool:
    """Tells whether a module is CPython: its executable or its library."""
    if module is None or module.kind is not ModuleKind.FILE:
        return False
    return _INTERPRETER.fullmatch(os.path.basename(module.path.removesuffix(_DELETED))) is not None


class PythonFrame(NamedTuple):
    """A Python frame."""

    function: str  # its qualified name
    file: str  # "" if unknown
    line: int  # 0 if unknown

    @property
    def text(self) -> str:
        """The frame's text in a stack: `py::function:file`."""
        return f"{PYTHON_FUNCTION}{self.function}" + (f":{self.file}" if self.file else "")


class PythonStacks:
    """The Python frames of a capture's stacks. Captures may be hostile: at most DEEPEST frames are read per stack."""

    def __init__(self, stacks: pa.Table, codes: pa.Table | None) -> None:
        """Takes the columns.

        Args:
            stacks: `stack` rows.
            codes: `python_code` rows of the same capture.
        """
        rows = len(stacks)
        self._starts = np.zeros(rows + 1, np.int64)
        self._code, self._line, self._at = np.empty(0, np.uint32), np.empty(0, np.uint32), np.empty(0, np.uint16)
        self._states = np.full(rows, Completeness.NONE, np.uint8)
        self._depths = np.zeros(rows, np.int64)
        if "python" in stacks.column_names and stacks["python"].null_count < rows:
            self._take(stacks)
        self._names = _CodeNames(codes, np.unique(self._code))
        self._named_row = self._names.rows(self._code)
        distinct = pa.array(self._named_row + 1 << 32 | self._line).dictionary_encode()
        self._kind: NDArray[np.int32] = distinct.indices.to_numpy()  # of each frame: the number of its code and line
        self._kinds: NDArray[np.int64] = distinct.dictionary.to_numpy()
        self._missing = {
            row: text
            for state, text in reversed(_MISSING.items())  # of several, the first one counts
            for row in np.flatnonzero(self._states & np.uint8(state)).tolist()
        }

    def _take(self, stacks: pa.Table) -> None:
        python = combined(stacks["python"])
        self._depths = combined(stacks["ips"]).value_lengths().to_numpy().astype(np.int64)
        lengths = python.value_lengths().fill_null(0).to_numpy().astype(np.int64)
        values, counts = python.flatten(), np.minimum(lengths, DEEPEST)
        np.cumsum(counts, out=self._starts[1:])
        kept = ranges(np.cumsum(lengths) - lengths, counts)
        self._code, self._line, self._at = (values.field(name).to_numpy()[kept] for name in ("code", "line", "at"))
        ended = stacks["python_ended"].to_pylist() if "python_ended" in stacks.column_names else []
        self._states = np.array([Completeness.from_column(value) for value in ended or [None] * len(stacks)], np.uint8)
        self._states[python.is_null().to_numpy(zero_copy_only=False)] = Completeness.NONE

    def groups(self, row: int) -> dict[int, list[int]]:
        """Returns a stack's Python frames by the number of the C frame that they replace, the outermost frame first.

        A frame is a kind: the number of a code object with a line, below `kinds`, for `frame`. A number that no C frame
        has means that the place is unknown.
        """
        piece = slice(int(self._starts[row]), int(self._starts[row + 1]))
        kinds, places = self._kind[piece][::-1].tolist(), self._at[piece][::-1].tolist()
        if places.count(places[0]) == len(places):
            return {places[0]: kinds}
        groups: dict[int, list[int]] = {}
        for kind, at in zip(kinds, places, strict=True):
            groups.setdefault(at, []).append(kind)
        return groups

    @property
    def kinds(self) -> int:
        """How many kinds of frames there are."""
        return len(self._kinds)

    def frame(self, kind: int) -> PythonFrame:
        """Returns the frame of a kind."""
        row, line = divmod(int(self._kinds[kind]), 1 << 32)
        return PythonFrame(*self._names.at(row - 1), line)

    @property
    def have_frames(self) -> NDArray[np.bool_]:
        """Which stacks have Python frames: bool[n]."""
        return np.diff(self._starts) > 0

    def has_frames(self, row: int) -> bool:
        """Tells whether a stack has Python frames."""
        return bool(self._starts[row] < self._starts[row + 1])

    def missing(self, row: int) -> str:
        """Returns the text that stands for missing outer Python frames of a stack; "" if none are missing."""
        return self._missing.get(row, "")

    def flags(self) -> NDArray[np.uint8]:
        """Returns how complete the Python frames of each stack are: Completeness flags, uint8[n]."""
        flags = self._states.copy()
        rows = np.repeat(np.arange(len(flags)), np.diff(self._starts))
        for applies, flag in (
            (self._named_row < 0, Completeness.UNNAMED),
            (self._at >= self._depths[rows], Completeness.UNPLACED),
        ):
            flags[np.unique(rows[applies])] |= np.uint8(flag)
        return flags


class _CodeNames:
    """Names and files of the code objects that stacks refer to."""

    def __init__(self, codes: pa.Table | None, used_ids: NDArray[np.uint32]) -> None:
        self._ids = np.empty(0, np.uint32)
        self._texts = [(NOT_COPIED, "")]  # the last one is of all others
        if codes is None or not len(codes):
            return
        ids = codes["id"].to_numpy()
        # A hostile capture may have an id twice: the first row counts.
        self._ids, first = np.unique(ids, return_index=True)
        kept = np.isin(self._ids, used_ids) & (self._ids != NO_CODE)
        self._ids, first = self._ids[kept], first[kept]
        names, files = (_texts(codes[name].take(pa.array(first))) for name in ("name", "file"))
        self._texts[:0] = [(name or NOT_COPIED, file) for name, file in zip(names, files, strict=True)]

    def rows(self, codes: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Returns the row of each id: int64[n]; -1 where there is no code object."""
        rows = np.searchsorted(self._ids, codes)
        known = rows < len(self._ids)
        known[known] = self._ids[rows[known]] == codes[known]
        return np.where(known, rows, -1)

    def at(self, row: int) -> tuple[str, str]:
        """Returns name and file of the code object in a row; -1: there is none."""
        return self._texts[row]


def _texts(column: pa.ChunkedArray) -> list[str]:
    """Returns the texts of a dictionary column, equal ones as one object: a text may be long."""
    texts = combined(column)
    used = texts.indices.dictionary_encode()
    distinct = texts.dictionary.take(used.dictionary).to_pylist()
    return [distinct[index] for index in used.indices.to_pylist()]
