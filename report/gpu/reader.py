"""The sandboxed child's side: reads code objects, DWARF and GPU code, and answers in JSON.

Answers have tables of strings, frames and stacks, and refer to these by index. report.gpu.decoder and report.gpu.module
check and use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from iaprof.gpu import vendors
from iaprof.gpu.code import CodeKernel, CodeObject, CodeObjectError
from iaprof.gpu.instructions import UNDECODABLE, Decoder, Decoding, InstructionSet, NoDecoder, NotDecoded
from iaprof.report.gpu.frames import DebugInfo, LineInfo, Segment, read_debug_info, readable_name
from iaprof.report.gpu.functions import TooMuchDebugInfo
from iaprof.sandbox.programs import open_program
from iaprof.sandbox.reader import Operation, OutOfTime, Refusal, stage_limit
from iaprof.symbols.names.demangle import demangled

_MOST_EXPECTED = 8 << 20  # bytes of code


class Numbering:
    """Numbers values 0, 1, 2, ... in the order in which they first appear."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        """Returns the value's index in `values`."""
        return self._numbers.setdefault(value, len(self._numbers))

    @property
    def values(self) -> list[Any]:
        """All values that have a number, in order."""
        return list(self._numbers)


def operations(stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations that the sandbox offers, by name."""
    reader = GpuReader(stage_seconds)
    return {"disasm": reader.disasm, "module": reader.module, "expect": reader.expect}


class GpuReader:
    """The operations of the child."""

    def __init__(self, stage_seconds: float) -> None:
        """Opens the readers and decoders of all vendors: the sandbox will soon forbid that.

        Args:
            stage_seconds: the time limit on each stage of reading a module.
        """
        self._stage_seconds = stage_seconds
        self._readers = {vendor.name: vendor.code_reader() for vendor in vendors.VENDORS}
        self._line_readers = {vendor.name: vendor.line_reader() for vendor in vendors.VENDORS}
        self._decoders: dict[str, Decoder] = {}  # by vendor
        self._no_decoder: dict[str, str] = {}  # by vendor: why there is none
        self._expected: dict[InstructionSet, list[bytes]] = {}  # code that will be asked for
        for vendor in vendors.VENDORS:
            try:
                self._decoders[vendor.name] = vendor.open_decoder(open_program)
            except NoDecoder as error:
                self._no_decoder[vendor.name] = str(error)
        demangled("_Z1fv")  # libraries open files at their first use, which the sandbox will soon forbid

    def disasm(self, parameters: dict[str, Any], code: bytearray, _files: list[int]) -> object:
        """Decodes `code` of parameters["instruction_set"].

        Raises:
            Refusal: DecoderUnavailable or DecodeError, as in report.gpu.decoder.
        """
        instruction_set = _instruction_set(parameters["instruction_set"])
        try:
            decoding = self._decoder(instruction_set).decode(instruction_set, bytes(code))
        except NoDecoder as error:
            raise Refusal("DecoderUnavailable", str(error)) from None
        except NotDecoded as error:
            raise Refusal("DecodeError", str(error)) from None
        strings = Numbering()
        instructions = _to_columns(decoding, strings)
        whole = UNDECODABLE not in decoding.mnemonics and _reaches_end(decoding, len(code), instruction_set)
        return {
            "strings": strings.values,
            "instructions": instructions,
            "message": "" if whole else decoding.message or "some of these bytes are not instructions",
        }

    def expect(self, parameters: dict[str, Any], elf: bytearray, _files: list[int]) -> object:
        """Remembers kernels that `module` will be asked for: their code is decoded together with the next one's.

        Args:
            parameters: "instruction_set" and "only", as `module` takes them.
            elf: the file.
        """
        data, only = bytes(elf), set(parameters["only"])
        expected = self._expected.setdefault(_instruction_set(parameters["instruction_set"]), [])
        left = _MOST_EXPECTED - sum(map(len, expected))
        try:
            kernels = self._readers[vendors.of_code(data).name](data).kernels
        except CodeObjectError:
            return None
        for kernel in kernels:
            if kernel.address in only and (left := left - len(kernel.code)) >= 0:
                expected.append(kernel.code)
        return None

    def module(self, parameters: dict[str, Any], elf: bytearray, _files: list[int]) -> object:
        """Reads a code object: kernels, instructions and frames, as far as possible.

        Args:
            parameters: "instruction_set": one, see `decoder.in_json`, or None; "only": a list of kernels' addresses, or
                None for all; "decode": whether to decode; "texts": whether to return the text of instructions, too.
            elf: the file.

        Raises:
            Refusal: CodeObjectError: it is no code object.
        """
        data = bytes(elf)
        vendor = vendors.of_code(data)
        try:
            code = self._readers[vendor.name](data)
        except CodeObjectError as error:
            raise Refusal("CodeObjectError", str(error)) from None
        only = None if parameters["only"] is None else set(parameters["only"])
        selected = {
            index: kernel for index, kernel in enumerate(code.kernels) if only is None or kernel.address in only
        }
        problems: list[str] = []
        segments = self._segments(data, code, vendor.name, selected, problems) if selected else {}
        decodings: dict[int, Decoding] = {}
        if parameters["decode"] and selected:
            decodings = self._decodings(
                parameters["instruction_set"], selected, parameters.get("texts", True), problems
            )
        strings, frame_table, stacks = Numbering(), Numbering(), Numbering()
        first_with: dict[int, int] = {}  # by the identity of a decoding: kernels with the same code share one
        kernels = [
            {
                "name": kernel.name,
                "demangled": readable_name(kernel),
                "fingerprint": kernel.fingerprint,
                "address": kernel.address,
                "size": kernel.size,
                "simd": kernel.simd,
                "code_size": len(kernel.code),
                "segments": _segment_columns(segments.get(index, ()), strings, frame_table, stacks),
                "instructions": _instructions(index, decodings, first_with, strings),
            }
            for index, kernel in enumerate(code.kernels)
        ]
        return {
            "vendor": vendor.name,
            "kernels": kernels,
            "strings": strings.values,
            "frames": frame_table.values,
            "stacks": stacks.values,
            "problems": problems,
        }

    def _segments(
        self, data: bytes, code: CodeObject, vendor: str, selected: dict[int, CodeKernel], problems: list[str]
    ) -> dict[int, tuple[Segment, ...]]:
        """Returns each kernel's segments; from the symbol table if debug information is missing or damaged."""
        read: list[DebugInfo | LineInfo] = []
        if code.has_debug and not code.placed:
            problems.append("it has no GPU addresses, so its debug information was left unread")
        elif code.has_debug:
            self._stage("its debug information", problems, lambda: read.append(read_debug_info(data, code)))
        elif (reader := self._line_readers[vendor]) is not None:
            self._stage("its debug information", problems, lambda: read.append(LineInfo(reader(data))))
        debug_info = read[0] if read else LineInfo({})
        problems.extend(debug_info.problems)
        found: dict[int, tuple[Segment, ...]] = {}

        def find_segments() -> None:
            for index, kernel in selected.items():
                found[index] = debug_info.segments(kernel)

        self._stage("its debug information", problems, find_segments)
        return found

    def _decodings(
        self, name: list[Any] | None, selected: dict[int, CodeKernel], texts: bool, problems: list[str]
    ) -> dict[int, Decoding]:
        """Returns each kernel's instructions, as far as they can be decoded; an empty dict if there is no decoder."""
        found: dict[int, Decoding] = {}
        if name is None:
            problems.append("its GPU's generation is not known, so its instructions were not decoded")
            return found
        instruction_set = _instruction_set(name)
        try:
            decoder = self._decoder(instruction_set)
        except NoDecoder as error:
            problems.append(str(error))
            return found

        def decode() -> None:
            expected = self._expected.pop(instruction_set, [])
            decoder.prepare(instruction_set, [*(kernel.code for kernel in selected.values()), *expected])
            for index, kernel in selected.items():
                try:
                    found[index] = (
                        decoder.decode(instruction_set, kernel.code, texts) if kernel.code else _empty_decoding()
                    )
                except NotDecoded as error:
                    found[index] = _empty_decoding(str(error))
                    problems.append(f"kernel {kernel.name!r} was not decoded: {error}"[:500])

        try:
            self._stage("its code", problems, decode)
        except NoDecoder as error:
            problems.append(str(error))
            return found
        for index in selected:
            found.setdefault(index, _empty_decoding())  # the time limit came first
        return found

    def _decoder(self, instruction_set: InstructionSet) -> Decoder:
        """Returns the decoder; NoDecoder if there is none."""
        if (found := self._decoders.get(instruction_set.vendor)) is None:
            raise NoDecoder(self._no_decoder[instruction_set.vendor])
        return found

    def _stage(self, subject: str, problems: list[str], work: Callable[[], None]) -> None:
        """Does a stage of the work under the time limit; an error becomes a problem, and other stages continue."""
        try:
            with stage_limit(self._stage_seconds):
                work()
        except OutOfTime:
            problems.append(f"{subject} takes too long to read")
        except MemoryError:
            problems.append(f"{subject} takes too much memory to read")
        except TooMuchDebugInfo:
            problems.append(f"{subject} has more entries than are read")
        except NoDecoder:
            raise
        except Exception as error:  # noqa: BLE001 (pyelftools on damaged input raises nearly anything)
            problems.append(f"{subject} is damaged ({type(error).__name__}: {error})"[:500])


def _instruction_set(name: list[Any]) -> InstructionSet:
    """Returns the instruction set that `decoder.in_json` named."""
    vendor, value = name
    return vendors.by_name(vendor).instruction_sets(value)


def _empty_decoding(message: str = "") -> Decoding:
    return Decoding([], [], [], [], [], message)


def _instructions(
    index: int, decodings: dict[int, Decoding], first_with: dict[int, int], strings: Numbering
) -> dict[str, list[Any]] | int | None:
    """Returns a kernel's instructions, or the index of an earlier kernel that has the same; None: not decoded."""
    if (decoding := decodings.get(index)) is None:
        return None
    first = first_with.setdefault(id(decoding), index)
    return _to_columns(decoding, strings) if first == index else first


def _to_columns(decoding: Decoding, strings: Numbering) -> dict[str, list[Any]]:
    """Returns a decoding as columns with an entry for each instruction."""
    number_of = {mnemonic: strings.number(mnemonic) for mnemonic in dict.fromkeys(decoding.mnemonics)}
    columns: dict[str, list[Any]] = {
        "offset": decoding.pcs,
        "size": decoding.sizes,
        "mnemonic": [number_of[mnemonic] for mnemonic in decoding.mnemonics],
    }
    if decoding.texts:
        columns |= {"text": list(map(strings.number, decoding.texts)), "targets": decoding.targets}
    return columns


def _reaches_end(decoding: Decoding, length: int, instruction_set: InstructionSet) -> bool:
    """Whether fewer bytes follow the last instruction than the longest one has."""
    longest = vendors.by_name(instruction_set.vendor).longest_instruction
    return bool(decoding.pcs) and length - decoding.pcs[-1] - decoding.sizes[-1] < longest


def _segment_columns(
    segments: Iterable[Segment], strings: Numbering, frame_table: Numbering, stacks: Numbering
) -> dict[str, list[int]]:
    """Returns segments as columns: each one's offset, and its stack's number."""
    each = list(segments)
    numbers = [
        stacks.number(
            tuple(
                frame_table.number((strings.number(frame.function), strings.number(frame.file), frame.line))
                for frame in segment.frames
            )
        )
        for segment in each
    ]
    return {"offset": [segment.offset for segment in each], "stack": numbers}
