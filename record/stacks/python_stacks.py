"""Frames of Python of a recording's stacks, put where their evaluation loop's frame of C is.

One evaluation loop, a function of the interpreter, runs many frames of Python. What ends the frames of a loop lies in
that function's frame on the C stack, and so tells which one it is.
"""

from __future__ import annotations

import bisect
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.header.python_counts import NO_CODE, NOWHERE, Completeness
from iaprof.formats.wire.launches import MAX_DEPTH, MAX_PYTHON, PYTHON_STACK, PythonState
from iaprof.record.stacks.stack_ids import StackIds
from iaprof.symbols.python.layout import Layout
from iaprof.symbols.python.locations import lines_of
from iaprof.symbols.python.texts import TextError, bytes_of, text_of, type_of, with_ellipsis

MOST_CODES = 1 << 18  # distinct ones
MOST_COPIED = 1 << 20  # of code objects, those that exec made at the same addresses included
MOST_INTERPRETERS = 8  # of one process, one after the other
_LONGEST_CODE = 1 << 31  # bytes
_MOST_AT_ONCE = 64  # code objects that were at one address, among which one is whose table goes on
_MOST_LINES = 1 << 12  # of one code object that are remembered
_ENDED = {PythonState.WHOLE: "whole", PythonState.DEEP: "deep", PythonState.DAMAGED: "damaged"}
_STACK = KINDS["stack"]


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

    def __init__(self, read: Callable[[int, int], bytes] = lambda _position, _length: b"") -> None:
        """Begins with none.

        Args:
            read: gives so many bytes of the spool from a position on, where records are that `add` got with theirs:
                they take kilobytes each.
        """
        self._read_spool = read
        # By the id of the stack: where PYTHON_STACK is in the spool, or itself, compressed.
        self._walked: dict[int, int | bytes] = {}
        self._finished: dict[int, int | bytes] = {}  # with the CFAs that the learner found
        self._interpreters: dict[int, list[Interpreter]] = defaultdict(list)  # by process; after exec there are more
        self._codes: dict[tuple[int, int], list[_Code]] = defaultdict(list)  # by process and address, sorted by time
        self._tables: dict[bytes, bytes] = {}  # exec makes the same code over and over
        self._numbers: dict[tuple[str, str, int], int] = {}  # of rows of python_code: by name, file and first line
        self._copied = 0  # of them
        self._no_codes: set[tuple[int, int]] = set()  # what was no code object, by process and address
        self._ids = StackIds()
        self._states: dict[int, Completeness] = {}  # of stacks of which `columns` was asked
        self.unbelieved = 0  # stacks that were cut where a frame has no code object
        self.too_many = 0  # code objects

    def add(self, records: NDArray[np.void], position: int | None = None) -> None:
        """Takes PYTHON_STACK[n].

        Args:
            records: one a path.
            position: where the first one is in the spool; without it they are kept here.
        """
        for index, record in enumerate(records):
            id_ = int(record["id"])
            place = zlib.compress(record.tobytes(), 1) if position is None else position + index * PYTHON_STACK.itemsize
            if record["state"] == PythonState.NONE:
                self._finished[id_] = place
            else:
                self._walked.setdefault(id_, place)

    def _record(self, place: int | bytes) -> np.void:
        """PYTHON_STACK, of which `add` remembered this."""
        data = self._read_spool(place, PYTHON_STACK.itemsize) if isinstance(place, int) else zlib.decompress(place)
        record: np.void = np.frombuffer(data, PYTHON_STACK, 1)[0]
        return record

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
            if id_ in self._walked:
                walked = self._record(self._walked[id_])
                pid, time, frames = int(walked["pid"]), int(walked["time"]), _frames_of(walked)
                frames = frames[frames["code"] > 0]  # ends of loops differ by thread
                codes = (self._code(pid, code, time) for code in frames["code"].tolist())
                numbers = np.array([code.number if code else NO_CODE for code in codes], np.uint64)
                words = np.stack([frames["code"], frames["instruction"], numbers], axis=1).ravel()
                found[index] = self._ids.of(np.array([len(words)]), words, np.zeros(1, np.uint64))[0]
        return found

    def columns(self, ids: NDArray[np.uint64]) -> tuple[pa.Array, pa.Array]:
        """The columns `python` and `python_ended` of `stack` rows, by the ids that these were sent with."""
        found = [self._frames(id_) if id_ in self._walked else (None, None) for id_ in ids.tolist()]
        frames, ended = [each for each, _ in found], [each for _, each in found]
        for id_, each, how in zip(ids.tolist(), frames, ended, strict=True):
            if each is not None:
                self._states[id_] = _state(each, how)
        return pa.array(frames, _STACK.field("python").type), pa.array(ended, pa.string())

    def _frames(self, id_: int) -> tuple[list[dict[str, int]], str]:
        """The frames of a stack, up to one that has no code object; and how they end."""
        walked = self._record(self._walked[id_])
        pid, time, cfas = int(walked["pid"]), int(walked["time"]), _cfas_of(walked)
        if id_ in self._finished:
            finished = self._record(self._finished[id_])
            cfas = np.concatenate([cfas[: int(finished["kept"])], _cfas_of(finished)])
        frames: list[dict[str, int]] = []
        for code, instruction, at in zip(*_placed(walked, cfas), strict=True):
            found = self._code(pid, code, time)
            if found is None and (pid, code) in self._no_codes:
                self.unbelieved += 1
                return frames, _ENDED[PythonState.DAMAGED]
            if found is not None and found.is_helper:
                continue
            number, line = (found.number, found.line(instruction)) if found else (NO_CODE, 0)
            frames.append({"code": number, "line": line, "at": at})
        return frames, _ENDED[PythonState(min(int(walked["state"]), PythonState.DAMAGED))]

    def states(self, ids: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """What is to be said of stacks of which `columns` was asked: State, uint8[n]."""
        return np.array([self._states.get(id_, Completeness.NONE) for id_ in ids.tolist()], np.uint8)

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
                texts = with_ellipsis(text_of(name, layout)), with_ellipsis(text_of(file, layout))
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


def _state(frames: list[dict[str, int]], ended: str | None) -> Completeness:
    """What is to be said of the frames of one stack."""
    state = Completeness.from_column(ended)
    if any(frame["code"] == NO_CODE for frame in frames):
        state |= Completeness.UNNAMED
    if any(frame["at"] == NOWHERE for frame in frames):
        state |= Completeness.UNPLACED
    return state


def _frames_of(walked: np.void) -> NDArray[np.void]:
    """The frames of a PYTHON_STACK record, and the ends of loops."""
    frames: NDArray[np.void] = walked["frames"][: min(int(walked["count"]), MAX_PYTHON)]
    return frames


def _cfas_of(walked: np.void) -> NDArray[np.uint64]:
    """Where the callers of C of a PYTHON_STACK record have their frames."""
    cfas: NDArray[np.uint64] = walked["cfas"][: min(int(walked["depth"]), MAX_DEPTH)]
    return cfas


def _placed(walked: np.void, cfas: NDArray[np.uint64]) -> tuple[list[int], list[int], list[int]]:
    """Code object, instruction, and number of the frame of C for each frame of Python, the innermost first.

    Args:
        walked: PYTHON_STACK.
        cfas: uint64[n], where the caller of each frame of C has its frame.
    """
    frames = _frames_of(walked)
    codes, instructions = frames["code"], frames["instruction"]
    is_end = codes == 0
    starts = np.concatenate([[walked["sp"]], cfas[:-1]]) if len(cfas) else cfas
    ends = instructions[is_end]
    inside = (starts[None, :] <= ends[:, None]) & (ends[:, None] < cfas[None, :])
    places = np.where(inside.any(axis=1), inside.argmax(axis=1), NOWHERE) if len(cfas) else np.full(len(ends), NOWHERE)
    # Those behind the last end, of a walk that did not come to its end, are of a loop that is not known.
    places = np.append(places, NOWHERE)
    loop = np.cumsum(is_end)[~is_end]
    return codes[~is_end].tolist(), instructions[~is_end].tolist(), places[loop].tolist()
