"""NVIDIA's architectures: compute capabilities, their names, and the names of their instruction sets.

Sources: the CUDA C++ Programming Guide (compute capabilities), nvdisasm --help (SM names).
"""

from __future__ import annotations

from iaprof.gpu.instructions import InstructionSet

INSTRUCTION_BYTES = 16
"""Of all instructions since Volta."""
_MACHINE = slice(18, 20)  # e_machine of an ELF header
EM_CUDA = 190


class Sm(InstructionSet):
    """Instruction sets by compute capability: ten times its major version, and its minor one."""

    SM70 = 70
    SM72 = 72
    SM75 = 75
    SM80 = 80
    SM86 = 86
    SM87 = 87
    SM88 = 88
    SM89 = 89
    SM90 = 90
    SM100 = 100
    SM101 = 101
    SM103 = 103
    SM110 = 110
    SM120 = 120
    SM121 = 121

    @property
    def vendor(self) -> str:
        """See InstructionSet."""
        return "nvidia"


GENERATIONS: dict[InstructionSet, str] = {
    Sm.SM70: "Volta", Sm.SM72: "Volta", Sm.SM75: "Turing", Sm.SM80: "Ampere", Sm.SM86: "Ampere", Sm.SM87: "Ampere",
    Sm.SM88: "Ampere", Sm.SM89: "Ada", Sm.SM90: "Hopper", Sm.SM100: "Blackwell", Sm.SM101: "Blackwell",
    Sm.SM103: "Blackwell", Sm.SM110: "Blackwell", Sm.SM120: "Blackwell", Sm.SM121: "Blackwell",
}  # fmt: skip
"""The generation of each; all sample warps by instruction."""


def instruction_set(major: int, minor: int) -> Sm | None:
    """Returns the instruction set of a compute capability; None if it is unknown."""
    try:
        return Sm(10 * major + minor)
    except ValueError:
        return None


def is_cubin(data: bytes) -> bool:
    """Whether a file begins as a cubin does."""
    return data[:4] == b"\x7fELF" and data[_MACHINE] == EM_CUDA.to_bytes(2, "little")
