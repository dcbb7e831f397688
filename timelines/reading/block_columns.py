"""Makes the columns of a block of events whose members have the usual forms, without a Python object for each value.

event_columns.py makes the same columns of all other events. Other forms raise NotPlain.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.timelines.reading import blocks
from iaprof.timelines.reading.answer import ABSENT, NO_TEXT, PHASES, Columns
from iaprof.timelines.reading.blocks import (
    IS_BLANK,
    LIST,
    MEMBERS,
    OBJECT,
    PRIMITIVE,
    TEXT,
    Block,
    Members,
    NotPlain,
    Places,
    escaped,
    last_word,
    word,
)
from iaprof.timelines.reading.event_columns import BANDWIDTH, INTEGERS, MOST_ARGS, TEXTS, Texts

_EVENT = ("name", "ph", "pid", "tid", "ts", "dur", "cat", "id", "args", "attr", "bp", "s")
_MOVED = ("id", "bp", "s")  # members of events that become the first ones of args
_SLICES, _COUNTERS, _FLOWS, _INSTANTS = range(4)
_KIND = np.full(256, _INSTANTS, np.uint8)
_KIND[list(PHASES.encode())], _KIND[ord("C")], _KIND[list(b"stf")] = _SLICES, _COUNTERS, _FLOWS
_HASHES = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)
_OPEN, _CLOSE, _COMMA, _QUOTE = b'{},"'
Table = dict[str, NDArray[Any]]


def columns_of(block: Block, texts: Texts) -> Columns:
    """Makes the columns of a block's events.

    Args:
        block: the events.
        texts: numbers the texts; `texts` of the result stays empty.

    Raises:
        NotPlain: an event has a member of another form, or lacks one.
    """
    return _Events(block, texts).columns()


class _Events:
    def __init__(self, block: Block, texts: Texts) -> None:
        self._block, self._texts = block, texts
        members = block.members(1)
        words = block.first_words(members)
        self._members = {name: members.take(np.flatnonzero(words == word(name.encode()))) for name in _EVENT}
        if sum(len(each.event) for each in self._members.values()) != len(words):
            raise NotPlain  # a member without a column
        self._members = {name: each for name, each in self._members.items() if len(each.event)}
        for each in self._members.values():
            if not (np.diff(each.event) > 0).all():
                raise NotPlain  # twice in an event
        nested = (members.kind == OBJECT) | (members.kind == LIST)
        containers = [self._members[name] for name in ("args", "attr") if name in self._members]
        self._containers = np.concatenate([np.zeros(0, np.int64), *(each.event for each in containers)])
        objects = sum(int((each.kind == OBJECT).sum()) for each in containers)
        if len(self._containers) != objects or objects != int(nested.sum()):
            raise NotPlain  # args that are not an object, or other members that are one
        if len(containers) > 1 and len(np.unique(self._containers)) < len(self._containers):
            raise NotPlain
        phases = self._every("ph", TEXT)
        if not (phases.end - phases.start == 3).all():
            raise NotPlain
        self._phase = block.bytes.take(phases.start + 1)
        self._kind = _KIND.take(self._phase)

    def _every(self, name: str, *kinds: int) -> Members:
        """Returns a member that all events have, with values of some kinds."""
        found = self._members.get(name)
        if found is None or len(found.event) < self._block.events or not _are(found, *kinds):
            raise NotPlain
        return found

    def columns(self) -> Columns:
        """Makes the columns."""
        block, count = self._block, self._block.events
        times = blocks.nanoseconds(block, *self._every("ts", PRIMITIVE, TEXT).inside())
        common: Table = {
            "time_ns": times,
            "pid": blocks.whole_numbers(block, *self._every("pid", PRIMITIVE, TEXT).inside()),
            "tid": self._numbers("tid", 0),
            "name": self._codes("name"),
            "category": self._codes("cat"),
        }
        has_name = common["name"] != NO_TEXT
        if not has_name.all() and (self._phase[~has_name] != ord("E")).any():
            raise NotPlain
        self._inner = block.members(2)
        if len(self._inner.event) and block.have_escapes(self._inner.key, self._inner.key + self._inner.key_length):
            raise NotPlain
        kinds = [np.flatnonzero(self._kind == kind) for kind in range(4)]
        inner = self._kind.take(self._inner.event)
        slices = self._slices(kinds[_SLICES], common, inner) if len(kinds[_SLICES]) else {}
        counters = self._counters(kinds[_COUNTERS], common, inner) if len(kinds[_COUNTERS]) else {}
        self._args(inner, count)
        flows, instants = (self._marks(kinds[kind], common) for kind in (_FLOWS, _INSTANTS))
        if slices:
            slices |= self._args_of(kinds[_SLICES])
        for table in (slices, counters, flows, instants):
            if table and (table["category"] == NO_TEXT).all():
                del table["category"]
        return Columns(slices, counters, flows, instants)

    def _numbers(self, name: str, absent: int) -> NDArray[np.int64]:
        """Reads an integer of each event, also one in a text."""
        found = self._members.get(name)
        values = np.full(self._block.events, absent, np.int64)
        if found is not None:
            if not _are(found, PRIMITIVE, TEXT):
                raise NotPlain
            values[found.event] = blocks.whole_numbers(self._block, *found.inside())
        return values

    def _codes(self, name: str) -> NDArray[np.int32]:
        found = self._members.get(name)
        codes = np.full(self._block.events, NO_TEXT, np.int32)
        if found is not None:
            if (found.kind != TEXT).any():
                raise NotPlain
            codes[found.event] = self._numbered(*found.inside())
        return codes

    def _numbered(self, starts: Places, ends: Places) -> NDArray[np.int32]:
        codes, distinct = blocks.encoded(self._block, starts, ends)
        return np.array([self._texts[text] for text in distinct], np.int32).take(codes)

    def _slices(self, rows: Places, common: Table, inner: NDArray[np.uint8]) -> Table:
        """Makes columns of X, B and E events; takes the members that have columns out of `_inner`."""
        is_x = self._phase[rows] == ord("X")
        durations = np.full(self._block.events, ABSENT, np.int64)
        if is_x.any():
            found = self._members.get("dur")
            if found is None:
                raise NotPlain
            found = found.take(self._phase[found.event] == ord("X"))
            if len(found.event) < int(is_x.sum()) or not _are(found, PRIMITIVE, TEXT):
                raise NotPlain
            durations[found.event] = blocks.nanoseconds(self._block, *found.inside())
            if (durations[found.event] < 0).any():
                raise NotPlain
        table = {name: column[rows] for name, column in common.items()}
        table["duration_ns"] = durations[rows]
        if not is_x.all():
            table["phase"] = np.searchsorted(_PHASE_ORDER, self._phase[rows], sorter=_PHASE_SORTED)
            table["phase"] = _PHASE_SORTED.take(table["phase"]).astype(np.uint8)
        is_slice = inner == _SLICES
        first, last = self._block.first_words(self._inner), self._block.last_words(self._inner)
        place = np.empty(self._block.events, np.int64)
        place[rows] = np.arange(len(rows))
        taken = np.zeros(len(first), bool)
        for name in (*INTEGERS, *TEXTS, BANDWIDTH):
            encoded = name.encode()
            has_key = (first == word(encoded)) & is_slice
            if len(encoded) > 8 and has_key.any():
                has_key &= (last == last_word(encoded)) & (self._inner.key_length == len(encoded))
                if len(encoded) > 16:
                    middle = np.uint64(int.from_bytes(encoded[8:16], "little"))
                    has_key[has_key] = self._block.words.take(self._inner.key[has_key] + 8) == middle
            places = np.flatnonzero(has_key)
            if len(places):
                taken[places] = True
                self._take(name, self._inner.take(places), place, table)
        self._taken = taken
        return table

    def _take(self, name: str, found: Members, place: Places, table: Table) -> None:
        """Makes a column of a member of args."""
        rows, count = place.take(found.event), len(table["time_ns"])
        values: NDArray[Any]
        if name in INTEGERS:
            if not _are(found, PRIMITIVE, TEXT):
                raise NotPlain
            label, column = INTEGERS[name], np.full(count, ABSENT, np.int64)
            values = blocks.integers(self._block, *found.inside())
            empty = ABSENT
        elif name in TEXTS:
            label, column = TEXTS[name], np.full(count, NO_TEXT, np.int32)
            if (found.kind != TEXT).any():
                if label != "peers":
                    raise NotPlain
                blocks.canonical(self._block, *found.take(found.kind != TEXT).inside())
            values = self._numbered(*found.inside())
            empty = NO_TEXT
        else:
            if (found.kind != PRIMITIVE).any():
                raise NotPlain
            label, column = "bandwidth", np.full(count, np.nan)
            values = blocks.doubles(self._block, found.start, found.end)
            empty = 0
        if len(rows) > 1 and not (np.diff(rows) > 0).all():
            raise NotPlain  # twice in an event
        if label in table:  # of another name
            column = table[label]
            if (column[rows] != empty).any():
                raise NotPlain
        column[rows] = values
        table[label] = column

    def _counters(self, rows: Places, common: Table, inner: NDArray[np.uint8]) -> Table:
        """Makes columns of C events: a row for each value."""
        if "id" in self._members and (self._kind[self._members["id"].event] == _COUNTERS).any():
            raise NotPlain
        values = self._inner.take(inner == _COUNTERS)
        if (values.kind != PRIMITIVE).any() or len(np.unique(values.event)) < len(rows):
            raise NotPlain
        place = np.empty(self._block.events, np.int64)
        place[rows] = np.arange(len(rows))
        table = {name: column.take(values.event) for name, column in common.items()}
        table["event"] = place.take(values.event)
        table["series"] = self._numbered(values.key, values.key + values.key_length)
        table["value"] = blocks.doubles(self._block, values.start, values.end)
        pairs = table["event"] * (len(self._texts) + 1) + table["series"]
        if len(np.unique(pairs)) < len(pairs):
            raise NotPlain  # twice in an event
        return table

    def _marks(self, rows: Places, common: Table) -> Table:
        """Makes columns of all other events."""
        if not len(rows):
            return {}
        table = {name: column[rows] for name, column in common.items()}
        phases, which = np.unique(self._phase[rows], return_inverse=True)
        table["phase"] = np.array([self._texts[chr(phase)] for phase in phases.tolist()], np.int32)[which]
        table["id"] = self._numbers("id", ABSENT)[rows]
        return table | self._args_of(rows)

    def _args(self, inner: NDArray[np.uint8], count: int) -> None:
        """Makes the JSON texts of all members without columns: `_rest`, null where there are none."""
        taken = getattr(self, "_taken", np.zeros(len(inner), bool))
        kept = self._with_moved(self._inner.take(np.flatnonzero((inner != _COUNTERS) & ~taken)))
        self._check_keys(kept)
        lengths = np.zeros(count, np.int64)
        content = np.zeros(0, np.uint8)
        if len(kept.event):
            content, of_events = _joined(self._block, kept)
            lengths[kept.event[_firsts(kept.event)]] = of_events
        if lengths.max(initial=0) > MOST_ARGS:
            raise NotPlain
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        valid = np.packbits(lengths > 0, bitorder="little")
        buffers = [pa.py_buffer(each) for each in (valid, offsets, content)]
        self._rest = pa.Array.from_buffers(pa.large_binary(), count, buffers)

    def _with_moved(self, inner: Members) -> Members:
        """Puts members of events that have no column before those of their args."""
        moved = []
        for name in _MOVED:
            found = self._members.get(name)
            if found is None:
                continue
            found = found.take(np.flatnonzero(self._kind[found.event] != _COUNTERS))
            if name == "id":  # others have a column
                found = found.take(np.flatnonzero(self._kind[found.event] == _SLICES))
                blocks.canonical(self._block, found.start, found.end)
            if len(found.event):
                moved.append(found)
        if not moved:
            return inner
        every = (*moved, inner)
        joined = Members(*(np.concatenate([getattr(each, name) for each in every]) for name in MEMBERS))
        return joined.take(np.argsort(joined.event, kind="stable"))

    def _check_keys(self, kept: Members) -> None:
        """Raises NotPlain if an object has a key twice. Objects with the same keys are checked once."""
        if not len(kept.event):
            return
        first, last = self._block.first_words(kept), self._block.last_words(kept)
        firsts = _firsts(kept.event)
        counts = np.diff(np.append(firsts, len(first)))
        place = np.arange(len(first)) - np.repeat(firsts, counts)
        hashes = (first ^ (last * _HASHES[0])) * _HASHES[1] + kept.key_length.astype(np.uint64)
        hashes = (hashes ^ (hashes >> np.uint64(29))) * (place.astype(np.uint64) * np.uint64(2) + _HASHES[2])
        _, examples = np.unique(np.add.reduceat(hashes, firsts), return_index=True)
        for example in examples.tolist():
            members = range(int(firsts[example]), int(firsts[example] + counts[example]))
            keys = {self._block.text[int(kept.key[row]) : int(kept.key[row] + kept.key_length[row])] for row in members}
            if len(keys) < len(members):
                raise NotPlain

    def _args_of(self, rows: Places) -> Table:
        """Returns the args of some events."""
        rest = self._rest if len(rows) == self._block.events else self._rest.take(pa.array(rows))
        valid = np.flatnonzero(pc.is_valid(rest).to_numpy(zero_copy_only=False))
        if not len(valid):
            return {}
        _, offsets, content = rest.buffers()
        places = np.frombuffer(offsets, np.int64)[rest.offset : rest.offset + len(rest) + 1]
        return {
            "args_row": valid,
            "args_length": np.diff(places)[valid],
            "args": np.frombuffer(content, np.uint8)[int(places[0]) : int(places[-1])],
        }


def _are(members: Members, *kinds: int) -> bool:
    """Whether the values of members are of these kinds."""
    found = members.kind == kinds[0]
    for kind in kinds[1:]:
        found |= members.kind == kind
    return bool(found.all())


_PHASE_ORDER = np.frombuffer(PHASES.encode(), np.uint8)
_PHASE_SORTED = np.argsort(_PHASE_ORDER)


def _firsts(events: Places) -> Places:
    """Returns the places at which ascending numbers change."""
    changes = np.ones(len(events), bool)
    changes[1:] = events[1:] != events[:-1]
    return np.flatnonzero(changes)


def _joined(block: Block, members: Members) -> tuple[NDArray[np.uint8], Places]:
    """Makes JSON objects of members: uint8, concatenated, without white space; and the length of that of each event."""
    firsts = _firsts(members.event)
    starts = members.key - 1
    starts[firsts] -= 1  # a place for the brace
    counts = members.separator + 1 - starts
    ends = np.cumsum(counts)
    found = blocks.content(block, starts, members.separator + 1)
    bounds = np.append((ends - counts)[firsts], ends[-1])
    found[ends - 1] = _COMMA
    found[bounds[1:] - 1] = _CLOSE
    found[bounds[:-1]] = _OPEN
    is_blank = IS_BLANK.take(found)
    if is_blank.any():
        quotes = np.flatnonzero(found == _QUOTE)
        if block.has_escapes:
            quotes = quotes[~escaped(found, quotes)]
        inside = np.zeros(len(found), np.uint8)
        inside[quotes] = 1
        kept = ~is_blank | ((np.cumsum(inside, dtype=np.uint8) & 1) == 1)
        if not kept.all():
            bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])[bounds]
            found = found[kept]
    return found, np.diff(bounds)
