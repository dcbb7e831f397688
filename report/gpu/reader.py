"""What the sandbox's child does: all reading of zebins, DWARF and GPU code, answered as JSON.

Answers hold indices into tables of strings, frames and stacks instead of repeating them. report.decoder and
report.gpu_module are the readers of these answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from iaprof.formats.zebin import Zebin, ZebinError, ZebinKernel, read_zebin
from iaprof.gpu.intel.generations import LONGEST_INSTRUCTION, Platform
from iaprof.report.gpu.frames import DebugInfo, Segment, no_debug_info, read_debug_info, readable_name
from iaprof.report.gpu.functions import TooMuchDebugInfo
from iaprof.report.gpu.iga import UNDECODABLE, Iga, IgaDecoding, IgaError, IgaUnavailable
from iaprof.sandbox.reader import Operation, Refusal
from iaprof.sandbox.stage_limit import OutOfTime, stage_limit
from iaprof.symbols.names.demangle import demangled


class Numbering:
    """Numbers for things that come often, in the order in which they came first."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        """The thing's index in `things`."""
        return self._numbers.setdefault(value, len(self._numbers))

    @property
    def values(self) -> list[Any]:
        """All things that got a number."""
        return list(self._numbers)


def operations(stage_seconds: float) -> dict[str, Operation]:
    """What the sandbox can be asked for."""
    reader = GpuReader(stage_seconds)
    return {"disasm": reader.disasm, "module": reader.module}


class GpuReader:
    """The operations of the child."""

    def __init__(self, stage_seconds: float) -> None:
        """Load the decoder; `stage_seconds` is what each stage of reading a module may take."""
        self._stage_seconds = stage_seconds
        self._iga: Iga | None = None
        self._no_iga = ""
        try:
            self._iga = Iga()
        except IgaUnavailable as error:
            self._no_iga = str(error)
        demangled("_Z1fv")  # what libraries do at their first use must not wait until nothing can be opened

    def disasm(self, parameters: dict[str, Any], code: bytearray, _files: list[int]) -> object:
        """Decode `code` for parameters["platform"]."""
        if self._iga is None:
            raise Refusal("DecoderUnavailable", self._no_iga)
        try:
            decoding = self._iga.decode(Platform(parameters["platform"]), bytes(code))
        except IgaUnavailable as error:
            raise Refusal("DecoderUnavailable", str(error)) from None
        except IgaError as error:
            raise Refusal("DecodeError", str(error)) from None
        strings = Numbering()
        instructions = _to_columns(decoding, strings)
        whole = UNDECODABLE not in decoding.mnemonics and _reaches_end(decoding, len(code))
        return {
            "strings": strings.values,
            "instructions": instructions,
            "message": "" if whole else decoding.message or "some of these bytes are no instructions",
        }

    def module(self, parameters: dict[str, Any], elf: bytearray, _files: list[int]) -> object:
        """Read a whole debug zebin: kernels, instructions and frames, each as far as it can be read.

        parameters: "platform" is a Platform or None, "only" a list of kernels' addresses or None for all, "decode"
        says whether to decode at all, "texts" whether instructions are wanted as text, too.
        """
        data = bytes(elf)
        try:
            zebin = read_zebin(data)
        except ZebinError as error:
            raise Refusal("ZebinError", str(error)) from None
        only = None if parameters["only"] is None else set(parameters["only"])
        wanted = {index: kernel for index, kernel in enumerate(zebin.kernels) if only is None or kernel.address in only}
        problems: list[str] = []
        segments = self._segments(data, zebin, wanted, problems) if wanted else {}
        decodings: dict[int, IgaDecoding] = {}
        if parameters["decode"] and wanted:
            decodings = self._decodings(parameters["platform"], wanted, parameters.get("texts", True), problems)
        strings, frame_table, stacks = Numbering(), Numbering(), Numbering()
        kernels = [
            {
                "name": kernel.name,
                "demangled": readable_name(kernel),
                "fingerprint": kernel.fingerprint,
                "address": kernel.address,
                "size": kernel.size,
                "code_size": len(kernel.code),
                "segments": _segment_columns(segments.get(index, ()), strings, frame_table, stacks),
                "instructions": _to_columns(decodings[index], strings) if index in decodings else None,
            }
            for index, kernel in enumerate(zebin.kernels)
        ]
        return {
            "kernels": kernels,
            "strings": strings.values,
            "frames": frame_table.values,
            "stacks": stacks.values,
            "problems": problems,
        }

    def _segments(
        self, data: bytes, zebin: Zebin, wanted: dict[int, ZebinKernel], problems: list[str]
    ) -> dict[int, tuple[Segment, ...]]:
        """Each kernel's frames; without debug information, or as far as it is damaged, those of the symbol table."""
        debug_info = no_debug_info()
        if zebin.has_debug and not zebin.placed:
            problems.append("it has no GPU addresses, so its debug information was left unread")
        elif zebin.has_debug:
            read: list[DebugInfo] = []
            self._stage("its debug information", problems, lambda: read.append(read_debug_info(data)))
            debug_info = read[0] if read else debug_info
        problems.extend(debug_info.problems)
        found: dict[int, tuple[Segment, ...]] = {}

        def find_segments() -> None:
            for index, kernel in wanted.items():
                found[index] = debug_info.segments(kernel)

        self._stage("its debug information", problems, find_segments)
        return found

    def _decodings(
        self, number: int | None, wanted: dict[int, ZebinKernel], texts: bool, problems: list[str]
    ) -> dict[int, IgaDecoding]:
        """Each kernel's instructions, as far as they can be decoded; no entry at all where there is no decoder."""
        found: dict[int, IgaDecoding] = {}
        if number is None:
            problems.append("its GPU's generation is not known, so its instructions were not decoded")
            return found
        if self._iga is None:
            problems.append(self._no_iga)
            return found
        platform, iga = Platform(number), self._iga

        def decode() -> None:
            for index, kernel in wanted.items():
                try:
                    found[index] = iga.decode(platform, kernel.code, texts) if kernel.code else _empty_decoding()
                except IgaError as error:
                    found[index] = _empty_decoding(str(error))
                    problems.append(f"kernel {kernel.name!r} was not decoded: {error}"[:500])

        try:
            self._stage("its code", problems, decode)
        except IgaUnavailable as error:
            problems.append(str(error))
            return found
        for index in wanted:
            found.setdefault(index, _empty_decoding())  # there was no time for it
        return found

    def _stage(self, subject: str, problems: list[str], work: Callable[[], None]) -> None:
        """Do a part of the work; what goes wrong in it becomes a problem, and the rest goes on."""
        try:
            with stage_limit(self._stage_seconds):
                work()
        except OutOfTime:
            problems.append(f"{subject} takes too long to read")
        except MemoryError:
            problems.append(f"{subject} takes too much memory to read")
        except TooMuchDebugInfo:
            problems.append(f"{subject} has more entries than are read")
        except IgaUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 (pyelftools on damaged input raises nearly anything)
            problems.append(f"{subject} is damaged ({type(error).__name__}: {error})"[:500])


def _empty_decoding(message: str = "") -> IgaDecoding:
    return IgaDecoding([], [], [], [], [], message)


def _to_columns(decoding: IgaDecoding, strings: Numbering) -> dict[str, list[Any]]:
    """A decoding as columns, one entry per instruction."""
    columns: dict[str, list[Any]] = {
        "offset": decoding.pcs,
        "size": decoding.sizes,
        "mnemonic": list(map(strings.number, decoding.mnemonics)),
    }
    if decoding.texts:
        columns |= {"text": list(map(strings.number, decoding.texts)), "targets": decoding.targets}
    return columns


def _reaches_end(decoding: IgaDecoding, length: int) -> bool:
    """Whether nothing is left behind the last instruction but what is too short for a whole one."""
    return bool(decoding.pcs) and length - decoding.pcs[-1] - decoding.sizes[-1] < LONGEST_INSTRUCTION


def _segment_columns(
    segments: Iterable[Segment], strings: Numbering, frame_table: Numbering, stacks: Numbering
) -> dict[str, list[int]]:
    """Segments as columns: where each starts, and its stack's number."""
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
