"""Runs NVIDIA's disassembler nvdisasm, which comes with CUDA, Triton, and wheels of NVIDIA's.

It takes a good third of a second to start, and a bad instruction makes it print nothing. So it gets the code of many
kernels at once, as raw instructions, and what it calls bad is replaced by NOPs for another run. The code is at a high
address (`-base`), so that addresses in operands can be told from other numbers, and be made relative to the kernel.

Its output is as untrusted as the code. Sources: nvdisasm --help and its output, of CUDA 13.5, for SM75 to SM121.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from iaprof.gpu.instructions import UNDECODABLE, Decoder, Decoding, NoDecoder, NotDecoded, OpenProgram
from iaprof.gpu.nvidia.architectures import INSTRUCTION_BYTES, Sm

PROGRAM_VARIABLE = "IAPROF_NVDISASM"
WHAT_TO_INSTALL = f"pip install nvidia-cuda-nvdisasm, or name the program in {PROGRAM_VARIABLE}"
_PROGRAM = "nvdisasm"
_IN_WHEELS = ("nvidia/cu13/bin", "nvidia/cuda_nvcc/bin", "triton/backends/nvidia/bin")
_BASE = (1 << 40) + (1 << 31)  # all addresses that operands can name begin alike
_NOP = (0x7918).to_bytes(8, "little") + (0x000F_C000_0000_0000).to_bytes(8, "little")
_NOTHING = bytes(INSTRUCTION_BYTES)  # no instruction, of which the program does not say where it is
_LONGEST_CODE = 8 << 20  # bytes of a kernel
_MOST_TOGETHER = 1 << 20  # bytes of code in a run, of several kernels
_MOST_RUNS = 12  # for what `prepare` gets at a time, beyond one for each batch
_MOST_KEPT = 8 << 20  # bytes of code whose decoding is kept, which takes some fifteen times as much memory
_SECONDS = 20.0  # of a run
_OUTPUT_PER_INSTRUCTION, _OUTPUT_MORE = 400, 64 << 10  # bytes; some 80 are usual
_LINE = re.compile(r"^[ \t]*/\*([0-9a-f]{1,16})\*/[ \t]+(.*?)[ \t]*;?[ \t]*$", re.MULTILINE)
_ADDRESS = re.compile(rf"0x{_BASE >> 32:x}[0-9a-f]{{8}}\b")
_BAD_ADDRESS = re.compile(r"at address 0x([0-9a-f]{1,16})\b")
_UNKNOWN_SET = "is not defined for option"
_PREDICATE = re.compile(r"^@!?\w+\s+")
_OPCODE = re.compile(r"[A-Z][A-Z0-9_]*")
_JUMPS = frozenset({"BRA", "BRX", "BRXU", "CALL", "JMP", "JMX", "JMXU"})
_NO_TARGETS: list[int] = []  # one list for all instructions
_Key: TypeAlias = tuple[Sm, bytes]  # instruction set, hash of the code


class Nvdisasm(Decoder):
    """The program, of which a process with few rights runs a new one for each batch of code."""

    def __init__(self, open_program: OpenProgram) -> None:
        """Opens the first one that is found.

        Raises:
            NoDecoder: there is none; the text says what to install.
        """
        choices = [["-b", each.name, "-ndf", "-base", hex(_BASE), "{file}"] for each in Sm]
        self._choice = {each: number for number, each in enumerate(Sm)}
        for path in candidates():
            try:
                self._program = open_program(path, choices)
            except OSError:
                continue
            self.path = path
            break
        else:
            raise NoDecoder(f"NVIDIA's nvdisasm was not found: {WHAT_TO_INSTALL}")
        self._kept: dict[_Key, Decoding | str] = {}  # the text says why it was not decoded
        self._sizes: dict[_Key, int] = {}  # of the code of what is kept, bytes
        self._runs_left = 0

    def prepare(self, instruction_set: Sm, codes: Sequence[bytes]) -> None:
        """See Decoder; decodes the code, and keeps the result for `decode`."""
        wanted: dict[_Key, bytes] = {}
        size = 0
        for code in codes:
            is_decoded = len(code) > _LONGEST_CODE or _key(instruction_set, code) in self._kept
            if not is_decoded and (not wanted or size + len(code) <= _MOST_KEPT):  # `decode` does the others
                wanted[_key(instruction_set, code)] = code
                size += len(code)
        while self._sizes and sum(self._sizes.values()) + size > _MOST_KEPT:
            oldest = next(iter(self._sizes))
            del self._sizes[oldest], self._kept[oldest]
        self._runs_left = _MOST_RUNS
        for batch in _batches(wanted):
            self._runs_left += 1
            self._decode(instruction_set, batch)
            self._sizes.update({key: len(code) for key, code in batch.items()})

    def decode(self, instruction_set: Sm, code: bytes, texts: bool = True) -> Decoding:
        """See Decoder."""
        del texts  # they cost nothing more
        key = _key(instruction_set, code)
        if len(code) > _LONGEST_CODE:
            raise NotDecoded(f"its {len(code)} bytes are more than are decoded")
        if key not in self._kept:
            self.prepare(instruction_set, [code])
        found = self._kept[key]
        if isinstance(found, str):
            raise NotDecoded(found)
        return found

    def _decode(self, instruction_set: Sm, batch: Mapping[_Key, bytes]) -> None:
        """Decodes a batch, and keeps what comes of it."""
        code = b"".join(batch.values())
        bad = {at for at in range(0, len(code), INSTRUCTION_BYTES) if code[at : at + INSTRUCTION_BYTES] == _NOTHING}
        why = f"{_PROGRAM} finds too much in it that is no instruction"
        while self._runs_left > 0:
            self._runs_left -= 1
            try:
                lines, errors = self._run(instruction_set, _without(code, bad))
            except TimeoutError:
                why = f"{_PROGRAM} takes too long, or writes too much"
                break
            except (OSError, _Nonsense) as error:
                why = f"{_PROGRAM} fails: {error}"
                break
            if lines is not None:
                self._keep(batch, lines, bad)
                return
            named = {int(address, 16) - _BASE for address in _BAD_ADDRESS.findall(errors)}
            named = {at for at in named - bad if 0 <= at < len(code) and at % INSTRUCTION_BYTES == 0}
            bad |= named
            if not named and len(batch) > 1:
                keys = list(batch)
                for some in (keys[: len(keys) // 2], keys[len(keys) // 2 :]):
                    self._decode(instruction_set, {key: batch[key] for key in some})
                return
            if not named:
                why = f"{_PROGRAM} fails: {_shown(errors) or 'it does not say why'}"
                break
        self._kept.update(dict.fromkeys(batch, why))

    def _run(self, instruction_set: Sm, code: bytes) -> tuple[list[str] | None, str]:
        """Runs the program.

        Returns:
            The text of each instruction, None if there is a bad one; its errors.

        Raises:
            NoDecoder: it does not know the instruction set.
            _Nonsense: its output is not that of nvdisasm.
            OSError: it could not be run to its end; TimeoutError if it was stopped.
        """
        count = len(code) // INSTRUCTION_BYTES
        most = _OUTPUT_MORE + _OUTPUT_PER_INSTRUCTION * count
        status, output, error_output = self._program.run(self._choice[instruction_set], code, most, _SECONDS)
        errors = error_output.decode("utf-8", "backslashreplace")
        if _UNKNOWN_SET in errors:
            raise NoDecoder(f"{self.path} does not know {instruction_set.name}: {WHAT_TO_INSTALL}")
        if status:
            return None, errors
        found = _LINE.findall(output.decode("utf-8", "backslashreplace"))
        if len(found) != count or any(int(at, 16) != _BASE + INSTRUCTION_BYTES * n for n, (at, _) in enumerate(found)):
            raise _Nonsense
        return [text for _, text in found], errors

    def _keep(self, batch: Mapping[_Key, bytes], lines: Sequence[str], bad: set[int]) -> None:
        """Keeps the decoding of each code of a batch.

        Args:
            batch: the code.
            lines: the text of each instruction of the whole batch.
            bad: offsets in it of what is no instruction.
        """
        start = 0
        for key, code in batch.items():
            end = start + len(code)
            own = [at - start for at in bad if start <= at < end]
            unknown = f"{len(own)} of its instructions are unknown to {_PROGRAM}" if own else ""
            found = Decoding(list(range(0, len(code), INSTRUCTION_BYTES)), [], [], [], [], unknown)
            for text in lines[start // INSTRUCTION_BYTES : end // INSTRUCTION_BYTES]:
                _add(found, text, start, len(code))
            for at in own:
                number = at // INSTRUCTION_BYTES
                found.mnemonics[number] = found.texts[number] = UNDECODABLE
            self._kept[key] = found
            start = end


class _Nonsense(Exception):
    def __init__(self) -> None:
        super().__init__("its output is not what was expected")


def _add(found: Decoding, text: str, start: int, length: int) -> None:
    """Adds an instruction of a code that begins at _BASE + start and has this length."""
    targets: list[int] = []

    def relative(address: re.Match[str]) -> str:
        offset = int(address[0], 16) - _BASE - start
        if 0 <= offset < length:
            targets.append(offset)
        return hex(offset)

    text = _ADDRESS.sub(relative, text)
    opcode = _OPCODE.match(_PREDICATE.sub("", text))
    mnemonic = sys.intern(opcode[0]) if opcode else UNDECODABLE
    found.sizes.append(INSTRUCTION_BYTES)
    found.mnemonics.append(mnemonic)
    found.texts.append(text)
    found.targets.append(targets[:1] if targets and mnemonic in _JUMPS else _NO_TARGETS)


def _key(instruction_set: Sm, code: bytes) -> _Key:
    return instruction_set, hashlib.sha256(code).digest()


def _batches(wanted: Mapping[_Key, bytes]) -> Iterator[dict[_Key, bytes]]:
    """Yields parts of what is wanted, without what follows the last whole instruction of each code."""
    batch: dict[_Key, bytes] = {}
    size = 0
    for key, code in wanted.items():
        if batch and size + len(code) > _MOST_TOGETHER:
            yield batch
            batch, size = {}, 0
        batch[key] = code[: len(code) // INSTRUCTION_BYTES * INSTRUCTION_BYTES]
        size += len(batch[key])
    if batch:
        yield batch


def _without(code: bytes, bad: Iterable[int]) -> bytes:
    """The code with NOPs at these offsets."""
    changed = bytearray(code)
    for at in bad:
        changed[at : at + INSTRUCTION_BYTES] = _NOP
    return bytes(changed)


def _shown(errors: str) -> str:
    """The first error, without the words that all begin with."""
    return re.sub(r"^nvdisasm \w+ *: *", "", errors.strip().partition("\n")[0])[:200]


def installed() -> str:
    """Returns the path of the program that would be run, and when it was changed; "" if there is none."""
    for path in candidates():
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            continue
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return f"{path} {status.st_mtime_ns}"
    return ""


def candidates() -> Iterator[str]:
    """Yields the paths at which it may be, in order."""
    if named := os.environ.get(PROGRAM_VARIABLE):
        yield named  # no fallback: the user wants this one
        return
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folders += [os.path.join(os.environ.get(name, ""), "bin") for name in ("CUDA_HOME", "CUDA_PATH")]
    folders.append("/usr/local/cuda/bin")
    folders += [os.path.join(folder, below) for folder in sys.path for below in _IN_WHEELS]
    for folder in folders:
        if os.path.isabs(folder):
            yield os.path.join(folder, _PROGRAM)
