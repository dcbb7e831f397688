"""The stored form of compiled BPF programs: programs.json, which ships, and the cache of programs compiled here.

A stored program contains no addresses and no descriptors. The file lists the instructions that load a map or a named
constant, and loader.py fills in the value. These are 64-bit immediate loads, so the kernel's verifier treats the value
as a constant, as if clang had compiled it in. The file also lists the calls of the kernel's functions, which the loader
makes calls by the function's number in the kernel's BTF.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from iaprof.basics.errors import IaprofError

_INSTRUCTION = struct.Struct("<BBhI")  # opcode, registers (source in the upper half), offset, immediate
_LOAD_64, _CALL, _SET = 0x18, 0x85, 0xB7  # opcodes, include/uapi/linux/bpf.h; the first takes two instructions
_PSEUDO_KERNEL_FUNCTION = 2  # as a call's source register: the immediate is the function's number in BTF
_PSEUDO_MAP_FD = 1  # as a source register: the immediate is a map's descriptor
_PER_LINE = 4  # instructions per line of the file
_MOST_INSTRUCTIONS = 1 << 20


class BytecodeError(IaprofError):
    """A file is not stored bytecode, or a compiled program cannot be stored."""


class BpfUnavailable(IaprofError):
    """BPF programs cannot be loaded or compiled here; the text says what to install or allow."""

    needs_bcc = False  # the kernel refused the programs that ship, so bcc and kernel headers are needed


class Map(NamedTuple):
    """The arguments of BPF_MAP_CREATE; the loader may choose another number of entries."""

    type: int  # enum bpf_map_type
    key_bytes: int
    value_bytes: int
    entries: int
    flags: int


class Program(NamedTuple):
    """A program's instructions, with zeros where map descriptors and constants are filled in."""

    code: bytes
    maps: tuple[tuple[int, str], ...]  # index of the instruction, name of the map
    constants: tuple[tuple[int, str], ...]  # index of the instruction, name of the constant
    calls: tuple[tuple[int, str], ...] = ()  # index of the instruction, name of the constant with the function's number

    def linked(self, maps: Mapping[str, int], constants: Mapping[str, int]) -> bytes:
        """Returns the instructions with descriptors and constants filled in.

        Args:
            maps: descriptors by name.
            constants: values by name, 0 to 2**64 - 1. Calls of the function number 0 become an assignment of 1 to
                the register of results.
        """
        code = bytearray(self.code)
        for at, name in self.calls:
            number = constants[name]
            instruction = (_CALL, _PSEUDO_KERNEL_FUNCTION << 4, 0, number) if number else (_SET, 0, 0, 1)
            _INSTRUCTION.pack_into(code, at * 8, *instruction)
        for at, name in self.maps:
            _fill(code, at, maps[name])
        for at, name in self.constants:
            _fill(code, at, constants[name])
        return bytes(code)


class Bytecode(NamedTuple):
    """Programs and the maps that they share."""

    source: str  # digest of the source (compile.compiler.Source.digest)
    compiler: str
    maps: Mapping[str, Map]
    programs: Mapping[str, Program]

    def to_text(self) -> str:
        """Returns the text of a file that `from_text` reads."""
        content = {
            "about": "Made by 'make bytecode'; after a merge conflict, run it again.",
            "source": self.source,
            "compiler": self.compiler,
            "maps": {name: each._asdict() for name, each in sorted(self.maps.items())},
            "programs": {
                name: {
                    "maps": _references(each.maps),
                    "constants": _references(each.constants),
                    "calls": _references(each.calls),
                    "code": _hex_lines(each.code),
                }
                for name, each in sorted(self.programs.items())
            },
        }
        return json.dumps(content, indent=1) + "\n"


def from_text(text: str) -> Bytecode:
    """Reads the text that `Bytecode.to_text` returned.

    Raises:
        BytecodeError: the text is damaged, or something else.
    """
    try:
        content = json.loads(text)
        maps = {
            str(name): Map(**{key: int(value) for key, value in each.items()}) for name, each in content["maps"].items()
        }
        programs = {str(name): _program(each, maps) for name, each in content["programs"].items()}
        return Bytecode(str(content["source"]), str(content["compiler"]), maps, programs)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BytecodeError(f"the compiled BPF programs cannot be read: {error!r}") from error


def placeholder(constant: str) -> int:
    """Returns the 64-bit number that stands for a named constant in clang's output; unlikely to occur otherwise."""
    return int.from_bytes(hashlib.sha256(f"iaprof: {constant}".encode()).digest()[:8], "little")


def call_placeholder(function: str) -> int:
    """Returns the 31-bit number of a helper that does not exist, which stands for a function of the kernel's."""
    return placeholder(function) & 0x7FFFFFFF


def from_compiled(code: bytes, maps: Mapping[int, str], constants: Sequence[str], calls: Sequence[str] = ()) -> Program:
    """Makes a Program from a compiler's output.

    Args:
        code: instructions.
        maps: names of maps, by the descriptors that the instructions contain.
        constants: names of constants, whose `placeholder` the instructions contain.
        calls: names of constants with the numbers of the kernel's functions, whose `call_placeholder` is called.

    Raises:
        BytecodeError: the code refers to something that exists only in the process that compiled it.
    """
    names = {placeholder(name): name for name in constants}
    functions = {call_placeholder(name): name for name in calls}
    blanked = bytearray(code)
    found_maps: list[tuple[int, str]] = []
    found_constants: list[tuple[int, str]] = []
    found_calls: list[tuple[int, str]] = []
    at, count = 0, len(code) // 8
    while at < count:
        opcode, registers, _, low = _INSTRUCTION.unpack_from(code, at * 8)
        source = registers >> 4
        if opcode == _CALL and source:
            raise BytecodeError(f"instruction {at} calls a function of its own or of the kernel's, not a helper")
        if opcode == _CALL and low in functions:
            found_calls.append((at, functions[low]))
            _INSTRUCTION.pack_into(blanked, at * 8, _CALL, 0, 0, 0)
        if opcode != _LOAD_64:
            at += 1
            continue
        value = low | _INSTRUCTION.unpack_from(code, (at + 1) * 8)[3] << 32
        if source == _PSEUDO_MAP_FD and value in maps:
            found_maps.append((at, maps[value]))
            _fill(blanked, at, 0)
        elif source:
            raise BytecodeError(f"instruction {at} loads an address that is not a map's")
        elif value in names:
            found_constants.append((at, names[value]))
            _fill(blanked, at, 0)
        at += 2
    return Program(bytes(blanked), tuple(found_maps), tuple(found_constants), tuple(found_calls))


def _fill(code: bytearray, at: int, value: int) -> None:
    """Sets the operand of the 64-bit immediate load at instruction `at`."""
    struct.pack_into("<I", code, at * 8 + 4, value & 0xFFFFFFFF)
    struct.pack_into("<I", code, at * 8 + 12, value >> 32)


def _hex_lines(code: bytes) -> list[str]:
    return [code[at : at + 8 * _PER_LINE].hex(" ", 8) for at in range(0, len(code), 8 * _PER_LINE)]


def _references(found: Sequence[tuple[int, str]]) -> list[str]:
    return [f"{at} {name}" for at, name in found]


def _read_references(lines: Sequence[str]) -> tuple[tuple[int, str], ...]:
    return tuple((int(at), name) for at, _, name in (line.partition(" ") for line in lines))


def _program(content: Any, maps: Mapping[str, Map]) -> Program:
    code = bytes.fromhex("".join(content["code"]))
    count = len(code) // 8
    if len(code) % 8 or not 0 < count < _MOST_INSTRUCTIONS:
        raise ValueError(f"{len(code)} bytes of code")
    found = [_read_references(content[kind]) for kind in ("maps", "constants", "calls")]
    for at, _ in (*found[0], *found[1]):
        if not 0 <= at < count - 1 or code[at * 8] != _LOAD_64:
            raise ValueError(f"instruction {at} loads nothing")
    for at, _ in found[2]:
        if not 0 <= at < count or code[at * 8] != _CALL:
            raise ValueError(f"instruction {at} calls nothing")
    if unknown := {name for _, name in found[0]} - maps.keys():
        raise ValueError(f"there are no maps {unknown}")
    return Program(code, found[0], found[1], found[2])
