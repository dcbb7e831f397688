"""What changed between two sets of captures, and whether captures of one set differ among themselves as much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import Profile
from iaprof.report.fleet.partial import Partial, profile_of
from iaprof.report.views.difference import Change, Difference, difference, joined
from iaprof.report.views.ranking import Key, number_rows

FEWEST = 3  # captures in each set: with fewer, no chance can be told
_DEALS = 2_000  # of all captures into two sets at random
_AT_ONCE = 100  # deals, which bounds the memory


def movers(before: Partial, after: Partial, by: str, limit: int, relative: bool) -> tuple[Difference, dict[Key, float]]:
    """Compares two sums whose groups are single captures.

    Args:
        before: the first set.
        after: the second set.
        by: one of difference.ENTRIES.
        limit: the number of entries; 0: all.
        relative: compare shares, not samples.

    Returns:
        The difference; and by key of its entries the probability that one of them changes as much by chance: how often
        one did when all captures were dealt into two sets at random. Without FEWEST captures in each set, it is empty.
    """
    profiles = [profile_of(each, by_group=True) for each in (before, after)]
    both = joined(*profiles)
    found = difference(both, by, limit, relative)
    numbers = len(before.groups), len(after.groups)
    if min(numbers) < FEWEST:
        return found, {}
    pairs = zip(profiles, numbers, strict=True)
    shares = np.concatenate([_shares(profile, number, by, found.entries) for profile, number in pairs], axis=1)
    return found, dict(zip((each.key for each in found.entries), _chances(shares, numbers[0]), strict=True))


def _shares(profile: Profile, captures: int, by: str, entries: Sequence[Change]) -> NDArray[np.float64]:
    """Returns the share of each entry in each capture (an interval of the profile): float64[entries, captures]."""
    rows = number_rows(profile, by)
    place = {entry.key: number for number, entry in enumerate(entries)}
    numbers, at = np.unique(rows.number, return_inverse=True)
    entry = np.array([place.get(rows.key(number), len(entries)) for number in numbers.tolist()], np.int64)[at]
    samples = profile.counts.sum(axis=1).astype(np.float64)
    cells = np.bincount(entry * captures + profile.interval, samples, (len(entries) + 1) * captures)
    table = cells.reshape(len(entries) + 1, captures)
    whole = table.sum(axis=0)
    return np.asarray(np.divide(table[:-1], whole, out=np.zeros_like(table[:-1]), where=whole > 0), np.float64)


def _chances(shares: NDArray[np.float64], first: int) -> list[float]:
    """Returns, for each entry, how often the largest change of all entries is at least as large by chance."""
    count = shares.shape[1]
    spread = shares.std(axis=1, keepdims=True)
    scaled = np.divide(shares - shares.mean(axis=1, keepdims=True), spread, out=np.zeros_like(shares), where=spread > 0)
    weights = np.where(np.arange(count) < first, -1.0 / first, 1.0 / (count - first))
    seen = np.abs(scaled @ weights)
    chance = np.random.default_rng(1)  # the same captures give the same figures
    reached = np.zeros(len(shares))
    for _ in range(0, _DEALS, _AT_ONCE):
        dealt = np.stack([chance.permutation(weights) for _ in range(_AT_ONCE)], axis=1)
        largest = np.abs(scaled @ dealt).max(axis=0)
        reached += (largest[None, :] >= seen[:, None] * (1 - 1e-9)).sum(axis=1)
    return list(((reached + 1) / (_DEALS + 1)).tolist())
