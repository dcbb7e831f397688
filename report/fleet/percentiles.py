"""How the share of a kernel, or of another entry of `iaprof top`, is spread over groups such as hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import Profile
from iaprof.report.fleet.groups import Group
from iaprof.report.fleet.partial import Partial, profile_of
from iaprof.report.views.ranking import Key, number_rows

_AT_ONCE = 1 << 22  # cells of a table of entries and groups, 8 bytes each


@dataclass(frozen=True)
class Spread:
    """An entry: its samples in all groups, and its shares of the samples of each group that has any."""

    key: Key
    samples: int
    share: float  # of all samples
    p50: float
    p90: float
    p99: float
    most: float
    group: Group  # with the largest share


def spreads(total: Partial, by: str) -> list[Spread]:
    """Returns all entries, those with most samples first.

    Args:
        total: the sum, with rows by group.
        by: one of ranking.KEYS.
    """
    profile = profile_of(total, by_group=True)
    entry, keys = _numbered(profile, by)
    samples = profile.counts.sum(axis=1).astype(np.int64)
    of_entry = np.bincount(entry, samples, len(keys)).astype(np.int64)
    of_group = np.bincount(profile.interval, samples, len(total.groups))
    with_samples = np.flatnonzero(of_group)
    order = np.argsort(-of_entry, kind="stable")
    place = np.argsort(order)[entry]
    found: list[Spread] = []
    several = max(_AT_ONCE // max(len(total.groups), 1), 1)
    for first in range(0, len(keys), several):
        rows = (place >= first) & (place < first + several)
        number = min(several, len(keys) - first)
        cells = (place[rows] - first) * len(total.groups) + profile.interval[rows]
        table = np.bincount(cells, samples[rows], number * len(total.groups)).reshape(number, -1)[:, with_samples]
        shares = table / of_group[with_samples]
        ranks = np.quantile(shares, (0.5, 0.9, 0.99), axis=1).T.tolist()
        largest = shares.argmax(axis=1)
        for at, (p50, p90, p99) in enumerate(ranks):
            one = int(order[first + at])
            group = total.groups[int(with_samples[largest[at]])]
            share = float(of_entry[one] / max(int(of_entry.sum()), 1))
            most = float(shares[at, largest[at]])
            found.append(Spread(keys[one], int(of_entry[one]), share, p50, p90, p99, most, group))
    return found


def _numbered(profile: Profile, by: str) -> tuple[NDArray[np.int64], list[Key]]:
    """Returns the entry of each row: int64[n], index into the keys."""
    rows = number_rows(profile, by)
    key_of: Callable[[int], Key] = rows.key
    numbers, first = np.unique(rows.number, return_inverse=True)
    distinct: dict[Key, int] = {}
    of_number = [distinct.setdefault(key_of(number), len(distinct)) for number in numbers.tolist()]
    return np.array(of_number, np.int64)[first.reshape(-1)], list(distinct)
