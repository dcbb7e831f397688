"""Decodes GPU instructions: a small interface to the vendors' decoders, in the style of Capstone.

    with Decoder(instruction_set) as decoder:
        for instruction in decoder.disasm(code, address):
            print(instruction.address, instruction.text)

A sandboxed child process loads and runs the decoder (sandbox.parent): if that crashes, the caller gets a DecodeError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.gpu.instructions import InstructionSet
from iaprof.report.gpu.instructions import read_instructions
from iaprof.report.gpu.sandbox import GpuSandboxed
from iaprof.sandbox.parent import AnswerError, Sandbox, SandboxDied, SandboxRefused, string_list


@dataclass(frozen=True, slots=True)
class Instruction:
    """One decoded instruction."""

    address: int
    size: int  # bytes
    mnemonic: str  # of the opcode alone: `send` for send.ugm; [undecodable] if the decoder does not know the bytes
    text: str  # as the decoder prints it, without trailing blanks; labels count from the code's first byte
    targets: tuple[int, ...]  # addresses that it can jump to


class DecodeError(IaprofError):
    """The decoder cannot decode the code, or crashed on it. The text is its message if there is one."""

    def __init__(self, message: str, instructions: tuple[Instruction, ...] = ()) -> None:
        """Keeps the instructions that were decoded nevertheless."""
        super().__init__(message)
        self.instructions = instructions


class DecoderUnavailable(IaprofError):
    """There is no decoder, or it is too old for the instruction set. The text says what to install."""


class Decoder(GpuSandboxed):
    """Decodes one instruction set's code; also a context manager."""

    def __init__(self, instruction_set: InstructionSet, sandbox: Sandbox | None = None) -> None:
        """Prepares decoding.

        Args:
            instruction_set: of the code.
            sandbox: a child process to share; None: the decoder starts its own, and closes it.
        """
        self.instruction_set = instruction_set
        super().__init__(sandbox)

    def disasm(self, code: bytes, address: int = 0) -> list[Instruction]:
        """Decodes all instructions of `code`, whose first byte is at `address`.

        Up to 15 bytes of padding may follow the last instruction.

        Raises:
            DecodeError: there is no code, some of it is not instructions, or the decoder crashed.
            DecoderUnavailable: no decoder knows this instruction set.
            SandboxError: the child process cannot be started.
        """
        try:
            answer = self._sandbox.call("disasm", {"instruction_set": in_json(self.instruction_set)}, code)
            instructions, message = _read(answer, len(code), address)
        except SandboxRefused as refusal:
            if refusal.kind == "DecoderUnavailable":
                raise DecoderUnavailable(str(refusal)) from None
            raise DecodeError(str(refusal)) from None
        except (SandboxDied, AnswerError) as error:
            raise DecodeError(f"the decoder died on these bytes: {error}") from None
        if message:
            raise DecodeError(message, tuple(instructions))
        return instructions


def in_json(instruction_set: InstructionSet) -> list[object]:
    """Returns an instruction set as the child gets it."""
    return [instruction_set.vendor, instruction_set.value]


def _read(answer: Any, length: int, address: int) -> tuple[list[Instruction], str]:
    match answer:
        case {"strings": strings, "instructions": columns, "message": str(message)}:
            found = read_instructions(columns, string_list(strings), length)
            instructions = [
                Instruction(address + offset, size, mnemonic, text, tuple(address + target for target in targets))
                for offset, size, mnemonic, text, targets in found
            ]
            return instructions, message
    raise AnswerError
