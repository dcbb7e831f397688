"""Intel GPUs' instruction sets, by the names of their decoder IGA."""

from __future__ import annotations

from iaprof.gpu.instructions import InstructionSet

LONGEST_INSTRUCTION = 16  # bytes, on all generations; compacted instructions have 8


class Platform(InstructionSet):
    """IGA's platform ids."""

    XE_HP = 0x100_0001
    XE_HPG = 0x100_0002
    XE_HPC = 0x100_0004
    XE2 = 0x200_0000
    XE3 = 0x300_0000
    XE3P = 0x300_0003

    @property
    def vendor(self) -> str:
        """See InstructionSet."""
        return "intel"
