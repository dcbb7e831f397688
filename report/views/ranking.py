"""Which kernels, functions, lines and so on have most samples: a profile as a table.

Rows of the profile are numbered by what they have in common, and added up by these numbers. Names are made once for
each launch, kernel and code, and put together for those entries only that are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import UNKNOWN_KERNEL, UNKNOWN_PROCESS, Code, Kernel, Launch, Profile, kernel_name
from iaprof.formats.ranges import ranges
from iaprof.report.views.launchers import launcher

KEYS: dict[str, tuple[str, ...]] = {
    "kernel": ("kernel", "file"),
    "function": ("function",),
    "line": ("file", "line", "kernel"),  # the kernel only where the file is not known
    "instruction": ("kernel", "file", "offset", "instruction"),
    "reason": ("reason",),
    "process": ("host", "process", "pid"),
    "launcher": ("launcher",),  # see report.launchers
    "stack": ("process", "stack"),  # the innermost frame first
}
"""What entries can be, and what an entry's key consists of."""

Key = tuple[str | int | tuple[str, ...], ...]
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    key: Key  # as KEYS says; empty in sums
    reasons: Sequence[str]
    counts: tuple[int, ...]  # samples, by reason
    inclusive: int | None = None  # by function: samples in it and in what is inlined in it
    launches: int | None = None  # by kernel, of a whole profile
    processes: int = 0  # whose launches the samples belong to

    @property
    def samples(self) -> int:
        """All of them."""
        return sum(self.counts)

    @property
    def reason(self) -> str:
        """That with most samples."""
        return self.reasons[self.counts.index(max(self.counts))]


@dataclass(frozen=True)
class Ranking:
    """A table; its entries and what is beyond them add up to the total."""

    by: str  # of KEYS
    entries: list[Entry]  # most samples first
    more: int  # entries that are beyond the limit
    rest: Entry  # and their sum
    total: Entry


@dataclass(frozen=True)
class Numbered:
    """Which entry each row of a profile belongs to."""

    number: NDArray[np.int64]  # [n]
    key: Callable[[int], Key]  # of a number


class Ranker:
    """Makes tables of one profile, of all of it and of parts."""

    def __init__(self, profile: Profile, by: str) -> None:
        """Takes one of KEYS."""
        self._profile = profile
        self._by = by
        self._rows = None if by == "reason" else numbered(profile, by)
        self._calls = _Calls(profile.codes) if by == "function" else None
        known = [(at.host, at.pid) if at and at.pid else None for at in profile.launches]
        processes, number = numbers_of(known)
        known_as = [-1 if each is None else index for index, each in enumerate(processes)]
        self._process = np.array(known_as, np.int64)[number]

    def table(self, limit: int, rows: slice | None = None) -> Ranking:
        """The entries with most samples.

        Args:
            limit: how many entries; 0 for all.
            rows: those of the profile that count; all when left out. Launches are known of all only.
        """
        some, reasons = slice(None) if rows is None else rows, self._profile.reasons
        counts = self._profile.counts[some]
        if self._rows is None:
            return _by_reason(reasons, counts.sum(axis=0).tolist(), limit)
        number = self._rows.number[some]
        samples_of = counts.sum(axis=1, dtype=np.uint64)
        inclusive = None
        if self._calls:
            found, inclusive = self._calls.inclusive(self._profile.code[some], samples_of)
            place = np.searchsorted(found, number)
        else:
            found, place = np.unique(number, return_inverse=True)
        samples = np.bincount(place, samples_of, len(found)).astype(np.int64)
        order = np.lexsort((-(samples if inclusive is None else inclusive), -samples))[: limit or None]
        bucket = buckets(order, len(found))[place]
        sums = added_up(bucket, counts, len(order) + 1).tolist()
        *processes, all_processes = _processes(bucket, self._process[self._profile.launch[some]], len(order) + 1)
        keys = [self._rows.key(index) for index in found[order].tolist()]
        known = self._by == "kernel" and rows is None and self._profile.launch_counts  # an imported text tells none
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
            )
            for at, (key, where) in enumerate(zip(keys, order.tolist(), strict=True))
        ]
        entries.sort(key=lambda entry: (-entry.samples, -(entry.inclusive or 0), entry.key))
        rest = Entry((), reasons, tuple(sums[-1]), None, beyond, processes[-1])
        total = Entry(
            (),
            reasons,
            tuple(sum(column) for column in zip(*sums, strict=True)),
            None,
            None if beyond is None else beyond + sum(number or 0 for number in launched),
            all_processes,
        )
        return Ranking(self._by, entries, len(found) - len(order), rest, total)

    def _launches(self) -> dict[Key, int]:
        """Of the kernels with samples."""
        launches: dict[Key, int] = {}
        for index in np.unique(self._profile.kernel).tolist():
            kernel = self._profile.kernels[index]
            if kernel is not None:
                key = (kernel.symbol, kernel.file)
                launches[key] = launches.get(key, 0) + self._profile.launch_counts.get(index, 0)
        return launches


def numbered(profile: Profile, by: str) -> Numbered:
    """Numbers rows by the entry they belong to: one of KEYS but reasons, of which a row has several."""
    if by in _LAUNCH_KEYS:
        keys, number = numbers_of([_LAUNCH_KEYS[by](launch) for launch in profile.launches])
        return Numbered(number[profile.launch], keys.__getitem__)
    if by == "function":
        calls = _Calls(profile.codes)
        return Numbered(calls.innermost[profile.code], lambda index: (calls.functions[index],))
    pairs, pair_of = np.unique(profile.kernel * len(profile.codes) + profile.code, return_inverse=True)
    each = [divmod(pair, len(profile.codes)) for pair in pairs.tolist()]
    keys, number = numbers_of([_CODE_KEYS[by](profile.kernels[kernel], profile.codes[code]) for kernel, code in each])
    if by != "instruction":
        return Numbered(number[pair_of], keys.__getitem__)
    offsets, offset_of = np.unique(profile.offset, return_inverse=True)

    def instruction(index: int) -> Key:
        place, offset = divmod(index, len(offsets))
        kernel, file, mnemonic = keys[place]
        return kernel, file, int(offsets[offset]), mnemonic

    return Numbered(number[pair_of] * len(offsets) + offset_of, instruction)


def numbers_of(keys: Sequence[_Key]) -> tuple[list[_Key], NDArray[np.int64]]:
    """Each key once, and which of them each one is."""
    numbers: dict[_Key, int] = {}
    number = [numbers.setdefault(key, len(numbers)) for key in keys]
    return list(numbers), np.array(number, np.int64)


def buckets(order: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Where each of `size` entries is in `order`; those that are not share the place after the last: int64[size]."""
    bucket = np.full(size, len(order), np.int64)
    bucket[order] = np.arange(len(order))
    return bucket


def added_up(bucket: NDArray[np.int64], counts: NDArray[np.uint64], size: int) -> NDArray[np.int64]:
    """Sums of the rows of each bucket: int64[size, m]. They pass through floats, which hold whole numbers to 2^53."""
    columns = [np.bincount(bucket, counts[:, reason], size) for reason in range(counts.shape[1])]
    return np.stack(columns, axis=1).astype(np.int64)


class _Calls:
    """Which functions each code is in, by numbers: it counts for each of them once, however often they recurse."""

    def __init__(self, codes: Sequence[Code]) -> None:
        stacks = [
            (*code.functions[:-1], code.functions[-1] or UNKNOWN_KERNEL) if code.functions else (UNKNOWN_KERNEL,)
            for code in codes
        ]
        self.functions, number = numbers_of([function for stack in stacks for function in stack])
        ends = np.cumsum([len(stack) for stack in stacks], dtype=np.int64)
        self.innermost = number[ends - 1]
        # Distinct pairs of code and function, by code.
        pairs = np.unique(np.repeat(np.arange(len(stacks)), np.diff(ends, prepend=0)) * len(self.functions) + number)
        self._code, self._function = np.divmod(pairs, max(len(self.functions), 1))

    def inclusive(
        self, code: NDArray[np.int64], samples: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of all functions that these samples are in, ascending, and how many are."""
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
    """The distinct processes of each bucket, and of all; those that are not known (-1) count nowhere."""
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


_CODE_KEYS = {"kernel": _kernel_key, "line": _line_key, "instruction": _instruction_key}
_LAUNCH_KEYS: dict[str, Callable[[Launch | None], Key]] = {
    "process": _process_key,
    "launcher": lambda launch: (launcher(launch),),
    "stack": _stack_key,
}
