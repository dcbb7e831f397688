"""Compares two profiles: both become one profile, in which interval 0 is before and interval 1 after."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from iaprof.formats.guesses import unmarked
from iaprof.formats.profile import Launch, Profile, all_reasons
from iaprof.report.views.ranking import Key, buckets, number_rows, sum_by_bucket

ENTRIES = ("kernel", "function", "launcher", "stack")
"""What can be compared: entries whose keys are the same in two recordings."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # a frame without a name
_UNNAMED = "[unnamed]"


@dataclass(frozen=True)
class Change:
    """An entry, before and after."""

    key: Key  # as in ranking.KEYS; empty for sums
    names: Sequence[str]  # of the reasons
    counts: tuple[tuple[int, ...], tuple[int, ...]]  # samples before and after, each by reason
    scale: tuple[float, float]  # the weight of a sample before and after

    @property
    def samples(self) -> tuple[int, int]:
        """Samples of all reasons, before and after."""
        return sum(self.counts[0]), sum(self.counts[1])

    @property
    def values(self) -> tuple[float, float]:
        """Scaled samples, before and after."""
        return self.samples[0] * self.scale[0], self.samples[1] * self.scale[1]

    @property
    def change(self) -> float:
        """The increase in scaled samples."""
        return self.values[1] - self.values[0]

    @property
    def state(self) -> str:
        """`new`, `gone`, or "" if it has samples both before and after."""
        before, after = self.samples
        return "" if (before and after) or not self.key else "new" if after else "gone"

    @property
    def reasons(self) -> dict[str, float]:
        """The increase in scaled samples, by reason."""
        pairs = zip(self.names, *self.counts, strict=True)
        return {name: after * self.scale[1] - before * self.scale[0] for name, before, after in pairs}

    @property
    def reason(self) -> str:
        """The reason that changed most."""
        changes = self.reasons
        return max(changes, key=lambda name: abs(changes[name]))


@dataclass(frozen=True)
class Difference:
    """A table of changes. The entries and `rest` add up to the total."""

    by: str  # one of ENTRIES
    entries: list[Change]  # the largest changes first
    more: int  # the number of entries beyond the limit
    rest: Change  # their sum
    total: Change


def joined(before: Profile, after: Profile) -> Profile:
    """Makes one profile of two: interval 0 is before, interval 1 after.

    Removes what always differs between two runs: pids become 0, and frames that are bare addresses get the same name.
    """
    both = (before, after)
    reasons = all_reasons(both)
    launches = without_addresses(launch for profile in both for launch in profile.launches)

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
        np.concatenate([profile.counts_for(reasons) for profile in both]),
        column("device", len(before.devices)),
        reasons,
        (0.0, 0.0),
        (*before.devices, *after.devices),
    )


def difference(both: Profile, by: str, limit: int, relative: bool = True) -> Difference:
    """Finds the entries that changed most.

    Args:
        both: a profile that `joined` made.
        by: one of ENTRIES.
        limit: the number of entries; 0: all.
        relative: compare percentages of all samples before and after, not samples.
    """
    rows = number_rows(both, by)
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

    sums = sum_by_bucket(bucket * 2 + both.interval, both.counts, 2 * size).reshape(size, 2, -1)
    entries = [change_of(rows.key(index), sums[at].tolist()) for at, index in enumerate(found[order].tolist())]
    entries.sort(key=lambda entry: (-abs(entry.change), -sum(entry.samples), entry.key))
    rest, total = (change_of((), counts.tolist()) for counts in (sums[-1], sums.sum(axis=0)))
    return Difference(by, entries, len(found) - len(order), rest, total)


def _percent(total: float) -> float:
    return 100.0 / total if total else 0.0


def without_addresses(launches: Iterable[Launch | None]) -> list[Launch | None]:
    """Removes what always differs between two runs: pids, and frames that are bare addresses."""
    name = cache(without_address)  # stacks share few frames
    return [launch and replace(launch, pid=0, stack=tuple(map(name, launch.stack))) for launch in launches]


def without_address(frame: str) -> str:
    """Returns a frame; instead of a bare address, which always differs between two runs, what stands for all."""
    name = unmarked(frame)
    return _UNNAMED + frame.removeprefix(name) if _ADDRESS.fullmatch(name) else frame
