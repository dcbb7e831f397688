"""Reads a library's USDT probes: their locations, and where their arguments are.

They are described in `.note.stapsdt` (written by <sys/sdt.h>). As the library is untrusted and the recorder is root, a
location is accepted only in an executable PT_LOAD, a semaphore only in a writable one. Argument specifications are
parsed to integers here, so that no text of the library reaches a compiler.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO

from iaprof.basics.elf import SHN_UNDEF
from iaprof.bpf.loader import linux_version
from iaprof.bpf.probes.library_file import LibraryFile, ProbeError
from iaprof.bpf.structs import ARG, MAX_ARGS, NO_REGISTER, ArgKind, pack

# Compilers inline a probe's function a few times at most; in the injected library several functions have each probe.
MAX_LOCATIONS = 32

# The 64-bit registers, in the order of the array that read_registers of launches.c fills.
_REGISTERS_64 = ("rax", "rdx", "rcx", "rbx", "rsi", "rdi", "rbp", "rsp", *(f"r{n}" for n in range(8, 16)), "rip")


@dataclass(frozen=True)
class Arg:
    """An argument of a probe, with the members of ARG."""

    kind: ArgKind
    bits: int = 64
    signed: bool = False
    value: int = 0
    base: int = NO_REGISTER
    index: int = NO_REGISTER
    scale: int = 0
    shift: int = 0

    def pack(self) -> bytes:
        """Packs the argument as ARG."""
        return pack(ARG, self.value, self.kind, self.base, self.index, self.scale, self.bits, self.signed, self.shift)


@dataclass(frozen=True)
class Probe:
    """A location of a probe. Offsets are in bytes from the start of the file."""

    provider: str
    name: str
    offset: int
    semaphore_offset: int
    args: tuple[Arg, ...]

    def pack(self) -> bytes:
        """Packs the arguments as PROBE."""
        args = [*self.args[:MAX_ARGS], *[Arg(ArgKind.NONE)] * (MAX_ARGS - len(self.args))]
        return b"".join(arg.pack() for arg in args)


def _registers() -> dict[str, tuple[int, int, int]]:
    """Returns index, bits and shift of the integer registers, by all their names."""
    names: dict[str, tuple[int, int, int]] = {}
    for index, wide in enumerate(_REGISTERS_64):
        names[wide] = (index, 64, 0)
        if wide[1:].isdigit():
            names |= {wide + "d": (index, 32, 0), wide + "w": (index, 16, 0), wide + "b": (index, 8, 0)}
            names[wide + "l"] = (index, 8, 0)
        elif wide != "rip":
            names |= {"e" + wide[1:]: (index, 32, 0), wide[1:]: (index, 16, 0)}
            letter = wide[1]
            if wide.endswith("x"):
                names |= {letter + "l": (index, 8, 0), letter + "h": (index, 8, 8)}
            else:
                names[wide[1:] + "l"] = (index, 8, 0)
    return names


_REGISTERS = _registers()
_SPEC = re.compile(r"^(?:(?P<size>-?[1248])@)?(?P<operand>\S+)$")
_NUMBER = r"-?(?:0[xX][0-9a-fA-F]+|[0-9]+)"
_CONSTANT = re.compile(rf"^\$(?P<number>{_NUMBER})$")
_MEMORY = re.compile(r"^(?P<displacement>[^()%$]*)\((?P<base>%\w+)?(?:,(?P<index>%\w+)?(?:,(?P<scale>[1248])?)?)?\)$")
_TERM = re.compile(r"(?P<sign>[+-]?)(?:(?P<number>0[xX][0-9a-fA-F]+|[0-9]+)|(?P<symbol>[A-Za-z_.$][\w.$@]*))")


def parse_arg(spec: str, location: int = 0, symbol: Callable[[str], int | None] = lambda _: None) -> Arg:
    """Parses an argument specification, such as `8@%rdi`, `-4@$5`, `4@-20(%rbp)` or `8@table+8(,%rcx,8)`.

    Args:
        spec: a word of the note's third string.
        location: the probe's virtual address in the file, which is the value of `%rip`.
        symbol: returns a symbol's virtual address in the file, for operands that name a symbol.

    Raises:
        ProbeError: the specification has none of the forms of x86-64 integer arguments.
    """
    match = _SPEC.match(spec)
    if match is None:
        raise ProbeError(f"argument {spec!r} has a form that iaprof does not know")
    size = int(match["size"] or 8)
    bits, signed = abs(size) * 8, size < 0
    operand = match["operand"]
    if constant := _CONSTANT.match(operand):
        value = int(constant["number"], 0)
        if not -(1 << 63) <= value < 1 << 64:
            raise ProbeError(f"argument {spec!r} does not fit 64 bits")
        return Arg(ArgKind.CONSTANT, bits, signed, _to_signed(value))
    if operand.startswith("%"):
        index, width, shift = _register(operand, spec)
        return Arg(ArgKind.REGISTER, min(bits, width), signed, base=index, shift=shift)
    memory = _MEMORY.match(operand)
    if memory is None:
        raise ProbeError(f"argument {spec!r} has a form that iaprof does not know")
    base = _register(memory["base"], spec, wide=True)[0] if memory["base"] else NO_REGISTER
    index = _register(memory["index"], spec, wide=True)[0] if memory["index"] else NO_REGISTER
    displacement, symbolic = _displacement(memory["displacement"], spec, symbol)
    if symbolic or base == _REGISTERS["rip"][0]:
        # For the assembler, a symbol is its address. At run time %rip is the probe's address, so the distance from the
        # probe gives the symbol's address wherever the library is loaded. (A number before %rip is already a distance.)
        if base not in (NO_REGISTER, _REGISTERS["rip"][0]) or (index != NO_REGISTER and base == NO_REGISTER):
            raise ProbeError(f"argument {spec!r} adds a register to a symbol, which has no fixed place")
        if symbolic:
            base, displacement = _REGISTERS["rip"][0], displacement - location
    scale = int(memory["scale"] or 1).bit_length() - 1
    return Arg(ArgKind.MEMORY, bits, signed, _to_signed(displacement), base, index, scale)


def _register(name: str, spec: str, wide: bool = False) -> tuple[int, int, int]:
    found = _REGISTERS.get(name.removeprefix("%"))
    if found is None or (wide and found[1] != 64):
        raise ProbeError(f"argument {spec!r} names a register that holds no integer")
    return found


def _displacement(text: str, spec: str, symbol: Callable[[str], int | None]) -> tuple[int, bool]:
    """Returns the sum before the parenthesis, and whether it contains a symbol."""
    total, symbolic, end = 0, False, 0
    while end < len(text):
        term = _TERM.match(text, end)
        if term is None or (end > 0 and not term["sign"]):
            raise ProbeError(f"argument {spec!r} has a displacement that iaprof does not know")
        if term["symbol"]:
            value = symbol(term["symbol"])
            if value is None:
                raise ProbeError(f"argument {spec!r} names a symbol that the library does not have")
            symbolic = True
        else:
            value = int(term["number"], 0)
        total += -value if term["sign"] == "-" else value
        end = term.end()
    if not -(1 << 63) <= total < 1 << 63:
        raise ProbeError(f"argument {spec!r} has a displacement over 64 bits")
    return total, symbolic


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def read_probes(file: BinaryIO, provider: str, names: Iterable[str]) -> list[Probe]:
    """Returns the locations of the probes of `provider` in an open library whose names are in `names`.

    Raises:
        ProbeError: the file is not an x86-64 ELF file, or a probe is invalid.
    """
    library = LibraryFile(file)
    wanted = frozenset(name.encode() for name in names)
    with library.reading():
        return list(_Notes(library).probes(provider.encode(), wanted))


# A probe of our libraries: its instruction, one of five bytes, and a mark (record/kernels/probe.h). In others the call
# that the kernel makes of the second one could overwrite the function's data, which may be below its stack pointer.
_NOPS = b"\x90" + b"\x0f\x1f\x44\x00\x00" + b"\x0f\x1f\x80iapr"


def _calls_long_nops() -> bool:
    """Whether the kernel turns a probe at a nop of five bytes into a call: Linux 6.18 and later on x86-64."""
    return linux_version() >= (6, 18)


class _Notes:
    """The notes of an open library that describe its probes."""

    def __init__(self, library: LibraryFile) -> None:
        self._library = library
        self._elf = library.elf

    def probes(self, provider: bytes, names: frozenset[bytes]) -> Iterator[Probe]:
        base = self._elf.indices.get(".stapsdt.base")
        moved_to = self._elf.sections[base].address if base is not None else None
        left = MAX_LOCATIONS
        semaphores: dict[int, int] = {}  # by the probe's offset
        for note in self._elf.notes_of(".note.stapsdt"):
            if note.name != b"stapsdt" or not left:
                continue
            probe = self._probe(note.description, moved_to, provider, names)
            if probe:
                if semaphores.setdefault(probe.offset, probe.semaphore_offset) != probe.semaphore_offset:
                    raise ProbeError("its notes place probes with different semaphores at one instruction")
                left -= 1
                yield probe

    def _probe(self, note: bytes, base: int | None, provider: bytes, names: frozenset[bytes]) -> Probe | None:
        location, linked_base, semaphore = struct.unpack_from("<QQQ", note)
        strings = note[24:].split(b"\0")
        if strings[0] != provider or strings[1] not in names:
            return None
        # prelink may have moved the file's addresses without those in the note; the base section was moved, too
        moved = base - linked_base if base is not None else 0
        location += moved
        offset = self._library.offset(location, executable=True)
        if _calls_long_nops() and self._library.code(offset, len(_NOPS)) == _NOPS:
            location, offset = location + 1, offset + 1
        semaphore_offset = self._library.offset(semaphore + moved, executable=False) if semaphore else 0
        if semaphore_offset >= 1 << 32:
            raise ProbeError("its semaphore lies beyond 4 GiB of the file")
        specs = strings[2].decode("latin-1").split()
        args = tuple(parse_arg(spec, location, self._symbol) for spec in specs[:MAX_ARGS])
        return Probe(provider.decode(), strings[1].decode(), offset, semaphore_offset, args)

    def _symbol(self, name: str) -> int | None:
        return self._symbols.get(name)

    @functools.cached_property
    def _symbols(self) -> dict[str, int]:
        """Addresses by name; read only when an argument names a symbol, which is rare."""
        tables = chain(self._elf.named_symbols(".dynsym"), self._elf.named_symbols(".symtab"))
        return {name.decode("utf-8", "replace"): each.value for name, each in tables if each.section != SHN_UNDEF}
