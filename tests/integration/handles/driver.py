"""A driver without probes that the tests play: its library and program, its layout, and kernels to launch with ctypes.

Any process that loads the library is one whose launches are recorded, the test's own, too. So a test makes a kernel,
or what looks like one, in its own memory, and calls the library.
"""

from __future__ import annotations

import ctypes
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from elftools.elf.elffile import ELFFile

import elf_sections
from iaprof.bpf.driver_layout import Action, Entry, Field, Layout

FOLDER = Path(__file__).parent
MODULE_BIAS, GONE_OFFSET = 16, 24  # of what is given back, from what it is launched by, or described
HEAP, HEAP_BYTES = 0x8001_0000_0000, 1 << 30
_FLAGS = ["-O1", "-Wall", "-Wextra", "-Werror", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-pthread"]
_ENDBR64, _TO_ITS_JE = 4, 4 + 4 + 5 + 5 + 3  # bytes of the instructions before


class Allocation(ctypes.Structure):
    """See driver.h; so are the others."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("kind", "gpu", "bytes")]


class Code(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_uint64),
        ("isa", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("memory", ctypes.c_uint64),
    ]


class Module(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("kind", "binary", "bytes")]


class Kernel(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cls", "code", "offset", "module")]


class Handle(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("magic", "kernel")]


def _entries(symbols: dict[str, int]) -> tuple[Entry, ...]:
    def entry(
        name: str, action: Action, handle: int, count: int | None = None, offset: int = 0, at: int = _ENDBR64
    ) -> Entry:
        return Entry(name, action, symbols[name] + at, handle, count, offset)

    return (
        entry("launch", Action.LAUNCH, 1),
        entry("launch_sub", Action.LAUNCH, 1),
        entry("launch_start", Action.LAUNCH, 1, at=0),
        entry("launch_frame", Action.LAUNCH, 1, at=_TO_ITS_JE),
        entry("launch_many", Action.LAUNCH_MANY, 1, 2),
        entry("kernel_gone", Action.KERNEL_GONE, 0, offset=GONE_OFFSET),
        entry("module_gone", Action.MODULE_GONE, 0),
        entry("execute", Action.EXECUTE, 2, 1),
        entry("list_closed", Action.LIST_CLOSED, 0),
        entry("list_reset", Action.LIST_RESET, 0),
        entry("list_gone", Action.LIST_GONE, 0),
    )


@dataclass(frozen=True)
class Built:
    """A build of the library, with a build-id that no other has."""

    library: Path
    program: Path
    symbols: dict[str, int]  # virtual addresses, in the file
    layout: Layout
    waiting: Path  # a program that waits

    @property
    def with_waits(self) -> Layout:
        """The layout of the driver as calibration finds it that looks for waits, too."""
        waits = (
            Entry("zeEventHostSynchronize", Action.WAIT, self.symbols["wait_event"] + _ENDBR64 + 3, 0),
            Entry("zeCommandQueueSynchronize", Action.WAIT, self.symbols["wait_queue"], 0),
        )
        return replace(self.layout, entries=(*self.layout.entries, *waits))


def build(folder: Path, name: str = "libplayed.so") -> Built:
    """Compiles it.

    Args:
        folder: to make.
        name: of the library; one that recorders look for is seen by all of the machine.
    """
    folder.mkdir()
    build_id = secrets.token_hex(20)
    library, program = folder / name, folder / "program"
    shared = ["-shared", "-fPIC", "-Wl,-Bsymbolic", f"-Wl,--build-id=0x{build_id}", f"-Wl,-soname,{name}"]
    linked = [str(library), "-Wl,-rpath,$ORIGIN"]
    subprocess.run(["cc", *_FLAGS, *shared, "-o", library, FOLDER / "driver.c"], check=True)
    subprocess.run(["cc", *_FLAGS, "-fPIC", "-o", program, FOLDER / "program.c", *linked], check=True)
    waiting = folder / "waiting"
    subprocess.run(
        ["cc", *_FLAGS, "-fPIC", "-fexceptions", "-fomit-frame-pointer", "-o", waiting, FOLDER / "waiting.c", *linked],
        check=True,
    )
    with library.open("rb") as file:
        table = elf_sections.symbols(ELFFile(file), ".symtab")
        symbols = {symbol.name: symbol["st_value"] for symbol in table.iter_symbols()}
    code, memory = (Handle.kernel.offset, Kernel.code.offset), Code.memory.offset
    module = Handle.kernel.offset, Kernel.module.offset
    start = Field((*code, memory, Allocation.gpu.offset))
    layout = Layout(
        build_id=build_id,
        driver="level_zero",
        version="played",
        entries=_entries(symbols),
        address=(start, Field((Handle.kernel.offset, Kernel.offset.offset))),
        size=Field((*code, Code.size.offset), 32),
        code=Field((*code, Code.isa.offset)),
        name=Field((*code, Code.name.offset)),
        allocation=(start, Field((*code, memory, Allocation.bytes.offset))),
        kernel_class=Field((Handle.kernel.offset, Kernel.cls.offset)),
        classes=(symbols["kernel_class"],),
        module=Field(module),
        module_bias=MODULE_BIAS,
        binary=Field((*module, Module.binary.offset)),
        binary_size=Field((*module, Module.bytes.offset)),
    )
    return Built(library, program, symbols, layout, waiting)


def copied(built: Built, folder: Path) -> Built:
    """The same build as other files: nobody else's probes are in them."""
    shutil.copytree(built.library.parent, folder)
    parts = (folder / path.name for path in (built.library, built.program, built.waiting))
    library, program, waiting = parts
    return Built(library, program, built.symbols, built.layout, waiting)


class LoadedModule:
    """A module in this process's memory; its parts may be changed to anything."""

    def __init__(self, binary: bytes = b"") -> None:
        self._bytes = ctypes.create_string_buffer(binary, max(len(binary), 1))
        self.it = Module(3, ctypes.addressof(self._bytes), len(binary))
        self.address = ctypes.addressof(self.it)


@dataclass
class LoadedKernel:
    """A kernel in this process's memory; its parts may be changed to anything."""

    handle: Handle
    kernel: Kernel
    code: Code
    memory: Allocation
    module: LoadedModule | None
    buffers: list[ctypes.Array[ctypes.c_char]] = field(repr=False)

    @property
    def value(self) -> int:
        """What programs have."""
        return ctypes.addressof(self.handle)

    @property
    def address(self) -> int:
        """On the GPU."""
        return int(self.memory.gpu + self.kernel.offset)


class Driver:
    """The library, loaded into this process."""

    def __init__(self, built: Built) -> None:
        self._loaded = ctypes.CDLL(str(built.library))
        launch = ctypes.cast(self._loaded.launch, ctypes.c_void_p).value
        assert launch is not None
        self.loaded_at = launch - built.symbols["launch"]
        self.cls = self.loaded_at + built.symbols["kernel_class"]
        self.other_class = self.loaded_at + built.symbols["other_class"]

    def kernel(self, name: bytes, code: bytes, offset: int = 0, module: LoadedModule | None = None) -> LoadedKernel:
        """A kernel that lies so far behind the begin of the GPU's memory for code."""
        buffers = [ctypes.create_string_buffer(name), ctypes.create_string_buffer(code, len(code))]
        memory = Allocation(1, HEAP, HEAP_BYTES)
        parts = Code(*map(ctypes.addressof, buffers), len(code), 0, ctypes.addressof(memory))
        kernel = Kernel(self.cls, ctypes.addressof(parts), offset, module.address if module else 0)
        return LoadedKernel(Handle(7, ctypes.addressof(kernel)), kernel, parts, memory, module, buffers)

    def launch(self, handle: int, queue: int = 0) -> None:
        """Launches what is at an address of this process."""
        self._loaded.launch(ctypes.c_uint64(queue), ctypes.c_uint64(handle))

    def launch_many(self, handles: Sequence[int], count: int | None = None, array: int | None = None) -> None:
        """Launches all of them; or as many as `count` says, or those at an address."""
        values = (ctypes.c_uint64 * max(len(handles), 1))(*handles)
        at = ctypes.addressof(values) if array is None else array
        self._loaded.launch_many(None, ctypes.c_uint64(at), ctypes.c_uint32(len(handles) if count is None else count))

    def execute(self, lists: Sequence[int], count: int | None = None, array: int | None = None, queue: int = 5) -> None:
        """Executes these lists; or as many as `count` says, or those at an address."""
        values = (ctypes.c_uint64 * max(len(lists), 1))(*lists)
        at = ctypes.addressof(values) if array is None else array
        number = ctypes.c_uint32(len(lists) if count is None else count)
        self._loaded.execute(ctypes.c_uint64(queue), number, ctypes.c_uint64(at))

    def list_event(self, what: str, list_: int) -> None:
        """Calls `list_closed`, `list_reset` or `list_gone`."""
        getattr(self._loaded, what)(ctypes.c_uint64(list_))

    def launch_deep(self, handle: int, depth: int, how: str) -> None:
        """Launches from a function that called itself `depth` times."""
        self._loaded.deep(getattr(self._loaded, how), ctypes.c_uint64(handle), depth)

    def launch_with_frame(self, handle: int, frame: int, how: str) -> None:
        """Launches from a function that has this in its frame pointer."""
        self._loaded.with_frame(getattr(self._loaded, how), ctypes.c_uint64(handle), ctypes.c_uint64(frame))

    def kernel_gone(self, kernel: LoadedKernel) -> None:
        """Gives a kernel back."""
        self._loaded.kernel_gone(ctypes.c_uint64(kernel.value - GONE_OFFSET))

    def module_gone(self, module: LoadedModule) -> None:
        """Gives a module back."""
        self._loaded.module_gone(ctypes.c_uint64(module.address + MODULE_BIAS))
