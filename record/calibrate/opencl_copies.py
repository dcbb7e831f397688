"""Has an OpenCL driver copy and fill in all ways, for `iaprof calibrate` to see what that launches.

What a device does not support is left out: some have no images.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator
from ctypes import byref, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from iaprof.record.calibrate.level_zero_driver import DriverError
from iaprof.record.calibrate.opencl_driver import OpenCLDriver

_BYTES = 1 << 20
_SIDE = 64  # pixels of an image
_READ_WRITE = 1  # CL_MEM_READ_WRITE
_MAP = 3  # CL_MAP_READ | CL_MAP_WRITE
_PLANE = 0x10F1  # CL_MEM_OBJECT_IMAGE2D
_FORMAT = (0x10B5, 0x10DA)  # CL_RGBA, CL_UNSIGNED_INT8
_NO_EVENTS = (0, None, None)
_PITCHES = tuple(map(c_size_t, (128, 8192)))

Call = Callable[[], None]


class Copies:
    """Buffers and images of a context, and calls that copy them."""

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

    def calls(self, queue: int) -> Iterator[Call]:
        """Yields calls that copy and fill, on a queue."""
        for call in (
            *self._buffers(queue),
            *self._regions(queue),
            *self._shared_memory(queue),
            *self._image_copies(queue),
        ):
            yield lambda call=call: self._try(call)  # type: ignore[misc]

    @staticmethod
    def _try(call: Call) -> None:
        with contextlib.suppress(DriverError):  # not every device supports it
            call()

    def _enqueue(self, name: str, queue: int, *arguments: Any) -> Call:
        return lambda: self._driver.call(name, c_void_p(queue), *arguments, *_NO_EVENTS)

    def _buffers(self, queue: int) -> Iterator[Call]:
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

    def _map(self, queue: int, memory: c_void_p, name: str, *arguments: Any) -> Call:
        def map_and_unmap() -> None:
            handle = c_void_p(queue)
            place = self._driver.create(name, handle, memory, 0, c_uint64(_MAP), *arguments, *_NO_EVENTS)
            self._driver.call("clEnqueueUnmapMemObject", handle, memory, c_void_p(place), *_NO_EVENTS)

        return map_and_unmap

    def _regions(self, queue: int) -> Iterator[Call]:
        origin = _sizes(0, 0, 0)
        for depth in (1, 4):
            places = (origin, origin, _sizes(100, 50, depth), *_PITCHES, *_PITCHES)
            yield self._enqueue("clEnqueueCopyBufferRect", queue, self._from, self._to, *places)
            yield self._enqueue("clEnqueueReadBufferRect", queue, self._from, 0, *places, self._host)
            yield self._enqueue("clEnqueueWriteBufferRect", queue, self._to, 0, *places, self._host)

    def _shared_memory(self, queue: int) -> Iterator[Call]:
        if not self._shared:
            return
        shared, other = c_void_p(self._shared), c_void_p(self._shared + _BYTES // 2)
        host, size = self._host, c_size_t(1 << 14)
        for destination, source in ((shared, other), (shared, host), (host, shared)):
            yield self._enqueue("clEnqueueSVMMemcpy", queue, 0, destination, source, size)
        yield self._enqueue("clEnqueueSVMMemFill", queue, shared, b"patt", c_size_t(4), size)
        yield self._enqueue("clEnqueueSVMMap", queue, 0, c_uint64(_MAP), shared, size)
        yield self._enqueue("clEnqueueSVMUnmap", queue, shared)

    def _image_copies(self, queue: int) -> Iterator[Call]:
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
