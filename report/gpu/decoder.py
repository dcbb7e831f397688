"""Decodes GPU instructions: a small interface to Intel's decoder IGA, in the style of Capstone.

    with Decoder(Platform.XE2) as decoder:
        for instruction in decoder.disasm(code, address):
            print(instruction.address, instruction.text)

A sandboxed child process loads and runs IGA (sandbox.parent): if IGA crashes, the caller gets a DecodeError.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.gpu.intel.instruction_set import Platform
from iaprof.report.gpu.instructions import read_instructions
from iaprof.report.gpu.sandbox import GpuSandboxed
from iaprof.sandbox.answers import AnswerError, string_list
from iaprof.sandbox.parent import Sandbox, SandboxDied, SandboxRefused

MIN_CODE_BYTES = 8  # bytes: a compacted instruction


@dataclass(frozen=True, slots=True)
class Instruction:
    """One decoded instruction."""

    address: int
    size: int  # bytes: 8 if compacted, else 16
    mnemonic: str  # of the opcode alone: `send` for send.ugm; [undecodable] if IGA does not know the bytes
    text: str  # as `iga64 -d` prints it, without trailing blanks; labels count from the code's first byte
    targets: tuple[int, ...]  # addresses that it can jump to


class DecodeError(IaprofError):
    """IGA cannot decode the code, or crashed on it. The text is IGA's message if there is one."""

    def __init__(self, message: str, instructions: tuple[Instruction, ...] = ()) -> None:
        """Keeps the instructions that IGA decoded nevertheless."""
        super().__init__(message)
        self.instructions = instructions


class DecoderUnavailable(IaprofError):
    """There is no libiga64, or it is too old for the platform. The text says what to install."""


class Decoder(GpuSandboxed):
    """Decodes one platform's code; also a context manager."""

    def __init__(self, platform: IntEnum, sandbox: Sandbox | None = None) -> None:
        """Prepares decoding for a platform of IGA.

        Args:
            platform: the instruction set.
            sandbox: a child process to share; None: the decoder starts its own, and closes it.
        """
        self.platform = Platform(platform)
        super().__init__(sandbox)

    def disasm(self, code: bytes, address: int = 0) -> list[Instruction]:
        """Decodes all instructions of `code`, whose first byte is at `address`.

        Up to 15 bytes of padding may follow the last instruction.

        Raises:
            DecodeError: there is no code, some of it is not instructions, or the decoder crashed.
            DecoderUnavailable: no library supports this platform.
            SandboxError: the child process cannot be started.
        """
        if len(code) < MIN_CODE_BYTES:
            raise DecodeError(f"{len(code)} bytes are not an instruction: the shortest has {MIN_CODE_BYTES}")
        try:
            answer = self._sandbox.call("disasm", {"platform": int(self.platform)}, code)
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
