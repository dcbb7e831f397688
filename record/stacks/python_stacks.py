"""Puts the Python frames of stacks next to the C frame of the evaluation loop that runs them.

One evaluation loop, a function of the interpreter, runs many Python frames. A loop's Python frames end with an address
in that function's frame on the C stack, which tells the loops apart.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pyarrow as pa
from isal import isal_zlib
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.distinct import distinct_rows, numbered
from iaprof.formats.header.stack_counts import NO_CODE, NOUNS, NOWHERE, Completeness, PythonCounts
from iaprof.formats.wire.launches import MAX_DEPTH, MAX_PYTHON, PYTHON_STACK, PythonState
from iaprof.record.stacks.walks import StackIds
from iaprof.symbols.python.code_objects import TextError, bytes_of, lines_of, text_of, type_of, with_ellipsis
from iaprof.symbols.python.layout import Layout

MOST_CODES = 1 << 18  # distinct code objects
MOST_COPIED = 1 << 20  # copied code objects: exec makes new ones at the same addresses
MOST_INTERPRETERS = 8  # of one process, whose interpreter changes with exec
_LONGEST_CODE = 1 << 31  # bytes
_MOST_AT_ONCE = 64  # of an address's latest code objects, those searched for the one that more of a table belongs to
_MOST_LINES = 1 << 12  # of one code object, kept
_LAST_ADDRESS = np.uint64((1 << 64) - 1)
_ENDED = {PythonState.WHOLE: "whole", PythonState.DEEP: "deep", PythonState.DAMAGED: "damaged"}
_STACK = KINDS["stack"]


@dataclass(frozen=True)
class Interpreter:
    """An interpreter in a process."""

    types: tuple[int, int]  # addresses of PyUnicode_Type and PyBytes_Type, to which its objects point
    layout: Layout


@dataclass(eq=False)
class _Code:
    """A code object that was copied."""

    number: int  # of its row
    time: int
    identity: int
    first_line: int
    table: bytes  # its line table, as far as it has come
    left: int  # bytes of the table still to come
    bytecode: int  # address of its first instruction
    # The code object in CPython 3.13 and later that calls a class's __init__: it is not a function of the program.
    is_helper: bool
    _lines: dict[int, int] = field(default_factory=dict)  # by instruction; kept, as many stacks share instructions

    def line(self, instruction: int) -> int:
        """Returns an instruction's line; 0 if it has none."""
        line = self._lines.get(instruction)
        if line is None:
            offset = instruction - self.bytecode
            line = 0 if abs(offset) > _LONGEST_CODE else max(int(lines_of(self.table, self.first_line, [offset])[0]), 0)
            if len(self._lines) < _MOST_LINES:
                self._lines[instruction] = line
        return line

    def add(self, offset: int, content: bytes) -> None:
        """Adds more of the line table, from an offset on."""
        if offset == len(self.table):  # otherwise another thread sent it, too
            self.table += content[: self.left]
            self.left -= min(self.left, len(content))
            self._lines.clear()


class PythonStacks:
    """Collects Python frames and code objects from BPF and the learner, and makes rows of them."""

    def __init__(self) -> None:
        # PYTHON_STACK by stack id, compressed, as each takes kilobytes.
        self._walked: dict[int, bytes] = {}
        self._finished: dict[int, bytes] = {}  # those with the CFAs that the learner found
        self._interpreters: dict[int, list[Interpreter]] = defaultdict(list)  # by process, the latest first
        self._codes: dict[tuple[int, int], list[_Code]] = defaultdict(list)  # by process and address, sorted by time
        self._tables: dict[bytes, bytes] = {}  # distinct line tables: exec makes equal code again and again
        self._numbers: dict[tuple[str, str, int], int] = {}  # of `python_code` rows, by name, file and first line
        self._copied = 0  # code objects
        self._no_codes: set[tuple[int, int]] = set()  # copied as code objects, but none; by process and address
        self._ids = StackIds()
        self._states: dict[int, Completeness] = {}  # by id, of stacks that `columns` was called for
        self._damaged = 0  # stacks cut at a frame without a valid code object
        self._dropped_codes = 0  # code objects past the limits

    def add(self, records: NDArray[np.void]) -> None:
        """Adds PYTHON_STACK[n], one for each distinct path."""
        records = records.copy()
        records["cfas"][np.arange(MAX_DEPTH) >= records["depth"][:, None]] = 0  # BPF sends what was there before
        records["frames"][np.arange(MAX_PYTHON) >= records["count"][:, None]] = 0
        for record in records:
            id_, compressed = int(record["id"]), isal_zlib.compress(record.tobytes(), 1)
            if record["state"] == PythonState.NONE:
                self._finished[id_] = compressed
            else:
                self._walked.setdefault(id_, compressed)

    def add_codes(self, records: NDArray[np.void]) -> None:
        """Adds CODE[n]; the interpreters of their processes must be known."""
        for record in records:  # one for each code object
            self._read(record)

    def add_interpreter(self, pid: int, interpreter: Interpreter) -> None:
        """Adds an interpreter of a process."""
        if interpreter not in self._interpreters[pid]:
            self._interpreters[pid] = [interpreter, *self._interpreters[pid][: MOST_INTERPRETERS - 1]]

    def losses(self) -> Iterator[tuple[int, str]]:
        """Yields how many stacks or code objects were lost, and a sentence, for each way that lost some."""
        if self._damaged:
            yield self._damaged, "frames of Python: cut where the memory does not hold code objects"
        if self._dropped_codes:
            yield self._dropped_codes, "Python code objects beyond the limit: they have no names"

    def content_hashes(self, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns hashes of stacks' Python frames, by the ids in the records: uint64[n], 0 without frames."""
        hashes = np.zeros(len(ids), np.uint64)
        rows = np.array([row for row, id_ in enumerate(ids.tolist()) if id_ in self._walked], np.int64)
        if not len(rows):
            return hashes
        pids, times, counts = (
            np.zeros(len(rows), np.uint32),
            np.zeros(len(rows), np.uint64),
            np.zeros(len(rows), np.int64),
        )
        parts = []
        for at, id_ in enumerate(ids[rows].tolist()):  # each is kept compressed
            walked = _record(self._walked[id_])
            frames = _frames_of(walked)
            parts.append(frames[frames["code"] > 0])  # ends of loops differ by thread
            pids[at], times[at], counts[at] = walked["pid"], walked["time"], len(parts[-1])
        all_frames = np.concatenate(parts)
        codes = all_frames["code"]
        numbers = self._numbers_of(np.repeat(pids, counts), codes, np.repeat(times, counts))
        words = np.stack([codes, all_frames["instruction"], numbers], axis=1).ravel()
        hashes[rows] = self._ids.hashes(3 * counts, words, np.zeros(len(rows), np.uint64))
        return hashes

    def columns(self, ids: NDArray[np.uint64]) -> tuple[pa.Array, pa.Array]:
        """Makes the columns `python` and `python_ended` of `stack` rows, by the ids that the stacks were sent with."""
        ended_frames = [self._frames(id_) if id_ in self._walked else (None, None) for id_ in ids.tolist()]
        frames, ended = [stack_frames for stack_frames, _ in ended_frames], [ending for _, ending in ended_frames]
        for id_, stack_frames, ending in zip(ids.tolist(), frames, ended, strict=True):
            if stack_frames is not None:
                self._states[id_] = _state(stack_frames, ending)
        return pa.array(frames, _STACK.field("python").type), pa.array(ended, pa.string())

    def _frames(self, id_: int) -> tuple[list[dict[str, int]], str]:
        """Returns the frames of a stack, up to one without a valid code object, and how they end."""
        walked = _record(self._walked[id_])
        pid, time, cfas = int(walked["pid"]), int(walked["time"]), _cfas_of(walked)
        if id_ in self._finished:
            finished = _record(self._finished[id_])
            cfas = np.concatenate([cfas[: int(finished["kept"])], _cfas_of(finished)])
        frames: list[dict[str, int]] = []
        for code, instruction, at in zip(*_placed(walked, cfas), strict=True):
            code_object = self._code(pid, code, time)
            if code_object is None and (pid, code) in self._no_codes:
                self._damaged += 1
                return frames, _ENDED[PythonState.DAMAGED]
            if code_object is not None and code_object.is_helper:
                continue
            number, line = (code_object.number, code_object.line(instruction)) if code_object else (NO_CODE, 0)
            frames.append({"code": number, "line": line, "at": at})
        return frames, _ENDED[PythonState(min(int(walked["state"]), PythonState.DAMAGED))]

    def states(self, ids: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Returns the Completeness of stacks for which `columns` was called: uint8[n]."""
        return np.array([self._states.get(id_, Completeness.NONE) for id_ in ids.tolist()], np.uint8)

    @property
    def pids(self) -> NDArray[np.uint32]:
        """Returns the processes with an interpreter."""
        with_interpreter = [
            pid for pid, interpreters in self._interpreters.items() if interpreters and 0 <= pid < 1 << 32
        ]
        return np.array(with_interpreter, np.uint32)

    def code_rows(self) -> pa.StructArray:
        """Makes `python_code` rows of all code objects."""
        rows = [
            {"id": number, "name": name, "file": file, "first_line": max(first_line, 0)}
            for (name, file, first_line), number in self._numbers.items()
        ]
        return pa.array(rows, KINDS["python_code"])

    def _code(self, pid: int, address: int, time: int) -> _Code | None:
        """Returns the code object at an address at that time: the last one copied before, or else the next one."""
        codes = self._codes.get((pid, address), [])
        at = bisect.bisect_right(codes, time, key=lambda code: code.time)
        return codes[max(at - 1, 0)] if codes else None

    def _numbers_of(
        self, pids: NDArray[np.uint32], addresses: NDArray[np.uint64], times: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """Returns the numbers of the code objects that `_code` returns: uint64[n], NO_CODE for none."""
        firsts, which = distinct_rows(pids, (addresses >> np.uint64(32)).astype(np.uint32), addresses.astype(np.uint32))
        order = np.argsort(which, kind="stable")
        bounds = np.searchsorted(which[order], np.arange(len(firsts) + 1)).tolist()
        numbers = np.full(len(pids), NO_CODE, np.uint64)
        places = zip(pids[firsts].tolist(), addresses[firsts].tolist(), pairwise(bounds), strict=True)
        for pid, address, (start, end) in places:  # one for each code object
            if known := self._codes.get((pid, address)):
                begin = np.array([code.time for code in known], np.uint64)
                at = np.searchsorted(begin, times[order[start:end]], "right")
                numbers[order[start:end]] = np.array([code.number for code in known], np.uint64)[np.maximum(at - 1, 0)]
        return numbers

    def _read(self, record: np.void) -> None:
        pid, address = int(record["pid"]), int(record["code"])
        if int(record["offset"]):
            self._add_more(self._codes.get((pid, address), []), record)
        elif self._copied == MOST_COPIED:
            self._dropped_codes += 1
        else:
            self._copied += 1
            code = self._read_code(pid, address, record)
            if code is not None:
                bisect.insort(self._codes[pid, address], code, key=lambda code: code.time)
            elif self._interpreters[pid] and len(self._no_codes) < MOST_CODES:
                self._no_codes.add((pid, address))

    def _read_code(self, pid: int, address: int, record: np.void) -> _Code | None:
        """Returns the copied code object; None if the copy is not one, or there are too many."""
        name, file, table = (record[member].tobytes() for member in ("qualname", "filename", "table"))
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
                self._dropped_codes += 1
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
        """Adds more of a code object's line table."""
        latest = reversed(codes[-_MOST_AT_ONCE:])  # one BPF program sends all parts of a table, one after the other
        code = next((code for code in latest if code.identity == int(record["identity"])), None)
        if code is not None:
            head = self._interpreters[int(record["pid"])][0].layout.bytes_data  # the same for all versions of CPython
            code.add(int(record["offset"]) - head, record["table"].tobytes())


def _state(frames: list[dict[str, int]], ended: str | None) -> Completeness:
    """Returns the Completeness of a stack's Python frames."""
    state = Completeness.from_column(ended)
    if any(frame["code"] == NO_CODE for frame in frames):
        state |= Completeness.UNNAMED
    if any(frame["at"] == NOWHERE for frame in frames):
        state |= Completeness.UNPLACED
    return state


def _record(compressed: bytes) -> np.void:
    """Returns a PYTHON_STACK that `add` kept."""
    record: np.void = np.frombuffer(isal_zlib.decompress(compressed), PYTHON_STACK, 1)[0]
    return record


def _frames_of(walked: np.void) -> NDArray[np.void]:
    """Returns the frames of a PYTHON_STACK, and the ends of loops between them."""
    frames: NDArray[np.void] = walked["frames"][: min(int(walked["count"]), MAX_PYTHON)]
    return frames


def _cfas_of(walked: np.void) -> NDArray[np.uint64]:
    """Returns the CFAs of the C frames of a PYTHON_STACK."""
    cfas: NDArray[np.uint64] = walked["cfas"][: min(int(walked["depth"]), MAX_DEPTH)]
    return cfas


def _placed(walked: np.void, cfas: NDArray[np.uint64]) -> tuple[list[int], list[int], list[int]]:
    """Returns code object, instruction, and index of the C frame, for each Python frame, the innermost first.

    Args:
        walked: PYTHON_STACK.
        cfas: uint64[n], of the C frames.
    """
    frames = _frames_of(walked)
    codes, instructions = frames["code"], frames["instruction"]
    is_end = codes == 0
    starts = np.concatenate([[walked["sp"]], cfas[:-1]]) if len(cfas) else cfas
    ends = instructions[is_end]
    inside = (starts[None, :] <= ends[:, None]) & (ends[:, None] < cfas[None, :])
    places = np.where(inside.any(axis=1), inside.argmax(axis=1), NOWHERE) if len(cfas) else np.full(len(ends), NOWHERE)
    # The frames after the last end belong to an unknown loop: the walk was not finished.
    places = np.append(places, NOWHERE)
    loop = np.cumsum(is_end)[~is_end]
    columns = codes[~is_end], instructions[~is_end], places[loop]
    if not ends.all():  # several interpreters, whose loops may call one another
        order = np.argsort(np.append(ends, _LAST_ADDRESS)[loop], kind="stable")
        columns = columns[0][order], columns[1][order], columns[2][order]
    return columns[0].tolist(), columns[1].tolist(), columns[2].tolist()


class PythonCounting:
    """Counts launches and CPU samples by the completeness of their stacks' Python frames."""

    def __init__(self, python: PythonStacks) -> None:
        """Begins without counts; `python` knows the stacks."""
        self._python = python
        self._states: dict[str, Counter[int]] = {kind: Counter() for kind in NOUNS}  # counts by Completeness, by kind
        self._none: Counter[str] = Counter()  # by kind: without Python frames, though their process has an interpreter

    def add(self, kind: str, stacks: NDArray[np.uint64], pids: NDArray[np.uint32]) -> None:
        """Counts launches or samples.

        Args:
            kind: `launches` or `cpu_samples`.
            stacks: uint64[n], the ids of their stacks in the capture; 0 for none.
            pids: uint32[n], their processes.
        """
        distinct, which = numbered(stacks)
        states = self._python.states(distinct)[which]
        counts = np.bincount(states)
        self._states[kind].update({state: int(counts[state]) for state in np.flatnonzero(counts).tolist()})
        without = (states == Completeness.NONE) & (stacks != 0)
        self._none[kind] += int(np.isin(pids[without], self._python.pids).sum())

    def header(self) -> dict[str, dict[str, int]]:
        """Returns the member of the header: by kind, see PythonCounts.to_json."""
        return {kind: PythonCounts.from_counts(self._states[kind], self._none[kind]).to_json() for kind in NOUNS}
