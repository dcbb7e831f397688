"""GPU modules as reports use them: kernels, their instructions, and each instruction's source.

The sandboxed child does all reading (report.gpu.reader); this module checks and holds its answers. Loading never fails:
if a stage does, placeholders stand in for its result, and `problems` has a sentence about it.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.gpu import vendors
from iaprof.gpu.code import CodeKernel, CodeObjectError, canonical
from iaprof.gpu.instructions import UNDECODABLE, InstructionSet
from iaprof.report.gpu.decoder import GpuSandboxed, Instructions, in_json, read_instructions
from iaprof.sandbox.deadline import patient_clock
from iaprof.sandbox.messages import LONGEST_DATA
from iaprof.sandbox.parent import (
    AnswerError,
    Sandbox,
    SandboxDied,
    SandboxError,
    SandboxRefused,
    any_list,
    ascending,
    integer,
    integers,
    sentence,
    string,
    string_list,
)

NO_BINARY = "[no binary]"
NO_DECODER = "[no decoder]"
NO_INSTRUCTION = "[not an instruction]"  # the offset is inside an instruction, or outside the code

_NO_INSTRUCTIONS = read_instructions({"offset": [], "size": [], "mnemonic": []}, [], 0)
_MOST_LANES = 32  # of a thread
_MAX_FRAMES = 256  # of a stack; report.gpu.functions makes fewer
_MAX_PROBLEMS = 20
_MAX_PROBLEM_SECONDS = 120.0  # spent on modules with problems; after that, only the names of further ones are read
_MAX_DEATHS = 8  # of the decoder in a module; after that, its other kernels are not decoded


@dataclass(frozen=True, slots=True)
class GpuFrame:
    """A function on the stack of inlined calls that an instruction belongs to."""

    function: str  # demangled, qualified, with parameters
    file: str  # with its directories as DWARF has them; "": unknown
    line: int  # of the next frame's call, or of the instruction; 0: none


@dataclass(frozen=True, slots=True)
class InstructionInfo:
    """An instruction of a kernel, or the placeholder for one."""

    offset: int  # bytes from the kernel's address
    size: int  # bytes; 0: no instruction is known to start here
    mnemonic: str  # of the opcode alone (`send` for send.ugm), or one of the placeholders in brackets
    text: str  # as the decoder writes it; "" for a placeholder
    targets: tuple[int, ...]  # offsets that it can jump to
    frames: tuple[GpuFrame, ...]  # outermost first; the first one is the kernel; never empty


@dataclass(frozen=True, eq=False)
class GpuKernel:
    """A kernel of a module."""

    name: str  # as in the code object
    demangled: str
    address: int  # canonical: 48 bits, not sign-extended; 0: the module has no addresses
    size: int  # bytes, without padding
    code_size: int  # bytes, with padding
    decoded: Instructions | None = field(repr=False, default=None)  # None: no decoder
    segment_offsets: tuple[int, ...] = field(repr=False, default=())
    segment_frames: tuple[tuple[GpuFrame, ...], ...] = field(repr=False, default=())
    fingerprint: str = ""  # a hash of its code in hexadecimal, which does not depend on its address
    vendor: str = vendors.VENDORS[0].name
    simd: int = 0  # lanes of its instructions that each thread executes; 0: unknown

    @cached_property
    def instructions(self) -> tuple[InstructionInfo, ...]:
        """All instructions, sorted by offset; empty if none could be decoded."""
        return tuple(
            InstructionInfo(offset, size, mnemonic, text, targets, self.frames_at(offset))
            for offset, size, mnemonic, text, targets in (() if self.decoded is None else self.decoded)
        )

    @cached_property
    def _by_offset(self) -> dict[int, InstructionInfo]:
        return {instruction.offset: instruction for instruction in self.instructions}

    @cached_property
    def file(self) -> str:
        """The source file of the kernel's first instruction; "" if unknown."""
        return self.frames_at(0)[0].file

    @cached_property
    def _outermost(self) -> tuple[GpuFrame, ...]:
        """The frames of code without known ones."""
        return (GpuFrame(self.demangled, "", 0),)

    def frames_at(self, offset: int) -> tuple[GpuFrame, ...]:
        """Returns the frames of the code at an offset, decoded or not; at least the kernel's."""
        index = bisect_right(self.segment_offsets, offset) - 1
        if index >= 0 and offset < max(self.code_size, self.size):
            return self.segment_frames[index]
        return self._outermost

    def at(self, offset: int) -> InstructionInfo:
        """Returns the instruction at an offset, or a placeholder whose mnemonic says why there is none."""
        found = self._by_offset.get(offset)
        if found is not None:
            return found
        return InstructionInfo(offset, 0, self._placeholder_at(offset), "", (), self.frames_at(offset))

    def _placeholder_at(self, offset: int) -> str:
        if self.decoded is None and 0 <= offset < self.code_size:
            return NO_DECODER
        inside = 0 <= offset < self.code_size
        return UNDECODABLE if inside and self.decoded is not None and offset >= self.decoded.end else NO_INSTRUCTION

    def _code_at(self, offset: int) -> tuple[str, tuple[GpuFrame, ...]]:
        """Returns mnemonic and frames of the instruction at an offset, or its placeholder."""
        decoded = self.decoded
        if decoded is not None:
            index = int(decoded.offset.searchsorted(offset))
            if index < len(decoded) and decoded.offset[index] == offset:
                return decoded.strings[decoded.mnemonic[index]], self.frames_at(offset)
        return self._placeholder_at(offset), self.frames_at(offset)

    def codes_at(self, offsets: NDArray[np.uint64]) -> tuple[list[tuple[str, tuple[GpuFrame, ...]]], NDArray[np.int64]]:
        """Looks up many offsets.

        Args:
            offsets: uint64[n], bytes from the kernel's address.

        Returns:
            The distinct (mnemonic, frames), and the index among them for each offset: int64[n].
        """
        decoded = self.decoded
        where = offsets.astype(np.int64)
        if len(where) == 1:  # as of most kernels, where there are very many
            return [self._code_at(int(where[0]))], np.zeros(1, np.int64)
        number = np.full(len(where), -1)  # of the mnemonic; -1: no instruction starts here
        if decoded is not None and len(decoded):
            index = np.minimum(np.searchsorted(decoded.offset, where), len(decoded) - 1)
            number = np.where(decoded.offset[index] == where, decoded.mnemonic[index], -1)
        # The placeholder depends on the region: before, within or after the decoded code, or after the code.
        end = 0 if decoded is None else decoded.end
        region = np.where(number >= 0, 0, (where >= 0).astype(np.int64) + (where >= end) + (where >= self.code_size))
        segment = np.searchsorted(np.array(self.segment_offsets, np.int64), where, side="right") - 1
        segment[(where < 0) | (where >= max(self.code_size, self.size))] = -1
        segments = len(self.segment_offsets) + 1  # with -1
        keys = ((number + 1) * 4 + region) * segments + segment + 1
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        strings = () if decoded is None else decoded.strings
        columns = (each[first].tolist() for each in (where, number, segment))
        codes = [
            (
                strings[mnemonic] if mnemonic >= 0 else self._placeholder_at(offset),
                self.segment_frames[place] if place >= 0 else self._outermost,
            )
            for offset, mnemonic, place in zip(*columns, strict=True)
        ]
        return codes, which.astype(np.int64)


@dataclass(frozen=True, eq=False)
class GpuModule:
    """A code object with GPU kernels, as far as it could be read."""

    kernels: tuple[GpuKernel, ...]
    problems: tuple[str, ...]  # sentences about what could not be read


class GpuModuleLoader(GpuSandboxed):
    """Loads modules, in one child process; also a context manager."""

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        """Takes a child process to share; None: the loader starts its own, and closes it."""
        super().__init__(sandbox)
        self.begin_capture()

    def begin(self) -> None:
        """Starts the child process, which gets ready while this process does something else."""
        self._sandbox.begin()

    def begin_capture(self) -> None:
        """Allows another capture's modules all the time that one capture's may take."""
        self._problem_seconds_left = _MAX_PROBLEM_SECONDS

    def load(
        self,
        elf: bytes,
        instruction_set: InstructionSet | None,
        only: Collection[int] | None = None,
        texts: bool = True,
    ) -> GpuModule:
        """Loads a code object; raises nothing, whatever it contains.

        Args:
            elf: the file.
            instruction_set: the GPU's; None: unknown, nothing is decoded.
            only: addresses of the kernels to read instructions and frames of, which takes most of the time; None: all.
                If empty, neither code nor debug information is read.
            texts: also read the text of instructions, not just mnemonics; this takes several times as long.
        """
        if self._problem_seconds_left <= 0:
            return self._names_only(elf, "it was not read: modules before it took too long")
        begun = patient_clock()
        module = self._load(elf, instruction_set, only, texts)
        if module.problems:
            self._problem_seconds_left -= patient_clock() - begun
        return module

    def expect(self, elf: bytes, instruction_set: InstructionSet, only: Collection[int]) -> None:
        """Says that `load` will be called so, before the first such call: all their code is then decoded together.

        It raises nothing; without it, `load` takes longer if the vendor has `decodes_together`.
        """
        if self._problem_seconds_left > 0:
            parameters = {"instruction_set": in_json(instruction_set), "only": sorted(map(canonical, only))}
            with contextlib.suppress(SandboxError):
                self._sandbox.call("expect", parameters, elf)

    def _load(
        self, elf: bytes, instruction_set: InstructionSet | None, only: Collection[int] | None, texts: bool
    ) -> GpuModule:
        addresses = None if only is None else sorted({canonical(address) for address in only})
        try:
            return _checked_module(self._call_module(elf, instruction_set, addresses, decode=True, texts=texts))
        except SandboxRefused as refusal:
            if refusal.kind == "CodeObjectError":
                return GpuModule((), _shown([str(refusal)]))
            first = str(refusal)
        except (SandboxDied, AnswerError) as error:
            first = str(error)
        except SandboxError as error:
            return self._names_only(elf, str(error))
        return self._load_by_kernel(elf, instruction_set, addresses, first)

    def _call_module(
        self,
        elf: bytes,
        instruction_set: InstructionSet | None,
        only: list[int] | None,
        decode: bool,
        texts: bool = False,
    ) -> Any:
        name = None if instruction_set is None else in_json(instruction_set)
        parameters = {"instruction_set": name, "only": only, "decode": decode, "texts": texts}
        return self._sandbox.call("module", parameters, elf)

    def _load_by_kernel(
        self, elf: bytes, instruction_set: InstructionSet | None, only: list[int] | None, first: str
    ) -> GpuModule:
        """Loads a module that crashed the child: first its debug information, then the code of one kernel at a time."""
        try:
            module = _checked_module(self._call_module(elf, instruction_set, only, decode=False))
        except (SandboxError, AnswerError) as error:
            module = self._names_only(elf, f"its debug information cannot be read: {error}")
        if instruction_set is None:
            return module
        try:
            codes = [kernel.code for kernel in vendors.of_code(elf).code_reader()(elf).kernels]
        except CodeObjectError as error:
            return GpuModule((), (str(error),))
        kernels = []
        problems = [*module.problems]
        deaths = 0
        for kernel, code in zip(module.kernels, codes, strict=True):
            decoded: Instructions | None = _NO_INSTRUCTIONS
            if (only is None or kernel.address in only) and code and deaths < _MAX_DEATHS:
                try:
                    answer = self._sandbox.call("disasm", {"instruction_set": in_json(instruction_set)}, code)
                    decoded = read_instructions(answer["instructions"], string_list(answer["strings"]), len(code))
                except SandboxRefused as refusal:
                    decoded = None if refusal.kind == "DecoderUnavailable" else _NO_INSTRUCTIONS
                    problems.append(f"kernel {kernel.name!r} was not decoded: {refusal}")
                except (SandboxError, AnswerError, KeyError, TypeError) as error:
                    deaths += 1
                    problems.append(f"kernel {kernel.name!r} was not decoded: {error}")
            kernels.append(
                GpuKernel(
                    name=kernel.name,
                    demangled=kernel.demangled,
                    address=kernel.address,
                    size=kernel.size,
                    code_size=kernel.code_size,
                    decoded=decoded,
                    segment_offsets=kernel.segment_offsets,
                    segment_frames=kernel.segment_frames,
                    fingerprint=kernel.fingerprint,
                    vendor=kernel.vendor,
                    simd=kernel.simd,
                )
            )
        if len(problems) == len(module.problems):
            problems.append(f"it could only be read in parts: {first}")
        return GpuModule(tuple(kernels), _shown(problems))

    def _names_only(self, elf: bytes, problem: str) -> GpuModule:
        """Reads only the kernels' names, in this process: vendors' readers are Python, bounded by the file's length."""
        if len(elf) > LONGEST_DATA:
            return GpuModule((), (problem,))
        vendor = vendors.of_code(elf)
        try:
            code = vendor.code_reader()(elf)
        except CodeObjectError as error:
            return GpuModule((), (str(error),))
        return GpuModule(tuple(_without_code(kernel, vendor.name) for kernel in code.kernels), (problem,))


def _without_code(kernel: CodeKernel, vendor: str) -> GpuKernel:
    return GpuKernel(
        kernel.name,
        kernel.name,
        kernel.address,
        kernel.size,
        len(kernel.code),
        fingerprint=kernel.fingerprint,
        vendor=vendor,
        simd=kernel.simd,
    )


def _checked_module(answer: Any) -> GpuModule:
    """Checks the child's answer, and makes a module of it."""
    if not isinstance(answer, dict):
        raise AnswerError
    strings = string_list(answer.get("strings"))
    frames = []
    for frame in any_list(answer.get("frames")):
        function, file, line = integers(frame, 1 << 31) if len(any_list(frame)) == 3 else (len(strings), 0, 0)
        if max(function, file) >= len(strings):
            raise AnswerError
        frames.append(GpuFrame(strings[function], strings[file], line))
    stacks = []
    for stack in any_list(answer.get("stacks")):
        numbers = integers(stack, len(frames))
        if not 0 < len(numbers) <= _MAX_FRAMES:
            raise AnswerError
        stacks.append(tuple(frames[number] for number in numbers))
    vendor = string(answer.get("vendor"))
    if vendor not in {each.name for each in vendors.VENDORS}:
        raise AnswerError
    kernels: list[GpuKernel] = []
    for kernel in any_list(answer.get("kernels")):
        kernels.append(_checked_kernel(kernel, vendor, strings, stacks, kernels))
    return GpuModule(tuple(kernels), _shown(string_list(answer.get("problems"))))


def _shown(problems: list[str]) -> tuple[str, ...]:
    """Returns the problems as users see them: each once, at most _MAX_PROBLEMS, and how many more there are."""
    different = [sentence(problem) for problem in dict.fromkeys(problems)]
    if len(different) <= _MAX_PROBLEMS:
        return tuple(different)
    return (*different[:_MAX_PROBLEMS], f"and {len(different) - _MAX_PROBLEMS} more problems")


def _checked_kernel(
    answer: Any, vendor: str, strings: list[str], stacks: list[tuple[GpuFrame, ...]], before: Sequence[GpuKernel]
) -> GpuKernel:
    match answer:
        case {
            "name": name,
            "demangled": demangled,
            "fingerprint": fingerprint,
            "address": address,
            "size": size,
            "simd": simd,
            "code_size": code_size,
            "segments": {"offset": offset, "stack": stack},
            "instructions": instructions,
        }:
            offsets, numbers = integers(offset), integers(stack, len(stacks))
            ascending(offsets)
            if len(offsets) != len(numbers):
                raise AnswerError
            length = integer(code_size)
            return GpuKernel(
                name=string(name),
                demangled=string(demangled),
                fingerprint=string(fingerprint),
                address=integer(address),
                size=integer(size),
                simd=integer(simd, _MOST_LANES + 1),
                code_size=length,
                decoded=_checked_instructions(instructions, strings, length, before),
                segment_offsets=tuple(offsets),
                segment_frames=tuple(stacks[number] for number in numbers),
                vendor=vendor,
            )
    raise AnswerError


def _checked_instructions(
    answer: Any, strings: list[str], length: int, before: Sequence[GpuKernel]
) -> Instructions | None:
    """Returns a kernel's instructions, which may be those of a kernel before it that has code of the same length."""
    if answer is None:
        return None
    if type(answer) is not int:
        return read_instructions(answer, strings, length)
    first = before[integer(answer, len(before))]
    if first.decoded is None or first.code_size != length:
        raise AnswerError
    return first.decoded
