"""The interface of code objects: files with the kernels of a GPU, as a vendor's compiler or driver writes them.

A vendor's reader gives kernels with their code. Where the file is ELF with DWARF, report/gpu/frames.py adds lines and
inlined functions. Code objects may come from anyone: a reader checks all that they declare before it uses it, and
bounds its work and memory by the file's length.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, TypeAlias

from iaprof.basics.errors import IaprofError

ADDRESS_MASK = 0xFFFF_FFFF_FFFF  # GPU addresses have 48 bits


class CodeObjectError(IaprofError):
    """The bytes are no usable code object; the text says why, in a clause whose subject is "it"."""


def canonical(address: int) -> int:
    """The low 48 bits of a GPU address: on some devices the driver sign-extends addresses, on others it does not."""
    return address & ADDRESS_MASK


class CodeFunction(NamedTuple):
    """A function in a kernel's code, other than the kernel itself."""

    name: str  # from the symbol table; may be mangled
    offset: int  # bytes from the kernel's address
    size: int  # bytes, 0 if the symbol table does not say


class CodeKernel(NamedTuple):
    """A kernel of a code object."""

    name: str  # may be mangled
    address: int
    """Canonical (48 bits, not sign-extended); 0 if the code object was not relocated. A code object that is at several
    places at once has addresses from 0 on: rows of it in a capture have the address that is added to them (`base`)."""
    size: int  # bytes, without the padding after the kernel
    code: bytes  # with that padding
    functions: tuple[CodeFunction, ...]  # sorted by offset
    relocations: tuple[tuple[int, int], ...] = ()  # offset and size, in bytes, of the bytes that relocations change
    simd: int = 0  # lanes of its instructions that each thread executes; 0: unknown
    label: str = ""  # what reports show if it is no kernel, but functions that kernels call

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the code without relocated bytes, in hexadecimal: the same at every load address."""
        code = bytearray(self.code)
        for offset, size in self.relocations:
            code[offset : offset + size] = bytes(min(size, max(len(code) - offset, 0)))
        return hashlib.sha256(code).hexdigest()


class CodeObject(NamedTuple):
    """The kernels of a code object, in the order of the file."""

    kernels: tuple[CodeKernel, ...]
    has_debug: bool  # it is ELF with DWARF, whose addresses are those of the kernels
    placed: bool  # kernels have GPU addresses
    without_code: frozenset[str] = frozenset()  # names of kernels of which only debug information is there


class CodePlace(NamedTuple):
    """Where an instruction comes from, or the call of a function that was inlined."""

    function: str  # that was inlined here, may be mangled; "": none, so that the symbol table says which function it is
    file: str  # with its directories; "": unknown
    line: int  # 0: unknown


Lines: TypeAlias = tuple[tuple[int, tuple[CodePlace, ...]], ...]
"""From each offset of a kernel on, sorted: the places of calls that were inlined, outermost first, and of the
instruction; () where nothing is known."""
