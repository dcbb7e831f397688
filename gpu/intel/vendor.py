"""Intel's GPUs, as all of iaprof sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from iaprof.gpu.code import CodeObject
from iaprof.gpu.instructions import Decoder, Dependencies, Instruction, InstructionSet, OpenProgram
from iaprof.gpu.intel.instruction_set import LONGEST_INSTRUCTION, Platform
from iaprof.gpu.intel.reasons import ABBREVIATIONS, MEANINGS, ROWS
from iaprof.gpu.samples import SampleLayout
from iaprof.gpu.vendor import Vendor

_MACHINE = slice(18, 20)  # e_machine of an ELF header
_EM_INTELGT = (205).to_bytes(2, "little")


class Intel(Vendor):
    """Intel: EU stalls, zebins, IGA."""

    name = "intel"
    meanings = MEANINGS
    abbreviations = ABBREVIATIONS
    rows = ROWS
    instruction_sets = Platform
    decoder = "IGA"
    decoder_packages = ("libigc2", "intel-igc")
    longest_instruction = LONGEST_INSTRUCTION

    @property
    def layouts(self) -> Mapping[str, SampleLayout]:
        """See Vendor."""
        from iaprof.gpu.intel.generations import LAYOUTS

        return LAYOUTS

    def instruction_set(self, major: int, minor: int) -> InstructionSet | None:
        """See Vendor."""
        from iaprof.gpu.intel.generations import platform_of

        return platform_of(major, minor)

    def generation(self, major: int, minor: int) -> str:
        """See Vendor."""
        from iaprof.gpu.intel.generations import generation

        known = generation(major, minor)
        return known.name if known else ""

    def sampled(self) -> Mapping[InstructionSet, str]:
        """See Vendor."""
        from iaprof.gpu.intel.generations import GENERATIONS

        return {each.platform: each.name for each in GENERATIONS if each.layout and each.platform}

    def guessed_layout(self, gpu: str, version: str, layout: str) -> str:
        """See Vendor."""
        from iaprof.gpu.intel.generations import guessed_layout

        return guessed_layout(gpu, version, layout)

    def is_code(self, data: bytes) -> bool:
        """See Vendor."""
        return data[:4] == b"\x7fELF" and data[_MACHINE] == _EM_INTELGT

    def code_reader(self) -> Callable[[bytes], CodeObject]:
        """See Vendor."""
        from iaprof.gpu.intel.zebin import read_zebin

        return read_zebin

    def open_decoder(self, open_program: OpenProgram) -> Decoder:
        """See Vendor."""
        del open_program
        from iaprof.gpu.intel.iga import Iga

        return Iga()

    def installed_decoder(self) -> str:
        """See Vendor."""
        from iaprof.gpu.intel.iga import installed

        return installed()

    def dependencies(self, instructions: Sequence[Instruction]) -> Dependencies:
        """See Vendor."""
        from iaprof.gpu.intel.scoreboard import Scoreboard

        return Scoreboard(instructions)
