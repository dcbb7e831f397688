"""Makes the columns that answer.py defines of decoded events, in a sandboxed child."""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from iaprof.timelines.reading.answer import ABSENT, NO_TEXT, PHASES, Columns
from iaprof.timelines.reading.event_decoding import NOTHING, Event
from iaprof.timelines.reading.numbers import integers, nanoseconds

INTEGERS = {
    **{f"TS{number}": f"ts{number}" for number in range(1, 6)},
    "Power": "power", "Bytes": "bytes", "bytes": "bytes", "correlation": "correlation", "device": "device",
    "External id": "external_id", "Python id": "python_id",
}  # fmt: skip
TEXTS = {"CollGroup": "group", "Type": "type", "Peer": "peers", "Peers": "peers"}
BANDWIDTH = "memory bandwidth (GB/s)"
_KNOWN = frozenset([*INTEGERS, *TEXTS, BANDWIDTH])
_MOST_TEXT, MOST_ARGS = 1 << 14, 1 << 16  # bytes
_FLOWS, _NO_TIME_NEEDED = frozenset("stf"), "M"
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,20}(?:\.0+)?\s*")
_encode = msgspec.json.Encoder().encode
_values = msgspec.json.Decoder(list[Any]).decode
_raws = msgspec.json.Decoder(list[Raw]).decode

Args = dict[str, Raw]


class Texts(dict[str, int]):
    """Numbers texts, in the order in which they are first used."""

    cut = 0

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number

    def values_cut(self) -> list[str]:
        """Returns the texts; long ones are cut."""
        found = []
        for text in self:
            if 4 * len(text) > _MOST_TEXT and len(encoded := text.encode("utf-8", "replace")) > _MOST_TEXT:
                self.cut += 1
                text = encoded[: _MOST_TEXT - 3].decode("utf-8", "ignore") + "…"
            found.append(text)
        return found


def columns_of(events: Sequence[Event], dropped: Counter[str], texts: Texts | None = None) -> Columns:
    """Makes the columns of events.

    Args:
        events: the events of a piece, in their order.
        dropped: counts the events that are left out, by reason.
        texts: numbers the texts; `texts` of the result stays empty. None: the result has its own texts.
    """
    by_phase: dict[str | None, list[Event]] = defaultdict(list)
    if [event.ph for event in events].count("X") == len(events):
        by_phase["X"] = list(events)
    else:
        for event in events:
            phase = event.ph
            kind = phase if phase == "C" else "X" if phase in ("X", "B", "E") else "s" if phase in _FLOWS else "i"
            by_phase[kind if phase else None].append(event)
    dropped["without a phase"] += len(by_phase.pop(None, []))
    builder = _Builder(dropped, Texts() if texts is None else texts)
    found = Columns(
        slices=builder.slices(by_phase["X"]),
        counters=builder.counters(by_phase["C"]),
        flows=builder.marks(by_phase["s"]),
        instants=builder.marks(by_phase["i"]),
        cut_args=builder.cut_args,
        bad_values=builder.bad_values,
    )
    if texts is None:
        found.texts, found.cut_texts = builder.texts.values_cut(), builder.texts.cut
    return found


class _Builder:
    def __init__(self, dropped: Counter[str], texts: Texts) -> None:
        self.texts = texts
        self.dropped = dropped
        self.cut_args = 0
        self.bad_values = 0

    def slices(self, events: list[Event]) -> dict[str, NDArray[Any]]:
        """Makes columns of X, B and E events."""
        events = self._kept(events, "without a name", [e.name is not None or e.ph == "E" for e in events])
        events = self._kept(events, "without a process", [e.pid is not None for e in events])
        if not events:
            return {}
        count = len(events)
        phases = [event.ph for event in events]
        timed, known = nanoseconds([event.ts for event in events] + [event.dur for event in events])
        is_x = np.ones(count, bool)
        if phases.count("X") < count:
            is_x = np.array([phase == "X" for phase in phases], bool)
        times, durations = timed[:count], timed[count:]
        kept = known[:count] & (known[count:] | ~is_x)
        if not kept.all():
            self.dropped["without a time"] += int((~known[:count]).sum())
            self.dropped["without a duration"] += int((known[:count] & ~kept).sum())
        negative = kept & is_x & (durations < 0)
        if negative.any():
            self.dropped["negative duration"] += int(negative.sum())
            kept &= ~negative
        if not kept.all():
            rows = np.flatnonzero(kept).tolist()
            events, times, durations, is_x = [events[row] for row in rows], times[kept], durations[kept], is_x[kept]
            phases, count = [phases[row] for row in rows], len(rows)
        args = _args(events)
        if [event.id for event in events].count(None) < count:
            for row, event in enumerate(events):
                if event.id is not None:
                    args[row] = {"id": Raw(_encode(event.id)), **(args[row] or {})}
        columns: dict[str, NDArray[Any]] = {"time_ns": times, "duration_ns": np.where(is_x, durations, ABSENT)}
        if not is_x.all():
            columns["phase"] = np.array([PHASES.index(phase or "") for phase in phases], np.uint8)
        columns |= self._common(events, args)
        self._take_known(args, columns)
        return columns | self._rest(args)

    def counters(self, events: list[Event]) -> dict[str, NDArray[Any]]:
        """Makes columns of C events: a row for each value, and `event`, the number of the event."""
        events, times = self._with_times(events, needed=True)
        if not events:
            return {}
        rows: list[int] = []
        series: list[str] = []
        values: list[float] = []
        for row, event in enumerate(events):
            for name, text in (event.args or event.attr or {}).items():
                value = _number(text)
                if value is None:
                    self.bad_values += 1
                    continue
                rows.append(row)
                series.append(name)
                values.append(value)
        self.dropped["counter without a value"] += len(events) - len(set(rows))
        places = np.array(rows, np.int64)
        args: list[Args | None] = [{} for _ in events]
        for event in events:
            if event.id is not None:  # it belongs to the counter's name
                event.name, event.id = f"{event.name}[{event.id}]", None
        columns = {name: column[places] for name, column in self._common(events, args).items()}
        columns["time_ns"], columns["event"] = times[places], places
        columns["series"] = np.array([self.texts[name] for name in series], np.int32)
        columns["value"] = np.array(values, np.float64)
        return columns if len(places) else {}

    def marks(self, events: list[Event]) -> dict[str, NDArray[Any]]:
        """Makes columns of all other events."""
        events, times = self._with_times(events, needed=False)
        if not events:
            return {}
        args = _args(events)
        columns: dict[str, NDArray[Any]] = {"time_ns": times, **self._common(events, args)}
        columns["phase"] = self._codes([event.ph or "" for event in events])
        ids = [event.id for event in events]
        try:
            columns["id"] = _array([ABSENT if each is None else each for each in ids])
        except (TypeError, OverflowError):
            numbers, texts = self._numbered(ids)
            columns["id"], columns["id_text"] = numbers, texts
            self._keep_originals(args, "oid", ids)
        return columns | self._rest(args)

    def _with_times(self, events: list[Event], needed: bool) -> tuple[list[Event], NDArray[np.int64]]:
        events = self._kept(events, "without a name", [e.name is not None for e in events])
        events = self._kept(events, "without a process", [e.pid is not None for e in events])
        times, known = nanoseconds([event.ts for event in events])
        if not needed:
            known = known | np.array([event.ph == _NO_TIME_NEEDED for event in events], bool)
        if not known.all():
            self.dropped["without a time"] += int((~known).sum())
            events, times = [events[row] for row in np.flatnonzero(known).tolist()], times[known]
        return events, times

    def _kept(self, events: list[Event], reason: str, are_wanted: list[bool]) -> list[Event]:
        if False in are_wanted:
            self.dropped[reason] += are_wanted.count(False)
            return [event for event, is_wanted in zip(events, are_wanted, strict=True) if is_wanted]
        return events

    def _common(self, events: Sequence[Event], args: list[Args | None]) -> dict[str, NDArray[Any]]:
        """Makes the columns that all kinds have."""
        columns: dict[str, NDArray[Any]] = {}
        originals = ("pid", "opid", [event.pid for event in events]), ("tid", "otid", [event.tid for event in events])
        for name, original, numbers in originals:
            try:
                columns[name] = _array([0 if number is None else number for number in numbers])
            except (TypeError, OverflowError):
                found, texts = self._numbered([0 if number is None else number for number in numbers])
                columns[name], columns[f"{name}_text"] = found, texts
                self._keep_originals(args, original, numbers)
        columns["name"] = self._codes([event.name for event in events])
        columns["category"] = self._codes([event.cat for event in events])
        if (columns["category"] == NO_TEXT).all():
            del columns["category"]
        return columns

    def _codes(self, texts: Sequence[str | None]) -> NDArray[np.int32]:
        if None in texts:
            if all(text is None for text in texts):
                return np.full(len(texts), NO_TEXT, np.int32)
            return np.array([NO_TEXT if text is None else self.texts[text] for text in texts], np.int32)
        return np.fromiter(map(self.texts.__getitem__, texts), np.int32, len(texts))  # type: ignore[arg-type]

    def _numbered(self, values: Sequence[int | str | None]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Returns integers, ABSENT for other values, and the codes of these as texts."""
        numbers = [ABSENT if (number := _integer(value)) is None else number for value in values]
        texts = [
            None if value is None or number != ABSENT else str(value)
            for value, number in zip(values, numbers, strict=True)
        ]
        return np.array(numbers, np.int64), self._codes(texts)

    def _keep_originals(self, args: list[Args | None], name: str, values: Sequence[int | str | None]) -> None:
        for row, value in enumerate(values):
            if value is not None and _integer(value) is None:
                args[row] = {**(args[row] or {}), name: Raw(_encode(str(value)))}

    def _take_known(self, args: list[Args | None], columns: dict[str, NDArray[Any]]) -> None:
        """Moves members that have a column from `args` to it. Members of another type stay."""
        rows_of: dict[str, list[int]] = defaultdict(list)
        shapes: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for row, each in enumerate(args):
            if each:
                shapes[tuple(each)].append(row)
        values_of: dict[str, list[Raw]] = defaultdict(list)
        for shape, rows in shapes.items():
            known_names = [name for name in shape if name in _KNOWN]
            some: list[Args] = [args[row] for row in rows]  # type: ignore[misc]
            for name in known_names:
                rows_of[name] += rows
                values_of[name] += map(itemgetter(name), some)
            if len(known_names) == len(shape):
                for row in rows:
                    args[row] = None
            else:
                for each in some:
                    for name in known_names:
                        del each[name]
        for name, rows in sorted(rows_of.items()):  # sorted: otherwise results would depend on where pieces end
            values = values_of[name]
            found: NDArray[Any]
            if name in INTEGERS:
                found, known = integers(values)
                column = columns.setdefault(INTEGERS[name], np.full(len(args), ABSENT, np.int64))
            elif name in TEXTS:
                texts = [_peer_or_text(name, value) for value in values]
                found, known = self._codes(texts), np.array([text is not None for text in texts], bool)
                column = columns.setdefault(TEXTS[name], np.full(len(args), NO_TEXT, np.int32))
            else:
                floats = [_number(value) for value in values]
                known = np.array([value is not None for value in floats], bool)
                found = np.array([value or 0.0 for value in floats], np.float64)
                column = columns.setdefault("bandwidth", np.full(len(args), np.nan))
            places = np.array(rows, np.int64)
            known &= (column[places] != column[places]) | (column[places] == (NO_TEXT if name in TEXTS else ABSENT))
            column[places[known]] = found[known]
            for place in np.flatnonzero(~known).tolist():
                args[rows[place]] = {**(args[rows[place]] or {}), name: values[place]}
                self.bad_values += bytes(values[place]) != b"null"

    def _rest(self, args: list[Args | None]) -> dict[str, NDArray[Any]]:
        """Makes JSON texts of the members that are left."""
        rows = [row for row, each in enumerate(args) if each]
        if not rows:
            return {}
        objects: list[Any] = [_encode(args[row]) for row in rows]
        joined = b",".join(objects)
        if any(blank in joined for blank in (b" ", b"\n", b"\t")):
            objects = _raws(msgspec.json.format(b"[%b]" % joined, indent=-1))
        lengths = np.array([memoryview(text).nbytes for text in objects], np.int64)
        if lengths.max() > MOST_ARGS:
            fits = lengths <= MOST_ARGS
            self.cut_args += int((~fits).sum())
            objects, rows = [objects[i] for i in np.flatnonzero(fits)], [rows[i] for i in np.flatnonzero(fits)]
            lengths = lengths[fits]
        return {
            "args_row": np.array(rows, np.int64),
            "args_length": lengths,
            "args": np.frombuffer(b"".join(objects), np.uint8),
        }


def _integer(value: int | str | None) -> int | None:
    """Returns an integer of 64 bits, also one in a text; None for others."""
    if isinstance(value, str):
        value = int(value.strip().partition(".")[0]) if _INTEGER.fullmatch(value) else None
    return value if value is not None and -(1 << 63) < value < 1 << 63 else None


def _array(numbers: Sequence[Any]) -> NDArray[np.int64]:
    """Returns integers as an array.

    Raises:
        TypeError, OverflowError: a value is not an integer, or does not fit.
    """
    return np.array(array("q", numbers), np.int64)


def _args(events: Sequence[Event]) -> list[Args | None]:
    """Returns the args of events, with `attr`, `bp` and `s`."""
    found = [event.args for event in events]
    rare = [event.attr is not None or event.bp is not NOTHING or event.s is not NOTHING for event in events]
    if True in rare:
        for row in np.flatnonzero(rare).tolist():
            event = events[row]
            also = {name: value for name, value in (("bp", event.bp), ("s", event.s)) if value is not NOTHING}
            found[row] = {**also, **(event.attr or {}), **(found[row] or {})}
    return found


def _number(text: Raw) -> float | None:
    """Returns a number, also one in a text; None if the value is not a finite number."""
    try:
        value = float(bytes(text).strip(b'"'))
    except ValueError:
        return None
    return value if abs(value) < 1e300 else None


def _peer_or_text(name: str, raw: Raw) -> str | None:
    """Returns a text; numbers and lists of peers become texts."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if isinstance(value, str):
        return value
    if TEXTS[name] == "peers" and type(value) is int:
        return str(value)
    return None
