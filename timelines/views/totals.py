"""Where time was spent: a row for each rank, row of the trace, category and name; and the differences of two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from iaprof.formats.texts import clean_texts
from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.grouped import Groups
from iaprof.timelines.stages.energy import OF_SLICES
from iaprof.timelines.trace import Texts, Trace
from iaprof.timelines.views import labels, nesting

_SIDES = ("host", "device")
_text = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [("rank", pa.int64()), ("side", _text), ("pid", pa.int64()), ("tid", pa.int64()), ("category", _text),
     ("name", _text), ("calls", pa.int64()), ("total_us", pa.float64()), ("self_us", pa.float64()),
     ("mean_us", pa.float64()), ("min_us", pa.float64()), ("max_us", pa.float64())]
)  # fmt: skip
"""`side` is `device` or `host`. `self_us` is without the slices inside of them. Texts can be null."""
ENERGY = "energy_uj"
"""A further column where power is known: microjoules, null for what has none."""


def totals(trace: Trace) -> pa.Table:
    """Returns the totals of a trace's slices, by rank and falling time: SCHEMA, and ENERGY where power is known."""
    slices = trace.slices
    device, ranks, names = labels.on_devices(trace), labels.ranks(trace), labels.names(trace)
    inside = nesting.parents(nesting.tracks(slices, ranks, device).numbers, *nesting.times(slices))
    own = nesting.self_times(slices, inside) / 1000
    whole = nesting.lengths(slices) / 1000
    groups = Groups(ranks, slices.pid, slices.tid, device, slices.category, names)
    total = groups.sum(whole)
    order = np.lexsort((-total, groups.key(ranks)))
    sides = pa.DictionaryArray.from_arrays(pa.array(groups.key(device)[order].astype(np.int32)), pa.array(_SIDES))
    columns = [
        pa.array(groups.key(ranks)[order]), sides, pa.array(groups.key(slices.pid)[order]),
        pa.array(groups.key(slices.tid)[order]), _texts(trace.texts, groups.key(slices.category)[order]),
        _texts(trace.texts, groups.key(names)[order]), pa.array(groups.counts[order]),
        *(pa.array(each[order]) for each in (total, groups.sum(own), total / groups.counts,
                                             groups.min(whole), groups.max(whole))),
    ]  # fmt: skip
    table = pa.Table.from_arrays(columns, schema=SCHEMA)
    energy = slices.extra.get(OF_SLICES)
    if energy is None:
        return table
    known = np.isfinite(energy)
    sums = groups.sum(np.where(known, energy, 0))[order]
    unknown = (groups.sum(known.astype(np.float64)) == 0)[order]
    return table.append_column(ENERGY, pa.array(sums, pa.float64(), mask=unknown))


def _texts(texts: Texts, codes: np.ndarray) -> pa.Array:
    return clean_texts(texts.taken(codes).cast(pa.string()).dictionary_encode())


BY = ("kernel", "category")
Key = tuple[int | None, str, str]
"""Rank (None: all), side (`device` or `host`; "" for kernels), and name."""


@dataclass(frozen=True)
class Use:
    """What a run spent on something."""

    calls: int = 0
    us: float = 0.0
    ideal_us: float | None = None  # None without ideal cycles

    @property
    def utilization(self) -> float | None:
        """The fraction of the time that would be ideal; None if it is not known."""
        return None if self.ideal_us is None or not self.us else self.ideal_us / self.us

    @property
    def mean_us(self) -> float:
        """Us per call; 0 without calls."""
        return self.us / self.calls if self.calls else 0.0


NOTHING = Use()


@dataclass(frozen=True)
class Change:
    """An entry, in both runs."""

    key: Key | None  # None for a sum
    before: Use
    after: Use
    scale: tuple[float, float] = (1.0, 1.0)

    @property
    def values(self) -> tuple[float, float]:
        """Us before and after, or percent of all us."""
        return self.before.us * self.scale[0], self.after.us * self.scale[1]

    @property
    def change(self) -> float:
        """The increase of the value."""
        return self.values[1] - self.values[0]

    @property
    def state(self) -> str:
        """`new`, `gone`, or "" if it has calls in both runs."""
        if self.key is None or (self.before.calls and self.after.calls):
            return ""
        return "new" if self.after.calls else "gone"


@dataclass(frozen=True)
class Difference:
    """A table of changes. The entries and `rest` add up to the total."""

    by: str
    entries: Sequence[Change]  # the largest changes first
    more: int  # entries beyond the limit
    rest: Change
    total: Change
    is_relative: bool = field(default=False)


def uses(trace: Trace, by: str, per_rank: bool) -> dict[Key, Use]:
    """Returns what a run spent on each kernel, or category of slices.

    A kernel has the durations of its slices, as in the table `summary`; a category the times of its slices without
    those inside of them, so that no time counts twice. With a compiler's ideal cycles a category is one of operations,
    as in the table `categories`.
    """
    operations = trace.tables.get("categories")
    if by == "kernel":
        rows = np.flatnonzero(find(trace, Kind.KERNEL))
        ranks, names = labels.ranks(trace)[rows], labels.names(trace)[rows]
        groups = Groups(ranks if per_rank else np.zeros(len(rows), np.int64), names)
        duration = np.clip(np.nan_to_num(trace.slices.duration[rows]), 0, None) / 1000
        share = trace.slices.extra.get("pt_active", np.zeros(len(trace.slices)))[rows]
        ideal = groups.sum(duration * np.where(share <= 1, share, 0))  # NaN is unknown, and above 1 is impossible
        columns = (groups.key(ranks), trace.texts.taken(groups.key(names)), groups.counts, groups.sum(duration), ideal)
        found = zip(*(each.tolist() for each in columns), strict=True)
        return {
            (rank if per_rank else None, "", name or ""): Use(calls, us, None if operations is None else ideal_us)
            for rank, name, calls, us, ideal_us in found
        }
    if operations is not None:
        return _of_operations(operations, per_rank)
    table = totals(trace)
    keys = ["rank", "side", "category"] if per_rank else ["side", "category"]
    for name in ("side", "category"):
        table = table.set_column(table.column_names.index(name), name, pc.fill_null(table[name].cast("string"), ""))
    sums = table.group_by(keys).aggregate([("calls", "sum"), ("self_us", "sum")])
    return {
        (row.get("rank"), row["side"], row["category"]): Use(row["calls_sum"], row["self_us_sum"])
        for row in sums.to_pylist()
    }


def _of_operations(table: pa.Table, per_rank: bool) -> dict[Key, Use]:
    # The last row of a rank and phase is their sum. A category can be called Total, too.
    sections = list(zip(table["Pid"].to_pylist(), table["Phase"].to_pylist(), strict=True))
    is_sum = [section != following for section, following in zip(sections, [*sections[1:], None], strict=True)]
    kept = table.filter(pc.and_(pc.invert(pa.array(is_sum, pa.bool_())), pc.greater(table["Calls"], 0)))
    sums = kept.group_by(["Pid", "Category"] if per_rank else ["Category"]).aggregate(
        [("Calls", "sum"), ("Kernel_Time", "sum"), ("Ideal_Time", "sum")]
    )
    return {
        (row.get("Pid"), "", row["Category"]): Use(row["Calls_sum"], row["Kernel_Time_sum"], row["Ideal_Time_sum"])
        for row in sums.to_pylist()
    }


def difference(
    before: Mapping[Key, Use], after: Mapping[Key, Use], by: str, limit: int, is_relative: bool = False
) -> Difference:
    """Finds what changed most.

    Args:
        before: of one run.
        after: of the other.
        by: one of BY.
        limit: the number of entries; 0: all.
        is_relative: compare percentages of all time, not us.
    """
    sums = [sum(use.us for use in run.values()) for run in (before, after)]
    scale = (_percent(sums[0]), _percent(sums[1])) if is_relative else (1.0, 1.0)
    changes = [
        Change(key, before.get(key, NOTHING), after.get(key, NOTHING), scale)
        for key in dict.fromkeys([*before, *after])
    ]
    changes.sort(key=lambda each: (-abs(each.change), -each.before.us - each.after.us, str(each.key)))
    entries = changes[: limit or None]
    rest = changes[len(entries) :]
    return Difference(by, entries, len(rest), _sum(rest, scale), _sum(changes, scale), is_relative)


def _percent(total: float) -> float:
    return 100.0 / total if total else 0.0


def _sum(changes: Sequence[Change], scale: tuple[float, float]) -> Change:
    before, after = (
        Use(sum(use.calls for use in uses_), sum(use.us for use in uses_), _ideal(uses_))
        for uses_ in ([each.before for each in changes], [each.after for each in changes])
    )
    return Change(None, before, after, scale)


def _ideal(uses_: Sequence[Use]) -> float | None:
    known = [use.ideal_us for use in uses_ if use.ideal_us is not None]
    return sum(known) if known else None
