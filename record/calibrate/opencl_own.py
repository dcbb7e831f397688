"""Where an OpenCL driver launches the kernels of its own with which it copies and fills; `iaprof calibrate` finds it.

Whatever a queue launches passes by one function, which a kernel of ours shows: its second argument leads to structures
in a row, one for each kernel that is launched, and in such a structure is our kernel. Where copies call this function
are the places where they launch kernels. A program's own launches call it elsewhere.

This runs in the driver's process, which ends afterwards.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from iaprof.record.calibrate.level_zero_driver import DriverError
from iaprof.record.calibrate.level_zero_own import OwnKernelsError
from iaprof.record.calibrate.opencl_copies import Copies
from iaprof.record.calibrate.opencl_driver import OpenCLDriver
from iaprof.record.calibrate.search import MAX_BIAS, Memory, Search
from iaprof.record.calibrate.traps import Call, Traps, TrapsError

_MOST_TOGETHER = 16  # kernels; bpf/c/copies.c goes no further
_LARGEST = 4096  # bytes of a structure
_MOST_WAYS = 200
_WORD = 8


@dataclass(frozen=True, order=True)
class Way:
    """From the second argument to the kernels' handles: bpf.driver_layout.Dispatch, and bytes that are added."""

    first: int
    many: int
    size: int
    kernel: int
    handle: int
    bias: int


@dataclass(frozen=True)
class Ours:
    """A kernel of ours."""

    handle: int
    kernel: int  # the GPU's kernel that belongs to it
    table: int  # where in a handle the pointer to the GPUs' kernels is


class OwnLaunches:
    """What is found out of one device."""

    def __init__(self, memory: Memory, search: Search, ours: Ours) -> None:
        """Begins with nothing."""
        self._memory, self._search, self._ours = memory, search, ours
        memory.look_again()
        self._class = search.class_of(ours.kernel)
        self._launches: list[list[Call]] = []  # of our kernel
        self._copies: list[list[Call]] = []

    def bias(self, queue: int) -> int:
        """Bytes that a queue's handle lies behind its object.

        Raises:
            OwnKernelsError: it is no object.
        """
        self._memory.look_again()
        for bias in range(_WORD, MAX_BIAS + 1, _WORD):  # at 0 is the table that loaders call through
            if self._search.class_of(queue - bias) is not None:
                return bias
        raise OwnKernelsError("its queues are no objects")

    def watch(self, traps: Traps, queue: int, launch: Callable[[], None], copies: Sequence[Callable[[], None]]) -> None:
        """Sees what a launch of our kernel, and what copies call with a queue as the first argument."""
        self._launches.append(traps.calls(queue, launch))
        self._copies += [traps.calls(queue, copy) for copy in copies]

    def found(self, place: Callable[[int], int | None]) -> tuple[list[Way], list[int]]:
        """Ways to the kernels, best first, and the places in the file from where copies launch them.

        Args:
            place: says where in the file an address lies.

        Raises:
            OwnKernelsError: it is not known.
        """
        self._memory.look_again()
        for function in self._functions():
            launches = [call for calls in self._launches for call in calls if call.function == function]
            copies = [call for calls in self._copies for call in calls if call.function == function]
            ways = list(self._ways(launches, copies))
            if ways:
                return ways, self._places(launches, copies, place)
        raise OwnKernelsError("its copies launch kernels in a way that is not known")

    @staticmethod
    def _places(launches: list[Call], copies: list[Call], place: Callable[[int], int | None]) -> list[int]:
        by_programs = {call.site for call in launches}
        if any(call.site in by_programs for call in copies):
            raise OwnKernelsError("its copies launch kernels where programs launch theirs")
        return sorted({at for call in copies if (at := place(call.site)) is not None})

    def _functions(self) -> list[int]:
        """Functions by which our launches pass, and most copies: the last that is called comes first."""
        by_launch = [
            [call.function for call in calls if self._words(call).count(self._ours.kernel)] for calls in self._launches
        ]
        common = set.intersection(*map(set, by_launch))
        often = Counter(function for calls in self._copies for function in {call.function for call in calls})
        known = [
            function for function in dict.fromkeys(reversed(by_launch[0])) if function in common and often[function]
        ]
        return sorted(known, key=lambda function: -often[function])

    @staticmethod
    def _words(call: Call) -> tuple[int, ...]:
        return struct.unpack(f"<{len(call.window) // _WORD}Q", call.window)

    def _ways(self, launches: list[Call], copies: list[Call]) -> Iterator[Way]:
        shortest = [
            (first, kernel)
            for first, kernel in self._to_first(launches)
            if self._leads(first, kernel, launches + copies)
        ]
        counted = [
            (sum(counts), first, many, size, kernel)
            for first, kernel in shortest
            for many in self._numbers(launches, copies)
            for size in range(_WORD, _LARGEST, _WORD)
            if (counts := self._counts(first, many, size, kernel, copies))
        ]
        most = max((count for count, *_ in counted), default=0)
        for _, first, many, size, kernel in sorted(each for each in counted if each[0] == most):
            for handle, bias in self._to_handle():
                way = Way(first, many, size, kernel, handle, bias)
                if all(self._is_way(way, call) for call in copies):
                    yield way

    def _to_first(self, launches: list[Call]) -> Iterator[tuple[int, int]]:
        """Where the pointer to the first structure may be, and in that our kernel."""
        words = self._words(launches[0])
        places = [_WORD * index for index, word in enumerate(words) if word == self._ours.kernel]
        for index, word in enumerate(words):
            start = word - launches[0].second
            for place in places:
                if 0 <= start <= place < start + _LARGEST:
                    yield _WORD * index, place - start

    def _leads(self, first: int, kernel: int, calls: list[Call]) -> bool:
        return all(self._is_kernel(call, self._start(call, first) + kernel) for call in calls)

    @staticmethod
    def _start(call: Call, first: int) -> int:
        """How far behind the second argument the first structure is."""
        return int.from_bytes(call.window[first : first + _WORD], "little") - call.second

    def _is_kernel(self, call: Call, at: int) -> bool:
        if not 0 <= at <= len(call.window) - _WORD:
            return False
        return self._search.class_of(int.from_bytes(call.window[at : at + _WORD], "little")) == self._class

    def _numbers(self, launches: list[Call], copies: list[Call]) -> Iterator[int]:
        """Where the number of structures may be: our launches are of one kernel, some copies of several."""
        for at in range(min(len(call.window) for call in launches + copies)):
            numbers = [call.window[at] for call in copies]
            if all(call.window[at] == 1 for call in launches) and 1 <= min(numbers) < max(numbers) <= _MOST_TOGETHER:
                yield at

    def _counts(self, first: int, many: int, size: int, kernel: int, copies: list[Call]) -> list[int]:
        """How many kernels each call launches; none if something else is where one should be."""
        counts = [call.window[many] for call in copies]
        for call, count in zip(copies, counts, strict=True):
            start = self._start(call, first) + kernel
            if not all(self._is_kernel(call, start + size * number) for number in range(1, count)):
                return []
        return counts

    def _is_way(self, way: Way, call: Call) -> bool:
        """Whether the handles to which a way leads have the kernels that a call launches."""
        start = self._start(call, way.first) + way.kernel
        for at in range(start, start + call.window[way.many] * way.size, way.size):
            kernel = int.from_bytes(call.window[at : at + _WORD], "little")
            handle = (self._memory.number(kernel + way.handle) or 0) + way.bias
            if self._memory.follow(handle, (self._ours.table, 0)) != kernel:
                return False
        return True

    def _to_handle(self) -> Iterator[tuple[int, int]]:
        """Where in a GPU's kernel the pointer is that leads back to its handle, and bytes from there to that."""
        ours = self._ours
        block = self._memory.words(ours.kernel)
        for index, word in enumerate(block):
            bias = ours.handle - word
            if 0 <= bias <= MAX_BIAS:
                yield _WORD * index, bias


class Prepared:
    """Copies on two queues, of which all that is done only once is done."""

    def __init__(self, driver: OpenCLDriver, ours: Ours) -> None:
        """Copies.

        Raises:
            DriverError: the driver refuses what all devices can do.
        """
        self._driver, self._ours = driver, ours
        self._copies = Copies(driver, driver.contexts[0])
        self._queues = list(driver.queues(driver.contexts[0], driver.gpus[0]))
        for queue in self._queues:
            driver.launch(queue, ours.handle)
            for copy in self._copies.calls(queue):
                copy()

    def find(self, memory: Memory, search: Search, file: bytes) -> dict[str, Any]:
        """From where the driver launches kernels of its own, and how they are found there; or why that is not known.

        Args:
            memory: of this process.
            search: in this driver.
            file: the driver's.
        """
        own = OwnLaunches(memory, search, self._ours)
        try:
            biases = {own.bias(queue) for queue in self._queues}
            if len(biases) > 1:
                raise OwnKernelsError("its queues are not alike")
            traps = Traps(memory, file, self._driver.table)
            for queue in self._queues:
                launch = partial(self._driver.launch, queue, self._ours.handle)
                own.watch(traps, queue - min(biases), launch, list(self._copies.calls(queue)))
            ways, places = own.found(search.place)
        except (DriverError, OwnKernelsError, TrapsError) as error:
            return {"no_own": str(error)}
        return {"own": places, "ways": [dataclasses.astuple(way) for way in ways[:_MOST_WAYS]], "list": min(biases)}
