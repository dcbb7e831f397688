"""The interface of a vendor of GPUs: all that recording and reports know of a vendor goes through it.

A vendor is a package in this folder and a line in vendors.py. Every verb imports its class for its help, so the class
imports what is slow, such as NumPy, when it is used. Its source of samples is a file in record/sources
and a line in record/sources/opening.py. A capture names its vendor by the layouts of its streams, a code object by
its bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from iaprof.gpu.code import CodeObject, Lines
from iaprof.gpu.instructions import Decoder, Dependencies, Instruction, InstructionSet, OpenProgram
from iaprof.gpu.samples import SampleLayout, SampleRows


class Vendor(ABC):
    """A vendor of GPUs."""

    name: str  # of its package
    meanings: Mapping[str, str]  # of each reason, in English; in the order of tables
    abbreviations: Mapping[str, str] = MappingProxyType(
        {}
    )  # of reasons, for columns: at most 7 characters; the others are short
    rows: SampleRows
    instruction_sets: type[InstructionSet]
    decoder: str  # its name, in messages
    decoder_packages: tuple[str, str]  # that have the decoder: of Debian, of Fedora
    decodes_together = False  # the decoder takes long to start: it is to get the code of many kernels at once
    longest_instruction: int  # bytes

    @property
    @abstractmethod
    def layouts(self) -> Mapping[str, SampleLayout]:
        """The layouts of records, by name."""

    # Generations. A stream's `ip_version` in the header is the vendor's version of the GPU: major, minor, ...

    @abstractmethod
    def instruction_set(self, major: int, minor: int) -> InstructionSet | None:
        """Returns the instruction set of a version of GPUs; None if it is unknown."""

    @abstractmethod
    def generation(self, major: int, minor: int) -> str:
        """Returns the name of the generation that a version of GPUs belongs to; "" if it is unknown."""

    @abstractmethod
    def sampled(self) -> Mapping[InstructionSet, str]:
        """Returns the instruction sets of GPUs that sample stalls, with the names of their generations."""

    def guessed_layout(self, gpu: str, version: str, layout: str) -> str:
        """Returns the warning about a GPU whose record layout is a guess."""
        return f"{gpu} is of version {version}: that its records are {layout} records is a guess; use a newer iaprof"

    # Code objects and instructions.

    @abstractmethod
    def is_code(self, data: bytes) -> bool:
        """Whether a file begins as the vendor's code objects do."""

    @abstractmethod
    def code_reader(self) -> Callable[[bytes], CodeObject]:
        """Imports and returns what reads a code object.

        It raises a CodeObjectError if the file is none, or damaged. It imports nothing more: the sandbox forbids that.
        """

    def line_reader(self) -> Callable[[bytes], Mapping[int, Lines]] | None:
        """Imports and returns what reads lines that are not DWARF's, of code objects without `has_debug`.

        It returns the lines of kernels by their addresses, and leaves out what is damaged. None: there are none.
        """
        return None

    @abstractmethod
    def open_decoder(self, open_program: OpenProgram) -> Decoder:
        """Opens the decoder, with all files that it needs.

        Args:
            open_program: opens a program that decodes, if it is one.

        Raises:
            NoDecoder: there is none.
        """

    def installed_decoder(self) -> str:
        """Returns a text that differs if another decoder is installed; "" if there is none."""
        return ""

    def dependencies(self, instructions: Sequence[Instruction]) -> Dependencies:
        """Returns the dependencies between the instructions of a kernel, which are sorted by offset."""
        del instructions
        return Dependencies()
