"""Frames of Python of a recording's stacks, put where their evaluation loop's frame of C is.

One evaluation loop, a function of the interpreter, runs many frames of Python. What ends the frames of a loop lies in
that function's frame on the C stack, and so tells which one it is.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture import KINDS
from iaprof.formats.launches import MAX_DEPTH, MAX_PYTHON, PythonState
from iaprof.formats.python_counts import NO_CODE, NOWHERE, State
from iaprof.record.stack_ids import StackIds
from iaprof.symbols.python.layout import Layout
from iaprof.symbols.python.locations import lines_of
from iaprof.symbols.python.texts import TextError, bytes_of, said, text_of, type_of

MOST_CODES = 1 << 18  # distinct ones
MOST_COPIED = 1 << 20  # of code objects, those that exec made at the same addresses included
MOST_INTERPRETERS = 8  # of one process, one after the other
_LONGEST_CODE = 1 << 31  # bytes
_MOST_AT_ONCE = 64  # code objects that were at one address, among which one is whose table goes on
_MOST_LINES = 1 << 12  # of one code object that are remembered
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


@dataclass(frozen=True)
class Interpreter:
    """An interpreter of a process."""

    types: tuple[int, int]  # the addresses of PyUnicode_Type and PyBytes_Type, to which its objects point
    layout: Layout


@dataclass(eq=False)
class _Code:
    """A code object that was copied."""

    number: int  # of its row
    time: int
    identity: int
    first_line: int
    table: bytes  # its lines, as far as they came
    left: int  # bytes that are missing of that
    bytecode: int  # where its instructions begin
    is_helper: (
        bool  # since 3.13, what calls a class's __init__: no function that anybody wrote, and not of the traceback
    )
    _lines: dict[int, int] = field(default_factory=dict)  # of instructions that were asked for, as many stacks have one

    def line(self, instruction: int) -> int:
        """Of an instruction; 0 where it has none."""
        line = self._lines.get(instruction)
        if line is None:
            offset = instruction - self.bytecode
            line = 0 if abs(offset) > _LONGEST_CODE else max(int(lines_of(self.table, self.first_line, [offset])[0]), 0)
            if len(self._lines) < _MOST_LINES:
                self._lines[instruction] = line
        return line

    def add(self, offset: int, content: bytes) -> None:
        """Takes more of the lines, from an offset of the table on."""
        if offset == len(self.table):  # else another thread sent it, too
            self.table += content[: self.left]
            self.left -= min(self.left, len(content))
            self._lines.clear()


class PythonStacks:
    """Collects what BPF and the learner send, and makes rows of it."""

    def __init__(self) -> None:
        self._walked: dict[int, _Walked] = {}  # by the id of the stack that was sent
        self._finished: dict[int, tuple[int, NDArray[np.uint64]]] = {}  # CFAs of the learner's, and how many go before
        self._interpreters: dict[int, list[Interpreter]] = defaultdict(list)  # by process; after exec there are more
        self._codes: dict[tuple[int, int], list[_Code]] = defaultdict(list)  # by process and address, sorted by time
        self._tables: dict[bytes, bytes] = {}  # exec makes the same code over and over
        self._numbers: dict[tuple[str, str, int], int] = {}  # of rows of python_code: by name, file and first line
        self._copied = 0  # of them
        self._no_codes: set[tuple[int, int]] = set()  # what was no code object, by process and address
        self._ids = StackIds()
        self._states: dict[int, State] = {}  # of stacks of which `columns` was asked
        self.unbelieved = 0  # stacks that were cut where a frame has no code object
        self.too_many = 0  # code objects

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
        """Takes CODE[n], of processes of which the interpreters are known."""
        for record in records:  # one a code object
            self._read(record)

    def add_interpreter(self, pid: int, interpreter: Interpreter) -> None:
        """A process has an interpreter."""
        if interpreter not in self._interpreters[pid]:
            self._interpreters[pid] = [interpreter, *self._interpreters[pid][: MOST_INTERPRETERS - 1]]

    def contents(self, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """What tells stacks of the same addresses of C apart, by the ids that they were sent with: uint64[n], or 0."""
        found = np.zeros(len(ids), np.uint64)
        for index, id_ in enumerate(ids.tolist()):
            walked = self._walked.get(id_)
            if walked is not None:
                frames = walked.frames[walked.frames["code"] > 0]  # ends of loops differ by thread
                codes = (self._code(walked.pid, code, walked.time) for code in frames["code"].tolist())
                numbers = np.array([code.number if code else NO_CODE for code in codes], np.uint64)
                words = np.stack([frames["code"], frames["instruction"], numbers], axis=1).ravel()
                found[index] = self._ids.of(np.array([len(words)]), words, np.zeros(1, np.uint64))[0]
        return found

    def columns(self, ids: NDArray[np.uint64]) -> tuple[pa.Array, pa.Array]:
        """The columns `python` and `python_ended` of `stack` rows, by the ids that these were sent with."""
        found = [self._frames(self._walked[id_], id_) if id_ in self._walked else (None, None) for id_ in ids.tolist()]
        frames, ended = [each for each, _ in found], [each for _, each in found]
        for id_, each, how in zip(ids.tolist(), frames, ended, strict=True):
            if each is not None:
                self._states[id_] = _state(each, how)
        return pa.array(frames, _STACK.field("python").type), pa.array(ended, pa.string())

    def _frames(self, walked: _Walked, id_: int) -> tuple[list[dict[str, int]], str]:
        """The frames of a stack, up to one that has no code object; and how they end."""
        cfas = walked.cfas
        if id_ in self._finished:
            before, finished = self._finished[id_]
            cfas = np.concatenate([cfas[:before], finished])
        frames: list[dict[str, int]] = []
        for code, instruction, at in zip(*_placed(walked, cfas), strict=True):
            found = self._code(walked.pid, code, walked.time)
            if found is None and (walked.pid, code) in self._no_codes:
                self.unbelieved += 1
                return frames, _ENDED[PythonState.DAMAGED]
            if found is not None and found.is_helper:
                continue
            number, line = (found.number, found.line(instruction)) if found else (NO_CODE, 0)
            frames.append({"code": number, "line": line, "at": at})
        return frames, _ENDED[walked.state]

    def states(self, ids: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """What is to be said of stacks of which `columns` was asked: State, uint8[n]."""
        return np.array([self._states.get(id_, State.NONE) for id_ in ids.tolist()], np.uint8)

    @property
    def pids(self) -> NDArray[np.uint32]:
        """The processes with an interpreter."""
        found = [pid for pid, each in self._interpreters.items() if each and 0 <= pid < 1 << 32]
        return np.array(found, np.uint32)

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

    def _read(self, record: np.void) -> None:
        pid, address = int(record["pid"]), int(record["code"])
        if int(record["offset"]):
            self._add_more(self._codes.get((pid, address), []), record)
        elif self._copied == MOST_COPIED:
            self.too_many += 1
        else:
            self._copied += 1
            code = self._read_code(pid, address, record)
            if code is not None:
                bisect.insort(self._codes[pid, address], code, key=lambda code: code.time)
            elif self._interpreters[pid] and len(self._no_codes) < MOST_CODES:
                self._no_codes.add((pid, address))

    def _read_code(self, pid: int, address: int, record: np.void) -> _Code | None:
        """What was copied as a code object; None if it is none, or one too many."""
        name, file, table = (record[of].tobytes() for of in ("qualname", "filename", "table"))
        for interpreter in self._interpreters[pid]:
            if (type_of(name), type_of(table)) != interpreter.types or type_of(file) != type_of(name):
                continue
            layout = interpreter.layout
            try:
                texts = said(text_of(name, layout)), said(text_of(file, layout))
                content, length = bytes_of(table, layout)
            except TextError:
                continue
            first_line = int(record["first_line"])
            number = self._numbers.setdefault((*texts, first_line), len(self._numbers))
            if number == MOST_CODES:
                del self._numbers[*texts, first_line]
                self.too_many += 1
                number = NO_CODE
            return _Code(
                number,
                int(record["time"]),
                int(record["identity"]),
                first_line,
                self._tables.setdefault(content, content),
                length - len(content),
                address + layout.code_bytecode,
                is_helper=texts == ("__init__", "__init__"),
            )
        return None

    def _add_more(self, codes: list[_Code], record: np.void) -> None:
        """Takes more of a code object's lines."""
        latest = reversed(codes[-_MOST_AT_ONCE:])  # as one program of BPF sends the parts, one after the other
        code = next((code for code in latest if code.identity == int(record["identity"])), None)
        if code is not None:
            head = self._interpreters[int(record["pid"])][0].layout.bytes_data  # the same in all versions
            code.add(int(record["offset"]) - head, record["table"].tobytes())


def _state(frames: list[dict[str, int]], ended: str | None) -> State:
    """What is to be said of the frames of one stack."""
    state = State.of(ended)
    if any(frame["code"] == NO_CODE for frame in frames):
        state |= State.UNNAMED
    if any(frame["at"] == NOWHERE for frame in frames):
        state |= State.UNPLACED
    return state


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
