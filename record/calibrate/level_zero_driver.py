"""Calls a Level Zero driver's own exported functions for `iaprof calibrate`, without loader and headers.

Structures and numbers are those of Level Zero's ze_api.h. Every failing call raises DriverError.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from ctypes import byref, c_char_p, c_size_t, c_uint32, c_uint64, c_void_p
from functools import partial
from typing import Any

from iaprof.gpu.code import ADDRESS_MASK
from iaprof.record.calibrate.search import Kernel

MAX_KERNELS = 16  # of a module
MAX_BYTES = 1 << 20  # of code, or of a module
_CONTEXT, _MODULE, _KERNEL = 0xD, 0x1B, 0x1D  # ZE_STRUCTURE_TYPE_..._DESC
_NATIVE = 1  # ZE_MODULE_FORMAT_NATIVE
_ANY_VERSION = 0x1FFFF  # of ze_api_version_t: 1.65535, so that the driver fills tables with all its functions
_TABLE_WORDS = 1024  # ten times those of the largest table in Level Zero 1.17

# By table that loaders ask for (ze_ddi.h): the index of functions that are probed or called.
TABLES = {
    "zeGetCommandListProcAddrTable": {
        "zeCommandListDestroy": 2,
        "zeCommandListClose": 3,
        "zeCommandListReset": 4,
        "zeCommandListAppendMemoryCopy": 8,
        "zeCommandListAppendMemoryFill": 9,
        "zeCommandListAppendMemoryCopyRegion": 10,
        "zeCommandListAppendMemoryCopyFromContext": 11,
        "zeCommandListAppendImageCopy": 12,
        "zeCommandListAppendImageCopyRegion": 13,
        "zeCommandListAppendImageCopyToMemory": 14,
        "zeCommandListAppendImageCopyFromMemory": 15,
        "zeCommandListAppendLaunchKernel": 22,
        "zeCommandListAppendLaunchCooperativeKernel": 23,
        "zeCommandListAppendLaunchKernelIndirect": 24,
        "zeCommandListAppendLaunchMultipleKernelsIndirect": 25,
        "zeCommandListAppendImageCopyToMemoryExt": 26,
        "zeCommandListAppendImageCopyFromMemoryExt": 27,
        "zeCommandListHostSynchronize": 28,
        "zeCommandListAppendLaunchKernelWithParameters": 36,
        "zeCommandListAppendLaunchKernelWithArguments": 37,
        "zeCommandListAppendMemoryCopyWithParameters": 38,
        "zeCommandListAppendMemoryFillWithParameters": 39,
        "zeCommandListImmediateAppendCommandListsWithParameters": 40,
    },
    "zeGetCommandListExpProcAddrTable": {
        "zeCommandListImmediateAppendCommandListsExp": 1,
        "zeCommandListUpdateMutableCommandKernelsExp": 7,
    },
    "zeGetCommandQueueProcAddrTable": {"zeCommandQueueExecuteCommandLists": 2},
    "zeGetKernelProcAddrTable": {"zeKernelDestroy": 1},
    "zeGetModuleProcAddrTable": {"zeModuleDestroy": 1},
}
OF_WAITS = {  # functions that wait: without them launches can be recorded all the same
    "zeGetEventProcAddrTable": {"zeEventHostSynchronize": 3},
    "zeGetCommandQueueProcAddrTable": {"zeCommandQueueSynchronize": 3},
    "zeGetFenceProcAddrTable": {"zeFenceHostSynchronize": 2},
    "zeGetDeviceProcAddrTable": {"zeDeviceSynchronize": 22},
}
EXTENSIONS = (  # found by name
    "zexCommandListAppendVariableLaunchKernel",
    "zexCommandListAppendMemoryCopyWithParameters",
    "zexCommandListAppendMemoryFillWithParameters",
)


DriverCall = Callable[[], None]


class DriverError(Exception):
    """A driver's call failed, or gave a wrong result; the text says which."""


def load(library: str, functions: Iterable[str] = ()) -> ctypes.CDLL:
    """Loads a driver, which has to have these functions."""
    try:
        loaded = ctypes.CDLL(library)
    except OSError as error:
        raise DriverError(f"it cannot be loaded: {error}") from error
    for name in functions:
        if not hasattr(loaded, name):
            raise DriverError(f"it has no function {name}")
    return loaded


def attempts(calls: Iterable[DriverCall]) -> Iterator[DriverCall]:
    """Yields these calls, which then do nothing where the driver refuses: not every device supports each."""

    def attempt(call: DriverCall) -> None:
        with contextlib.suppress(DriverError):
            call()

    return (partial(attempt, call) for call in calls)


class _ContextDesc(ctypes.Structure):
    _fields_ = (("type", c_uint32), ("next", c_void_p), ("flags", c_uint32))


class _ModuleDesc(ctypes.Structure):
    _fields_ = (
        ("type", c_uint32),
        ("next", c_void_p),
        ("format", c_uint32),
        ("size", c_size_t),
        ("module", c_char_p),
        ("flags", c_char_p),
        ("constants", c_void_p),
    )


class _KernelDesc(ctypes.Structure):
    _fields_ = (("type", c_uint32), ("next", c_void_p), ("flags", c_uint32), ("name", c_char_p))


class Driver:
    """A driver and its first device."""

    def __init__(self, library: str) -> None:
        """Loads and initializes the driver."""
        self._library = load(library)
        self.call("zeInit", 0)
        self._driver, self.device, self.context = c_void_p(), c_void_p(), c_void_p()
        self.call("zeDriverGet", byref(c_uint32(1)), byref(self._driver))
        self.call("zeDeviceGet", self._driver, byref(c_uint32(1)), byref(self.device))
        self.call("zeContextCreate", self._driver, byref(_ContextDesc(_CONTEXT)), byref(self.context))

    def version(self) -> str:
        """Returns the driver's version: 1.15.39122+14 is Level Zero 1.15 and the end of NEO's 26.27.39122.14."""
        text = ctypes.create_string_buffer(64)
        with contextlib.suppress(DriverError):
            name = "zeIntelGetDriverVersionString"
            self._check(name, self._extension(name)(self._driver, text, byref(c_size_t(len(text) - 1))))
        return text.value.decode("ascii", "replace") or "unknown"

    def functions(self) -> dict[str, int]:
        """Returns the addresses of functions as loaders call them, by name."""
        addresses: dict[str, int] = {}
        for table, places in TABLES.items():
            addresses |= self._in_table(table, places)
        for table, places in OF_WAITS.items():
            with contextlib.suppress(DriverError):
                addresses |= self._in_table(table, places)
        for name in EXTENSIONS:
            with contextlib.suppress(DriverError):
                addresses[name] = ctypes.cast(self._extension(name), c_void_p).value or 0
        return {name: address for name, address in addresses.items() if address}

    def _in_table(self, table_function: str, places: Mapping[str, int]) -> dict[str, int]:
        words = (c_uint64 * _TABLE_WORDS)()
        self.call(table_function, _ANY_VERSION, words)
        return {name: words[place] for name, place in places.items()}

    def exports(self) -> dict[str, int]:
        """Returns the addresses of exported functions, for programs that find them by name in the driver."""
        names = [name for functions in TABLES.values() for name in functions if hasattr(self._library, name)]
        return {name: ctypes.cast(getattr(self._library, name), c_void_p).value or 0 for name in names}

    @contextlib.contextmanager
    def module(self, binary: bytes, copies: int = 1) -> Iterator[list[Kernel]]:
        """Makes a module, and `copies` of each of its kernels; both are destroyed at the end of the context."""
        module = c_void_p()
        desc = _ModuleDesc(_MODULE, None, _NATIVE, len(binary), binary)
        self.call("zeModuleCreate", self.context, self.device, byref(desc), byref(module), None)
        names = (c_char_p * MAX_KERNELS)()
        count = c_uint32(MAX_KERNELS)
        self.call("zeModuleGetKernelNames", module, byref(count), names)
        handles = [(name, self._kernel(module, name)) for name in names[: count.value] * copies if name is not None]
        yield [self._about(module, name, handle) for name, handle in handles]
        for _name, handle in handles:
            self.call("zeKernelDestroy", handle)
        self.call("zeModuleDestroy", module)

    def _kernel(self, module: c_void_p, name: bytes) -> c_void_p:
        kernel = c_void_p()
        self.call("zeKernelCreate", module, byref(_KernelDesc(_KERNEL, None, 0, name)), byref(kernel))
        return kernel

    def _about(self, module: c_void_p, name: bytes, handle: c_void_p) -> Kernel:
        """Returns what the public calls say of a kernel; they must agree."""
        pointer = c_void_p()  # stays 0 if the name is that of something else
        self.call("zeModuleGetFunctionPointer", module, name, byref(pointer))
        called, base, code = self.kernel(handle.value or 0)
        if not base or (base ^ (pointer.value or 0)) & ADDRESS_MASK:
            raise DriverError(f"its calls disagree on where a kernel is ({base:#x}, {pointer.value or 0:#x})")
        if called != name:
            raise DriverError("its calls disagree on a kernel's name")
        return Kernel(
            handle=handle.value or 0,
            module=module.value or 0,
            name=name,
            address=base,
            code=code,
            binary=self._bytes("zeModuleGetNativeBinary", module),
        )

    def kernel(self, handle: int) -> tuple[bytes, int, bytes]:
        """Returns what the driver says of a kernel: its name, GPU address and code."""
        base = c_uint64()
        what = "zexKernelGetBaseAddress"
        self._check(what, self._extension(what)(c_void_p(handle), byref(base)))
        name = self._bytes("zeKernelGetName", c_void_p(handle)).removesuffix(b"\0")
        return name, base.value, self._bytes("zeKernelGetBinaryExp", c_void_p(handle))

    def _bytes(self, what: str, handle: c_void_p) -> bytes:
        size = c_size_t()
        self.call(what, handle, byref(size), None)
        if not 0 < size.value <= MAX_BYTES:
            raise DriverError(f"{what} gives {size.value} bytes")
        buffer = ctypes.create_string_buffer(size.value)
        self.call(what, handle, byref(size), buffer)
        return buffer.raw

    def _extension(self, name: str) -> Any:
        function = c_void_p()
        self.call("zeDriverGetExtensionFunctionAddress", self._driver, name.encode(), byref(function))
        return ctypes.CFUNCTYPE(c_uint32)(function.value or 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls an exported function, which must succeed."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DriverError(f"it has no function {name}") from None
        self._check(name, function(*arguments))

    @staticmethod
    def _check(name: str, result: int) -> None:
        if result:
            raise DriverError(f"its {name} fails with {result & 0xFFFFFFFF:#x}")
