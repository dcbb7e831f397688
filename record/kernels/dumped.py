"""Puts dumped kernels (bpf/c/handles.c) together from their chunks, to modules as their process had them.

BPF dumps a module's kernels one by one, over the whole recording. Meanwhile only the chunks' positions in the spool
are kept.

Of the zebin as the compiler wrote it, and of the kernels that were launched, this makes what a driver with probes
gives: a debug ELF, a zebin with the addresses where the kernels lie. gpu.intel.zebin reads both. The source for what
the driver changes is compute-runtime's shared/source/device_binary_format/zebin/debug_zebin.cpp.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from iaprof.basics import elf
from iaprof.formats.elf_tables import HEADER, RELOCATION, SECTION, SEGMENT, SYMBOL
from iaprof.formats.wire.launches import CHUNK, ChunkOf
from iaprof.gpu.code import CodeKernel, CodeObjectError, canonical
from iaprof.gpu.elf_code import TEXT_PREFIX, Section, StringTable, kernel_sections
from iaprof.gpu.intel.zebin import EM_INTELGT, INFO, SIMD_WIDTHS, info, read_sections, read_zebin
from iaprof.record.spool import Frame, SpoolReader

HEAD = np.dtype([(name, CHUNK[name]) for name in CHUNK.names or () if name != "data"])
# Two threads may launch a kernel for the first time together, and the one that dumps it may have begun later by this.
# Destroying a module and creating another at its address takes longer.
SAME_TIME_NS = 1_000_000
MAX_WHOLE_BYTES = 1 << 28  # MOST_CODE_BYTES of handles.c; BPF sends less of a module


@dataclass(frozen=True)
class ChunkHead:
    """The head of a CHUNK; see formats.wire.launches.CHUNK."""

    time: int
    pid: int
    tid: int
    module: int
    module_time: int
    address: int
    size: int
    offset: int
    total: int
    what: int
    simd: int
    bytes: int


def chunk_head(frame: Frame) -> ChunkHead:
    """Reads the head of a frame's CHUNK; raises ValueError if the frame is too short."""
    if len(frame.payload) < HEAD.itemsize:
        raise ValueError("it is too short for a chunk")
    return ChunkHead(*np.frombuffer(frame.payload, HEAD, 1)[0].item())


@dataclass
class _Dump:
    """The name or code of a kernel, or a module, and where its chunks are in the spool."""

    total: int = 0
    chunks: dict[int, tuple[int, int]] = field(default_factory=dict)  # position and checksum, by offset

    def read(self, spool: SpoolReader) -> bytes | None:
        """Reads the chunks; returns None if one is missing."""
        data = bytearray()
        while len(data) < self.total:
            if len(data) not in self.chunks:
                return None
            position, _ = self.chunks[len(data)]
            data += spool.frame_at(position).payload[HEAD.itemsize :]
        return bytes(data[: self.total])


@dataclass
class _Module:
    """A module of a process, from its creation to its destruction."""

    pid: int
    time_ns: int
    dumps: dict[tuple[int, int], _Dump] = field(default_factory=dict)  # by ChunkOf and address of the kernel
    addresses: dict[int, int] = field(default_factory=dict)  # of kernels, in order of their chunks: lanes, 0 if unknown

    def add(self, head: ChunkHead, position: int, checksum: int) -> bool:
        """Adds a chunk; returns False if it contradicts an earlier one."""
        key = (head.what, 0 if head.what == ChunkOf.MODULE else head.address)
        dump = self.dumps.setdefault(key, _Dump(head.total))
        self.time_ns = min(self.time_ns, head.time)
        self.note(head)
        if dump.total != head.total:
            return False
        _, known = dump.chunks.setdefault(head.offset, (position, checksum))
        return known == checksum

    def note(self, head: ChunkHead) -> None:
        """Notes the kernel that a chunk is of."""
        self.addresses[head.address] = head.simd or self.addresses.get(head.address, 0)

    def whole(self, what: ChunkOf, address: int, spool: SpoolReader) -> bytes | None:
        """Reads a name, code or module; returns None if a chunk is missing."""
        return self.dumps.get((what, address), _Dump()).read(spool) or None


@dataclass(frozen=True)
class PlacedModule:
    """A module as its process had it."""

    pid: int
    time_ns: int  # no later than the first launch of one of its kernels
    elf: bytes  # like a debug ELF
    shaders: tuple[PlacedKernel, ...] = ()  # launches of these may have no name


class DumpedModules:
    """The modules whose kernels were dumped, from the chunks in a spool."""

    def __init__(self) -> None:
        # Incomplete ones; known when `modules` is exhausted.
        self.kernels_unfinished = self.modules_unfinished = 0
        self._modules: list[_Module] = []
        self._current: dict[tuple[int, int, int], _Module] = {}

    def add(self, frame: Frame) -> None:
        """Adds a CHUNK frame; raises ValueError if it is damaged."""
        head = chunk_head(frame)
        if head.total > MAX_WHOLE_BYTES or head.what not in ChunkOf.__members__.values():
            raise ValueError("it belongs to no file that has begun")
        data = frame.payload[HEAD.itemsize :]
        key = (head.pid, head.module, head.module_time)
        if key not in self._current:
            self._begin(key, head.module_time)
        if not data:  # BPF could not read it, and sends it again
            self._current[key].note(head)
            return
        checksum = zlib.crc32(data)
        if not self._current[key].add(head, frame.position, checksum):
            # Another module or kernel lies at the same address now, and nothing reported the end of the first.
            self._begin(key, head.time).add(head, frame.position, checksum)

    def _begin(self, key: tuple[int, int, int], time_ns: int) -> _Module:
        self._current[key] = _Module(key[0], time_ns)
        self._modules.append(self._current[key])
        return self._current[key]

    def modules(self, spool: SpoolReader) -> Iterator[PlacedModule]:
        """Yields each module, with its completely known kernels.

        Args:
            spool: the spool of all frames.
        """
        for module in self._modules:
            kernels, shaders = [], []
            for address, simd in module.addresses.items():
                name = module.whole(ChunkOf.NAME, address, spool)
                code = module.whole(ChunkOf.CODE, address, spool)
                if name and code:
                    kernels.append(PlacedKernel(name.decode("utf-8", "backslashreplace"), address, code))
                for stage in _STAGES if not code else ():
                    if shader := module.whole(stage, address, spool):
                        width = simd if simd in SIMD_WIDTHS else 0
                        entry = module.whole(ChunkOf.ENTRY, address, spool)
                        shaders.append(PlacedKernel(_shader_name(name, entry, shader, stage), address, shader, width))
                        break
            binary = module.whole(ChunkOf.MODULE, 0, spool)
            kernels += shaders
            self.kernels_unfinished += len(module.addresses) - len(kernels)
            self.modules_unfinished += binary is None and (ChunkOf.MODULE, 0) in module.dumps
            if kernels:
                since = max(module.time_ns - SAME_TIME_NS, 0)
                yield PlacedModule(module.pid, since, compose(binary, kernels), tuple(shaders))


# Shaders that draw have their stage before their name.
_STAGES = {
    ChunkOf.SHADER: "",
    ChunkOf.VERTEX: "vertex",
    ChunkOf.CONTROL: "tessellation control",
    ChunkOf.EVALUATION: "tessellation evaluation",
    ChunkOf.GEOMETRY: "geometry",
    ChunkOf.FRAGMENT: "fragment",
    ChunkOf.TASK: "task",
    ChunkOf.MESH: "mesh",
}


def _shader_name(name: bytes | None, entry: bytes | None, code: bytes, of: ChunkOf) -> str:
    """Returns the name of a shader: its pipeline's, if that has one, else one that its code has on each run.

    Many shaders may have an entry point of the same name.
    """
    stage = _STAGES[of]
    before = f"{stage} " if stage else ""
    if name:
        return before + name.decode("utf-8", "backslashreplace")
    before = f"{before}{entry.decode('utf-8', 'backslashreplace')}" if entry else stage or "compute"
    return f"{before} {hashlib.sha256(code).hexdigest()[:8]}"


MOST_KERNELS = 65_000  # of one module; ELF's counts of segments and of sections have 16 bits


_ET_EXEC = 2
_READ_EXECUTE = 5
_ALLOCATED_CODE = 6  # SHF_ALLOC and SHF_EXECINSTR
_SHT_ZEBIN_ZEINFO = 0xFF000011
_CODE = 3  # number of the first section of code
_RELOCATED = {1: range(8), 2: range(4), 3: range(4, 8)}  # address bytes that R_ZE_SYM_ADDR, _32 and _32_HI write
_MOST_DEBUG_SECTIONS = 64  # DWARF has a dozen
_OTHER_HALF = 1 << 47  # of the 48-bit address space


@dataclass(frozen=True, slots=True)
class PlacedKernel:
    """A kernel that was launched."""

    name: str  # as the zebin has it
    address: int  # 64 bits, as the driver gives it: sign-extended or not
    code: bytes  # from the GPU's memory: perhaps with padding behind it, perhaps incomplete
    simd: int = 0  # lanes, where the zebin does not say so; 0: unknown


def compose(binary: bytes | None, kernels: Sequence[PlacedKernel]) -> bytes:
    """Returns a debug ELF that contains just these kernels, as gpu.intel.zebin.read_zebin reads it.

    Args:
        binary: the module's zebin as the compiler wrote it, or what is taken for it; None if unknown.
        kernels: those that were launched. Kernels past MOST_KERNELS are left out, as are those without a name.

    Symbols and DWARF get the addresses that the driver would give them. A kernel's section keeps its size: code past
    it is cut off, and missing code stays as it is in the zebin. The addresses of kernels that were not launched, and of
    functions in a section of their own (CALLED_FUNCTIONS), are unknown: their sections become SHT_NULL, and their DWARF
    moves to the other half of the address space. Global data stays at address 0. So does, as in the driver's own debug
    ELF, DWARF that refers to a kernel by a symbol without a name: report.gpu.units finds its kernel.

    Kernels that overlap, and empty ones, stay as they are. If the zebin does not fit the kernels (it is damaged, lacks
    a kernel's name, or has other code under it), or a name comes twice, the result is an ELF of sections and symbols
    for these kernels alone. Work and memory are bounded by the input, and no input raises.
    """
    kernels = kernels[:MOST_KERNELS]
    try:
        return _place(binary or b"", kernels)
    except CodeObjectError:
        return _bare(kernels)


def _place(binary: bytes, kernels: Sequence[PlacedKernel]) -> bytes:
    """Returns the zebin with addresses; raises CodeObjectError if that would differ from `kernels`."""
    launched = {kernel.name: kernel for kernel in kernels}
    zebin_kernels = read_zebin(binary).kernels
    if len({kernel.name for kernel in zebin_kernels}) < len(zebin_kernels):
        raise CodeObjectError("two of its kernels have one name")
    sections = read_sections(binary)
    out = bytearray(binary)
    header = np.frombuffer(out, HEADER, 1)
    table = np.frombuffer(out, SECTION, len(sections), int(header["sections"][0]))
    elsewhere = next((kernel.address ^ _OTHER_HALF for kernel in kernels), 0)
    added = np.zeros(len(sections) + 1, np.uint64)  # to the symbols of each section; the last one for other symbols
    expected, places = [], []
    for (index, section), kernel in zip(kernel_sections(sections).items(), zebin_kernels, strict=True):
        if (placed := launched.get(kernel.name)) is None:
            table["type"][index], added[index] = elf.SHT_NULL, elsewhere
            continue
        code = _loaded(kernel, placed)
        out[section.offset : section.offset + section.size] = code
        table["address"][index] = added[index] = placed.address
        places.append((section.offset, placed.address, section.size))
        expected.append((kernel.name, canonical(placed.address), code))
    _apply(out, sections, _move_symbols(out, sections, added))
    header["type"], header["segments"] = _ET_EXEC, len(out)
    header["segment_size"], header["segment_count"] = SEGMENT.itemsize, len(places)
    result = bytes(out) + _segments(places)
    # Sections may overlap one another or the tables: writing to one may have changed another.
    if [(kernel.name, kernel.address, kernel.code) for kernel in read_zebin(result).kernels] != expected:
        raise CodeObjectError("its sections overlap")
    if len(expected) < len(kernels):
        raise CodeObjectError("it does not have all of these kernels, or two of them have one name")
    return result


def _loaded(kernel: CodeKernel, placed: PlacedKernel) -> bytes:
    """Returns a kernel's whole section as the GPU has it; CodeObjectError if that is other code than the zebin's."""
    size = len(kernel.code)
    code = placed.code[:size] + kernel.code[len(placed.code) :]
    if not size or kernel._replace(code=code).fingerprint != kernel.fingerprint:
        raise CodeObjectError("it has other code")
    return code


def _move_symbols(out: bytearray, sections: list[Section], added: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Adds to each symbol what is added to its section; returns the symbols' values, uint64[symbols].

    DWARF's relocations do not use the kernels' symbols, but symbols in the .debug_ section they apply to, which are
    named like the sections of code.
    """
    symbol_table = next((section for section in sections if section.type == elf.SHT_SYMTAB), None)
    if symbol_table is None:
        return np.empty(0, np.uint64)
    symbols = np.frombuffer(out, SYMBOL, symbol_table.size // SYMBOL.itemsize, symbol_table.offset)
    section_numbers = np.minimum(symbols["section"], len(sections))
    by_name = {section.name: added[index] for index, section in kernel_sections(sections).items()}
    names_at = sections[symbol_table.link].offset
    strings = StringTable(bytes(out[names_at : names_at + sections[symbol_table.link].size]))
    in_dwarf = np.array([section.name.startswith(".debug_") for section in sections] + [False])[section_numbers]
    names, which = np.unique(symbols["name"][in_dwarf], return_inverse=True)
    base = added[section_numbers]
    base[in_dwarf] += np.array([by_name.get(strings.at(name), 0) for name in names.tolist()], np.uint64)[which]
    symbols["value"] += base
    return symbols["value"].copy()


def _apply(out: bytearray, sections: list[Section], values: NDArray[np.uint64]) -> None:
    """Applies the relocations of DWARF, given the symbols' values."""
    relocations = [
        section for section in sections if section.type == elf.SHT_RELA and section.name.startswith(".rela.debug_")
    ]
    if len(relocations) > _MOST_DEBUG_SECTIONS or sum(section.size for section in relocations) > len(out):
        raise CodeObjectError("its sections overlap: they hold more relocations than the file has bytes")
    for section in relocations:
        target = sections[section.info] if section.info < len(sections) else None
        if target is None or target.type != elf.SHT_PROGBITS:
            raise CodeObjectError("it has relocations of nothing")
        places = np.frombuffer(out, np.uint8, target.size, target.offset)
        entries = np.frombuffer(out, RELOCATION, section.size // RELOCATION.itemsize, section.offset)
        entries = entries[entries["symbol"] < len(values)]
        for kind, written in _RELOCATED.items():
            own = entries[(entries["kind"] == kind) & (entries["offset"] < max(target.size - len(written) + 1, 0))]
            value = values[own["symbol"]] + own["addend"]
            for at, byte in enumerate(written):
                places[own["offset"] + np.uint64(at)] = value >> np.uint64(8 * byte) & np.uint64(0xFF)


def _segments(places: Sequence[tuple[int, int, int]]) -> bytes:
    """Program headers for code, given its offset in the file, address and bytes."""
    rows = [(elf.PT_LOAD, _READ_EXECUTE, offset, address, 0, size, size, 1) for offset, address, size in places]
    return np.array(rows, SEGMENT).tobytes()


def _bare(kernels: Sequence[PlacedKernel]) -> bytes:
    """Returns an ELF of these kernels alone: header, segments, sections, names, symbols, code, lanes."""
    count = len(kernels)
    widths = {kernel.name: kernel.simd for kernel in kernels if kernel.simd}
    about = info(widths) if widths else b""
    texts = [TEXT_PREFIX.encode() + kernel.name.encode("utf-8", "backslashreplace") + b"\0" for kernel in kernels]
    strings = b"".join([b"\0.strtab\0.symtab\0", *texts, INFO.encode() + b"\0"])
    names = np.array([len(b"\0.strtab\0.symtab\0"), *map(len, texts)], np.uint32).cumsum()
    addresses = np.array([kernel.address for kernel in kernels], np.uint64)
    sizes = np.array([len(kernel.code) for kernel in kernels], np.uint64)

    symbols = np.zeros(1 + count, SYMBOL)
    symbols["name"][1:] = names[:-1] + len(TEXT_PREFIX)
    symbols["info"][1:] = elf.STT_FUNC
    symbols["section"][1:] = np.arange(_CODE, _CODE + count)
    symbols["value"][1:] = addresses
    symbols["size"][1:] = sizes

    sections = np.zeros(_CODE + count + bool(about), SECTION)
    sections["name"][1:] = [1, 9, *names][: len(sections) - 1]
    sections["type"][:_CODE] = elf.SHT_NULL, elf.SHT_STRTAB, elf.SHT_SYMTAB
    sections["type"][_CODE:] = elf.SHT_PROGBITS
    sections["type"][_CODE + count :] = _SHT_ZEBIN_ZEINFO
    code = sections[_CODE : _CODE + count]
    code["flags"], code["address"] = _ALLOCATED_CODE, addresses
    sections["size"][1:] = [len(strings), symbols.nbytes, *sizes, len(about)][: len(sections) - 1]
    start = HEADER.itemsize + count * SEGMENT.itemsize + sections.nbytes
    sections["offset"] = start + sections["size"].cumsum() - sections["size"]
    # Symbols have their names in section 1; all symbols count as local.
    sections["link"][2], sections["info"][2], sections["entry_size"][2] = 1, len(symbols), SYMBOL.itemsize

    header = np.zeros(1, HEADER)
    header["ident"], header["type"], header["machine"], header["version"] = (
        elf.MAGIC + b"\2\1\1",
        _ET_EXEC,
        EM_INTELGT,
        1,
    )
    header["segments"], header["sections"] = HEADER.itemsize, start - sections.nbytes
    header["size"], header["segment_size"], header["section_size"] = (
        dtype.itemsize for dtype in (HEADER, SEGMENT, SECTION)
    )
    header["segment_count"], header["section_count"], header["names"] = count, len(sections), 1
    segments = _segments(list(zip(code["offset"].tolist(), addresses.tolist(), sizes.tolist(), strict=True)))
    tables = [header.tobytes(), segments, sections.tobytes(), strings, symbols.tobytes()]
    return b"".join([*tables, *(kernel.code for kernel in kernels), about])
