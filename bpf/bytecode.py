"""Compiled BPF programs as they are stored: in programs.json, which ships, and in the cache of programs compiled here.

A stored program holds no addresses and no descriptors. For each instruction that loads a map or a named constant, the
file says which one, and loader.py fills it in. Both are 64-bit immediate loads, so the kernel's verifier treats the
filled-in number as a constant, as if clang had compiled it in.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iaprof.basics.errors import IaprofError

_INSTRUCTION = struct.Struct("<BBhI")  # opcode, registers (source in the upper half), offset, immediate
_LOAD_64, _CALL = 0x18, 0x85  # opcodes, include/uapi/linux/bpf.h; the first takes two instructions
_PSEUDO_MAP_FD = 1  # as a source register: the immediate is a map's descriptor
_PER_LINE = 4  # instructions, in the file
_MOST_INSTRUCTIONS = 1 << 20


class BytecodeError(IaprofError):
    """What was read or compiled is not bytecode that can be stored here."""


@dataclass(frozen=True)
class Map:
    """What BPF_MAP_CREATE is given; the loader may choose another number of entries."""

    type: int  # enum bpf_map_type
    key_bytes: int
    value_bytes: int
    entries: int
    flags: int


@dataclass(frozen=True)
class Program:
    """Instructions, with zeros where maps and constants are filled in."""

    code: bytes
    maps: tuple[tuple[int, str], ...]  # number of the instruction, name of the map
    constants: tuple[tuple[int, str], ...]  # number of the instruction, name of the constant

    def linked(self, maps: Mapping[str, int], constants: Mapping[str, int]) -> bytes:
        """Instructions for the kernel.

        Args:
            maps: descriptors by name.
            constants: values by name, 0 to 2**64 - 1.
        """
        code = bytearray(self.code)
        for at, name in self.maps:
            _fill(code, at, maps[name])
        for at, name in self.constants:
            _fill(code, at, constants[name])
        return bytes(code)


@dataclass(frozen=True)
class Bytecode:
    """Programs and the maps that they share."""

    source: str  # digest of what was compiled (programs.Source.digest)
    compiler: str
    maps: Mapping[str, Map]
    programs: Mapping[str, Program]

    def to_text(self) -> str:
        """The text of a file that `from_text` reads."""
        content = {
            "about": "Made by 'make bytecode'; after a merge conflict, run it again.",
            "source": self.source,
            "compiler": self.compiler,
            "maps": {name: vars(each) for name, each in sorted(self.maps.items())},
            "programs": {
                name: {"maps": _places(each.maps), "constants": _places(each.constants), "code": _lines(each.code)}
                for name, each in sorted(self.programs.items())
            },
        }
        return json.dumps(content, indent=1) + "\n"


def from_text(text: str) -> Bytecode:
    """What `to_text` wrote.

    Raises:
        BytecodeError: it is something else.
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


def magic(constant: str) -> int:
    """The number that stands for a named constant in what clang compiles: 64 bits that nothing else has."""
    return int.from_bytes(hashlib.sha256(f"iaprof: {constant}".encode()).digest()[:8], "little")


def from_compiled(code: bytes, maps: Mapping[int, str], constants: Sequence[str]) -> Program:
    """A program of what a compiler made.

    Args:
        code: instructions.
        maps: names, by the descriptors that are in the instructions.
        constants: names; `magic` says which number is in the instructions.

    Raises:
        BytecodeError: it refers to what only the process that compiled it has.
    """
    names = {magic(name): name for name in constants}
    left = bytearray(code)
    found_maps: list[tuple[int, str]] = []
    found_constants: list[tuple[int, str]] = []
    at, count = 0, len(code) // 8
    while at < count:
        opcode, registers, _, low = _INSTRUCTION.unpack_from(code, at * 8)
        source = registers >> 4
        if opcode == _CALL and source:
            raise BytecodeError(f"instruction {at} calls a function of its own or of the kernel's, not a helper")
        if opcode != _LOAD_64:
            at += 1
            continue
        value = low | _INSTRUCTION.unpack_from(code, (at + 1) * 8)[3] << 32
        if source == _PSEUDO_MAP_FD and value in maps:
            found_maps.append((at, maps[value]))
            _fill(left, at, 0)
        elif source:
            raise BytecodeError(f"instruction {at} loads an address that is no map's")
        elif value in names:
            found_constants.append((at, names[value]))
            _fill(left, at, 0)
        at += 2
    return Program(bytes(left), tuple(found_maps), tuple(found_constants))


def _fill(code: bytearray, at: int, value: int) -> None:
    """Sets the number that the 64-bit immediate load at an instruction loads."""
    struct.pack_into("<I", code, at * 8 + 4, value & 0xFFFFFFFF)
    struct.pack_into("<I", code, at * 8 + 12, value >> 32)


def _lines(code: bytes) -> list[str]:
    return [code[at : at + 8 * _PER_LINE].hex(" ", 8) for at in range(0, len(code), 8 * _PER_LINE)]


def _places(found: Sequence[tuple[int, str]]) -> list[str]:
    return [f"{at} {name}" for at, name in found]


def _read_places(lines: Sequence[str]) -> tuple[tuple[int, str], ...]:
    return tuple((int(at), name) for at, _, name in (line.partition(" ") for line in lines))


def _program(content: Any, maps: Mapping[str, Map]) -> Program:
    code = bytes.fromhex("".join(content["code"]))
    count = len(code) // 8
    if len(code) % 8 or not 0 < count < _MOST_INSTRUCTIONS:
        raise ValueError(f"{len(code)} bytes of code")
    found = [_read_places(content[kind]) for kind in ("maps", "constants")]
    for at, _ in (*found[0], *found[1]):
        if not 0 <= at < count - 1 or code[at * 8] != _LOAD_64:
            raise ValueError(f"instruction {at} loads nothing")
    if unknown := {name for _, name in found[0]} - maps.keys():
        raise ValueError(f"there are no maps {unknown}")
    return Program(code, found[0], found[1])
