"""Puts the Python frames of stacks next to the C frame of the evaluation loop that runs them.

One evaluation loop, a function of the interpreter, runs many Python frames. A loop's Python frames end with an address
in that function's frame on the C stack, which tells the loops apart.
"""

from __future__ import annotations

import bisect
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
import pyarrow as pa
from isal import isal_zlib
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.distinct import distinct_rows, numbered, order_by
from iaprof.formats.header.stack_counts import NO_CODE, NOUNS, NOWHERE, Completeness, PythonCounts
from iaprof.formats.ranges import ranges
from iaprof.formats.wire.launches import MAX_DEPTH, MAX_PYTHON, PYTHON_FRAME, PYTHON_STACK, PythonState
from iaprof.record.stacks.id_map import IdMap
from iaprof.record.stacks.walks import StackIds
from iaprof.symbols.python.code_objects import TextError, bytes_of, lines_of, text_of, type_of, with_ellipsis
from iaprof.symbols.python.layout import Layout

MOST_CODES = 1 << 18  # distinct code objects
MOST_COPIED = 1 << 20  # copied code objects: exec makes new ones at the same addresses
MOST_INTERPRETERS = 8  # of one process, whose interpreter changes with exec
_LONGEST_CODE = 1 << 31  # bytes: an instruction there has no line
_MOST_AT_ONCE = 64  # of an address's latest code objects, those searched for the one that more of a table belongs to
_MOST_LINES = 1 << 12  # of one code object, kept
_LAST_ADDRESS = np.uint64((1 << 64) - 1)
_ENDED = np.array([None, "whole", "deep", "damaged"], object)  # by PythonState
_COMPLETENESS = np.array([Completeness.from_column(ended) for ended in _ENDED], np.uint8)
_NOT_COPIED, _NO_CODE_OBJECT, _SEVERAL = -1, -2, -3  # in place of a code object
_INDEX_BITS = 16  # of a record in a frame of the spool
_IN_MEMORY = 1 << 63
_NO_PLACE = np.uint64((1 << 64) - 1)
_ENDS_AT_ONCE = 1 << 10
_STACK = KINDS["stack"]
_HEAD = np.dtype([(name, PYTHON_STACK[name]) for name in PYTHON_STACK.names or () if not PYTHON_STACK[name].shape])
"""A PYTHON_STACK up to its arrays, which are the CFAs and then the frames."""


@dataclass(frozen=True)
class Interpreter:
    """An interpreter in a process."""

    types: tuple[int, int]  # addresses of PyUnicode_Type and PyBytes_Type, to which its objects point
    layout: Layout


@dataclass(eq=False, slots=True)
class _Code:
    """A code object that was copied."""

    index: int  # among all of them
    time: int
    identity: int
    first_line: int
    table: bytes  # its line table, as far as it has come
    left: int  # bytes of the table still to come
    bytecode: int  # address of its first instruction
    _lines: dict[int, int] | None = None  # by instruction; kept, as many stacks share instructions

    def lines(self, instructions: list[int]) -> list[int]:
        """Returns instructions' lines; 0 for one that has none."""
        known = self._lines or {}
        new = [instruction for instruction in instructions if instruction not in known]
        if not new:
            return [known[instruction] for instruction in instructions]
        offsets = [instruction - self.bytecode for instruction in new]
        near = [offset if abs(offset) < _LONGEST_CODE else _LONGEST_CODE for offset in offsets]
        found = np.maximum(lines_of(self.table, self.first_line, near), 0).tolist()
        every = known | dict(zip(new, found, strict=True))
        if len(every) <= _MOST_LINES:
            self._lines = every
        return [every[instruction] for instruction in instructions]

    def add(self, offset: int, content: bytes) -> None:
        """Adds more of the line table, from an offset on."""
        if offset == len(self.table):  # otherwise another thread sent it, too
            self.table += content[: self.left]
            self.left -= min(self.left, len(content))
            self._lines = None


class _CodeObjects:
    """The code objects that were copied from processes."""

    def __init__(self) -> None:
        self._interpreters: dict[int, list[Interpreter]] = defaultdict(list)  # by process, the latest first
        self._codes: dict[tuple[int, int], list[_Code]] = defaultdict(list)  # by process and address, sorted by time
        self._all: list[_Code] = []
        self._numbers = array("I")  # of each one's row,
        self._are_helpers = array("b")  # and see `are_helpers`
        self._tables: dict[bytes, bytes] = {}  # distinct line tables: exec makes equal code again and again
        self._names: dict[tuple[str, str, int], int] = {}  # numbers of rows, by name, file and first line
        self._no_codes: set[tuple[int, int]] = set()  # copied as code objects, but none; by process and address
        self._copied = 0
        self.dropped = 0  # past the limits

    def add(self, record: np.void) -> None:
        """Adds a CODE, or more of its line table; the interpreters of its process must be known."""
        pid, address = int(record["pid"]), int(record["code"])
        if int(record["offset"]):
            self._add_more(self._codes.get((pid, address), []), record)
        elif self._copied == MOST_COPIED:
            self.dropped += 1
        else:
            self._copied += 1
            code = self._read(pid, address, record)
            if code is not None:
                bisect.insort(self._codes[pid, address], code, key=lambda code: code.time)
            elif self._interpreters[pid] and len(self._no_codes) < MOST_CODES:
                self._no_codes.add((pid, address))

    def add_interpreter(self, pid: int, interpreter: Interpreter) -> None:
        """Adds an interpreter of a process."""
        if interpreter not in self._interpreters[pid]:
            self._interpreters[pid] = [interpreter, *self._interpreters[pid][: MOST_INTERPRETERS - 1]]

    @property
    def pids(self) -> list[int]:
        """The processes with an interpreter."""
        return [pid for pid, interpreters in self._interpreters.items() if interpreters]

    def rows(self) -> pa.StructArray:
        """Makes `python_code` rows of all code objects."""
        rows = [
            {"id": number, "name": name, "file": file, "first_line": max(first_line, 0)}
            for (name, file, first_line), number in self._names.items()
        ]
        return pa.array(rows, KINDS["python_code"])

    def at(
        self, pids: NDArray[np.uint32], addresses: NDArray[np.uint64], times: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """Returns the code object at an address at a time: the last one copied before, or else the next one.

        Returns:
            int64[n], indices for the other methods; _NOT_COPIED where none came, _NO_CODE_OBJECT where memory had none.
        """
        firsts, which = distinct_rows(pids, *_halves(addresses))
        places = list(zip(pids[firsts].tolist(), addresses[firsts].tolist(), strict=True))
        found = np.fromiter(map(self._only, places), np.int64, len(places))
        several = np.flatnonzero(found == _SEVERAL)
        found = found[which]
        rows = np.flatnonzero(found == _SEVERAL)
        rows = rows[order_by(which[rows])]
        parts = np.split(rows, np.flatnonzero(np.diff(which[rows])) + 1)
        for place, part in zip(several.tolist(), parts if len(rows) else [], strict=True):
            moments, moment = np.unique(times[part], return_inverse=True)
            latest = [_latest(self._codes[places[place]], time) for time in moments.tolist()]
            found[part] = np.array(latest, np.int64)[moment]
        return found

    def _only(self, place: tuple[int, int]) -> int:
        """Returns the code object at an address of a process; _SEVERAL if the time decides."""
        codes = self._codes.get(place)
        if codes:
            return codes[0].index if len(codes) == 1 else _SEVERAL
        return _NO_CODE_OBJECT if place in self._no_codes else _NOT_COPIED

    def numbers(self, codes: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Returns the numbers of code objects' rows: uint32[n], NO_CODE for none."""
        return np.append(np.array(self._numbers, np.uint32), np.uint32(NO_CODE))[np.maximum(codes, _NOT_COPIED)]

    def are_helpers(self, codes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which code objects call a class's __init__, in CPython 3.13 and later.

        They are no functions of the program.
        """
        return np.append(np.array(self._are_helpers, np.bool_), False)[np.maximum(codes, _NOT_COPIED)]

    def lines(self, codes: NDArray[np.int64], instructions: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Returns the lines of instructions of code objects: uint32[n], 0 for none."""
        firsts, which = distinct_rows(codes, *_halves(instructions))
        code_of, lines = codes[firsts], np.zeros(len(firsts), np.uint32)
        for part in np.split(np.arange(len(firsts)), np.flatnonzero(np.diff(code_of)) + 1):
            if len(part) and code_of[part[0]] >= 0:
                lines[part] = self._all[code_of[part[0]]].lines(instructions[firsts[part]].tolist())
        return lines[which]

    def _read(self, pid: int, address: int, record: np.void) -> _Code | None:
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
            number = self._names.setdefault((*texts, first_line), len(self._names))
            if number == MOST_CODES:
                del self._names[*texts, first_line]
                self.dropped += 1
                number = NO_CODE
            code = _Code(
                len(self._all),
                int(record["time"]),
                int(record["identity"]),
                first_line,
                self._tables.setdefault(content, content),
                length - len(content),
                address + layout.code_bytecode,
            )
            self._all.append(code)
            self._numbers.append(number)
            self._are_helpers.append(texts == ("__init__", "__init__"))
            return code
        return None

    def _add_more(self, codes: list[_Code], record: np.void) -> None:
        """Adds more of a code object's line table."""
        latest = reversed(codes[-_MOST_AT_ONCE:])  # one BPF program sends all parts of a table, one after the other
        code = next((code for code in latest if code.identity == int(record["identity"])), None)
        if code is not None:
            head = self._interpreters[int(record["pid"])][0].layout.bytes_data  # the same for all versions of CPython
            code.add(int(record["offset"]) - head, record["table"].tobytes())


@dataclass(frozen=True, eq=False)
class _Walks:
    """What k PYTHON_STACK records have, without the unused ends of their arrays."""

    heads: NDArray[np.void]  # _HEAD[k]
    cfas: NDArray[np.uint64]  # of one record after the other
    frames: NDArray[np.void]  # PYTHON_FRAME, likewise

    @property
    def depths(self) -> NDArray[np.int64]:
        """The numbers of CFAs: int64[k]."""
        depths: NDArray[np.int64] = np.minimum(self.heads["depth"], MAX_DEPTH).astype(np.int64)
        return depths

    @property
    def counts(self) -> NDArray[np.int64]:
        """The numbers of frames: int64[k]."""
        counts: NDArray[np.int64] = np.minimum(self.heads["count"], MAX_PYTHON).astype(np.int64)
        return counts

    @property
    def owners(self) -> NDArray[np.int64]:
        """The record of each frame."""
        return np.repeat(np.arange(len(self.heads)), self.counts)

    @classmethod
    def at(cls, content: bytes, indices: NDArray[np.int64]) -> _Walks:
        """Reads some of the PYTHON_STACK records that bytes hold."""
        words = np.frombuffer(content, np.uint64)
        starts = indices * (PYTHON_STACK.itemsize // 8)
        head_words = np.arange(_HEAD.itemsize // 8)
        heads = words[starts[:, None] + head_words].view(_HEAD)[:, 0]
        walks = cls(heads, words[:0], np.zeros(0, PYTHON_FRAME))
        cfas = words[ranges(starts + _HEAD.itemsize // 8, walks.depths)]
        frames = words[ranges(starts + _HEAD.itemsize // 8 + MAX_DEPTH, 2 * walks.counts)]
        return cls(heads, cfas, frames.view(PYTHON_FRAME))

    @classmethod
    def joined(cls, parts: list[_Walks]) -> _Walks:
        """The records of several, one after the other."""
        parts = [cls(np.zeros(0, _HEAD), np.zeros(0, np.uint64), np.zeros(0, PYTHON_FRAME)), *parts]
        return cls(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    def take(self, rows: NDArray[np.int64]) -> _Walks:
        """Records by their indices, int64[n]."""
        cfas, frames = (ranges((np.cumsum(sizes) - sizes)[rows], sizes[rows]) for sizes in (self.depths, self.counts))
        return _Walks(self.heads[rows], self.cfas[cfas], self.frames[frames])


class _Records:
    """PYTHON_STACK records by the ids of their stacks. They take kilobytes, so they stay in the spool."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._places = IdMap()  # position in the spool and index in the frame; or _IN_MEMORY and index in `_kept`
        self._kept: list[bytes] = []  # those that are not in the spool, compressed

    def add(self, records: NDArray[np.void], chosen: NDArray[np.bool_], position: int | None) -> None:
        """Adds the chosen ones, bool[n], of PYTHON_STACK[n] of the frame at a position in the spool; None: in none."""
        indices = np.flatnonzero(chosen)
        if position is not None:
            places = np.uint64(position << _INDEX_BITS) + indices.astype(np.uint64)
        else:
            places = np.uint64(_IN_MEMORY + len(self._kept)) + np.arange(len(indices), dtype=np.uint64)
            kept = records[indices]
            kept["cfas"][np.arange(MAX_DEPTH) >= kept["depth"][:, None]] = 0  # there is what was there before
            kept["frames"][np.arange(MAX_PYTHON) >= kept["count"][:, None]] = 0
            self._kept += [isal_zlib.compress(record.tobytes(), 1) for record in kept]
        self._places.add(records["id"][indices], places)

    def of(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.int64], _Walks]:
        """Returns which of n stacks have a record, int64[k] in ascending order, and the k records."""
        places = self._places.get(ids, np.full(len(ids), _NO_PLACE))
        rows = np.flatnonzero(places != _NO_PLACE)
        order = rows[np.argsort(places[rows])]
        frames, indices = places[order] >> np.uint64(_INDEX_BITS), places[order] & np.uint64((1 << _INDEX_BITS) - 1)
        parts = []
        bounds = [0, *(np.flatnonzero(frames[1:] != frames[:-1]) + 1).tolist(), len(frames)]
        for part in (slice(*each) for each in pairwise(bounds if len(frames) else [])):
            frame, of_frame = int(frames[part.start]), indices[part].astype(np.int64)
            if frame << _INDEX_BITS < _IN_MEMORY:
                parts.append(_Walks.at(self._read(frame), of_frame))
            else:
                first = (frame << _INDEX_BITS) - _IN_MEMORY
                kept = b"".join(isal_zlib.decompress(self._kept[first + index]) for index in of_frame.tolist())
                parts.append(_Walks.at(kept, np.arange(len(of_frame))))
        return rows, _Walks.joined(parts).take(np.argsort(order))


@dataclass(frozen=True, eq=False)
class PythonFrames:
    """What was recorded of the Python frames of n stacks, of which k have some."""

    stacks: int  # n
    rows: NDArray[np.int64]  # [k], which ones, ascending
    walks: _Walks  # k
    codes: NDArray[np.int64]  # of each frame


class PythonStacks:
    """Collects Python frames and code objects from BPF and the learner, and makes columns of them."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        """Begins without stacks; `read` gives the payload of the spool's frame at a position."""
        self._walked = _Records(read)
        self._finished = _Records(read)  # those with the CFAs that the learner found
        self._codes = _CodeObjects()
        self._ids = StackIds()
        self._states = IdMap()  # the Completeness of stacks that `columns` was called for
        self._damaged = 0  # stacks cut at a frame without a valid code object

    def add(self, records: NDArray[np.void], position: int | None = None) -> None:
        """Adds PYTHON_STACK[n], one for each distinct path.

        Args:
            records: the records.
            position: of their frame in the spool; None if they are not there.

        Raises:
            ValueError: nobody sends as many.
        """
        if len(records) > 1 << _INDEX_BITS:
            raise ValueError("it has more stacks than are ever sent at once")
        is_finished = records["state"] == PythonState.NONE
        self._walked.add(records, ~is_finished, position)
        self._finished.add(records, is_finished, position)

    def add_codes(self, records: NDArray[np.void]) -> None:
        """Adds CODE[n]; the interpreters of their processes must be known."""
        for record in records:  # one for each code object
            self._codes.add(record)

    def add_interpreter(self, pid: int, interpreter: Interpreter) -> None:
        """Adds an interpreter of a process."""
        self._codes.add_interpreter(pid, interpreter)

    def losses(self) -> Iterator[tuple[int, str]]:
        """Yields how many stacks or code objects were lost, and a sentence, for each way that lost some."""
        if self._damaged:
            yield self._damaged, "frames of Python: cut where the memory does not hold code objects"
        if self._codes.dropped:
            yield self._codes.dropped, "Python code objects beyond the limit: they have no names"

    def frames(self, ids: NDArray[np.uint64]) -> PythonFrames:
        """Returns the Python frames of n stacks, by the ids that these were sent with: uint64[n]."""
        rows, walks = self._walked.of(ids)
        owners = walks.owners
        codes = self._codes.at(walks.heads["pid"][owners], walks.frames["code"], walks.heads["time"][owners])
        return PythonFrames(len(ids), rows, walks, codes)

    def content_hashes(self, frames: PythonFrames) -> NDArray[np.uint64]:
        """Returns hashes of the Python frames of n stacks: uint64[n], 0 without frames."""
        is_frame = frames.walks.frames["code"] > 0  # ends of loops differ by thread
        flat, owners = frames.walks.frames[is_frame], frames.walks.owners[is_frame]
        numbers = self._codes.numbers(frames.codes[is_frame]).astype(np.uint64)
        words = np.stack([flat["code"], flat["instruction"], numbers], axis=1)
        count = len(frames.rows)
        hashes = np.zeros(frames.stacks, np.uint64)
        hashes[frames.rows] = self._ids.hashes(
            3 * np.bincount(owners, minlength=count), words.ravel(), np.zeros(count, np.uint64)
        )
        return hashes

    def columns(self, frames: PythonFrames, chosen: NDArray[np.bool_]) -> tuple[pa.Array, pa.Array]:
        """Makes the columns `python` and `python_ended` of the chosen ones of n stacks, bool[n]."""
        is_chosen = chosen[frames.rows]
        codes = frames.codes[np.repeat(is_chosen, frames.walks.counts)]
        rows, walks = (np.cumsum(chosen) - 1)[frames.rows[is_chosen]], frames.walks.take(np.flatnonzero(is_chosen))
        order, places = _placed(walks, *self._cfas_of(walks))
        owners, codes, instructions = walks.owners[order], codes[order], walks.frames["instruction"][order]
        # Where the memory held no code object, Python ends.
        first_damaged = np.full(len(rows), len(codes))
        at_damage = np.flatnonzero(codes == _NO_CODE_OBJECT)[::-1]
        first_damaged[owners[at_damage]] = at_damage
        is_damaged = first_damaged < len(codes)
        self._damaged += int(np.count_nonzero(is_damaged))
        stay = np.flatnonzero((np.arange(len(codes)) < first_damaged[owners]) & ~self._codes.are_helpers(codes))
        owners, codes, places = owners[stay], codes[stay], places[stay]
        numbers, lines = self._codes.numbers(codes), self._codes.lines(codes, instructions[stay])
        state = np.minimum(walks.heads["state"], np.uint16(PythonState.DAMAGED))
        state[is_damaged] = PythonState.DAMAGED
        completeness = _COMPLETENESS[state]
        completeness[owners[numbers == NO_CODE]] |= np.uint8(Completeness.UNNAMED)
        completeness[owners[places == NOWHERE]] |= np.uint8(Completeness.UNPLACED)
        self._states.add(walks.heads["id"], completeness)
        stacks = int(np.count_nonzero(chosen))
        return _lists(stacks, rows, owners, (numbers, lines, places)), _texts(stacks, rows, state)

    def _cfas_of(self, walks: _Walks) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Returns the CFAs of the C frames of k stacks, and how many each has: uint64[k, most], int64[k]."""
        rows, finished = self._finished.of(walks.heads["id"])
        depths = walks.depths
        kept = np.minimum(finished.heads["kept"], depths[rows])
        whole = depths.copy()
        whole[rows] = kept + finished.depths
        cfas = np.zeros((len(depths), max(depths.max(initial=0), whole.max(initial=0))), np.uint64)
        for of, starts, part in ((np.arange(len(depths)), np.zeros_like(depths), walks), (rows, kept, finished)):
            sizes = part.depths
            cfas[np.repeat(of, sizes), np.repeat(starts, sizes) + ranges(0, sizes)] = part.cfas
        return cfas, whole

    def states(self, ids: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Returns the Completeness of stacks for which `columns` was called: uint8[n]."""
        return self._states.get(ids, np.full(len(ids), Completeness.NONE, np.uint64)).astype(np.uint8)

    @property
    def pids(self) -> NDArray[np.uint32]:
        """Returns the processes with an interpreter."""
        return np.array([pid for pid in self._codes.pids if 0 <= pid < 1 << 32], np.uint32)

    def code_rows(self) -> pa.StructArray:
        """Makes `python_code` rows of all code objects."""
        return self._codes.rows()


def _latest(codes: list[_Code], time: int) -> int:
    """Returns the index of the last code object that was copied before a time, or else of the first one."""
    at = bisect.bisect_right(codes, time, key=lambda code: code.time)
    return codes[max(at - 1, 0)].index


def _halves(words: NDArray[np.uint64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Returns the upper and lower halves of words: columns of 32 bits are numbered faster."""
    return (words >> np.uint64(32)).astype(np.uint32), words.astype(np.uint32)


def _placed(
    walks: _Walks, cfas: NDArray[np.uint64], depths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """Returns the order of the Python frames of k stacks, the innermost of each first, and their places.

    Args:
        walks: the frames, and the ends of loops between them.
        cfas: uint64[k, ...], of their C frames.
        depths: int64[k], how many of these there are.

    Returns:
        int64[m], indices of the frames without the ends; uint16[m], the indices of their C frames, NOWHERE if unknown.
    """
    owners, is_end = walks.owners, walks.frames["code"] == 0
    order, at_ends = np.flatnonzero(~is_end), np.flatnonzero(is_end)
    ends, owners_of_ends, owners = walks.frames["instruction"][at_ends], owners[at_ends], owners[order]
    loops = np.searchsorted(at_ends, order)
    # The frames after the last end belong to an unknown loop: the walk was not finished.
    has_loop = np.append(owners_of_ends, -1)[loops] == owners
    loops[~has_loop] = len(at_ends)
    of_loops = _places_of(ends, owners_of_ends, walks.heads["sp"], cfas, depths)
    places = np.append(of_loops, np.uint16(NOWHERE))[loops]
    several = np.zeros(len(depths), bool)
    several[owners_of_ends[ends == 0]] = True
    if several.any():  # interpreters, whose loops may call one another
        keys = np.append(ends, _LAST_ADDRESS)[loops]
        keys[~several[owners]] = 0
        sorted_ = np.lexsort((keys, owners))
        order, places = order[sorted_], places[sorted_]
    return order, places


def _places_of(
    ends: NDArray[np.uint64],
    owners: NDArray[np.int64],
    sps: NDArray[np.uint64],
    cfas: NDArray[np.uint64],
    depths: NDArray[np.int64],
) -> NDArray[np.uint16]:
    """Returns the indices of the C frames in which loops end: uint16[n], NOWHERE for none.

    Args:
        ends: uint64[n], the addresses of the ends.
        owners: int64[n], their stacks.
        sps, cfas, depths: see `_placed`; uint64[k], uint64[k, ...], int64[k].
    """
    places = np.full(len(ends), NOWHERE, np.uint16)
    widest = int(depths.max(initial=0))
    if widest:
        ends_of_frames = cfas[:, :widest]
        starts = np.concatenate([sps[:, None], ends_of_frames[:, :-1]], axis=1)
        is_there = np.arange(widest) < depths[:, None]
        for part in (slice(begin, begin + _ENDS_AT_ONCE) for begin in range(0, len(ends), _ENDS_AT_ONCE)):
            end, owner = ends[part, None], owners[part]
            inside = (starts[owner] <= end) & (end < ends_of_frames[owner]) & is_there[owner]
            places[part] = np.where(inside.any(axis=1), inside.argmax(axis=1), NOWHERE)
    return places


def _lists(
    stacks: int, rows: NDArray[np.int64], owners: NDArray[np.int64], columns: tuple[NDArray[np.unsignedinteger], ...]
) -> pa.ListArray:
    """Makes the column `python`: null but for the stacks in `rows`, int64[k]; `owners` are indices into these."""
    counts = np.zeros(stacks, np.int64)
    counts[rows] = np.bincount(owners, minlength=len(rows))
    is_null = np.ones(stacks, bool)
    is_null[rows] = False
    type_ = _STACK.field("python").type
    fields = [type_.value_type.field(index) for index in range(type_.value_type.num_fields)]
    values = pa.StructArray.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)], fields=fields
    )
    offsets = pa.array(np.append(0, np.cumsum(counts)), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, type=type_, mask=pa.array(is_null))


def _texts(stacks: int, rows: NDArray[np.int64], states: NDArray[np.uint16]) -> pa.StringArray:
    """Makes the column `python_ended`: null but for the stacks in `rows`, int64[k], which have PythonStates."""
    texts = np.full(stacks, None, object)
    texts[rows] = _ENDED[states]
    return pa.array(texts, pa.string())


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
