"""Symbolizes the frames of CPU stacks, each distinct address once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.header.python_counts import PythonCounts
from iaprof.formats.header.whole_stacks import ProcessEnd, WholeStacks
from iaprof.formats.profile import CodeKind, Origin
from iaprof.formats.ranges import ranges
from iaprof.formats.wire.unwind_rules import Mark
from iaprof.symbols.names.address_space import NOWHERE, AddressSpaces
from iaprof.symbols.names.calls import DEEPEST_STACK, by_module, calls
from iaprof.symbols.names.demangle import demangled
from iaprof.symbols.names.modules import Module, ModuleKind
from iaprof.symbols.names.names import Symbolized, Symbolizer, is_shortened, shortened
from iaprof.symbols.python.frames import PythonStacks
from iaprof.symbols.python.without_interpreter import PYTHON_FUNCTION, is_interpreter, without_interpreter
from iaprof.symbols.unwind.stack_ends import WHOLE, End, code_of, end_of, has_no_beginning, mark, without_strays


@dataclass(frozen=True, slots=True)
class CpuFrame:
    """One frame of a stack."""

    name: str  # demangled; a placeholder if the function has no name
    module: Module
    file: str = ""  # empty if unknown
    line: int = 0  # 0 if unknown
    is_named: bool = False
    is_inlined: bool = False
    symbol: str = ""  # the name before demangling


@dataclass(frozen=True)
class FrameOptions:
    """The user's options for CPU frames."""

    inlines: bool = True  # show inlined functions as frames
    lines: bool = False  # show file and line after the function
    interpreter: bool = False  # show CPython's own frames between Python functions


@dataclass(frozen=True)
class ModuleNames:
    """The names of the addresses that stacks have in one module."""

    module: Module
    addresses: int  # the number of distinct addresses
    rows: dict[int, int]  # by address, if it has a name: its range in `symbolized.names`
    symbolized: Symbolized
    outermost: frozenset[int] = frozenset()  # the addresses in functions that have no caller
    no_calls: frozenset[int] = frozenset()  # the addresses at which no call instruction ends


_MISSING = Origin(CodeKind.UNKNOWN)  # of the frame that stands for missing frames
_NO_CODE = Module(ModuleKind.FILE, "")  # of the frame that stands for missing Python frames
_NO_MODULE = Module(ModuleKind.GENERATED, NOWHERE)  # of Python frames in a stack without addresses


class CpuFrames:
    """The frames of the stacks of one capture."""

    def __init__(
        self,
        stacks: pa.Table,
        spaces: AddressSpaces,
        symbolizer: Symbolizer,
        options: FrameOptions = FrameOptions(),
        are_cut: bool = False,
        codes: pa.Table | None = None,
    ) -> None:
        """Symbolizes all frames.

        Args:
            stacks: `stack` rows, those whose frames will be asked for.
            spaces: the mappings of the same capture.
            symbolizer: names the addresses.
            options: the user's options for frames.
            codes: `python_code` rows of the same capture.
            are_cut: false return addresses are already cut off the stacks, as in captures of format 5 and later.
        """
        self._options, self._are_cut = options, are_cut
        self._rows = {int(stack): row for row, stack in enumerate(stacks["id"].to_numpy())}
        self._truncated = stacks["truncated"].to_numpy(zero_copy_only=False)
        # How each stack ended; None if the capture does not say.
        ended = stacks["ended"].to_pylist() if "ended" in stacks.column_names else []
        self._ended: list[str | None] = ended or [None] * len(stacks)
        self._guessed, self._pids = _first_guesses(stacks), stacks["pid"].to_numpy()
        self._python = PythonStacks(stacks, codes)
        frames = calls(stacks)
        self._truncated = self._truncated | (np.bincount(frames.stacks, minlength=len(stacks)) >= DEEPEST_STACK)
        # The frames of the stack in row i: _starts[i] to _starts[i + 1].
        self._starts = np.searchsorted(frames.stacks, np.arange(len(stacks) + 1))
        self._numbers, self._inside = spaces.locate(frames.pids, frames.addresses, frames.times)
        self._modules = spaces.modules
        self._names: dict[tuple[object, ...], ModuleNames] = {}  # by the module's identity
        self.shortened: dict[str, set[str]] = {}  # names that were cut, by the module's path
        for module, addresses, times in by_module(self._modules, self._numbers, self._inside, frames.times):
            symbolized = symbolizer.name(module, addresses, times) or Symbolized()
            rows = symbolized.names.find(addresses)
            has_name = rows >= 0
            row_of_address = dict(zip(addresses[has_name].tolist(), rows[has_name].tolist(), strict=True))
            outermost, no_calls = (
                frozenset(() if column is None else column.tolist())
                for column in (symbolized.outermost, symbolized.no_calls)
            )
            names = ModuleNames(module, len(addresses), row_of_address, symbolized, outermost, no_calls)
            self._names[module.identity] = names
        self._frames_at = cache(self._find_frames_at)
        self._stack = cache(self._find_stack)
        self._origin = cache(_origin)
        self._python_frame = cache(self._make_python_frame)

    @property
    def modules(self) -> list[ModuleNames]:
        """The names in each module."""
        return list(self._names.values())

    def _find_frames_at(self, number: int, address: int) -> tuple[CpuFrame, ...]:
        """Returns the frames at an address of a module, the outermost first."""
        module = self._modules[number]
        names = self._names[module.identity]
        row = names.rows.get(address)
        if row is None:
            return (CpuFrame(unnamed(module, address), module),)
        frames = [
            CpuFrame(
                self._readable(frame.function, module) or unnamed(module, address),
                module,
                frame.file,
                frame.line,
                True,
                i > 0,
                frame.function,
            )
            for i, frame in enumerate(names.symbolized.names.frames(row))
        ]
        return tuple(frames if self._options.inlines else frames[:1])

    def _readable(self, symbol: str, module: Module) -> str:
        name = shortened(demangled(symbol))
        if is_shortened(name):
            self.shortened.setdefault(module.path, set()).add(name)
        return name

    def _places(self, row: int) -> list[tuple[int, int]]:
        """Returns module number and address of a stack's frames, the outermost first.

        A stack that was walked by frame pointers is cut at the first address that cannot be a return address.
        """
        part = slice(int(self._starts[row]), int(self._starts[row + 1]))
        places = list(zip(self._numbers[part].tolist(), self._inside[part].tolist(), strict=True))
        # A walk by call frame information is reliable; it also passes instructions that a signal interrupted.
        is_reliable = self._ended[row] is not None
        for index, (number, address) in enumerate([] if is_reliable else places[1:], 1):
            if address in self._names[self._modules[number].identity].no_calls:
                places = places[:index]
                break
        return places[::-1]

    def _frames(self, row: int) -> list[CpuFrame]:
        """Returns a stack's frames, the outermost first, with Python frames in place of their evaluation loops."""
        places = self._places(row)
        if not self._python.has_frames(row):
            return [frame for place in places for frame in self._frames_at(*place)]
        groups = {
            at: self._python_frames(row, at, frames, len(places)) for at, frames in self._python.groups(row).items()
        }
        self._place_groups(groups, places)
        if missing := self._python.missing(row):
            outermost = groups[max(groups)]
            groups[max(groups)] = [CpuFrame(missing, _NO_CODE), *outermost]
        shown: list[CpuFrame] = []
        for at, place in zip(range(len(places) - 1, -1, -1), places, strict=True):
            if at in groups:
                shown += groups.pop(at)
            else:  # with python -X perf, a perf map names the same Python functions a second time
                shown += (frame for frame in self._frames_at(*place) if not _is_of_perf_map(frame))
        # The remaining Python frames go outermost: nobody knows between which C frames they ran.
        return [*(frame for group in groups.values() for frame in group), *shown]

    def _place_groups(self, groups: dict[int, list[CpuFrame]], places: list[tuple[int, int]]) -> None:
        """Moves Python frames whose evaluation loop is unknown to the next frame of CPython."""
        depth, modules = len(places), [self._modules[number] for number, _ in reversed(places)]
        known = max((at for at in groups if at < depth), default=-1)
        free = (at for at in range(known + 1, depth) if is_interpreter(modules[at]))
        for unplaced in [at for at in groups if at >= depth]:
            if (at := next(free, None)) is None:
                break
            groups[at] = groups.pop(unplaced)

    def _python_frames(self, row: int, at: int, frames: list[tuple[int, int]], places: int) -> list[CpuFrame]:
        """Returns the Python frames that replace frame `at` of a stack.

        Args:
            row: of the stack.
            at: the number of the replaced frame, from the innermost on.
            frames: code object and line of each Python frame.
            places: the number of frames that the stack has without Python.
        """
        number = int(self._numbers[int(self._starts[row]) + min(at, places - 1)]) if places else None
        return [self._python_frame(code, line, number) for code, line in frames]

    def _make_python_frame(self, code: int, line: int, number: int | None) -> CpuFrame:
        """Makes a Python frame in the module of that number."""
        frame = self._python.frame(code, line)
        module = _NO_MODULE if number is None else self._modules[number]
        return CpuFrame(frame.text, module, frame.file, frame.line, True, False, frame.function)

    def _is_truncated(self, row: int) -> bool:
        """Tells whether frames may be missing because the stack is as deep as the limit."""
        return bool(self._truncated[row]) and len(self._places(row)) == self._starts[row + 1] - self._starts[row]

    def frames(self, stack: int) -> tuple[str, ...]:
        """Returns the frames of the stack with this id as text, the outermost first; empty for an unknown id."""
        return self._stack(stack)[0]

    def origins(self, stack: int) -> tuple[Origin, ...]:
        """Returns the origin of each of these frames."""
        return self._stack(stack)[1]

    def _find_stack(self, stack: int) -> tuple[tuple[str, ...], tuple[Origin, ...]]:
        row = self._rows.get(stack)
        if row is None:
            return (), ()
        frames = self._frames(row)
        if not self._are_cut:
            frames = without_strays(frames, self._keeps_frame_pointers)
        with_code = [frame for frame in frames if frame.module is not _NO_CODE]
        end = mark(*self._end(row, with_code), self._is_truncated(row), self._ended[row]) if with_code else None
        if not self._options.interpreter:
            frames = list(without_interpreter(frames))
        texts = (*((end,) if end else ()), *(self._text(frame) for frame in frames))
        return texts, (*((_MISSING,) if end else ()), *(self._origin(frame) for frame in frames))

    def _end(self, row: int, frames: Sequence[CpuFrame]) -> tuple[End, Module | None]:
        """Returns how a stack with these frames, the outermost first, ends, and in which module."""
        if not frames:
            return End.UNKNOWN, None
        first = frames[0]
        if self._ended[row] is not None:
            return (End.WHOLE if self._ended[row] == WHOLE else End.CUT), first.module
        names = self._names.get(first.module.identity)
        if names is None:  # a stack without addresses that has Python frames
            return End.UNKNOWN, None
        # The first frame may not be at the first place: stray frames before it were removed.
        places = self._places(row)
        address = next((inside for number, inside in places if self._modules[number] == first.module), 0)
        is_outermost = None if names.symbolized.outermost is None else address in names.outermost
        if self._are_cut and has_no_beginning(first.module):
            is_outermost = bool(is_outermost)
        return end_of(first.symbol, first.module, is_outermost, names.symbolized.frame_pointers), first.module

    def python(self, weights: Mapping[int, int]) -> PythonCounts:
        """Counts how complete the Python frames of stacks are.

        Args:
            weights: how often each stack counts, by its id.
        """
        flags, counts = self._python.flags(), Counter[int]()
        for stack, weight in weights.items():
            if (row := self._rows.get(stack)) is not None:
                counts[int(flags[row])] += weight
        return PythonCounts.from_counts(counts)

    def ends(self, weights: Mapping[int, int]) -> WholeStacks:
        """Counts where stacks end.

        Args:
            weights: how often each stack counts, by its id.
        """
        whole = unknown = deep = 0
        ends, deep_in, guesses = Counter[str](), Counter[str](), Counter[str]()
        processes = []
        for stack, weight in weights.items():
            row = self._rows.get(stack)
            if row is None:
                continue
            if guessed := int(self._guessed[row]):
                # `guessed` is the level of the guessed caller; the guess was made in the code one level further in.
                inner = min(int(self._starts[row]) + guessed - 1, len(self._numbers) - 1)
                guesses[code_of(self._modules[self._numbers[inner]])] += weight
            frames = [frame for place in self._places(row) for frame in self._frames_at(*place)]
            end, module = self._end(
                row, frames if self._are_cut else without_strays(frames, self._keeps_frame_pointers)
            )
            is_early = end is not End.WHOLE
            truncated = is_early and self._is_truncated(row)
            counts = weight * is_early, weight * truncated, weight * bool(guessed)
            processes.append(ProcessEnd(int(self._pids[row]), weight, *counts))
            if is_early:
                deep += weight * truncated
                unknown += weight * (end is End.UNKNOWN and not truncated)
                ends[code_of(module)] += weight
                deep_in[code_of(module)] += weight * truncated
            else:
                whole += weight
        sums = {"deep": deep, "guessed": guesses.total()}
        return WholeStacks.from_counts(whole, unknown, ends, processes, deep_in=deep_in, guesses=guesses, **sums)

    def _keeps_frame_pointers(self, module: Module) -> bool | None:
        """Tells whether a module was built with frame pointers; None if unknown."""
        names = self._names.get(module.identity)
        return names.symbolized.frame_pointers if names is not None else None

    def _text(self, frame: CpuFrame) -> str:
        if not self._options.lines or not frame.file:
            return frame.name
        if frame.name.startswith(PYTHON_FUNCTION) and frame.name.endswith(f":{frame.file}"):
            return frame.name + (f":{frame.line}" if frame.line else "")
        return f"{frame.name} {os.path.basename(frame.file)}" + (f":{frame.line}" if frame.line else "")

    def shares(self, weights: Mapping[int, int]) -> dict[tuple[object, ...], tuple[int, int]]:
        """Returns, by a module's identity, the weight of stacks with a frame in it and of those with an unnamed one.

        CPython's own frames do not count if Python functions are shown in their place.

        Args:
            weights: how often each stack counts, by its id.
        """
        shares: dict[tuple[object, ...], tuple[int, int]] = {}
        for stack, weight in weights.items():
            row = self._rows.get(stack)
            places = self._places(row) if row is not None else []
            while places and self._modules[places[0][0]].path == NOWHERE:
                places.pop(0)  # a walk by frame pointers often ends in addresses that are not code
            if row is not None and self._python.has_frames(row) and not self._options.interpreter:
                places = [place for place in places if not is_interpreter(self._modules[place[0]])]
            unnamed_in: dict[tuple[object, ...], bool] = {}
            for number, address in places:
                identity = self._modules[number].identity
                unnamed_in[identity] = unnamed_in.get(identity, False) or address not in self._names[identity].rows
            for identity, is_unnamed in unnamed_in.items():
                all_, without = shares.get(identity, (0, 0))
                shares[identity] = all_ + weight, without + weight * is_unnamed
        return shares


def _origin(frame: CpuFrame) -> Origin:
    return Origin(_kind(frame), frame.module.path, frame.file, frame.line, frame.is_inlined)


def _kind(frame: CpuFrame) -> CodeKind:
    if frame.module.kind is ModuleKind.KERNEL:
        return CodeKind.KERNEL
    if frame.name.startswith(PYTHON_FUNCTION):
        return CodeKind.PYTHON
    if not frame.is_named:
        return CodeKind.UNKNOWN
    if frame.module.kind is ModuleKind.GENERATED:
        return CodeKind.JIT
    # C symbols are not mangled.
    return CodeKind.C if frame.symbol == frame.name else CodeKind.CPP


def _is_of_perf_map(frame: CpuFrame) -> bool:
    """Tells whether CPython named this function in a perf map; a C++ namespace may be called `py`, too."""
    return frame.module.kind is ModuleKind.GENERATED and frame.name.startswith(PYTHON_FUNCTION)


def unnamed(module: Module, address: int) -> str:
    """Returns the text of a frame whose function has no name: `[libfoo.so+0x1234]`, with the offset in the file."""
    match module.kind:
        case ModuleKind.FILE:
            return f"[{os.path.basename(module.path)}+0x{address:x}]"
        case ModuleKind.GENERATED:
            return f"0x{address:x}" if module.path == NOWHERE else "[anon]"
    return module.path  # [vdso] or [kernel]


def _first_guesses(stacks: pa.Table) -> NDArray[np.int64]:
    """Returns the level of each stack's innermost guessed caller, the innermost frame being 0: int64[n]; 0 for none."""
    levels = np.zeros(len(stacks), np.int64)
    if "marks" in stacks.column_names:  # since format 6
        marks = stacks["marks"].combine_chunks()
        row_of_mark = pc.list_parent_indices(marks).to_numpy()
        level_of_mark = ranges(0, np.bincount(row_of_mark))
        guessed = np.flatnonzero((pc.list_flatten(marks).to_numpy() & Mark.GUESSED) != 0)
        rows, first = np.unique(row_of_mark[guessed], return_index=True)
        levels[rows] = np.maximum(level_of_mark[guessed[first]], 1)
    return levels
