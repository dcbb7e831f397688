"""Decodes GPU instructions: a small interface to the vendors' decoders, in the style of Capstone.

    with Decoder(instruction_set) as decoder:
        for instruction in decoder.disasm(code, address):
            print(instruction.address, instruction.text)

A sandboxed child process loads and runs the decoder (sandbox.parent): if that crashes, the caller gets a DecodeError.
Its answers are checked. A capture can have hundreds of thousands of instructions, so these are columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.gpu.instructions import InstructionSet
from iaprof.gpu.vendors import LONGEST_INSTRUCTION
from iaprof.sandbox.parent import (
    LARGEST,
    AnswerError,
    Limits,
    Sandbox,
    SandboxDied,
    SandboxRefused,
    any_list,
    integers,
    string_list,
)
from iaprof.sandbox.worker import Closing

_MAX_TARGETS = 3


def gpu_sandbox(limits: Limits | None = None) -> Sandbox:
    """Returns a sandbox that runs report.gpu.reader."""
    return Sandbox("iaprof.report.gpu.reader", limits)


class GpuSandboxed(Closing):
    """Base class of what works in such a sandbox; also a context manager."""

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        """Takes a child process to share; None: starts one, which `close` ends."""
        self._is_shared = sandbox is not None
        self._sandbox = sandbox or gpu_sandbox()

    def close(self) -> None:
        """Ends the child process, unless it is shared."""
        if not self._is_shared:
            self._sandbox.close()


@dataclass(frozen=True, eq=False)
class Instructions:
    """The instructions of a kernel, sorted by offset, not overlapping."""

    offset: NDArray[np.int64]  # [n], bytes from the code's start
    size: NDArray[np.int64]  # [n], bytes
    mnemonic: NDArray[np.int64]  # [n], index into strings
    strings: Sequence[str]
    text: NDArray[np.int64] | None = None  # [n], index into strings; None unless asked for
    targets: Sequence[tuple[int, ...]] = ()  # [n], offsets that each can jump to; empty unless asked for

    def __len__(self) -> int:
        return len(self.offset)

    def __iter__(self) -> Iterator[tuple[int, int, str, str, tuple[int, ...]]]:
        """Yields (offset, size, mnemonic, text, targets); text and targets are empty unless asked for."""
        texts = [""] * len(self) if self.text is None else [self.strings[number] for number in self.text.tolist()]
        mnemonics = [self.strings[number] for number in self.mnemonic.tolist()]
        targets = self.targets or [()] * len(self)
        return zip(self.offset.tolist(), self.size.tolist(), mnemonics, texts, targets, strict=True)

    @property
    def end(self) -> int:
        """The offset of the end of the last instruction; 0 if there is none."""
        return int(self.offset[-1] + self.size[-1]) if len(self) else 0


def read_instructions(columns: Any, strings: list[str], length: int) -> Instructions:
    """Checks the columns of the child's answer.

    Args:
        columns: the answer's "instructions".
        strings: the answer's string table.
        length: of the code, bytes.

    Raises:
        AnswerError: the columns are not such as report.gpu.reader makes.
    """
    match columns:
        case {"offset": offset, "size": size, "mnemonic": mnemonic, **rest}:
            offsets, sizes = _column(offset, length), _column(size, LONGEST_INSTRUCTION + 1, 1)
            mnemonics = _column(mnemonic, len(strings))
        case _:
            raise AnswerError
    if not len(offsets) == len(sizes) == len(mnemonics):
        raise AnswerError
    if len(offsets) and ((offsets[:-1] + sizes[:-1] > offsets[1:]).any() or offsets[-1] + sizes[-1] > length):
        raise AnswerError
    if "text" not in rest:
        return Instructions(offsets, sizes, mnemonics, strings)
    texts = _column(rest["text"], len(strings))
    targets = [tuple(integers(each, LARGEST, -LARGEST)) for each in any_list(rest.get("targets"))]
    if not len(texts) == len(targets) == len(offsets) or any(len(each) > _MAX_TARGETS for each in targets):
        raise AnswerError
    return Instructions(offsets, sizes, mnemonics, strings, texts, targets)


def _column(values: Any, limit: int, lowest: int = 0) -> NDArray[np.int64]:
    """Checks a list of integers from `lowest` up to, but not including, `limit`; returns int64[n]."""
    try:
        found = np.array(any_list(values) or np.empty(0, np.int64))
    except (ValueError, OverflowError):
        raise AnswerError from None
    if found.dtype != np.int64 or found.ndim != 1 or (len(found) and not lowest <= found.min() <= found.max() < limit):
        raise AnswerError
    return found


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
