"""Decoding GPU instructions: a small capstone-like interface to Intel's decoder IGA.

    with Decoder(Platform.XE2) as decoder:
        for instruction in decoder.disasm(code, address):
            print(instruction.address, instruction.text)

IGA itself is loaded and run in a child process (sandbox.parent): what it dies on is a DecodeError here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.gpu.intel.generations import Platform
from iaprof.report.gpu.instructions import read_instructions
from iaprof.report.gpu.sandbox import GpuSandboxed
from iaprof.sandbox.answers import AnswerError, strings_of
from iaprof.sandbox.parent import Sandbox, SandboxDied, SandboxRefused

MIN_CODE_BYTES = 8  # bytes: a compacted instruction


@dataclass(frozen=True, slots=True)
class Instruction:
    """One decoded instruction."""

    address: int
    size: int  # bytes: 8 when compacted, else 16
    mnemonic: str  # of the opcode alone: `send` for send.ugm; [undecodable] where IGA does not know the bytes
    text: str  # as `iga64 -d` prints it, without blanks at the end; its labels count from the code's first byte
    targets: tuple[int, ...]  # addresses that it may jump to


class DecodeError(IaprofError):
    """IGA did not understand the code, or died on it; the text is IGA's message where it gave one."""

    def __init__(self, message: str, instructions: tuple[Instruction, ...] = ()) -> None:
        """`instructions` is what it made of the code all the same."""
        super().__init__(message)
        self.instructions = instructions


class DecoderUnavailable(IaprofError):
    """There is no libiga64, or it is too old for the platform; the text says what to install."""


class Decoder(GpuSandboxed):
    """Decodes one platform's code; also a context manager."""

    def __init__(self, platform: IntEnum, sandbox: Sandbox | None = None) -> None:
        """`sandbox` is for sharing a child process; without one, the decoder has its own and closes it."""
        self.platform = Platform(platform)
        super().__init__(sandbox)

    def disasm(self, code: bytes, address: int = 0) -> list[Instruction]:
        """All instructions of `code`, of which `address` is the first byte's.

        Up to 15 bytes of padding may follow the last one. Raises DecodeError where there is no code, where not all of
        it is instructions, and where the decoder dies of it; DecoderUnavailable without a library that can do it;
        SandboxError where no child process can be started.
        """
        if len(code) < MIN_CODE_BYTES:
            raise DecodeError(f"{len(code)} bytes are no instruction: the shortest has {MIN_CODE_BYTES}")
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
            found = read_instructions(columns, strings_of(strings), length)
            instructions = [
                Instruction(address + offset, size, mnemonic, text, tuple(address + target for target in targets))
                for offset, size, mnemonic, text, targets in found
            ]
            return instructions, message
    raise AnswerError
