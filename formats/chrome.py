"""Chrome's Trace Event format, whole columns of events at a time. Perfetto, TensorBoard and others read it, too.

The format is that of the document "Trace Event Format" (Chromium): JSON, in which events have a phase `ph` and times in
microseconds. Callers pass a chunk of rows whose texts stay below 2 GiB.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.basics.heap import return_free_memory
from iaprof.formats.distinct import few
from iaprof.formats.texts import HIDDEN

ABSENT = np.iinfo(np.int64).min
"""An integer that an event does not have."""
MOST_ROWS = 1 << 15
"""How many events a caller should pass at once: more need more memory, fewer more time."""

Texts: TypeAlias = pa.StringArray | pa.DictionaryArray
"""JSON texts, also with numbers of distinct ones."""

_SEPARATOR = ",\n"
_RETURNED_AFTER = 32  # chunks: what they leave in pieces would add up
_FARTHEST = 1 << 40  # behind the end of every text
_NEEDS_ESCAPES = rf'["\\]|{HIDDEN}'
_THOUSANDTHS = pa.array([f".{n:03}".rstrip("0") if n else "" for n in range(1000)], pa.string())


# Events


def place(names: Texts, categories: Texts | None, pids: Texts, tids: Texts) -> list[Member]:
    """What events of all phases have.

    Args:
        names: JSON strings.
        categories: JSON strings.
        pids: JSON.
        tids: JSON.
    """
    of_kind = [member("cat", categories)] if categories is not None else []
    return [member("name", names), *of_kind, member("pid", pids), member("tid", tids)]


def slices(
    places: Sequence[Member], starts: NDArray[np.int64], durations: NDArray[np.int64], args: Sequence[Member]
) -> pa.StringArray:
    """Events that take time: n of them, each behind the separator, with times in ns."""
    times = [member("ts", microseconds(starts)), member("dur", microseconds(durations))]
    return _events('{"ph":"X",', [*places, *times], len(starts), args)


def counters(places: Sequence[Member], times: NDArray[np.int64], args: Sequence[Member]) -> pa.StringArray:
    """Values of counters, by series: members of args. Returns what `slices` does."""
    return _events('{"ph":"C",', [*places, member("ts", microseconds(times))], len(times), args)


def marks(
    phases: Texts,
    places: Sequence[Member],
    times: NDArray[np.int64],
    ids: NDArray[np.int64],
    more: Member,
    args: Sequence[Member] | None = None,
) -> pa.StringArray:
    """Events of other phases, JSON strings.

    Args:
        phases: of each.
        places: see `place`.
        times: ns.
        ids: of events that belong together, such as a flow's; ABSENT.
        more: `bp` of flows: an arrow ends at the slice that encloses its end, not at the next one to begin; or `s`.
        args: their arguments.

    Returns:
        what `slices` does.
    """
    members = [member("ph", phases), *places, member("ts", microseconds(times)), member("id", numbers(ids)), more]
    return _events("{", members, len(times), args)


def _events(start: str, members: Sequence[Member], count: int, args: Sequence[Member] | None) -> pa.StringArray:
    last = [member("args", objects(args, count))] if args is not None else []
    return objects([*members, *last], count, _SEPARATOR + start)


def write(
    output: IO[bytes], head: Mapping[str, Any], first: Iterable[Mapping[str, Any]], chunks: Iterable[pa.StringArray]
) -> None:
    """Writes a file.

    Args:
        output: receives the JSON.
        head: members of the object before its events.
        first: events before the others.
        chunks: the others, each behind the separator.
    """
    output.write(json.dumps(head, indent=1)[:-2].encode() + b',\n"traceEvents":[\n')
    before = _SEPARATOR.join(map(json.dumps, first)).encode()
    output.write(before)
    skipped = 0 if before else len(_SEPARATOR)  # before the first event
    for number, chunk in enumerate(chunks, 1):
        _, offsets, content = chunk.buffers()
        places = np.frombuffer(offsets, np.int32)
        output.write(memoryview(content)[places[chunk.offset] + skipped : places[chunk.offset + len(chunk)]])
        skipped = 0
        if number % _RETURNED_AFTER == 0:
            return_free_memory()
    output.write(b"\n]}\n")


# JSON, by columns


def quoted(texts: pa.Array) -> pa.Array:
    """Returns texts as JSON strings, of the same type; nulls stay null."""
    quote, nothing = pa.scalar('"', texts.type), pa.scalar("", texts.type)
    escaped = pc.fill_null(pc.match_substring_regex(texts, _NEEDS_ESCAPES), fill_value=False)
    plain = pc.binary_join_element_wise(quote, texts, quote, nothing)
    rows = np.flatnonzero(escaped.to_numpy(zero_copy_only=False))
    if not len(rows):
        return plain
    odd = pa.array([json.dumps(text) for text in texts.take(pa.array(rows)).to_pylist()], texts.type)
    return pc.replace_with_mask(plain, escaped, odd)


def microseconds(ns: NDArray[np.int64]) -> pa.StringArray:
    """Returns times in ns as JSON numbers in us, with up to three decimals."""
    size = np.abs(ns).astype(np.uint64)  # as no int64 is the size of the least one
    whole = pa.array(size // np.uint64(1000)).cast(pa.string())
    parts = [whole, _THOUSANDTHS.take(pa.array(size % np.uint64(1000))), _text("")]
    if (ns < 0).any():
        parts.insert(0, pc.if_else(pa.array(ns < 0), _text("-"), _text("")))
    return pc.binary_join_element_wise(*parts)


def numbers(values: NDArray[np.generic]) -> pa.StringArray:
    """Returns numbers as JSON numbers, and True as true; null for False, ABSENT, NaN and infinity."""
    if values.dtype == bool:
        return pc.if_else(pa.array(values), _text("true"), pa.scalar(None, pa.string()))
    if values.dtype.kind == "f":
        return pa.array(values, mask=~np.isfinite(values)).cast(pa.string())
    return pa.array(values, mask=values == ABSENT).cast(pa.string())


def few_numbers(values: NDArray[np.int64]) -> Texts:
    """Returns integers as JSON numbers; null for ABSENT. Each of them is made once, if few are different."""
    found = few(values, values == ABSENT)
    return numbers(values) if found is None else pa.DictionaryArray.from_arrays(found[0], numbers(found[1]))


@dataclass(frozen=True)
class Member:
    """A member of some objects; they do not have it where the value is null."""

    before: str
    values: Texts
    after: str

    @property
    def is_in_all(self) -> bool:
        """Whether all objects have it."""
        return not self.values.null_count

    @property
    def is_plain(self) -> bool:
        """Whether values are texts for each object, and no dictionary."""
        return not isinstance(self.values, pa.DictionaryArray)

    def texts(self, start: str = "") -> pa.StringArray:
        """Returns it as it stands in objects, with a comma, behind a start; null where they do not have it."""
        if not self.is_plain:
            return replace(self, values=self.values.dictionary).texts(start).take(self.values.indices)
        return pc.binary_join_element_wise(_text(start + self.before), self.values, _text(self.after), _text(""))


def member(name: str, values: Texts, quote: str = "") -> Member:
    """Returns a member of objects, `"name":value,`.

    Args:
        name: its key.
        values: JSON, or what stands between quotes; null for objects without it.
        quote: stands on both sides of the values.
    """
    return Member(f"{json.dumps(name)}:{quote}", values, f"{quote},")


def objects(members: Sequence[Member], count: int, start: str = "{") -> pa.StringArray:
    """Returns `count` objects of members.

    Args:
        members: of those with a name, one that all objects have may become the last, which saves a copy.
        count: how many.
        start: what all of them start with: a brace, and JSON of members that all have, with a comma behind each.
    """
    used = [each for each in members if each.values.null_count < count]
    last = next(
        (n for n in reversed(range(len(used))) if used[n].is_in_all and (used[n].before or used[n] is used[-1])), None
    )
    if last is not None:
        used.append(used.pop(last))
    # The commas are not separators of Arrow's join, which leaves out rows in which all members are null.
    parts: list[pa.StringArray | pa.StringScalar] = []
    constant = start
    for alike in _together(used):
        if not alike[0].is_plain and alike[0].is_in_all:
            parts.append(replace(alike[0], after="").texts(constant))
            constant = alike[0].after
        elif alike[0].is_in_all:
            parts += [_text(constant + alike[0].before), alike[0].values]
            constant = alike[0].after
        else:
            parts += [_text(constant), _texts(alike)]
            constant = ""
    if not used:
        return pa.repeat(_text(constant.rstrip(",") + "}"), count)
    if last is not None:
        return _join(*parts, _text(constant.removesuffix(",") + "}"))
    return _join(pc.ascii_rtrim(_join(*parts), ","), _text("}"))


def shared(members: Sequence[Member], number: NDArray[np.int64]) -> Member:
    """Returns members of distinct objects as one member of all objects, which have them by number."""
    count = len(members[0].values)
    texts = objects(members, count, "")
    texts = pc.binary_replace_slice(texts, start=-1, stop=_FARTHEST, replacement="")  # the brace
    none = pc.equal(texts, _text("")).to_numpy(zero_copy_only=False)
    return Member("", pa.DictionaryArray.from_arrays(pa.array(number, mask=none[number]), texts), ",")


def _together(members: Sequence[Member]) -> list[list[Member]]:
    """Returns members in lists: plain ones beside each other that the same objects lack become one text."""
    found: list[list[Member]] = []
    lack: pa.BooleanArray | None = None  # of the last list
    for each in members:
        before, lack = lack, pc.is_null(each.values) if each.is_plain and not each.is_in_all else None
        if before is not None and lack is not None and lack.equals(before):
            found[-1].append(each)
        else:
            found.append([each])
    return found


def _texts(members: Sequence[Member]) -> pa.StringArray:
    """Returns members that the same objects lack, as Member.texts does."""
    if len(members) == 1:
        return members[0].texts()
    parts: list[pa.StringArray | pa.StringScalar] = []
    constant = ""
    for each in members:
        parts += [_text(constant + each.before), each.values]
        constant = each.after
    return pc.binary_join_element_wise(*parts, _text(constant), _text(""))


def _join(*parts: pa.StringArray | pa.StringScalar) -> pa.StringArray:
    return pc.binary_join_element_wise(*parts, _text(""), null_handling="replace", null_replacement="")


@functools.cache
def _text(text: str) -> pa.StringScalar:
    """Returns a scalar; those that Arrow makes of a str itself cost as much as a thousand rows."""
    return pa.scalar(text, pa.string())
