"""Finds where an OpenCL driver launches kernels of its own, with which it copies and fills, for `iaprof calibrate`.

Every launch of a queue calls one function, which a launch of our own kernel shows: its second argument leads to
successive structures, one for each launched kernel, and one of these contains our kernel. Where copies call this
function they launch kernels. Programs' own launches call it from elsewhere.

This runs in the driver's process, which ends afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

from iaprof.record.calibrate.level_zero_driver import DriverCall, DriverError, attempts
from iaprof.record.calibrate.level_zero_own import OwnKernelsError
from iaprof.record.calibrate.opencl_driver import OpenCLDriver
from iaprof.record.calibrate.search import MAX_BIAS, Memory, Search
from iaprof.record.calibrate.traps import Call, Traps, TrapsError

_MOST_TOGETHER = 16  # kernels of one launch; bpf/c/copies.c reads no more
_LARGEST = 4096  # bytes of a structure
_MOST_HANDLE_PATHS = 200
_WORD = 8


@dataclass(frozen=True, order=True)
class HandlePath:
    """From the second argument to the kernels' handles: bpf.driver_layout.Dispatch, and bytes that are added."""

    first: int
    many: int
    size: int
    kernel: int
    handle: int
    bias: int


@dataclass(frozen=True)
class OurKernel:
    """A kernel of ours."""

    handle: int
    kernel: int  # the GPU's kernel of this handle
    table: int  # offset from a handle to the pointer to the GPUs' kernels


class OwnLaunches:
    """Finds, on one device, where the driver launches kernels of its own."""

    def __init__(self, memory: Memory, search: Search, our_kernel: OurKernel) -> None:
        """Begins without calls."""
        self._memory, self._search, self._our_kernel = memory, search, our_kernel
        memory.refresh()
        self._class = search.class_of(our_kernel.kernel)
        self._launches: list[list[Call]] = []  # the calls in each launch of our kernel
        self._copies: list[list[Call]] = []

    def bias(self, queue: int) -> int:
        """Returns the bytes from a queue's object to its handle.

        Raises:
            OwnKernelsError: the handle is that of no object.
        """
        self._memory.refresh()
        for bias in range(_WORD, MAX_BIAS + 1, _WORD):  # the first word is the table that loaders call through
            if self._search.class_of(queue - bias) is not None:
                return bias
        raise OwnKernelsError("its queues are not objects")

    def watch(self, traps: Traps, queue: int, launch: Callable[[], None], copies: Sequence[Callable[[], None]]) -> None:
        """Notes the calls, with a queue as the first argument, in a launch of our kernel and in copies."""
        self._launches.append(traps.calls(queue, launch))
        self._copies += [traps.calls(queue, copy) for copy in copies]

    def result(self, place: Callable[[int], int | None]) -> tuple[list[HandlePath], list[int]]:
        """Returns paths to the kernels, best first, and the places in the file where copies launch them.

        Args:
            place: returns the place in the file of an address.

        Raises:
            OwnKernelsError: they are unknown.
        """
        self._memory.refresh()
        for function in self._functions():
            launches = [call for calls in self._launches for call in calls if call.function == function]
            copies = [call for calls in self._copies for call in calls if call.function == function]
            handle_paths = list(self._handle_paths(launches, copies))
            if handle_paths:
                return handle_paths, self._places(launches, copies, place)
        raise OwnKernelsError("its copies launch kernels in an unknown way")

    @staticmethod
    def _places(launches: list[Call], copies: list[Call], place: Callable[[int], int | None]) -> list[int]:
        by_programs = {call.site for call in launches}
        if any(call.site in by_programs for call in copies):
            raise OwnKernelsError("its copies launch kernels where programs launch theirs")
        return sorted({at for call in copies if (at := place(call.site)) is not None})

    def _functions(self) -> list[int]:
        """Returns the functions that our launches and most copies call; of these, the last called comes first."""
        by_launch = [
            [call.function for call in calls if self._words(call).count(self._our_kernel.kernel)]
            for calls in self._launches
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

    def _handle_paths(self, launches: list[Call], copies: list[Call]) -> Iterator[HandlePath]:
        starts = [
            (first, kernel)
            for first, kernel in self._to_first(launches)
            if self._leads(first, kernel, launches + copies)
        ]
        counted = [
            (sum(counts), first, many, size, kernel)
            for first, kernel in starts
            for many in self._numbers(launches, copies)
            for size in range(_WORD, _LARGEST, _WORD)
            if (counts := self._counts(first, many, size, kernel, copies))
        ]
        most = max((count for count, *_ in counted), default=0)
        for _, first, many, size, kernel in sorted(entry for entry in counted if entry[0] == most):
            for handle, bias in self._to_handle():
                path = HandlePath(first, many, size, kernel, handle, bias)
                if all(self._is_handle_path(path, call) for call in copies):
                    yield path

    def _to_first(self, launches: list[Call]) -> Iterator[tuple[int, int]]:
        """Yields the offset of what may be the pointer to the first structure, and the offset of our kernel in that."""
        words = self._words(launches[0])
        places = [_WORD * index for index, word in enumerate(words) if word == self._our_kernel.kernel]
        for index, word in enumerate(words):
            start = word - launches[0].second
            for place in places:
                if 0 <= start <= place < start + _LARGEST:
                    yield _WORD * index, place - start

    def _leads(self, first: int, kernel: int, calls: list[Call]) -> bool:
        return all(self._is_kernel(call, self._start(call, first) + kernel) for call in calls)

    @staticmethod
    def _start(call: Call, first: int) -> int:
        """Returns the bytes from the second argument to the first structure."""
        return int.from_bytes(call.window[first : first + _WORD], "little") - call.second

    def _is_kernel(self, call: Call, at: int) -> bool:
        if not 0 <= at <= len(call.window) - _WORD:
            return False
        return self._search.class_of(int.from_bytes(call.window[at : at + _WORD], "little")) == self._class

    def _numbers(self, launches: list[Call], copies: list[Call]) -> Iterator[int]:
        """Yields offsets of what may be the number of structures: our launches have one kernel, some copies several."""
        for at in range(min(len(call.window) for call in launches + copies)):
            numbers = [call.window[at] for call in copies]
            if all(call.window[at] == 1 for call in launches) and 1 <= min(numbers) < max(numbers) <= _MOST_TOGETHER:
                yield at

    def _counts(self, first: int, many: int, size: int, kernel: int, copies: list[Call]) -> list[int]:
        """Returns how many kernels each call launches; nothing if a structure contains no kernel."""
        counts = [call.window[many] for call in copies]
        for call, count in zip(copies, counts, strict=True):
            start = self._start(call, first) + kernel
            if not all(self._is_kernel(call, start + size * number) for number in range(1, count)):
                return []
        return counts

    def _is_handle_path(self, path: HandlePath, call: Call) -> bool:
        """Whether the handles that a path leads to have the kernels that a call launches."""
        start = self._start(call, path.first) + path.kernel
        for at in range(start, start + call.window[path.many] * path.size, path.size):
            kernel = int.from_bytes(call.window[at : at + _WORD], "little")
            handle = (self._memory.number(kernel + path.handle) or 0) + path.bias
            if self._memory.follow(handle, (self._our_kernel.table, 0)) != kernel:
                return False
        return True

    def _to_handle(self) -> Iterator[tuple[int, int]]:
        """Yields offsets in a GPU's kernel of pointers to its handle's object, and the bytes to the handle."""
        our_kernel = self._our_kernel
        block = self._memory.words(our_kernel.kernel)
        for index, word in enumerate(block):
            bias = our_kernel.handle - word
            if 0 <= bias <= MAX_BIAS:
                yield _WORD * index, bias


class PreparedCopies:
    """Copies on two queues, whose one-time work has been done."""

    def __init__(self, driver: OpenCLDriver, our_kernel: OurKernel) -> None:
        """Copies once.

        Raises:
            DriverError: the driver refuses what all devices support.
        """
        self._driver, self._our_kernel = driver, our_kernel
        self._copies = Copies(driver, driver.contexts[0])
        self._queues = list(driver.queues(driver.contexts[0], driver.gpus[0]))
        for queue in self._queues:
            driver.launch(queue, our_kernel.handle)
            for copy in self._copies.calls(queue):
                copy()

    def find(self, memory: Memory, search: Search, file: bytes) -> dict[str, Any]:
        """Finds where the driver launches kernels of its own, and the paths to them; or returns why that is unknown.

        Args:
            memory: of this process.
            search: of this driver.
            file: the content of the driver's file.
        """
        own = OwnLaunches(memory, search, self._our_kernel)
        try:
            biases = {own.bias(queue) for queue in self._queues}
            if len(biases) > 1:
                raise OwnKernelsError("its queues are not alike")
            traps = Traps(memory, file, self._driver.table)
            for queue in self._queues:
                launch = partial(self._driver.launch, queue, self._our_kernel.handle)
                own.watch(traps, queue - min(biases), launch, list(self._copies.calls(queue)))
            handle_paths, places = own.result(search.place)
        except (DriverError, OwnKernelsError, TrapsError) as error:
            return {"no_own": str(error)}
        return {
            "own": places,
            "ways": [dataclasses.astuple(path) for path in handle_paths[:_MOST_HANDLE_PATHS]],
            "list": min(biases),
        }


_BYTES = 1 << 20
_SIDE = 64  # pixels of an image
_READ_WRITE = 1  # CL_MEM_READ_WRITE
_MAP = 3  # CL_MAP_READ | CL_MAP_WRITE
_PLANE = 0x10F1  # CL_MEM_OBJECT_IMAGE2D
_FORMAT = (0x10B5, 0x10DA)  # CL_RGBA, CL_UNSIGNED_INT8
_NO_EVENTS = (0, None, None)
_PITCHES = tuple(map(c_size_t, (128, 8192)))


class Copies:
    """Buffers and images of a context, and calls that copy them, in all ways; some devices have no images."""

    def __init__(self, driver: OpenCLDriver, context: int) -> None:
        """Makes the buffers and images.

        Raises:
            DriverError: the driver refuses what all devices support.
        """
        self._driver, self._context = driver, c_void_p(context)
        self._to, self._from = (self._buffer() for _ in range(2))
        self._host = ctypes.create_string_buffer(_BYTES)
        self._shared = driver.shared_memory(context, _BYTES)
        self._images: list[c_void_p] = []
        with contextlib.suppress(DriverError):
            self._images = [self._image() for _ in range(2)]

    def _buffer(self) -> c_void_p:
        return self._new("clCreateBuffer", self._context, c_uint64(_READ_WRITE), c_size_t(_BYTES), None)

    def _image(self) -> c_void_p:
        desc = struct.pack("<I4x6QII8x", _PLANE, _SIDE, _SIDE, 0, 0, 0, 0, 0, 0)
        kind = (c_uint32 * 2)(*_FORMAT)
        return self._new("clCreateImage", self._context, c_uint64(_READ_WRITE), kind, desc, None)

    def _new(self, name: str, *arguments: Any) -> c_void_p:
        return c_void_p(self._driver.create(name, *arguments))

    def calls(self, queue: int) -> Iterator[DriverCall]:
        """Yields calls that copy and fill, on a queue."""
        every = (self._buffers(queue), self._regions(queue), self._shared_memory(queue), self._image_copies(queue))
        return attempts([call for calls in every for call in calls])

    def _enqueue(self, name: str, queue: int, *arguments: Any) -> DriverCall:
        return lambda: self._driver.call(name, c_void_p(queue), *arguments, *_NO_EVENTS)

    def _buffers(self, queue: int) -> Iterator[DriverCall]:
        # Aligned and unaligned: the driver has other kernels for what is unaligned.
        for at, size in ((0, 1 << 16), (3, 100_001)):
            place, byte_count = c_size_t(at), c_size_t(size)
            yield self._enqueue("clEnqueueCopyBuffer", queue, self._from, self._to, place, place, byte_count)
            yield self._enqueue("clEnqueueReadBuffer", queue, self._from, 0, place, byte_count, self._host)
            yield self._enqueue("clEnqueueWriteBuffer", queue, self._to, 0, place, byte_count, self._host)
        for length, at, size in ((1, 0, 1 << 16), (1, 3, 65531), (4, 0, 65532), (16, 16, 65552)):
            numbers = (c_size_t(length), c_size_t(at), c_size_t(size))
            yield self._enqueue("clEnqueueFillBuffer", queue, self._to, b"a pattern of 16.", *numbers)
        yield self._map(queue, self._to, "clEnqueueMapBuffer", c_size_t(0), c_size_t(1 << 16))

    def _map(self, queue: int, memory: c_void_p, name: str, *arguments: Any) -> DriverCall:
        def map_and_unmap() -> None:
            handle = c_void_p(queue)
            place = self._driver.create(name, handle, memory, 0, c_uint64(_MAP), *arguments, *_NO_EVENTS)
            self._driver.call("clEnqueueUnmapMemObject", handle, memory, c_void_p(place), *_NO_EVENTS)

        return map_and_unmap

    def _regions(self, queue: int) -> Iterator[DriverCall]:
        origin = _sizes(0, 0, 0)
        for depth in (1, 4):
            places = (origin, origin, _sizes(100, 50, depth), *_PITCHES, *_PITCHES)
            yield self._enqueue("clEnqueueCopyBufferRect", queue, self._from, self._to, *places)
            yield self._enqueue("clEnqueueReadBufferRect", queue, self._from, 0, *places, self._host)
            yield self._enqueue("clEnqueueWriteBufferRect", queue, self._to, 0, *places, self._host)

    def _shared_memory(self, queue: int) -> Iterator[DriverCall]:
        if not self._shared:
            return
        shared, other = c_void_p(self._shared), c_void_p(self._shared + _BYTES // 2)
        host, size = self._host, c_size_t(1 << 14)
        for destination, source in ((shared, other), (shared, host), (host, shared)):
            yield self._enqueue("clEnqueueSVMMemcpy", queue, 0, destination, source, size)
        yield self._enqueue("clEnqueueSVMMemFill", queue, shared, b"patt", c_size_t(4), size)
        yield self._enqueue("clEnqueueSVMMap", queue, 0, c_uint64(_MAP), shared, size)
        yield self._enqueue("clEnqueueSVMUnmap", queue, shared)

    def _image_copies(self, queue: int) -> Iterator[DriverCall]:
        if not self._images:
            return
        image, other = self._images
        origin, whole = _sizes(0, 0, 0), _sizes(_SIDE, _SIDE, 1)
        no_pitches = (c_size_t(0), c_size_t(0))
        yield self._enqueue("clEnqueueCopyImage", queue, image, other, origin, origin, whole)
        yield self._enqueue("clEnqueueCopyImageToBuffer", queue, image, self._to, origin, whole, c_size_t(0))
        yield self._enqueue("clEnqueueCopyBufferToImage", queue, self._from, image, c_size_t(0), origin, whole)
        yield self._enqueue("clEnqueueFillImage", queue, image, (c_uint32 * 4)(1, 2, 3, 4), origin, whole)
        yield self._enqueue("clEnqueueReadImage", queue, image, 0, origin, whole, *no_pitches, self._host)
        yield self._enqueue("clEnqueueWriteImage", queue, image, 0, origin, whole, *no_pitches, self._host)
        pitches = (byref(c_size_t()), byref(c_size_t()))
        yield self._map(queue, image, "clEnqueueMapImage", origin, whole, *pitches)


def _sizes(*numbers: int) -> ctypes.Array[c_size_t]:
    return (c_size_t * len(numbers))(*numbers)
