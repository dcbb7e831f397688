"""What captures are grouped by: their host, day or labels, or what partitions of a store's paths say."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from iaprof.basics.errors import UsageError
from iaprof.report.fleet.partial import Group, Partial, dropped
from iaprof.report.fleet.summary import Summary

OF_CAPTURES = ("host", "day", "hour", "capture", "command", "gpu")
OF_ROWS = {"container": "launch", "pod": "launch", "device": "device", "hash": "kernel"}
"""By group: the column of rows that has it."""
LABEL = "label:"
ALL = (*OF_CAPTURES, *OF_ROWS, f"{LABEL}NAME")
UNKNOWN = "[unknown]"
_NS = 10**9


@dataclass(frozen=True)
class Grouping:
    """The dimensions of a group, in order."""

    by: tuple[str, ...] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> Grouping:
        """Checks the values of --group-by.

        Raises:
            UsageError: there is no such group.
        """
        for word in words:
            if word not in (*OF_CAPTURES, *OF_ROWS) and not word.removeprefix(LABEL) != word:
                raise UsageError(f"--group-by does not know '{word}': choose from {', '.join(ALL)}")
        return cls(tuple(dict.fromkeys(words)))

    @property
    def of_captures(self) -> tuple[str, ...]:
        """The dimensions that are the same for all rows of a capture."""
        return tuple(word for word in self.by if word not in OF_ROWS)

    @property
    def columns(self) -> frozenset[str]:
        """The columns of rows that other dimensions need."""
        return frozenset(OF_ROWS[word] for word in self.by if word in OF_ROWS)

    def of(self, capture: Summary) -> tuple[str, ...]:
        """Returns the group of a capture: a text for each of `of_captures`."""
        return tuple(_text(capture, word) for word in self.of_captures)


def _text(capture: Summary, word: str) -> str:
    if word.startswith(LABEL):
        name = word.removeprefix(LABEL)
        return capture.labels.get(name) or partitions(capture.file).get(name) or UNKNOWN
    if word in ("day", "hour"):
        if not capture.begun_ns:
            return UNKNOWN
        begun = datetime.fromtimestamp(capture.begun_ns // _NS, UTC)
        return f"{begun:%Y-%m-%d}" if word == "day" else f"{begun:%H}"
    texts = {
        "host": capture.host or partitions(capture.file).get("host", ""),
        "capture": capture.name,
        "command": capture.command,
        "gpu": capture.gpus,
    }
    return texts[word] or UNKNOWN


def partitions(name: str) -> dict[str, str]:
    """Returns what the folders of a path or URL say, as in `date=2026-11-20/host=a1/cap.parquet`."""
    pairs = (folder.partition("=") for folder in name.split("/")[:-1])
    return {key: value for key, equals, value in pairs if equals and key}


def regrouped(total: Partial, grouping: Grouping, kept: Collection[str]) -> Partial:
    """Divides the groups of captures by the dimensions of rows, in the order of --group-by.

    Args:
        total: the sum, which has the columns of these dimensions.
        grouping: the dimensions.
        kept: the columns that tell rows apart afterwards.
    """
    if not grouping.columns:
        return total
    rows = total.rows
    texts = {
        "container": [launch.container if launch else "" for launch in total.launches],
        "pod": [launch.pod if launch else "" for launch in total.launches],
        "device": list(total.devices),
        "hash": [kernel.hash if kernel else "" for kernel in total.kernels],
    }
    numbers: list[np.ndarray] = []
    known: list[list[str]] = []
    for word in grouping.by:
        if word in OF_ROWS:
            of_table, column = texts[word], getattr(rows, OF_ROWS[word])
        else:
            at = grouping.of_captures.index(word)
            of_table, column = [group[at] for group in total.groups], rows.capture
        distinct: dict[str, int] = {}
        number = np.array([distinct.setdefault(text or UNKNOWN, len(distinct)) for text in of_table], np.int64)
        numbers.append(number[column])
        known.append(list(distinct))
    found, group = np.unique(np.stack(numbers, axis=1), axis=0, return_inverse=True)
    groups: list[Group] = [tuple(known[place][number] for place, number in enumerate(each)) for each in found.tolist()]
    return dropped(replace(total, groups=groups, rows=replace(rows, capture=group.reshape(-1))), kept)
