"""Finds the inlined frames of every instruction of a kernel, from DWARF's lines and functions.

This reads code objects whose DWARF holds absolute addresses, as debug ELFs have. They are untrusted: this runs
in the sandboxed child, under its limits.

Addresses in DWARF are relocations against symbols named after the kernels' sections. Intel's compiler leaves some of
these names empty, different ones in each compilation. The driver cannot resolve such relocations, so the functions,
lines or both of a compile unit stay at address 0, while the kernel's code lies elsewhere: such a unit's kernel is found
by its names and lines.
"""

from __future__ import annotations

import contextlib
import io
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elftools.elf.elffile import ELFFile

from iaprof.gpu.code import CodeKernel, CodeObject, CodePlace, Lines
from iaprof.report.gpu.functions import FunctionTree, Scope, TooMuchDebugInfo
from iaprof.report.gpu.lines import FileTable, LineRange, LineTable, line_ranges, text
from iaprof.symbols.names.demangle import demangled

MAX_SEGMENTS = 2_000_000  # in all kernels of a module
_MAX_PROBLEMS = 100  # in debug information; after that many, the rest is not read


@dataclass(slots=True)
class UnitCode:
    """The functions and lines of one compile unit."""

    functions: list[list[Scope]] = field(default_factory=list)  # for each: its scopes, itself first
    lines: list[LineRange] = field(default_factory=list)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yields the start and end of all code with a function or a line."""
        for scopes in self.functions:
            yield from scopes[0].ranges
        for row in self.lines:
            yield row.start, row.end

    def move(self, size: int, by: int) -> None:
        """Adds `by` to the addresses of all code that ends at or below `size`."""
        for scopes in self.functions:
            if all(end <= size for _, end in scopes[0].ranges):
                for scope in scopes:
                    scope.ranges = [(start + by, end + by) for start, end in scope.ranges]
        self.lines = [
            replace(row, start=row.start + by, end=row.end + by) if row.end <= size else row for row in self.lines
        ]


@dataclass(frozen=True, slots=True)
class _Unplaced:
    """A unit with code at address 0."""

    unit: UnitCode
    size: int  # of that code, bytes
    names: frozenset[str]  # of the functions that start at 0


class _UnitMatcher:
    """Matches units to the kernels of a module, at most one unit without addresses for each kernel."""

    def __init__(self, kernels: Sequence[CodeKernel]) -> None:
        self._kernels = sorted(kernels, key=lambda kernel: kernel.address)
        self._starts = [kernel.address for kernel in self._kernels]
        self._longest_code = max((len(kernel.code) for kernel in kernels), default=0)
        self._claimed: set[int] = set()  # kernels that have a unit, by address

    @property
    def unclaimed(self) -> list[CodeKernel]:
        """Kernels without a unit."""
        return [kernel for kernel in self._kernels if kernel.address not in self._claimed]

    def claim(self, unit: UnitCode, functions: FunctionTree) -> _Unplaced | None:
        """Claims the kernels at a unit's addresses; returns its code at address 0 unless it belongs to one of them."""
        own: dict[int, CodeKernel] = {}
        starts_at_zero, size = False, 0
        for start, end in unit.ranges():
            if (kernel := self._at(start)) is not None:
                own[kernel.address] = kernel
            elif start < self._longest_code:
                starts_at_zero, size = starts_at_zero or start == 0, max(size, end)
        self._claimed |= own.keys()
        if not starts_at_zero:
            return None
        at_zero = _Unplaced(unit, size, _names_at_zero(unit, functions))
        if len(own) == 1 and self.assign(at_zero, *own.values()):
            return None
        return at_zero

    def _at(self, address: int) -> CodeKernel | None:
        index = bisect_right(self._starts, address) - 1
        kernel = self._kernels[index] if index >= 0 else None
        return kernel if kernel is not None and address < kernel.address + len(kernel.code) else None

    def match(
        self,
        waiting: Sequence[_Unplaced],
        keys_of: Callable[[_Unplaced], Iterable[object]],
        key_of: Callable[[CodeKernel], object],
    ) -> list[_Unplaced]:
        """Matches a unit and a kernel if they share a key with each other and with no other unit or kernel.

        Returns:
            The units without a match.
        """
        kernels: dict[object, CodeKernel | None] = {}  # None: several kernels have this key
        for kernel in self.unclaimed:
            key = key_of(kernel)
            kernels[key] = None if key in kernels else kernel
        usable_keys = [{key for key in keys_of(each) if key in kernels} for each in waiting]
        claims = Counter(key for keys in usable_keys for key in keys)
        unmatched = []
        for each, keys in zip(waiting, usable_keys, strict=True):
            key = keys.pop() if len(keys) == 1 else None
            found = kernels.get(key)
            if found is None or claims[key] > 1 or not self.assign(each, found):
                unmatched.append(each)
        return unmatched

    def assign(self, unplaced: _Unplaced, kernel: CodeKernel) -> bool:
        """Moves a unit to a kernel if it is not larger than the kernel."""
        if unplaced.size > len(kernel.code):
            return False
        unplaced.unit.move(unplaced.size, kernel.address)
        self._claimed.add(kernel.address)
        return True


def _names_at_zero(unit: UnitCode, functions: FunctionTree) -> frozenset[str]:
    starting = [scopes[0] for scopes in unit.functions if any(start == 0 for start, _ in scopes[0].ranges)]
    return frozenset(name for scope in starting for name in functions.names(scope.function))


def place_units(
    units: Sequence[UnitCode], kernels: Sequence[CodeKernel], unplaced_names: Collection[str], functions: FunctionTree
) -> list[str]:
    """Moves code at address 0 to the kernel that it belongs to.

    That is the kernel that the rest of the unit belongs to; else the kernel with the name of one of the unit's
    functions at address 0; else, among the kernels without a unit, the only one of the unit's size, or the only one.

    Args:
        units: all units of a module; changed in place.
        kernels: the module's kernels with addresses.
        unplaced_names: names of kernels without addresses; their units are not moved.
        functions: the functions of the units.

    Returns:
        A sentence for each unit that could belong to several kernels.
    """
    matcher = _UnitMatcher(kernels)
    waiting = [at_zero for unit in units if (at_zero := matcher.claim(unit, functions)) is not None]
    waiting = [each for each in waiting if each.names.isdisjoint(unplaced_names)]
    waiting = matcher.match(waiting, lambda each: each.names, lambda kernel: kernel.name)
    known = {kernel.name for kernel in kernels}
    nameless = [each for each in waiting if each.names.isdisjoint(known)]
    nameless = matcher.match(nameless, lambda each: (each.size,), lambda kernel: kernel.size)
    if len(nameless) == len(matcher.unclaimed) == 1 and matcher.assign(nameless[0], matcher.unclaimed[0]):
        nameless = []
    longest = max((len(kernel.code) for kernel in matcher.unclaimed), default=0)
    return [
        f"it is not known which kernel the source lines of {min(each.names, default='a nameless function')} belong to"
        for each in nameless
        if each.size <= longest
    ]


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


class LineInfo:
    """The lines and inlined calls of a module's kernels, from a table of its vendor's; functions from symbols."""

    problems: tuple[str, ...] = ()

    def __init__(self, lines: Mapping[int, Lines]) -> None:
        """Args: by a kernel's address, its lines, if there are any."""
        self._lines = lines
        self._segments_left = MAX_SEGMENTS

    def segments(self, kernel: CodeKernel) -> tuple[Segment, ...]:
        """Returns a kernel's segments, sorted, without gaps, the first one at offset 0.

        Raises:
            TooMuchDebugInfo: the module's kernels have more than MAX_SEGMENTS segments.
        """
        lines = self._lines.get(kernel.address, ())
        offsets = [offset for offset, _ in lines]
        edges = {0, *offsets}
        for symbol in kernel.functions:
            edges.update((symbol.offset, symbol.offset + symbol.size))
        cuts = sorted(edge for edge in edges if edge < max(len(kernel.code), 1))
        self._segments_left -= len(cuts)
        if self._segments_left < 0:
            raise TooMuchDebugInfo
        segments: list[Segment] = []
        cached: dict[tuple[tuple[CodePlace, ...], str], tuple[DwarfFrame, ...]] = {}
        for cut in cuts:
            row = bisect_right(offsets, cut) - 1
            key = lines[row][1] if row >= 0 else (), _subroutine(kernel, cut)
            if key not in cached:
                cached[key] = _frames_of_places(kernel, *key)
            if not segments or segments[-1].frames != cached[key]:
                segments.append(Segment(cut, cached[key]))
        return tuple(segments)


def _frames_of_places(kernel: CodeKernel, places: Sequence[CodePlace], subroutine: str) -> tuple[DwarfFrame, ...]:
    name = readable_name(kernel)
    file, line = (places[0].file, places[0].line) if places else ("", 0)
    inlined = [DwarfFrame(demangled(place.function), place.file, place.line) for place in places[1:]]
    if subroutine:  # its caller is unknown, so the kernel's frame has no line
        return (DwarfFrame(name, "", 0), DwarfFrame(subroutine, file, line), *inlined)
    return (DwarfFrame(name, file, line), *inlined)


def readable_name(kernel: CodeKernel) -> str:
    """Returns the name of a kernel, or of the section with functions that a module's kernels call, as reports show."""
    return kernel.label or demangled(kernel.name)


def _subroutine(kernel: CodeKernel, offset: int) -> str:
    """Returns the name of the function, other than the kernel, whose symbol covers the offset; "" if there is none."""
    for function in reversed(kernel.functions):
        if function.offset <= offset and (offset < function.offset + function.size or not function.size):
            return demangled(function.name)
    return ""


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
