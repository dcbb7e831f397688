"""The interface of a vendor's instruction sets: decoding, and what instructions wait for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

UNDECODABLE = "[undecodable]"  # the mnemonic of bytes that the decoder does not know


class InstructionSet(Enum):
    """A vendor's instruction sets: a vendor derives an enum, whose values are its decoder's numbers."""

    @property
    def vendor(self) -> str:
        """The vendor's name."""
        raise NotImplementedError


class NoDecoder(Exception):
    """There is no decoder, or it does not know the instruction set; the text says what to install."""


class NotDecoded(Exception):
    """The decoder rejected the code; the text is its message."""


class Decoding(NamedTuple):
    """Decoded instructions, as columns, and the decoder's message."""

    pcs: list[int]  # bytes from the code's start
    sizes: list[int]  # bytes
    mnemonics: list[str]  # of the opcode alone, or UNDECODABLE
    texts: list[str]  # empty unless asked for
    targets: list[list[int]]  # bytes from the code's start; empty unless asked for
    message: str  # "" if everything was decoded


class Program(ABC):
    """A program of others that the sandboxed child may have run on bytes, by a process with fewer rights still."""

    @abstractmethod
    def run(self, choice: int, data: bytes, most: int, seconds: float) -> tuple[int, bytes, bytes]:
        """Runs it.

        Args:
            choice: index of the arguments among those with which it was opened.
            data: the content of the file that these name.
            most: bytes that it may write.
            seconds: for how long it may run.

        Returns:
            Its exit status, or minus the signal that ended it; what it wrote to stdout and to stderr.

        Raises:
            TimeoutError: it took too long, or wrote too much.
            OSError: it cannot be run.
        """


class OpenProgram(Protocol):
    """What opens programs: sandbox.programs.open_program."""

    def __call__(self, path: str, choices: Sequence[Sequence[str]]) -> Program:
        """Opens the program at a path, to be run with any of these lists of arguments.

        An argument `{file}` becomes the path of the bytes that it is to read.

        Raises:
            OSError: there is none, or it cannot be executed.
        """
        ...


class Decoder(ABC):
    """A decoder of a vendor's code. It may crash on untrusted code, so it runs only in the sandboxed child."""

    def prepare(self, instruction_set: Any, codes: Sequence[bytes]) -> None:
        """Gets ready to decode several pieces of code, if it is faster to do them together. Raises as `decode` does."""
        del instruction_set, codes

    @abstractmethod
    def decode(self, instruction_set: Any, code: bytes, texts: bool = True) -> Decoding:
        """Decodes code from its first byte to its last, or to where no instruction starts.

        Args:
            instruction_set: one of the vendor's.
            code: the code.
            texts: also return texts and targets, which take most of the time.

        Raises:
            NoDecoder: it does not know the instruction set.
            NotDecoded: it fails in another way. Unknown instructions are no error.
        """


class Instruction(Protocol):
    """What a vendor gets of a decoded instruction to find what it waits for."""

    @property
    def offset(self) -> int:
        """Bytes from the kernel's address."""

    @property
    def text(self) -> str:
        """As the decoder writes it; "" for a placeholder."""

    @property
    def targets(self) -> tuple[int, ...]:
        """Offsets that it can jump to."""


@dataclass(frozen=True)
class Wait(ABC):
    """What an instruction waits for."""

    what: str  # in the vendor's notation
    reasons: tuple[str, ...]  # the stall reasons that count such waits
    offsets: tuple[int, ...] = ()  # of the instructions that it waits for, on each path; () if that is not known

    @abstractmethod
    def describe(self, instructions: Sequence[str]) -> str:
        """Returns the wait in words; `instructions` are those at `offsets`, as the caller shows them."""

    @abstractmethod
    def opcode(self, text: str) -> str:
        """Returns the opcode of an instruction with that text, as `describe`'s callers show it."""


class Dependencies:
    """The dependencies between the instructions of a kernel. This one is of vendors that know none."""

    def waits(self, offset: int) -> Sequence[Wait]:
        """Returns the possible waits of the instruction at an offset; none if it does not wait or there is none."""
        del offset
        return ()
