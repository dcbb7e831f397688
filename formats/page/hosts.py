"""The heat map of hosts on a page of many captures, of bounded size: samples by host and time of day.

Of many hosts, several share a row: those next to each other by name, with numbers in names as numbers.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from iaprof.basics.clean import clean
from iaprof.formats.host_times import HostTimes

_MOST_ROWS = 250
_LONGEST = 80  # characters of a name


def host_map(times: HostTimes, most_rows: int = _MOST_ROWS) -> dict[str, Any] | None:
    """Returns the data of the heat map; None if it is of no capture known when it ran.

    Cells come as runs: those of a row, one after the other, each as the way from the one before, and its samples.

    Args:
        times: samples by host and time.
        most_rows: how many rows there may be.
    """
    if not len(times.host):
        return None
    known, host = np.unique(times.host, return_inverse=True)
    names = [times.hosts[number] for number in known.tolist()]
    order = sorted(range(len(names)), key=lambda number: _natural(names[number]))
    each = -(-len(names) // most_rows)  # hosts of a row
    row_of = np.empty(len(names), np.int64)
    row_of[order] = np.arange(len(names)) // each
    first = int(times.column.min())
    columns = int(times.column.max()) - first + 1
    cells, at = np.unique(row_of[host] * columns + times.column - first, return_inverse=True)
    samples = np.zeros(len(cells), np.int64)
    np.add.at(samples, at, times.samples)
    rows = [order[begin : begin + each] for begin in range(0, len(order), each)]
    return {
        "begin": first * times.width,
        "width": times.width,
        "columns": columns,
        "rows": [{"first": _short(names[row[0]]), "last": _short(names[row[-1]]), "hosts": len(row)} for row in rows],
        "steps": np.diff(cells, prepend=0).tolist(),
        "samples": samples.tolist(),
        "timeless": times.timeless,
    }


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Returns a key that sorts node-2 before node-10."""
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+", name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]


def _short(name: str) -> str:
    text = clean(name)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
