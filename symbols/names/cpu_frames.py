"""Names for the frames of CPU stacks: each distinct place is asked for once, of one source of names after the other."""

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
from iaprof.symbols.names.names import Named, Naming
from iaprof.symbols.python.frames import StacksOfPython
from iaprof.symbols.python.without_interpreter import PYTHON_FUNCTION, is_interpreter, without_interpreter
from iaprof.symbols.unwind.stack_ends import WHOLE, End, code_of, end_of, has_no_beginning, mark, without_strays


@dataclass(frozen=True, slots=True)
class CpuFrame:
    """One frame of a stack."""

    name: str  # readable; what is said instead where there is none
    module: Module
    file: str = ""  # empty where unknown
    line: int = 0  # 0 where unknown
    is_named: bool = False
    is_inlined: bool = False
    symbol: str = ""  # the name before it was made readable


@dataclass(frozen=True)
class Look:
    """How the user wants CPU frames."""

    inlines: bool = True  # inlined functions as frames
    lines: bool = False  # file and line beside the function
    interpreter: bool = False  # CPython's own frames between Python functions


@dataclass(frozen=True)
class ModuleNames:
    """How the naming of one module went."""

    module: Module
    addresses: int
    rows: dict[int, int]  # in the names, of those addresses that have one
    named: Named
    outermost: frozenset[int] = frozenset()  # of the addresses, those without a caller
    no_calls: frozenset[int] = frozenset()  # of the addresses, those where no call ends


_MISSING = Origin(CodeKind.UNKNOWN)  # of what stands for frames that are not there
_NO_CODE = Module(ModuleKind.FILE, "")  # of what stands for frames of Python
_NO_MODULE = Module(ModuleKind.GENERATED, NOWHERE)  # of frames of Python whose stack has no address


class CpuFrames:
    """The frames of the stacks of one capture."""

    def __init__(
        self,
        stacks: pa.Table,
        spaces: AddressSpaces,
        naming: Naming,
        look: Look = Look(),
        are_cut: bool = False,
        codes: pa.Table | None = None,
    ) -> None:
        """Asks for all names.

        Args:
            stacks: `stack` rows, those whose frames will be wanted.
            spaces: of the same capture.
            naming: knows the names.
            look: how frames are to look.
            codes: `python_code` rows of the same capture.
            are_cut: the stacks have no frames that are none, as in captures of format 5 and later.
        """
        self._look, self._are_cut = look, are_cut
        self._rows = {int(stack): row for row, stack in enumerate(stacks["id"].to_numpy())}
        self._truncated = stacks["truncated"].to_numpy(zero_copy_only=False)
        # How each stack ended; None where the capture does not say.
        ended = stacks["ended"].to_pylist() if "ended" in stacks.column_names else []
        self._ended: list[str | None] = ended or [None] * len(stacks)
        self._guessed, self._pids = _guesses(stacks), stacks["pid"].to_numpy()
        self._python = StacksOfPython(stacks, codes)
        found = calls(stacks)
        self._truncated = self._truncated | (np.bincount(found.stacks, minlength=len(stacks)) >= DEEPEST_STACK)
        self._ends = np.searchsorted(found.stacks, np.arange(len(stacks) + 1))
        self._numbers, self._inside = spaces.locate(found.pids, found.addresses, found.times)
        self._modules = spaces.modules
        self._told: dict[tuple[object, ...], ModuleNames] = {}
        for module, addresses, times in by_module(self._modules, self._numbers, self._inside, found.times):
            named = naming.name(module, addresses, times) or Named()
            rows = named.names.find(addresses)
            has = rows >= 0
            found_rows = dict(zip(addresses[has].tolist(), rows[has].tolist(), strict=True))
            outermost, no_calls = (
                frozenset(() if each is None else each.tolist()) for each in (named.outermost, named.no_calls)
            )
            told = ModuleNames(module, len(addresses), found_rows, named, outermost, no_calls)
            self._told[module.identity] = told
        self._at = cache(self._find_at)
        self._stack = cache(self._find_stack)
        self._origin = cache(_origin)
        self._made_of = cache(self._make)

    @property
    def modules(self) -> list[ModuleNames]:
        """How the naming of each module went."""
        return list(self._told.values())

    def _find_at(self, number: int, address: int) -> tuple[CpuFrame, ...]:
        """The frames of one place, the outermost first."""
        module = self._modules[number]
        told = self._told[module.identity]
        row = told.rows.get(address)
        if row is None:
            return (CpuFrame(unnamed(module, address), module),)
        frames = [
            CpuFrame(
                demangled(frame.function) or unnamed(module, address),
                module,
                frame.file,
                frame.line,
                True,
                i > 0,
                frame.function,
            )
            for i, frame in enumerate(told.named.names.frames(row))
        ]
        return tuple(frames if self._look.inlines else frames[:1])

    def _places(self, row: int) -> list[tuple[int, int]]:
        """Module and address of a stack's frames, the outermost first, up to one that can be no return address."""
        part = slice(int(self._ends[row]), int(self._ends[row + 1]))
        places = list(zip(self._numbers[part].tolist(), self._inside[part].tolist(), strict=True))
        # What was walked by call frame information needs no call: a signal may have come there.
        is_sure = self._ended[row] is not None
        for index, (number, address) in enumerate([] if is_sure else places[1:], 1):
            if address in self._told[self._modules[number].identity].no_calls:
                places = places[:index]
                break
        return places[::-1]

    def _frames(self, row: int) -> list[CpuFrame]:
        """A stack's frames, the outermost first, with those of Python in the place of their evaluation loop's."""
        places = self._places(row)
        if not self._python.has_frames(row):
            return [frame for place in places for frame in self._at(*place)]
        groups = {at: self._made(row, at, frames, len(places)) for at, frames in self._python.groups(row).items()}
        self._place(groups, places)
        if missing := self._python.missing(row):
            outermost = groups[max(groups)]
            groups[max(groups)] = [CpuFrame(missing, _NO_CODE), *outermost]
        shown: list[CpuFrame] = []
        for at, place in zip(range(len(places) - 1, -1, -1), places, strict=True):
            if at in groups:
                shown += groups.pop(at)
            else:  # an interpreter may name its functions in a perf map besides (python -X perf): that is the same
                shown += (frame for frame in self._at(*place) if not _is_of_perf_map(frame))
        # Of those that are left it is not known between which frames of C they ran.
        return [*(frame for group in groups.values() for frame in group), *shown]

    def _place(self, groups: dict[int, list[CpuFrame]], places: list[tuple[int, int]]) -> None:
        """Puts frames of Python whose loop is not known in the place of the next frame of CPython."""
        depth, modules = len(places), [self._modules[number] for number, _ in reversed(places)]
        known = max((at for at in groups if at < depth), default=-1)
        free = (at for at in range(known + 1, depth) if is_interpreter(modules[at]))
        for lost in [at for at in groups if at >= depth]:
            if (at := next(free, None)) is None:
                break
            groups[at] = groups.pop(lost)

    def _made(self, row: int, at: int, frames: list[tuple[int, int]], places: int) -> list[CpuFrame]:
        """Frames of Python that stand in the place of frame `at`, of a stack with so many places."""
        number = int(self._numbers[int(self._ends[row]) + min(at, places - 1)]) if places else None
        return [self._made_of(code, line, number) for code, line in frames]

    def _make(self, code: int, line: int, number: int | None) -> CpuFrame:
        """A frame of Python in a module."""
        made = self._python.frame(code, line)
        module = _NO_MODULE if number is None else self._modules[number]
        return CpuFrame(made.text, module, made.file, made.line, True, False, made.function)

    def _is_truncated(self, row: int) -> bool:
        """Whether more frames may be missing behind the last one."""
        return bool(self._truncated[row]) and len(self._places(row)) == self._ends[row + 1] - self._ends[row]

    def frames(self, stack: int) -> tuple[str, ...]:
        """The stack's frames as text, outermost first; empty where the stack is not in the capture."""
        return self._stack(stack)[0]

    def origins(self, stack: int) -> tuple[Origin, ...]:
        """Where each of these frames is from."""
        return self._stack(stack)[1]

    def _find_stack(self, stack: int) -> tuple[tuple[str, ...], tuple[Origin, ...]]:
        row = self._rows.get(stack)
        if row is None:
            return (), ()
        frames = self._frames(row)
        if not self._are_cut:
            frames = without_strays(frames, self._keeps)
        there = [frame for frame in frames if frame.module is not _NO_CODE]
        end = mark(*self._end(row, there), self._is_truncated(row), self._ended[row]) if there else None
        if not self._look.interpreter:
            frames = list(without_interpreter(frames))
        texts = (*((end,) if end else ()), *(self._text(frame) for frame in frames))
        return texts, (*((_MISSING,) if end else ()), *(self._origin(frame) for frame in frames))

    def _end(self, row: int, frames: Sequence[CpuFrame]) -> tuple[End, Module | None]:
        """How a stack with these frames ends, and in what."""
        if not frames:
            return End.UNKNOWN, None
        first = frames[0]
        if self._ended[row] is not None:
            return (End.WHOLE if self._ended[row] == WHOLE else End.CUT), first.module
        told = self._told.get(first.module.identity)
        if told is None:  # a stack without addresses, that has frames of Python
            return End.UNKNOWN, None
        # The place of that frame: strays may be before it.
        places = self._places(row)
        address = next((inside for number, inside in places if self._modules[number] == first.module), 0)
        is_outermost = None if told.named.outermost is None else address in told.outermost
        if self._are_cut and has_no_beginning(first.module):
            is_outermost = bool(is_outermost)
        return end_of(first.symbol, first.module, is_outermost, told.named.frame_pointers), first.module

    def python(self, weights: Mapping[int, int]) -> PythonCounts:
        """What stacks tell of Python.

        Args:
            weights: of stacks, by id.
        """
        flags, counts = self._python.flags(), Counter[int]()
        for stack, weight in weights.items():
            if (row := self._rows.get(stack)) is not None:
                counts[int(flags[row])] += weight
        return PythonCounts.from_counts(counts)

    def ends(self, weights: Mapping[int, int]) -> WholeStacks:
        """Where stacks end.

        Args:
            weights: of stacks, by id.
        """
        whole = unknown = deep = 0
        ends, deep_in, guesses = Counter[str](), Counter[str](), Counter[str]()
        processes = []
        for stack, weight in weights.items():
            row = self._rows.get(stack)
            if row is None:
                continue
            if guessed := int(self._guessed[row]):
                # That is the number of a caller: of the address before it, counted from the innermost.
                inner = min(int(self._ends[row]) + guessed - 1, len(self._numbers) - 1)
                guesses[code_of(self._modules[self._numbers[inner]])] += weight
            frames = [frame for place in self._places(row) for frame in self._at(*place)]
            end, module = self._end(row, frames if self._are_cut else without_strays(frames, self._keeps))
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

    def _keeps(self, module: Module) -> bool | None:
        """Whether a module's code keeps frame pointers; None where that is not known."""
        told = self._told.get(module.identity)
        return told.named.frame_pointers if told is not None else None

    def _text(self, frame: CpuFrame) -> str:
        if not self._look.lines or not frame.file:
            return frame.name
        if frame.name.startswith(PYTHON_FUNCTION) and frame.name.endswith(f":{frame.file}"):
            return frame.name + (f":{frame.line}" if frame.line else "")
        return f"{frame.name} {os.path.basename(frame.file)}" + (f":{frame.line}" if frame.line else "")

    def shares(self, weights: Mapping[int, int]) -> dict[tuple[object, ...], tuple[int, int]]:
        """By a module's identity, the weight of stacks with a frame in it, and of those with an unnamed one in it.

        An interpreter's own frames do not count where they are left out in favour of Python functions.

        Args:
            weights: of stacks, by id.
        """
        shares: dict[tuple[object, ...], tuple[int, int]] = {}
        for stack, weight in weights.items():
            row = self._rows.get(stack)
            places = self._places(row) if row is not None else []
            while places and self._modules[places[0][0]].path == NOWHERE:
                places.pop(0)  # what a walk finds behind the last frame is often no code
            if row is not None and self._python.has_frames(row) and not self._look.interpreter:
                places = [place for place in places if not is_interpreter(self._modules[place[0]])]
            met: dict[tuple[object, ...], bool] = {}
            for number, address in places:
                identity = self._modules[number].identity
                met[identity] = met.get(identity, False) or address not in self._told[identity].rows
            for identity, is_unnamed in met.items():
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
    # What a compiler of another language than C wrote so that it says more than a name.
    return CodeKind.C if frame.symbol == frame.name else CodeKind.CPP


def _is_of_perf_map(frame: CpuFrame) -> bool:
    """Whether CPython named this function; C++ has a namespace of that name, too."""
    return frame.module.kind is ModuleKind.GENERATED and frame.name.startswith(PYTHON_FUNCTION)


def unnamed(module: Module, address: int) -> str:
    """What stands for a frame whose function has no name: `[libfoo.so+0x1234]`, an offset in the file."""
    match module.kind:
        case ModuleKind.FILE:
            return f"[{os.path.basename(module.path)}+0x{address:x}]"
        case ModuleKind.GENERATED:
            return f"0x{address:x}" if module.path == NOWHERE else "[anon]"
    return module.path  # [vdso] or [kernel]


def _guesses(stacks: pa.Table) -> NDArray[np.int64]:
    """Of each stack, the number of the first caller that was guessed, from the innermost frame on; 0 if none was."""
    found = np.zeros(len(stacks), np.int64)
    if "marks" in stacks.column_names:  # which came with format 6
        marks = stacks["marks"].combine_chunks()
        of = pc.list_parent_indices(marks).to_numpy()
        numbers = ranges(0, np.bincount(of))
        guessed = np.flatnonzero((pc.list_flatten(marks).to_numpy() & Mark.GUESSED) != 0)
        rows, first = np.unique(of[guessed], return_index=True)
        found[rows] = np.maximum(numbers[guessed[first]], 1)
    return found
