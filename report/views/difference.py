"""What changed between two profiles: both as one, whose two intervals are before and after."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from iaprof.formats.profile import Launch, Profile, all_reasons
from iaprof.report.views.ranking import Key, added_up, buckets, numbered

ENTRIES = ("kernel", "function", "launcher", "stack")
"""What can be compared: what is called the same in two recordings."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # a frame that nothing is known of
_UNNAMED = "[unnamed]"


@dataclass(frozen=True)
class Change:
    """One entry, before and after."""

    key: Key  # as ranking.KEYS says; empty in sums
    names: Sequence[str]  # of reasons
    counts: tuple[tuple[int, ...], tuple[int, ...]]  # samples before and after, each by reason
    scale: tuple[float, float]  # what a sample before, and one after, counts

    @property
    def samples(self) -> tuple[int, int]:
        """Before and after."""
        return sum(self.counts[0]), sum(self.counts[1])

    @property
    def values(self) -> tuple[float, float]:
        """The samples, scaled."""
        return self.samples[0] * self.scale[0], self.samples[1] * self.scale[1]

    @property
    def change(self) -> float:
        """How much more it is after than before, scaled."""
        return self.values[1] - self.values[0]

    @property
    def state(self) -> str:
        """`new`, `gone`, or nothing where it is before and after."""
        before, after = self.samples
        return "" if (before and after) or not self.key else "new" if after else "gone"

    @property
    def reasons(self) -> dict[str, float]:
        """How much more of each reason there is, scaled."""
        pairs = zip(self.names, *self.counts, strict=True)
        return {name: after * self.scale[1] - before * self.scale[0] for name, before, after in pairs}

    @property
    def reason(self) -> str:
        """That which changed most."""
        changes = self.reasons
        return max(changes, key=lambda name: abs(changes[name]))


@dataclass(frozen=True)
class Difference:
    """A table; its entries and what is beyond them add up to the total."""

    by: str  # of ENTRIES
    entries: list[Change]  # the largest changes first
    more: int  # entries that are beyond the limit
    rest: Change  # and their sum
    total: Change


def joined(before: Profile, after: Profile) -> Profile:
    """One profile with the rows of both, interval 0 before and 1 after, without what differs between two runs anyway.

    Process ids are 0, and frames that are bare addresses have one name.
    """
    both = (before, after)
    reasons = all_reasons(both)
    launches = [_without_addresses(launch) for profile in both for launch in profile.launches]

    def column(name: str, shift: int = 0) -> np.ndarray:
        return np.concatenate((getattr(before, name), getattr(after, name) + shift))

    return Profile(
        launches,
        [*before.kernels, *after.kernels],
        [*before.codes, *after.codes],
        np.repeat(np.arange(2), [len(before), len(after)]),
        column("launch", len(before.launches)),
        column("kernel", len(before.kernels)),
        column("code", len(before.codes)),
        np.concatenate((before.offset, after.offset)),
        np.concatenate([profile.counts_of(reasons) for profile in both]),
        column("device", len(before.devices)),
        reasons,
        (0.0, 0.0),
        (*before.devices, *after.devices),
    )


def difference(both: Profile, by: str, limit: int, relative: bool = True) -> Difference:
    """What changed most.

    Args:
        both: as `joined` makes it.
        by: one of ENTRIES.
        limit: how many entries; 0 for all.
        relative: counts percent of all samples before or after; else samples as they are.
    """
    rows = numbered(both, by)
    found, place = np.unique(rows.number, return_inverse=True)
    samples_of = both.counts.sum(axis=1)
    samples = np.bincount(place * 2 + both.interval, samples_of, 2 * len(found)).reshape(-1, 2)
    totals = samples.sum(axis=0).tolist()
    scale = (_percent(totals[0]), _percent(totals[1])) if relative else (1.0, 1.0)
    change = np.abs(samples @ (np.array(scale) * (-1, 1)))
    order = np.lexsort((-samples.sum(axis=1), -change))[: limit or None]
    bucket = buckets(order, len(found))[place]
    size = len(order) + 1

    def change_of(key: Key, counts: Sequence[Sequence[int]]) -> Change:
        return Change(key, both.reasons, (tuple(counts[0]), tuple(counts[1])), scale)

    sums = added_up(bucket * 2 + both.interval, both.counts, 2 * size).reshape(size, 2, -1)
    entries = [change_of(rows.key(index), sums[at].tolist()) for at, index in enumerate(found[order].tolist())]
    entries.sort(key=lambda entry: (-abs(entry.change), -sum(entry.samples), entry.key))
    rest, total = (change_of((), counts.tolist()) for counts in (sums[-1], sums.sum(axis=0)))
    return Difference(by, entries, len(found) - len(order), rest, total)


def _percent(total: float) -> float:
    return 100.0 / total if total else 0.0


def _without_addresses(launch: Launch | None) -> Launch | None:
    if launch is None:
        return None
    stack = tuple(_UNNAMED if _ADDRESS.fullmatch(frame) else frame for frame in launch.stack)
    return replace(launch, pid=0, stack=stack)
