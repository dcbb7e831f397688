"""Finds the inlined frames of every instruction of a kernel, from DWARF's lines and functions.

This reads code objects whose DWARF holds absolute addresses, as debug ELFs have. They are untrusted: this runs
in the sandboxed child, under its limits.
"""

from __future__ import annotations

import contextlib
import io
from bisect import bisect_left
from collections.abc import Generator
from dataclasses import dataclass

from elftools.elf.elffile import ELFFile

from iaprof.gpu.code import CodeKernel, CodeObject
from iaprof.report.gpu.functions import FunctionTree, Scope, TooMuchDebugInfo
from iaprof.report.gpu.lines import FileTable, LineTable, line_ranges, text
from iaprof.report.gpu.units import UnitCode, place_units
from iaprof.symbols.names.demangle import demangled

MAX_SEGMENTS = 2_000_000  # in all kernels of a module
_MAX_PROBLEMS = 100  # in debug information; after that many, the rest is not read


@dataclass(frozen=True, slots=True)
class DwarfFrame:
    """A function on the stack of inlined calls, with the place of the instruction or of the next frame's call."""

    function: str  # demangled and qualified
    file: str  # with its directories as DWARF has them; "": unknown
    line: int  # 0: unknown, or the compiler attributes the code to no line


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent instructions with the same frames."""

    offset: int  # of the first instruction, bytes from the kernel's address; the segment ends where the next one begins
    frames: tuple[DwarfFrame, ...]  # outermost first; the first one is the kernel


class DebugInfo:
    """The lines and functions of a module's kernels, from its DWARF."""

    def __init__(self, lines: LineTable, functions: FunctionTree, problems: tuple[str, ...]) -> None:
        self._lines = lines
        self._functions = functions
        self._segments_left = MAX_SEGMENTS
        self.problems = problems  # sentences about debug information that could not be read

    def segments(self, kernel: CodeKernel) -> tuple[Segment, ...]:
        """Returns a kernel's segments, sorted, without gaps, the first one at offset 0.

        Raises:
            TooMuchDebugInfo: the module's kernels have more than MAX_SEGMENTS segments.
        """
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
        for scope in scopes:  # each one comes after its parent, so that inner scopes overwrite outer ones
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
        self, kernel: CodeKernel, function: Scope | None, file: str, line: int, subroutine: str
    ) -> tuple[DwarfFrame, ...]:
        name = readable_name(kernel)
        frames: list[DwarfFrame] = []
        is_kernel = False
        while function is not None:
            is_kernel = (
                function.parent is None
                and not kernel.label
                and any(start == kernel.address for start, _ in function.ranges)
            )
            frames.append(DwarfFrame(name if is_kernel else self._functions.name(function.function), file, line))
            file, line = function.call_file, function.call_line
            function = function.parent.innermost_function if function.parent else None
        if (frames and not is_kernel) or subroutine:
            # A subroutine of the kernel: its caller is unknown, so the kernel's frame has no line.
            frames = frames or [DwarfFrame(subroutine, file, line)]
            frames.append(DwarfFrame(name, "", 0))
        return tuple(reversed(frames)) or (DwarfFrame(name, file, line),)


def readable_name(kernel: CodeKernel) -> str:
    """Returns the name of a kernel, or of the section with functions that a module's kernels call, as reports show."""
    return kernel.label or demangled(kernel.name)


def _subroutine(kernel: CodeKernel, offset: int) -> str:
    """Returns the name of the function, other than the kernel, whose symbol covers the offset; "" if there is none."""
    for function in reversed(kernel.functions):
        if function.offset <= offset and (offset < function.offset + function.size or not function.size):
            return demangled(function.name)
    return ""


def no_debug_info() -> DebugInfo:
    """Returns what stands in for DWARF in a module without it: frames come from symbols only."""
    functions = FunctionTree()
    functions.finish()
    return DebugInfo(LineTable([]), functions, ())


@contextlib.contextmanager
def _collecting_problems(problems: list[str]) -> Generator[None]:
    """Turns an error in the with-block into a problem, and continues after it."""
    try:
        yield
    except (TooMuchDebugInfo, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 (pyelftools on damaged input raises nearly anything)
        problems.append(f"a part of the debug information is damaged ({type(error).__name__}: {error})"[:300])


def read_debug_info(elf: bytes, module: CodeObject) -> DebugInfo:
    """Reads the DWARF of a code object. A unit that cannot be read has no frames, and a problem says so.

    Args:
        elf: the file.
        module: what its vendor's reader read of it.

    Raises:
        TooMuchDebugInfo: the DWARF exceeds a limit.
        Exception: anything that pyelftools raises if it cannot open the DWARF at all.
    """
    # The driver has applied the relocations, but leaves their sections in the debug ELF: do not apply them again.
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
            break  # without this unit's header, the next one's offset is unknown
        with _collecting_problems(problems):
            functions.read(unit, files, code.functions)
        found.append(code)
    problems += place_units(found, module.kernels, module.without_code, functions)[:_MAX_PROBLEMS]
    for code in found:
        functions.add(code.functions)
    functions.finish()
    lines = LineTable(row for code in found for row in code.lines)
    return DebugInfo(lines, functions, tuple(dict.fromkeys(problems)))
