"""NVIDIA's GPUs, as all of iaprof sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from iaprof.gpu.code import CodeObject, Lines
from iaprof.gpu.instructions import Decoder, InstructionSet, OpenProgram
from iaprof.gpu.nvidia.architectures import GENERATIONS, INSTRUCTION_BYTES, Sm, instruction_set, is_cubin
from iaprof.gpu.nvidia.reasons import ABBREVIATIONS, MEANINGS, ROWS
from iaprof.gpu.samples import SampleLayout
from iaprof.gpu.vendor import Vendor


class Nvidia(Vendor):
    """NVIDIA: samples of CUPTI, cubins, nvdisasm."""

    name = "nvidia"
    meanings = MEANINGS
    abbreviations = ABBREVIATIONS
    rows = ROWS
    instruction_sets = Sm
    decoder = "nvdisasm"
    decoder_packages = ("nvidia-cuda-toolkit", "cuda-nvdisasm")
    decodes_together = True
    longest_instruction = INSTRUCTION_BYTES

    @property
    def layouts(self) -> Mapping[str, SampleLayout]:
        """See Vendor."""
        from iaprof.gpu.nvidia.records import PC_SAMPLES

        return {PC_SAMPLES.name: PC_SAMPLES}

    def instruction_set(self, major: int, minor: int) -> InstructionSet | None:
        """See Vendor; a version is a compute capability."""
        return instruction_set(major, minor)

    def generation(self, major: int, minor: int) -> str:
        """See Vendor."""
        known = instruction_set(major, minor)
        return GENERATIONS[known] if known else ""

    def sampled(self) -> Mapping[InstructionSet, str]:
        """See Vendor; one of each generation, but for Volta, which CUDA 13 no longer knows."""
        return {Sm.SM75: "Turing", Sm.SM80: "Ampere", Sm.SM89: "Ada", Sm.SM90: "Hopper", Sm.SM100: "Blackwell"}

    def is_code(self, data: bytes) -> bool:
        """See Vendor."""
        return is_cubin(data)

    def code_reader(self) -> Callable[[bytes], CodeObject]:
        """See Vendor."""
        from iaprof.gpu.nvidia.cubin import read_cubin

        return read_cubin

    def line_reader(self) -> Callable[[bytes], Mapping[int, Lines]]:
        """See Vendor."""
        from iaprof.gpu.nvidia.lines import read_lines

        return read_lines

    def open_decoder(self, open_program: OpenProgram) -> Decoder:
        """See Vendor."""
        from iaprof.gpu.nvidia.nvdisasm import Nvdisasm

        return Nvdisasm(open_program)

    def installed_decoder(self) -> str:
        """See Vendor."""
        from iaprof.gpu.nvidia import nvdisasm

        return nvdisasm.installed()
