"""Ranks kernels, functions, lines and so on by samples, for tables.

Rows of the profile are numbered by entry, and added up by these numbers. Keys are made once for each launch, kernel and
code, and full keys only for the entries that are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import distinct
from iaprof.formats.profile import UNKNOWN_KERNEL, UNKNOWN_PROCESS, Code, Kernel, Launch, Profile, kernel_name
from iaprof.formats.ranges import ranges
from iaprof.formats.stacks.trees import divided_rows
from iaprof.report.views.launchers import launcher

ENERGY = "energy"
KEYS: dict[str, tuple[str, ...]] = {
    "kernel": ("kernel", "file"),
    "function": ("function",),
    "line": ("file", "line", "kernel"),  # the kernel only if the file is unknown
    "instruction": ("kernel", "file", "offset", "instruction"),
    "reason": ("reason",),
    "process": ("host", "process", "pid"),
    "launcher": ("launcher",),  # see launchers.py
    "stack": ("process", "stack"),  # the innermost frame first
    "operator": ("operator",),
    ENERGY: ("kernel", "file"),  # kernels, those with most energy first
}
"""By kind of entry: what an entry's key consists of."""
NO_OPERATOR = "[no operator]"

Key = tuple[str | int | tuple[str, ...], ...]
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Entry:
    """A line of the table."""

    key: Key  # as in KEYS; empty for sums
    reasons: Sequence[str]
    counts: tuple[int, ...]  # samples, by reason
    inclusive: int | None = None  # for functions and operators: samples in it and in those that it calls
    launches: int | None = None  # for kernels of a whole profile
    processes: int = 0  # processes whose launches have these samples
    energy: int | None = None  # nJ that GPUs used for the samples
    divided: int | None = None
    """Of the samples: divided between this entry and others that launched the same kernel; of the total: any that is;
    None where it is unknown, or entries do not depend on launches."""

    @property
    def samples(self) -> int:
        """Samples of all reasons."""
        return sum(self.counts)

    @property
    def reason(self) -> str:
        """The reason with most samples."""
        return self.reasons[self.counts.index(max(self.counts))]


@dataclass(frozen=True)
class Ranking:
    """A table. The entries and `rest` add up to the total."""

    by: str  # one of KEYS
    entries: list[Entry]  # most samples first
    more: int  # the number of entries beyond the limit
    rest: Entry  # their sum
    total: Entry
    timed: bool = False  # see Profile


@dataclass(frozen=True)
class RowNumbers:
    """The entry that each row of a profile belongs to."""

    number: NDArray[np.int64]  # [n], of the entry
    key: Callable[[int], Key]  # returns the key of an entry's number


class Ranker:
    """Makes tables of a profile or of some of its rows."""

    def __init__(self, profile: Profile, by: str) -> None:
        """Numbers the profile's rows by entry; `by` is one of KEYS."""
        self._profile = profile
        self._by = by
        self._rows = None if by == "reason" else number_rows(profile, by)
        self._calls, self._caller = _calls(profile, by)
        known = [(at.host, at.pid) if at and at.pid else None for at in profile.launches]
        processes, number = distinct_keys(known)
        known_as = [-1 if each is None else index for index, each in enumerate(processes)]
        self._process = np.array(known_as, np.int64)[number]

    def table(self, limit: int, rows: slice | None = None) -> Ranking:
        """Returns the entries with most samples.

        Args:
            limit: the number of entries; 0: all.
            rows: rows of the profile; None: all. Numbers of launches are only known for all rows.
        """
        some, reasons = slice(None) if rows is None else rows, self._profile.reasons
        counts = self._profile.counts[some]
        if self._rows is None:
            return _by_reason(reasons, counts.sum(axis=0).tolist(), limit)
        number = self._rows.number[some]
        row_samples = counts.sum(axis=1, dtype=np.uint64)
        inclusive = None
        if self._calls:
            found, inclusive = self._calls.inclusive(self._caller[some], row_samples)
            place = np.searchsorted(found, number)
        else:
            found, place = np.unique(number, return_inverse=True)
        samples = np.bincount(place, row_samples, len(found)).astype(np.int64)
        order = np.lexsort((-(samples if inclusive is None else inclusive), -samples))
        if self._by == ENERGY and self._profile.energy is not None:
            own = np.zeros(len(found), np.int64)
            np.add.at(own, place, self._profile.energy[some])
            order = np.lexsort((-samples, -own))
        order = order[: limit or None]
        bucket = buckets(order, len(found))[place]
        sums = sum_by_bucket(bucket, counts, len(order) + 1).tolist()
        energy = self._energy(some, bucket, len(order) + 1)
        divided = self._divided(some, bucket, len(order) + 1)
        *processes, all_processes = _processes(bucket, self._process[self._profile.launch[some]], len(order) + 1)
        keys = [self._rows.key(index) for index in found[order].tolist()]
        known = (
            self._by in ("kernel", ENERGY) and rows is None and self._profile.launch_counts
        )  # imported captures have none
        launches = self._launches() if known else None
        launched = [None if launches is None else launches.pop(key, 0) for key in keys]
        beyond = None if launches is None else sum(launches.values())
        entries = [
            Entry(
                key,
                reasons,
                tuple(sums[at]),
                None if inclusive is None else int(inclusive[where]),
                launched[at],
                processes[at],
                energy[at],
                divided[at],
            )
            for at, (key, where) in enumerate(zip(keys, order.tolist(), strict=True))
        ]
        by_energy = self._by == ENERGY
        entries.sort(
            key=lambda entry: (-(entry.energy or 0) * by_energy, -entry.samples, -(entry.inclusive or 0), entry.key)
        )
        rest = Entry((), reasons, tuple(sums[-1]), None, beyond, processes[-1], energy[-1], divided[-1])
        total = Entry(
            (),
            reasons,
            tuple(sum(column) for column in zip(*sums, strict=True)),
            None,
            None if beyond is None else beyond + sum(number or 0 for number in launched),
            all_processes,
            None if energy[-1] is None else sum(each or 0 for each in energy),
            None if divided[-1] is None else self._divided_total(some),
        )
        return Ranking(self._by, entries, len(found) - len(order), rest, total, self._profile.timed)

    def _energy(self, rows: slice, bucket: NDArray[np.int64], size: int) -> list[int | None]:
        """Returns the energy of each bucket; None if it is unknown."""
        if self._profile.energy is None:
            return [None] * size
        sums = np.zeros(size, np.int64)
        np.add.at(sums, bucket, self._profile.energy[rows])
        return list(sums.tolist())

    def _divided(self, rows: slice, bucket: NDArray[np.int64], size: int) -> Sequence[int | None]:
        """Returns the divided samples of each bucket; None where entries do not depend on launches."""
        divided = self._profile.divided
        if divided is None or self._by not in (*_LAUNCH_KEYS, "operator"):
            return [None] * size
        own = divided_rows(bucket, self._profile.places[rows], divided[rows])
        return list(np.bincount(bucket, own, size).astype(np.int64).tolist())

    def _divided_total(self, rows: slice) -> int:
        return 0 if self._profile.divided is None else int(self._profile.divided[rows].sum())

    def _launches(self) -> dict[Key, int]:
        """Returns the launches of kernels with samples, by the kernel's key."""
        launches: dict[Key, int] = {}
        for index in np.unique(self._profile.kernel).tolist():
            kernel = self._profile.kernels[index]
            if kernel is not None:
                key = (kernel.symbol, kernel.file)
                launches[key] = launches.get(key, 0) + self._profile.launch_counts.get(index, 0)
        return launches


def number_rows(profile: Profile, by: str) -> RowNumbers:
    """Numbers a profile's rows by entry; `by` is one of KEYS except "reason", as a row has several reasons."""
    if by in _LAUNCH_KEYS:
        keys, number = distinct_keys([_LAUNCH_KEYS[by](launch) for launch in profile.launches])
        return RowNumbers(number[profile.launch], keys.__getitem__)
    calls, caller = _calls(profile, by)
    if calls:
        functions = calls.functions
        return RowNumbers(calls.innermost[caller], lambda index: (functions[index],))
    pairs, pair_of = np.unique(profile.kernel * len(profile.codes) + profile.code, return_inverse=True)
    each = [divmod(pair, len(profile.codes)) for pair in pairs.tolist()]
    keys, number = distinct_keys(
        [_CODE_KEYS[by](profile.kernels[kernel], profile.codes[code]) for kernel, code in each]
    )
    if by != "instruction":
        return RowNumbers(number[pair_of], keys.__getitem__)
    offsets, offset_of = np.unique(profile.offset, return_inverse=True)

    def instruction(index: int) -> Key:
        place, offset = divmod(index, len(offsets))
        kernel, file, mnemonic = keys[place]
        return kernel, file, int(offsets[offset]), mnemonic

    return RowNumbers(number[pair_of] * len(offsets) + offset_of, instruction)


def distinct_keys(keys: Sequence[_Key]) -> tuple[list[_Key], NDArray[np.int64]]:
    """Returns the distinct keys, and the index among them for each key: int64[n]."""
    numbers: dict[_Key, int] = {}
    number = [numbers.setdefault(key, len(numbers)) for key in keys]
    return list(numbers), np.array(number, np.int64)


def buckets(order: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Returns the index in `order` of each of `size` entries: int64[size]. Others get the index after the last."""
    bucket = np.full(size, len(order), np.int64)
    bucket[order] = np.arange(len(order))
    return bucket


def sum_by_bucket(bucket: NDArray[np.int64], counts: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """Adds up the rows of each bucket: int64[size, reasons]. Sums go through doubles, so they are exact up to 2^53."""
    columns = [np.bincount(bucket, counts[:, reason], size) for reason in range(counts.shape[1])]
    return np.stack(columns, axis=1).astype(np.int64)


def _calls(profile: Profile, by: str) -> tuple[_Calls | None, NDArray[np.int64]]:
    """Returns the calls that entries of functions or operators are of, and each row's index into these: int64[n]."""
    if by == "function":
        return _Calls([(*code.functions[:-1], code.functions[-1] or UNKNOWN_KERNEL) if code.functions else
                       (UNKNOWN_KERNEL,) for code in profile.codes]), profile.code  # fmt: skip
    if by == "operator":
        return _Calls([(launch and launch.operators) or (NO_OPERATOR,) for launch in profile.launches]), profile.launch
    return None, profile.launch


class _Calls:
    """The functions that each code is in, as numbers, or the operators. A recursive one has each code once."""

    def __init__(self, stacks: Sequence[tuple[str, ...]]) -> None:
        self.functions, number = distinct_keys([function for stack in stacks for function in stack])
        ends = np.cumsum([len(stack) for stack in stacks], dtype=np.int64)
        self.innermost = number[ends - 1]
        # Distinct (code, function), sorted.
        pairs = distinct(np.repeat(np.arange(len(stacks)), np.diff(ends, prepend=0)) * len(self.functions) + number)
        self._code, self._function = np.divmod(pairs, max(len(self.functions), 1))

    def inclusive(
        self, code: NDArray[np.int64], samples: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the numbers of all functions that these samples are in, ascending, and their samples."""
        codes, which = np.unique(code, return_inverse=True)
        weights = np.bincount(which, samples, len(codes))
        first, last = np.searchsorted(self._code, codes), np.searchsorted(self._code, codes, "right")
        length = last - first
        found, place = np.unique(self._function[ranges(first, length)], return_inverse=True)
        return found, np.bincount(place, np.repeat(weights, length), len(found)).astype(np.int64)


def _by_reason(reasons: Sequence[str], counts: list[int], limit: int) -> Ranking:
    order = sorted((reason for reason in range(len(reasons)) if counts[reason]), key=lambda reason: -counts[reason])
    shown, others = order[: limit or None], order[limit:] if limit else []

    def only(*reasons: int) -> tuple[int, ...]:
        return tuple(count if reason in reasons else 0 for reason, count in enumerate(counts))

    entries = [Entry((reasons[reason],), reasons, only(reason)) for reason in shown]
    return Ranking("reason", entries, len(others), Entry((), reasons, only(*others)), Entry((), reasons, tuple(counts)))


def _processes(bucket: NDArray[np.int64], process: NDArray[np.int64], size: int) -> list[int]:
    """Counts the distinct processes of each bucket, and of all, without unknown ones (-1)."""
    known = process >= 0
    most = int(process.max(initial=0)) + 1
    pairs = np.unique(bucket[known] * most + process[known])
    return [*np.bincount(pairs // most, minlength=size).tolist(), len(np.unique(pairs % most))]


def _kernel_key(kernel: Kernel | None, code: Code) -> Key:
    return kernel_name(kernel, code), kernel.file if kernel else ""


def _line_key(kernel: Kernel | None, code: Code) -> Key:
    line = code.lines[-1] if code.lines else 0
    file = code.files[-1] if line and code.files else ""
    return file, line, "" if file else _kernel_key(kernel, code)[0]


def _instruction_key(kernel: Kernel | None, code: Code) -> Key:
    return *_kernel_key(kernel, code), code.mnemonic


def _process_key(launch: Launch | None) -> Key:
    return (launch.host, launch.comm or UNKNOWN_PROCESS, launch.pid) if launch else ("", UNKNOWN_PROCESS, 0)


def _stack_key(launch: Launch | None) -> Key:
    if launch is None:
        return UNKNOWN_PROCESS, ()
    frames = (*launch.stack, *(f"{frame}_[k]" for frame in launch.kernel_stack))
    return launch.comm or UNKNOWN_PROCESS, frames[::-1]


_CODE_KEYS = {"kernel": _kernel_key, ENERGY: _kernel_key, "line": _line_key, "instruction": _instruction_key}
_LAUNCH_KEYS: dict[str, Callable[[Launch | None], Key]] = {
    "process": _process_key,
    "launcher": lambda launch: (launcher(launch),),
    "stack": _stack_key,
}
