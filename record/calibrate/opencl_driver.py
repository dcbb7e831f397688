"""Calls an OpenCL driver for `iaprof calibrate` by the functions that it gives the loader, without loader and headers.

Structures and numbers are those of OpenCL's cl.h and cl_icd.h, and NEO's own (opencl/extensions/public). Every failing
call raises DriverError.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from iaprof.bpf.probes.functions import MAY_COPY, OPENCL_TRANSFERS, OPENCL_WAITS
from iaprof.record.calibrate.level_zero_driver import MAX_BYTES, MAX_KERNELS, DriverError, load
from iaprof.record.calibrate.search import Kernel

OF_OPENCL = "clIcdGetPlatformIDsKHR"  # the function by which loaders recognize such a driver
GPUS = 3  # that the driver simulates: see calibrate.py
_GPU = 4  # CL_DEVICE_TYPE_GPU
_DRIVER_VERSION = 0x102D
_FUNCTION_NAME = 0x1190
_CODE, _ADDRESS = 0x407D, 0x10010  # CL_KERNEL_BINARY_PROGRAM_INTEL, CL_KERNEL_BINARY_GPU_ADDRESS_INTEL
_MOST_ARGUMENTS = 4  # of our kernels
_QUEUE_PROPERTIES, _ANY_ORDER = 0x1093, 1
_BY_AFFINITY, _NEXT = 0x1088, 0x20  # CL_DEVICE_PARTITION_BY_AFFINITY_DOMAIN, ..._NEXT_PARTITIONABLE

# Indices of functions in the table that loaders call through (cl_icd.h).
TABLE = {
    "clGetDeviceIDs": 2, "clGetDeviceInfo": 3, "clCreateContext": 4, "clReleaseContext": 7, "clReleaseCommandQueue": 11,
    "clCreateBuffer": 14, "clCreateProgramWithBinary": 27, "clReleaseProgram": 29, "clBuildProgram": 30,
    "clCreateKernel": 34, "clCreateKernelsInProgram": 35, "clReleaseKernel": 37, "clSetKernelArg": 38,
    "clGetKernelInfo": 39, "clWaitForEvents": 41, "clFinish": 47, "clEnqueueReadBuffer": 48, "clEnqueueWriteBuffer": 49,
    "clEnqueueCopyBuffer": 50, "clEnqueueReadImage": 51, "clEnqueueWriteImage": 52, "clEnqueueCopyImage": 53,
    "clEnqueueCopyImageToBuffer": 54, "clEnqueueCopyBufferToImage": 55, "clEnqueueMapBuffer": 56,
    "clEnqueueMapImage": 57, "clEnqueueUnmapMemObject": 58, "clEnqueueNDRangeKernel": 59, "clEnqueueReadBufferRect": 86,
    "clEnqueueWriteBufferRect": 87, "clEnqueueCopyBufferRect": 88, "clCreateSubDevices": 93, "clCreateImage": 96,
    "clEnqueueFillBuffer": 102, "clEnqueueFillImage": 103, "clCreateCommandQueueWithProperties": 123, "clSVMAlloc": 126,
    "clEnqueueSVMMemcpy": 129, "clEnqueueSVMMemFill": 130, "clEnqueueSVMMap": 131, "clEnqueueSVMUnmap": 132,
}  # fmt: skip
LAUNCHES = ("clEnqueueNDRangeKernel", "clEnqueueNDCountKernelINTEL")


class OpenCLDriver:
    """A driver and its GPUs."""

    def __init__(self, library: str) -> None:
        """Loads and initializes the driver."""
        self._library = load(library, ("clGetExtensionFunctionAddress", "clIcdGetPlatformIDsKHR"))
        self._by_name = self._library.clGetExtensionFunctionAddress
        self._by_name.restype = c_void_p
        platform = c_void_p()
        check("clIcdGetPlatformIDsKHR", self._library.clIcdGetPlatformIDsKHR(1, byref(platform), None))
        if not platform:
            raise DriverError("it has no platform")
        self.table = c_void_p.from_address(platform.value or 0).value or 0
        devices = (c_void_p * GPUS)()
        count = c_uint32()
        self.call("clGetDeviceIDs", platform, c_uint64(_GPU), GPUS, devices, byref(count))
        if count.value != GPUS:
            raise DriverError(f"it runs as {count.value} GPUs, where {GPUS} are needed")
        self.gpus = [gpu or 0 for gpu in devices]
        self.contexts = [self.context([gpu]) for gpu in self.gpus]

    def version(self) -> str:
        """Returns the driver's version: 26.27.39122.14."""
        text = ctypes.create_string_buffer(64)
        with contextlib.suppress(DriverError):
            self.call("clGetDeviceInfo", c_void_p(self.gpus[0]), _DRIVER_VERSION, c_size_t(63), text, None)
        return text.value.decode("ascii", "replace") or "unknown"

    def functions(self) -> dict[str, int]:
        """Returns the addresses of functions as loaders call them, by name."""
        addresses = {}
        for name in (*LAUNCHES, *OPENCL_TRANSFERS, *MAY_COPY, *OPENCL_WAITS):
            address = self._address(name)
            if address:
                addresses[name] = address
        return addresses

    def _address(self, name: str) -> int:
        if name in TABLE:
            return c_uint64.from_address(self.table + 8 * TABLE[name]).value
        return self._by_name(name.encode()) or 0

    def context(self, gpus: Sequence[int]) -> int:
        """Makes a context of these GPUs."""
        return self.create("clCreateContext", None, len(gpus), (c_void_p * len(gpus))(*gpus), None, None)

    def queues(self, context: int, gpu: int) -> Iterator[int]:
        """Makes an in-order queue and an out-of-order queue."""
        for order in (0, _ANY_ORDER):
            properties = (c_uint64 * 3)(_QUEUE_PROPERTIES, order, 0)
            yield self.create("clCreateCommandQueueWithProperties", c_void_p(context), c_void_p(gpu), properties)

    def tiles(self, gpu: int) -> list[int]:
        """Returns the tiles of a GPU; none if it has only one."""
        properties = (c_uint64 * 3)(_BY_AFFINITY, _NEXT, 0)
        tiles, count = (c_void_p * 2)(), c_uint32()
        try:
            self.call("clCreateSubDevices", c_void_p(gpu), properties, 2, tiles, byref(count))
        except DriverError:
            return []
        return [tile or 0 for tile in tiles[: count.value]]

    @contextlib.contextmanager
    def program(self, gpu: int, binary: bytes, copies: int = 1) -> Iterator[list[Kernel]]:
        """Makes a program for one GPU, and `copies` of each of its kernels; releases both at the end of the context."""
        program = self.build(self.contexts[gpu], [self.gpus[gpu]], [binary])
        handles = [handle for _ in range(copies) for handle in self.kernels(program)]
        yield [self.about(program, handle, binary) for handle in handles]
        for handle in handles:
            self.release("Kernel", handle)
        self.release("Program", program)

    def build(self, context: int, gpus: Sequence[int], binaries: Sequence[bytes]) -> int:
        """Makes a program for these GPUs of a context, with a binary for each."""
        count = len(gpus)
        devices = (c_void_p * count)(*gpus)
        sizes, texts = (c_size_t * count)(*map(len, binaries)), (ctypes.c_char_p * count)(*binaries)
        program = self.create("clCreateProgramWithBinary", c_void_p(context), count, devices, sizes, texts, None)
        self.call("clBuildProgram", c_void_p(program), count, devices, None, None, None)
        return program

    def kernels(self, program: int) -> list[int]:
        """Makes all kernels of a program for one GPU; with several GPUs, NEO 26.27 crashes. Returns their handles."""
        handles, count = (c_void_p * MAX_KERNELS)(), c_uint32()
        self.call("clCreateKernelsInProgram", c_void_p(program), MAX_KERNELS, handles, byref(count))
        return [handle or 0 for handle in handles[: count.value]]

    def kernel(self, program: int, name: bytes) -> int:
        """Makes a kernel of a program; returns its handle."""
        return self.create("clCreateKernel", c_void_p(program), name)

    def about(self, program: int, handle: int, binary: bytes) -> Kernel:
        """Returns what the public calls say of a kernel."""
        address = int.from_bytes(self._kernel_info(handle, _ADDRESS), "little")
        if not address:
            raise DriverError("its clGetKernelInfo gives no GPU address")
        name = self._kernel_info(handle, _FUNCTION_NAME).removesuffix(b"\0")
        return Kernel(handle, program, name, address, self._kernel_info(handle, _CODE), binary)

    def _kernel_info(self, handle: int, what: int) -> bytes:
        size = c_size_t()
        self.call("clGetKernelInfo", c_void_p(handle), what, c_size_t(0), None, byref(size))
        if not 0 < size.value <= MAX_BYTES:
            raise DriverError(f"its clGetKernelInfo gives {size.value} bytes")
        buffer = ctypes.create_string_buffer(size.value)
        self.call("clGetKernelInfo", c_void_p(handle), what, size, buffer, None)
        return buffer.raw

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function, which must succeed."""
        check(name, self._function(name, c_int32)(*arguments))

    def create(self, name: str, *arguments: Any) -> int:
        """Calls a function that returns an object and writes an error code to its last argument."""
        result = c_int32()
        handle = self._function(name, c_void_p)(*arguments, byref(result))
        check(name, result.value)
        return int(handle or 0)

    def shared_memory(self, context: int, size: int) -> int:
        """Allocates shared virtual memory (SVM); returns 0 if the driver refuses."""
        return int(self._function("clSVMAlloc", c_void_p)(c_void_p(context), c_uint64(1), c_size_t(size), 0) or 0)

    def launch(self, queue: int, kernel: int) -> None:
        """Launches a kernel, with zeros as arguments."""
        one = (c_size_t * 1)(16)
        for argument in range(_MOST_ARGUMENTS):
            # Eight zero bytes are a null pointer, four are a number; local memory has only a size.
            for size, value in ((8, byref(c_uint64(0))), (4, byref(c_uint64(0))), (1024, None)):
                with contextlib.suppress(DriverError):
                    self.call("clSetKernelArg", c_void_p(kernel), argument, c_size_t(size), value)
                    break
        self.call("clEnqueueNDRangeKernel", c_void_p(queue), c_void_p(kernel), 1, None, one, one, 0, None, None)

    def release(self, kind: str, handle: int) -> None:
        """Releases an object of a kind: Kernel, Program or another one of OpenCL."""
        self.call(f"clRelease{kind}", c_void_p(handle))

    def _function(self, name: str, result_type: Any) -> Any:
        address = self._address(name)
        if not address:
            raise DriverError(f"it has no function {name}")
        return ctypes.CFUNCTYPE(result_type)(address)


def check(name: str, result: int) -> None:
    """Raises DriverError unless a call's result is success."""
    if result:
        raise DriverError(f"its {name} fails with {result}")
