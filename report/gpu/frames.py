"""Source frames for GPU code: DWARF's lines and functions put together, for every instruction of a kernel.

Meant for the debug zebins that the driver makes, in which DWARF holds absolute addresses. It may be hostile: this runs
in the sandbox's child, under its limits.
"""

from __future__ import annotations

import contextlib
import io
from bisect import bisect_left
from collections.abc import Generator
from dataclasses import dataclass

from elftools.elf.elffile import ELFFile

from iaprof.formats.zebin import CALLED_FUNCTIONS, ZebinKernel, kernels_elsewhere, read_zebin
from iaprof.report.gpu.functions import FunctionTree, Scope, TooMuchDebugInfo
from iaprof.report.gpu.lines import FileTable, LineTable, line_ranges, text
from iaprof.report.gpu.units import UnitCode, place_units
from iaprof.symbols.names.demangle import demangled

MAX_SEGMENTS = 2_000_000  # in all of a module's kernels
_MAX_PROBLEMS = 100  # damaged parts; then the rest is not looked at


@dataclass(frozen=True, slots=True)
class DwarfFrame:
    """One function on the stack of inlined calls: where in it the code, or the call of the next frame, stands."""

    function: str  # readable: demangled and qualified
    file: str  # with its directories as DWARF has them, empty where unknown
    line: int  # 0 where unknown, or where the compiler says that no line is to blame


@dataclass(frozen=True, slots=True)
class Segment:
    """The instructions from `offset` (bytes from the kernel's address) up to the next segment share these frames."""

    offset: int
    frames: tuple[DwarfFrame, ...]  # outermost first; the first names the kernel


class DebugInfo:
    """What a module's DWARF says about its kernels."""

    def __init__(self, lines: LineTable, functions: FunctionTree, problems: tuple[str, ...]) -> None:
        self._lines = lines
        self._functions = functions
        self._segments_left = MAX_SEGMENTS
        self.problems = problems  # what could not be read, one sentence each

    def segments(self, kernel: ZebinKernel) -> tuple[Segment, ...]:
        """A kernel's segments, sorted, without gaps, the first at offset 0."""
        start, end = kernel.address, kernel.address + max(len(kernel.code), 1)
        scopes = list(self._functions.scopes(start, end))
        edges = {start, *self._lines.boundaries(start, end)}
        edges.update(edge for scope in scopes for pair in scope.ranges for edge in pair if start < edge < end)
        for symbol in kernel.functions:
            edges.update((start + symbol.offset, start + symbol.offset + symbol.size))
        cuts = sorted(edge for edge in edges if edge < end)
        self._segments_left -= len(cuts)
        if self._segments_left < 0:
            raise TooMuchDebugInfo
        innermost: list[Scope | None] = [None] * len(cuts)
        for scope in scopes:  # each comes after the one around it
            for low, high in scope.ranges:
                first, last = bisect_left(cuts, low), bisect_left(cuts, high)
                innermost[first:last] = [scope] * max(last - first, 0)
        segments: list[Segment] = []
        cached: dict[tuple[int, str, int, str], tuple[DwarfFrame, ...]] = {}
        for cut, inner in zip(cuts, innermost, strict=True):
            row = self._lines.at(cut)
            file, line = (row.file, row.line) if row else ("", 0)
            function = inner.innermost_function if inner else None
            if function is not None:
                function = self._functions.call_of_line(function, cut, file, line) or function
            subroutine = "" if function else _subroutine(kernel, cut - start)
            key = (id(function), file, line, subroutine)
            if key not in cached:
                cached[key] = self._frames(kernel, function, file, line, subroutine)
            if not segments or segments[-1].frames != cached[key]:
                segments.append(Segment(cut - start, cached[key]))
        return tuple(segments)

    def _frames(
        self, kernel: ZebinKernel, function: Scope | None, file: str, line: int, subroutine: str
    ) -> tuple[DwarfFrame, ...]:
        name = readable_name(kernel)
        frames: list[DwarfFrame] = []
        is_kernel = False
        while function is not None:
            is_kernel = (
                function.parent is None
                and kernel.name != CALLED_FUNCTIONS
                and any(start == kernel.address for start, _ in function.ranges)
            )
            frames.append(DwarfFrame(name if is_kernel else self._functions.name(function.function), file, line))
            file, line = function.call_file, function.call_line
            function = function.parent.innermost_function if function.parent else None
        if (frames and not is_kernel) or subroutine:
            # A subroutine: who called it is not known, whose it is is.
            frames = frames or [DwarfFrame(subroutine, file, line)]
            frames.append(DwarfFrame(name, "", 0))
        return tuple(reversed(frames)) or (DwarfFrame(name, file, line),)


def readable_name(kernel: ZebinKernel) -> str:
    """What reports call a kernel, and what they call the functions that a module's kernels share and call."""
    return "[called functions]" if kernel.name == CALLED_FUNCTIONS else demangled(kernel.name)


def _subroutine(kernel: ZebinKernel, offset: int) -> str:
    """The name of the function, not the kernel itself, whose symbol covers the offset; empty where none does."""
    for function in reversed(kernel.functions):
        if function.offset <= offset and (offset < function.offset + function.size or not function.size):
            return demangled(function.name)
    return ""


def no_debug_info() -> DebugInfo:
    """What is known of a module without DWARF: symbols."""
    functions = FunctionTree()
    functions.finish()
    return DebugInfo(LineTable([]), functions, ())


@contextlib.contextmanager
def _collecting_problems(problems: list[str]) -> Generator[None]:
    """What goes wrong in here costs what is in here, and becomes a problem."""
    try:
        yield
    except (TooMuchDebugInfo, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 (pyelftools on damaged input raises nearly anything)
        problems.append(f"a part of the debug information is damaged ({type(error).__name__}: {error})"[:300])


def read_debug_info(elf: bytes) -> DebugInfo:
    """Read the DWARF of a debug zebin that formats.zebin.read_zebin accepted.

    A unit that cannot be read costs its own frames; the problems say so. TooMuchDebugInfo where the limits are passed,
    and whatever pyelftools raises where the file's DWARF cannot be opened at all.
    """
    # The relocation sections remain in a debug ELF although the driver applied them.
    dwarf = ELFFile(io.BytesIO(elf)).get_dwarf_info(relocate_dwarf_sections=False, follow_links=False)
    found: list[UnitCode] = []
    functions = FunctionTree()
    programs: set[int] = set()
    problems: list[str] = []
    units = dwarf.iter_CUs() if dwarf.debug_info_sec is not None else iter(())
    while len(problems) < _MAX_PROBLEMS:
        unit = files = None
        code = UnitCode()
        with _collecting_problems(problems):
            unit = next(units, None)
            if unit is None:
                break
            directory = unit.get_top_DIE().attributes.get("DW_AT_comp_dir")
            program = dwarf.line_program_for_CU(unit)
            if program is not None:
                files = FileTable(program.header, text(directory.value) if directory else "")
                if program.program_start_offset not in programs:
                    programs.add(program.program_start_offset)
                    code.lines = line_ranges(program, files)
        if unit is None:
            break  # without its header nobody knows where the next one starts
        with _collecting_problems(problems):
            functions.read(unit, files, code.functions)
        found.append(code)
    problems += place_units(found, read_zebin(elf).kernels, kernels_elsewhere(elf), functions)[:_MAX_PROBLEMS]
    for code in found:
        functions.add(code.functions)
    functions.finish()
    lines = LineTable(row for code in found for row in code.lines)
    return DebugInfo(lines, functions, tuple(dict.fromkeys(problems)))
