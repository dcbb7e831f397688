"""Frames of Python of a recording's stacks, put where their evaluation loop's frame of C is.

One evaluation loop, a function of the interpreter, runs many frames of Python. What ends the frames of a loop lies in
that function's frame on the C stack, and so tells which one it is.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture import KINDS
from iaprof.formats.launches import MAX_DEPTH, MAX_PYTHON, PythonState
from iaprof.record.stack_ids import StackIds
from iaprof.symbols.python.layout import Layout
from iaprof.symbols.python.locations import lines_of
from iaprof.symbols.python.texts import TextError, bytes_of, text_of

NOWHERE = (1 << 16) - 1
"""In place of a frame of C: it is not known which one runs a frame of Python."""
MOST_CODES = 1 << 18  # distinct ones
UNKNOWN = (1 << 32) - 1
"""In place of a code object's number: it was not copied, or cannot be read."""
_LONGEST_CODE = 1 << 31  # bytes
_ENDED = {PythonState.WHOLE: "whole", PythonState.DEEP: "deep", PythonState.DAMAGED: "damaged"}
_STACK = KINDS["stack"]


@dataclass(frozen=True, eq=False)
class _Walked:
    """What BPF sent of a stack."""

    pid: int
    time: int
    state: PythonState
    sp: int  # of the innermost frame of C
    cfas: NDArray[np.uint64]  # where the callers of C have their frames, as far as BPF came
    frames: NDArray[np.void]  # of PYTHON_STACK


@dataclass(frozen=True, eq=False)
class _Code:
    """A code object that was copied."""

    number: int  # of its row
    time: int
    first_line: int
    table: bytes
    bytecode: int  # where its instructions begin
    is_helper: (
        bool  # since 3.13, what calls a class's __init__: no function that anybody wrote, and not of the traceback
    )

    def line(self, instruction: int) -> int:
        """Of an instruction; 0 where it has none."""
        offset = instruction - self.bytecode
        if abs(offset) > _LONGEST_CODE:
            return 0
        return max(int(lines_of(self.table, self.first_line, [offset])[0]), 0)


class PythonStacks:
    """Collects what BPF and the learner send, and makes rows of it."""

    def __init__(self) -> None:
        self._walked: dict[int, _Walked] = {}  # by the id of the stack that was sent
        self._finished: dict[int, tuple[int, NDArray[np.uint64]]] = {}  # CFAs of the learner's, and how many go before
        self._layouts: dict[int, Layout] = {}  # by process
        self._waiting: list[NDArray[np.void]] = []  # CODE
        self._codes: dict[tuple[int, int], list[_Code]] = defaultdict(list)  # by process and address, sorted by time
        self._numbers: dict[tuple[str, str, int], int] = {}  # of rows of python_code: by name, file and first line
        self._ids = StackIds()
        self.unreadable = 0  # code objects whose names or lines are none, or that are too many

    def add(self, records: NDArray[np.void]) -> None:
        """Takes PYTHON_STACK[n]."""
        for record in records:  # one a path
            id_, depth = int(record["id"]), min(int(record["depth"]), MAX_DEPTH)
            cfas = record["cfas"][:depth].copy()
            if record["state"] == PythonState.NONE:
                self._finished[id_] = min(int(record["kept"]), MAX_DEPTH), cfas
            elif id_ not in self._walked:
                frames = record["frames"][: min(int(record["count"]), MAX_PYTHON)].copy()
                state = PythonState(min(int(record["state"]), PythonState.DAMAGED))
                pid, time = int(record["pid"]), int(record["time"])
                self._walked[id_] = _Walked(pid, time, state, int(record["sp"]), cfas, frames)

    def add_codes(self, records: NDArray[np.void]) -> None:
        """Takes CODE[n]."""
        self._waiting.append(records)

    def add_interpreter(self, pid: int, layout: Layout) -> None:
        """A process has an interpreter."""
        self._layouts[pid] = layout

    def contents(self, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """What tells stacks of the same addresses of C apart, by the ids that they were sent with: uint64[n], or 0."""
        found = np.zeros(len(ids), np.uint64)
        for index, id_ in enumerate(ids.tolist()):
            walked = self._walked.get(id_)
            if walked is not None:
                frames = walked.frames[walked.frames["code"] > 0]  # ends of loops differ by thread
                words = np.stack([frames["code"], frames["instruction"]], axis=1).ravel()
                found[index] = self._ids.of(np.array([len(words)]), words, np.zeros(1, np.uint64))[0]
        return found

    def columns(self, ids: NDArray[np.uint64]) -> tuple[pa.Array, pa.Array]:
        """The columns `python` and `python_ended` of `stack` rows, by the ids that these were sent with."""
        self._read_codes()
        frames = [self._frames(id_) if id_ in self._walked else None for id_ in ids.tolist()]
        ended = [_ENDED[self._walked[id_].state] if id_ in self._walked else None for id_ in ids.tolist()]
        return pa.array(frames, _STACK.field("python").type), pa.array(ended, pa.string())

    def _frames(self, id_: int) -> list[dict[str, int]]:
        walked = self._walked[id_]
        cfas = walked.cfas
        if id_ in self._finished:
            before, finished = self._finished[id_]
            cfas = np.concatenate([cfas[:before], finished])
        frames: list[dict[str, int]] = []
        for code, instruction, at in zip(*_placed(walked, cfas), strict=True):
            found = self._code(walked.pid, code, walked.time)
            if found is not None and found.is_helper:
                continue
            number, line = (found.number, found.line(instruction)) if found else (UNKNOWN, 0)
            frames.append({"code": number, "line": line, "at": at})
        return frames

    def code_rows(self) -> pa.StructArray:
        """Rows of kind `python_code`, of all code objects."""
        rows = [
            {"id": number, "name": name, "file": file, "first_line": max(first_line, 0)}
            for (name, file, first_line), number in self._numbers.items()
        ]
        return pa.array(rows, KINDS["python_code"])

    def _code(self, pid: int, address: int, time: int) -> _Code | None:
        """The code object that was at an address then: the last one that was copied before, else the next one."""
        codes = self._codes.get((pid, address), [])
        at = bisect.bisect_right(codes, time, key=lambda code: code.time)
        return codes[max(at - 1, 0)] if codes else None

    def _read_codes(self) -> None:
        waiting, self._waiting = self._waiting, []
        for record in (record for records in waiting for record in records):
            layout = self._layouts.get(int(record["pid"]))
            if layout is None:
                continue
            try:
                name, file = (text_of(record[of].tobytes(), layout).value for of in ("qualname", "filename"))
                table = bytes_of(record["table"].tobytes(), layout).value
            except TextError:
                self.unreadable += 1
                continue
            pid, address = int(record["pid"]), int(record["code"])
            first_line = int(record["first_line"])
            number = self._numbers.setdefault((name, file, first_line), len(self._numbers))
            if number == MOST_CODES:
                del self._numbers[name, file, first_line]
                self.unreadable += 1
                continue
            is_helper = name == file == "__init__"
            code = _Code(number, int(record["time"]), first_line, table, address + layout.code_bytecode, is_helper)
            bisect.insort(self._codes[pid, address], code, key=lambda code: code.time)


def _placed(walked: _Walked, cfas: NDArray[np.uint64]) -> tuple[list[int], list[int], list[int]]:
    """Code object, instruction, and number of the frame of C for each frame of Python, the innermost first.

    Args:
        walked: what BPF sent.
        cfas: uint64[n], where the caller of each frame of C has its frame.
    """
    codes, instructions = walked.frames["code"], walked.frames["instruction"]
    is_end = codes == 0
    starts = np.concatenate([[np.uint64(walked.sp)], cfas[:-1]]) if len(cfas) else cfas
    ends = instructions[is_end]
    inside = (starts[None, :] <= ends[:, None]) & (ends[:, None] < cfas[None, :])
    places = np.where(inside.any(axis=1), inside.argmax(axis=1), NOWHERE) if len(cfas) else np.full(len(ends), NOWHERE)
    # Those behind the last end, of a walk that did not come to its end, are of a loop that is not known.
    places = np.append(places, NOWHERE)
    loop = np.cumsum(is_end)[~is_end]
    return codes[~is_end].tolist(), instructions[~is_end].tolist(), places[loop].tolist()
