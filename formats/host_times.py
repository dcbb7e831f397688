"""Samples of many captures by host and time of day: what the heat map of hosts shows, in bounded memory.

Times are divided at multiples of a width since 1970, so that columns begin at round times of day, UTC. Each width is a
multiple of the narrower ones. Of a capture it is known how many samples it has and when it ran: these are spread evenly
over its time, in whole numbers, such that each wider column has exactly the samples of the narrower ones in it. So sums
do not depend on the order in which they are made, nor on the widths on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_COLUMNS = 600
_MOST_CELLS = 1 << 20  # 24 bytes each
_WIDTHS = (1, 10, 60, 300, 900, 3600, 3 * 3600, 6 * 3600, 24 * 3600, 7 * 24 * 3600)  # seconds
_NS = 10**9
_EARLIEST_NS = 946_684_800 * _NS  # 2000: a clock that says less was never set
_Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class HostTimes:
    """Samples by host and column of time; a cell with 0 was recorded, and nothing stalled."""

    hosts: Sequence[str]  # sorted
    width: int  # of a column, seconds
    host: _Ints  # [n], index into hosts, ascending
    column: _Ints  # [n], seconds since 1970 divided by `width`; ascending within a host
    samples: _Ints  # [n]
    timeless: int = 0  # samples of captures of which it is not known when they ran

    @classmethod
    def of(
        cls, hosts: Sequence[str], begun_ns: Sequence[int], lengths_ns: Sequence[int], samples: Sequence[int]
    ) -> HostTimes:
        """Makes it of captures.

        Args:
            hosts: of each capture.
            begun_ns: when each began, ns since 1970; 0: unknown.
            lengths_ns: how long each took.
            samples: of each.
        """
        names, number = _numbered(hosts)
        begun, lengths, counts = (np.array(each, np.int64) for each in (begun_ns, lengths_ns, samples))
        known = begun >= _EARLIEST_NS
        timeless = int(counts[~known].sum())
        number, begun, lengths, counts = (each[known] for each in (number, begun, lengths, counts))
        last = begun + np.maximum(lengths - 1, 0)
        for width in _widths():
            first_column, last_column = begun // (width * _NS), last // (width * _NS)
            if int(last_column.max(initial=0)) - int(first_column.min(initial=1 << 62)) < MOST_COLUMNS:
                break
        columns = last_column - first_column + 1
        capture = np.repeat(np.arange(len(begun)), columns)
        column = np.arange(len(capture)) - np.repeat(np.cumsum(columns) - columns, columns) + first_column[capture]

        def so_far(edge: _Ints) -> _Ints:
            """Samples of each capture up to an edge: the same whatever the width, so that differences add up."""
            share = (edge - begun[capture]) / np.maximum(lengths[capture], 1)
            return np.floor(counts[capture] * np.clip(share, 0, 1)).astype(np.int64)

        begins = column * width * _NS
        is_last = column == last_column[capture]
        until = np.where(is_last, counts[capture], so_far(begins + width * _NS))
        cells = until - np.where(column == first_column[capture], 0, so_far(begins))
        return cls(names, width, number[capture], column, cells, timeless)._summed()

    @classmethod
    def total(cls, several: Sequence[HostTimes]) -> HostTimes:
        """Adds up several, in columns as wide as needed for MOST_COLUMNS, and for the memory."""
        if len(several) == 1:
            return several[0]
        names = sorted({host for each in several for host in each.hosts})
        place = {name: number for number, name in enumerate(names)}
        width = max((each.width for each in several), default=_WIDTHS[0])
        numbers = [np.array([place[host] for host in each.hosts], np.int64)[each.host] for each in several]
        columns = [each.column // (width // each.width) for each in several]
        empty = np.empty(0, np.int64)
        return cls(
            names,
            width,
            np.concatenate([empty, *numbers]),
            np.concatenate([empty, *columns]),
            np.concatenate([empty, *(each.samples for each in several)]),
            sum(each.timeless for each in several),
        )._summed()

    def _summed(self) -> HostTimes:
        """Adds up equal cells, and widens columns while there are too many."""
        if not len(self.host):
            return self
        column = self.column
        for width in _widths(self.width):
            column = self.column // (width // self.width)
            first, span = int(column.min()), int(np.ptp(column)) + 1
            if span > MOST_COLUMNS:
                continue
            cells, cell = np.unique(self.host * span + column - first, return_inverse=True)
            if len(cells) <= _MOST_CELLS:
                break
        samples = np.zeros(len(cells), np.int64)
        np.add.at(samples, cell, self.samples)
        host, offset = np.divmod(cells, span)
        return HostTimes(self.hosts, width, host, offset + first, samples, self.timeless)


def _widths(first: int = _WIDTHS[0]) -> Iterator[int]:
    """Yields widths that are multiples of one another, from `first` on."""
    yield from (width for width in _WIDTHS[:-1] if width >= first)
    width = max(first, _WIDTHS[-1])
    while True:
        yield width
        width *= 4


def _numbered(texts: Sequence[str]) -> tuple[list[str], _Ints]:
    """Returns the distinct texts, sorted, and the number of each text: int64[n]."""
    names = sorted(set(texts))
    place = {name: number for number, name in enumerate(names)}
    return names, np.array([place[text] for text in texts], np.int64)
