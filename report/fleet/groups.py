"""What captures are grouped by: their host, day or labels, or what partitions of a store's paths say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import UsageError
from iaprof.report.fleet.samples import Samples
from iaprof.report.fleet.totals import Summary

Group = tuple[str, ...]
"""A text for each dimension."""

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

    def groups_of(self, samples: Samples, captures: Sequence[Summary]) -> tuple[list[Group], NDArray[np.int64]]:
        """Divides rows into groups.

        Args:
            samples: whose rows have the number of their capture.
            captures: all captures; one without rows has a group, too, unless its rows would have several.

        Returns:
            The groups; and the group of each row: int64[n], index into the groups.
        """
        of_captures = [tuple(_text(each, word) for word in self.of_captures) for each in captures]
        rows = samples.rows
        if not self.columns:
            distinct: dict[Group, int] = {}
            for capture, group in zip(captures, of_captures, strict=True):
                if capture.is_sound:
                    distinct.setdefault(group, len(distinct))
            number = np.array([distinct.get(group, -1) for group in of_captures], np.int64)
            return list(distinct), number[rows.capture]
        texts = {
            "container": [launch.container if launch else "" for launch in samples.launches],
            "pod": [launch.pod if launch else "" for launch in samples.launches],
            "device": list(samples.devices),
            "hash": [kernel.hash if kernel else "" for kernel in samples.kernels],
        }
        numbers: list[NDArray[np.int64]] = []
        known: list[list[str]] = []
        for word in self.by:
            if word in OF_ROWS:
                of_table, column = texts[word], getattr(rows, OF_ROWS[word])
            else:
                at = self.of_captures.index(word)
                of_table, column = [group[at] for group in of_captures], rows.capture
            names: dict[str, int] = {}
            name = np.array([names.setdefault(text or UNKNOWN, len(names)) for text in of_table], np.int64)
            numbers.append(name[column])
            known.append(list(names))
        found, number = np.unique(np.stack(numbers, axis=1), axis=0, return_inverse=True)
        groups = [tuple(known[place][name] for place, name in enumerate(each)) for each in found.tolist()]
        return groups, number.reshape(-1)

    def counted(
        self, groups: Sequence[Group], group: NDArray[np.int64], capture: NDArray[np.int64], captures: Sequence[Summary]
    ) -> Counter[Group]:
        """Counts the captures of each group: those with samples in it, if a capture's rows may be in several.

        Args:
            groups: the groups.
            group: int64[n], of each row.
            capture: int64[n], of each row.
            captures: all captures.
        """
        if not self.columns:
            found = (tuple(_text(each, word) for word in self.of_captures) for each in captures if each.is_sound)
            return Counter(found)
        pairs = np.unique(np.stack([group, capture], axis=1), axis=0)
        counts = np.bincount(pairs[:, 0], minlength=len(groups)).tolist()
        return Counter(dict(zip(groups, counts, strict=True)))

    @staticmethod
    def host_of(capture: Summary) -> str:
        """Returns the host of a capture."""
        return _text(capture, "host")


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
