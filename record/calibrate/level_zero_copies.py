"""Has a Level Zero driver copy and fill in all ways, for `iaprof calibrate` to see what that launches.

Structures and numbers are those of Level Zero's ze_api.h. What a device does not support is left out: some have no
images.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from ctypes import byref, c_uint32, c_uint64, c_void_p

from iaprof.record.calibrate.level_zero_driver import Driver, DriverError
from iaprof.record.calibrate.level_zero_own import OwnKernels

_BYTES = 1 << 20
_QUEUE, _LIST, _IMAGE, _MEMORY = 0xE, 0xF, 0x13, 0x15  # ZE_STRUCTURE_TYPE_..._DESC
_ASYNCHRONOUS = 2  # ZE_COMMAND_QUEUE_MODE_ASYNCHRONOUS
_PLANE = 2  # ZE_IMAGE_TYPE_2D
# ZE_IMAGE_FORMAT_LAYOUT_: 8, 16, 32, 16_16_16_16, 32_32_32_32, 8_8_8, 16_16_16
_LAYOUTS = (0, 1, 2, 6, 8, 43, 44)

Call = Callable[[], None]


def find_own_kernels(driver: Driver, own: OwnKernels, kernel: int) -> None:
    """Has the driver copy and fill in all ways, so that `own` finds where it launches kernels for that.

    Args:
        driver: the running driver.
        own: watches the calls.
        kernel: handle of a kernel of ours.

    Raises:
        OwnKernelsError: launches cannot be watched.
        DriverError: the driver refuses what all devices support.
    """
    copies = _Copies(driver)
    lists = [copies.regular(), copies.immediate()]
    own.learn(lists, lambda handle: copies.launch(handle, kernel), kernel)
    for number, handle in enumerate(lists):
        for call in copies.calls(handle):
            own.watch(number, call)


def _structure(kind: int, *values: int) -> ctypes.Array[c_uint32]:
    """Makes a descriptor without extensions, from 32-bit numbers."""
    return (c_uint32 * (4 + len(values)))(kind, 0, 0, 0, *values)


class _Copies:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._memory = [c_void_p(), c_void_p()]
        for memory in self._memory:
            desc = _structure(_MEMORY, 0, 0)
            driver.call(
                "zeMemAllocDevice",
                driver.context,
                byref(desc),
                c_uint64(_BYTES),
                c_uint64(4096),
                driver.device,
                byref(memory),
            )

    def regular(self) -> int:
        """Makes a command list; like all here, for compute queues."""
        handle = c_void_p()
        desc = _structure(_LIST, 0, 0)
        self._driver.call("zeCommandListCreate", self._driver.context, self._driver.device, byref(desc), byref(handle))
        return handle.value or 0

    def immediate(self) -> int:
        """Makes an immediate command list."""
        handle = c_void_p()
        desc = _structure(_QUEUE, 0, 0, 0, _ASYNCHRONOUS, 0, 0)
        self._driver.call(
            "zeCommandListCreateImmediate", self._driver.context, self._driver.device, byref(desc), byref(handle)
        )
        return handle.value or 0

    def launch(self, handle: int, kernel: int) -> None:
        """Launches a kernel."""
        self._driver.call("zeKernelSetGroupSize", c_void_p(kernel), 16, 1, 1)
        groups = (c_uint32 * 3)(1, 1, 1)
        self._append("zeCommandListAppendLaunchKernel", handle, c_void_p(kernel), byref(groups))

    def _append(self, function: str, handle: int, *arguments: object) -> None:
        self._driver.call(function, c_void_p(handle), *arguments, None, 0, None)

    def calls(self, handle: int) -> Iterator[Call]:
        """Yields calls that copy and fill, on a list."""
        for call in (*self._buffers(handle), *self._regions(handle), *self._images(handle)):
            yield lambda call=call: self._try(call)  # type: ignore[misc]

    @staticmethod
    def _try(call: Call) -> None:
        with contextlib.suppress(DriverError):  # not every device supports it
            call()

    def _buffers(self, handle: int) -> Iterator[Call]:
        destination, source = (memory.value or 0 for memory in self._memory)
        pattern = ctypes.create_string_buffer(b"pattern", 64)
        # Aligned and unaligned: the driver has other kernels for what is unaligned.
        for at, size in ((0, 1 << 16), (3, 100_001), (0, 60), (3, 5), (4, 1 << 12)):
            yield lambda at=at, size=size: self._append(  # type: ignore[misc]
                "zeCommandListAppendMemoryCopy",
                handle,
                c_void_p(destination + at),
                c_void_p(source + at),
                c_uint64(size),
            )
            for pattern_bytes in (1, 2, 4, 16, 64):
                yield lambda at=at, size=size, pattern_bytes=pattern_bytes: self._append(  # type: ignore[misc]
                    "zeCommandListAppendMemoryFill",
                    handle,
                    c_void_p(destination + at),
                    byref(pattern),
                    c_uint64(pattern_bytes),
                    c_uint64(size // pattern_bytes * pattern_bytes),
                )
        yield lambda: self._append(
            "zeCommandListAppendMemoryCopyFromContext",
            handle,
            c_void_p(destination),
            self._driver.context,
            c_void_p(source),
            c_uint64(4096),
        )

    def _regions(self, handle: int) -> Iterator[Call]:
        destination, source = self._memory
        for depth in (1, 4):
            region = (c_uint32 * 6)(0, 0, 0, 100, 50, depth)
            pitches = (128, 128 * 64 if depth > 1 else 0)
            yield lambda region=region, pitches=pitches: self._append(  # type: ignore[misc]
                "zeCommandListAppendMemoryCopyRegion",
                handle,
                destination,
                byref(region),
                *pitches,
                source,
                byref(region),
                *pitches,
            )

    def _images(self, handle: int) -> Iterator[Call]:
        memory = self._memory[0]
        for layout in _LAYOUTS:
            first, second = self._image(layout), self._image(layout)
            if not first or not second:
                continue
            whole = (first, memory, None)
            yield lambda whole=whole: self._append("zeCommandListAppendImageCopyFromMemory", handle, *whole)  # type: ignore[misc]
            to_memory = (memory, first, None)
            yield lambda to=to_memory: self._append("zeCommandListAppendImageCopyToMemory", handle, *to)  # type: ignore[misc]
            images = (second, first)
            yield lambda images=images: self._append("zeCommandListAppendImageCopy", handle, *images)  # type: ignore[misc]

    def _image(self, layout: int) -> c_void_p | None:
        image = c_void_p()
        # No flags; a plane of 64 by 64 pixels: the width has 64 bits.
        desc = _structure(_IMAGE, 0, _PLANE, layout, 0, 0, 1, 2, 3, 64, 0, 64, 1, 0, 0)
        try:
            self._driver.call("zeImageCreate", self._driver.context, self._driver.device, byref(desc), byref(image))
        except DriverError:
            return None
        return image
