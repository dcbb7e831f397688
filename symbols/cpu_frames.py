"""Symbolizes the frames of CPU stacks, each distinct address once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.guesses import SUFFIX
from iaprof.formats.header.stack_counts import ProcessEnd, PythonCounts, WholeStacks
from iaprof.formats.profile import CodeKind, Origin
from iaprof.formats.ranges import batches, groups, ranges
from iaprof.symbols.names.address_space import NOWHERE, AddressSpaces
from iaprof.symbols.names.calls import DEEPEST_STACK, Places, calls, identities
from iaprof.symbols.names.demangle import demangled
from iaprof.symbols.names.names import Module, ModuleKind, Symbolized, Symbolizer, is_shortened, shortened
from iaprof.symbols.python.frames import PYTHON_FUNCTION, PythonStacks, is_interpreter, without_interpreter
from iaprof.symbols.unwind.stack_ends import WHOLE, End, code_of, end_of, has_no_beginning, mark, without_strays

_MISSING = Origin(CodeKind.UNKNOWN)  # of the frame that stands for missing frames


@dataclass(slots=True, eq=False)
class CpuFrame:
    """One frame of a stack. Frames are compared by identity, and not frozen: captures have millions."""

    name: str  # demangled; a placeholder if the function has no name
    module: Module
    file: str = ""  # empty if unknown
    line: int = 0  # 0 if unknown
    is_named: bool = False
    is_inlined: bool = False
    symbol: str = ""  # the name before demangling
    text: str = ""  # in stacks
    origin: Origin = _MISSING
    is_python: bool = False
    is_of_interpreter: bool = False  # CPython's own


@dataclass(frozen=True)
class FrameOptions:
    """The user's options for CPU frames."""

    inlines: bool = True  # show inlined functions as frames
    lines: bool = False  # show file and line after the function
    interpreter: bool = False  # show CPython's own frames between Python functions
    guesses: bool = True  # mark callers that are guesses


@dataclass(frozen=True)
class ModuleNames:
    """The names of the addresses that stacks have in one module."""

    module: Module
    addresses: int  # the number of distinct addresses
    rows: dict[int, int]  # by address, if it has a name: its range in `symbolized.names`
    symbolized: Symbolized
    outermost: frozenset[int] = frozenset()  # the addresses in functions that have no caller


_NO_CODE = Module(ModuleKind.FILE, "")  # of the frame that stands for missing Python frames
_NEVER = np.uint64((1 << 64) - 1)  # later than any time
_FRAMES_AT_ONCE = 1 << 20
_LIBRARY, _CUPTI, _DRIVER = "libiaprof_cuda.so", "libcupti.so", "libcuda.so"
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
        self._pids = stacks["pid"].to_numpy()
        self._python = PythonStacks(stacks, codes)
        depths, places, self._guessed = _places(stacks, spaces)  # of each frame, whether it was found by a guess
        self._truncated = self._truncated | (depths >= DEEPEST_STACK)
        # The frames of the stack in row i: _starts[i] to _starts[i + 1].
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(depths)])
        self._modules, self._places = spaces.modules, places
        self._identities = identities(self._modules)[places.modules]  # of each place
        self._has_name, no_calls = np.zeros((2, len(places.modules)), bool)  # likewise
        self._names: dict[tuple[object, ...], ModuleNames] = {}  # by the module's identity
        self.shortened: dict[str, set[str]] = {}  # names that were cut, by the module's path
        for number, here in groups(self._identities):
            module = self._modules[number]
            addresses, which = np.unique(places.addresses[here], return_inverse=True)
            first = np.full(len(addresses), _NEVER)
            np.minimum.at(first, which, places.times[here])
            symbolized = symbolizer.name(module, addresses, first) or Symbolized()
            rows = symbolized.names.find(addresses)
            has_name = rows >= 0
            row_of_address = dict(zip(addresses[has_name].tolist(), rows[has_name].tolist(), strict=True))
            outermost = frozenset(() if symbolized.outermost is None else symbolized.outermost.tolist())
            self._names[module.identity] = ModuleNames(module, len(addresses), row_of_address, symbolized, outermost)
            self._has_name[here] = has_name[which]
            if symbolized.no_calls is not None:
                no_calls[here] = np.isin(addresses, symbolized.no_calls)[which]
        self._kept = self._kept_frames(no_calls)
        self._frames_at = cache(self._find_frames_at)
        self._guessed_frames_at = cache(partial(self._find_frames_at, is_guess=True))
        self._stack = cache(self._find_stack)
        self._python_frames_of: dict[int | None, list[CpuFrame | None]] = {}  # by module's number: of each kind

    @property
    def modules(self) -> list[ModuleNames]:
        """The names in each module."""
        return list(self._names.values())

    def _find_frames_at(self, place: int, is_guess: bool = False) -> tuple[CpuFrame, ...]:
        """Returns the frames at a place, the outermost first.

        Args:
            place: the place.
            is_guess: whether to mark them, as the place was found by a guess.
        """
        module, address = self._modules[self._places.modules[place]], int(self._places.addresses[place])
        names = self._names[module.identity]
        row = names.rows.get(address)
        if row is None:
            return (self._with_text(CpuFrame(unnamed(module, address), module), is_guess),)
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
        return tuple(self._with_text(frame, is_guess) for frame in (frames if self._options.inlines else frames[:1]))

    def _with_text(self, frame: CpuFrame, is_guess: bool = False) -> CpuFrame:
        """Fills in what a stack needs of each of its frames."""
        frame.text, frame.origin = self._find_text(frame), _origin(frame)
        frame.is_python, frame.is_of_interpreter = frame.name.startswith(PYTHON_FUNCTION), is_interpreter(frame.module)
        if is_guess and not frame.is_python:
            frame.text += SUFFIX
        return frame

    def _readable(self, symbol: str, module: Module) -> str:
        name = shortened(demangled(symbol))
        if is_shortened(name):
            self.shortened.setdefault(module.path, set()).add(name)
        return name

    def _kept_frames(self, no_calls: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns how many frames of each stack count, from the innermost one on: int64[stacks].

        A stack that was walked by frame pointers is cut at the first address that cannot be a return address.

        Args:
            no_calls: whether no call instruction ends at each place.
        """
        kept = np.diff(self._starts)
        frames = np.flatnonzero(no_calls[self._places.of_frame]) if no_calls.any() else np.empty(0, np.int64)
        stacks = np.searchsorted(self._starts, frames, side="right") - 1
        levels = frames - self._starts[stacks]
        # A walk by call frame information is reliable; it also passes instructions that a signal interrupted.
        cut = (levels > 0) & np.array([ended is None for ended in self._ended], bool)[stacks]
        np.minimum.at(kept, stacks[cut], levels[cut])
        return kept

    def _places_of(self, row: int) -> list[int]:
        """Returns the places of a stack's frames, the outermost first."""
        start = int(self._starts[row])
        places: list[int] = self._places.of_frame[start : start + int(self._kept[row])][::-1].tolist()
        return places

    def _guesses_of(self, row: int) -> NDArray[np.bool_]:
        """Returns which of a stack's places were found by a guess, the innermost first: bool[places]."""
        start = int(self._starts[row])
        return self._guessed[start : start + int(self._kept[row])]

    def _frames_at_places(self, row: int) -> list[tuple[CpuFrame, ...]]:
        """Returns the frames at each of a stack's places, the outermost first."""
        places, guesses = self._places_of(row), self._guesses_of(row)
        if not self._options.guesses or not guesses.any():
            return list(map(self._frames_at, places))
        return [
            self._guessed_frames_at(place) if is_guess else self._frames_at(place)
            for place, is_guess in zip(places, guesses[::-1].tolist(), strict=True)
        ]

    def _frames(self, row: int) -> list[CpuFrame]:
        """Returns a stack's frames, the outermost first, with Python frames in place of their evaluation loops."""
        at_places = self._frames_at_places(row)
        if not self._python.has_frames(row):
            return list(chain.from_iterable(at_places))
        places = self._places_of(row)
        groups = {
            at: self._python_frames(row, at, frames, len(places)) for at, frames in self._python.groups(row).items()
        }
        self._place_groups(groups, places)
        if missing := self._python.missing(row):
            outermost = groups[max(groups)]
            groups[max(groups)] = [self._with_text(CpuFrame(missing, _NO_CODE)), *outermost]
        shown: list[CpuFrame] = []
        for at, frames in zip(range(len(places) - 1, -1, -1), at_places, strict=True):
            if at in groups:
                shown += groups.pop(at)
            else:  # with python -X perf, a perf map names the same Python functions a second time
                shown += (frame for frame in frames if not _is_of_perf_map(frame))
        # The remaining Python frames go outermost: nobody knows between which C frames they ran.
        return [*(frame for group in groups.values() for frame in group), *shown]

    def _place_groups(self, groups: dict[int, list[CpuFrame]], places: list[int]) -> None:
        """Moves Python frames whose evaluation loop is unknown to the next frame of CPython."""
        depth, modules = len(places), [self._modules[number] for number in self._places.modules[places[::-1]]]
        known = max((at for at in groups if at < depth), default=-1)
        free = (at for at in range(known + 1, depth) if is_interpreter(modules[at]))
        for unplaced in [at for at in groups if at >= depth]:
            if (at := next(free, None)) is None:
                break
            groups[at] = groups.pop(unplaced)

    def _python_frames(self, row: int, at: int, kinds: list[int], places: int) -> list[CpuFrame]:
        """Returns the Python frames that replace frame `at` of a stack.

        Args:
            row: of the stack.
            at: the number of the replaced frame, from the innermost on.
            kinds: of the Python frames.
            places: the number of frames that the stack has without Python.
        """
        number = self._module_number(int(self._starts[row]) + min(at, places - 1)) if places else None
        known = self._python_frames_of.get(number)
        if known is None:
            known = self._python_frames_of[number] = [None] * self._python.kinds
        return [known[kind] or self._make_python_frame(kind, number, known) for kind in kinds]

    def _module_number(self, frame: int) -> int:
        return int(self._places.modules[self._places.of_frame[frame]])

    def _make_python_frame(self, kind: int, number: int | None, known: list[CpuFrame | None]) -> CpuFrame:
        """Makes a Python frame in the module of that number, and keeps it."""
        frame = self._python.frame(kind)
        module = _NO_MODULE if number is None else self._modules[number]
        made = self._with_text(CpuFrame(frame.text, module, frame.file, frame.line, True, False, frame.function))
        known[kind] = made
        return made

    def _is_truncated(self, row: int) -> bool:
        """Tells whether frames may be missing because the stack is as deep as the limit."""
        return bool(self._truncated[row]) and bool(self._kept[row] == self._starts[row + 1] - self._starts[row])

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
            frames = without_interpreter(frames)
        frames = _without_callback(frames)
        texts, origins = [frame.text for frame in frames], [frame.origin for frame in frames]
        return ((end, *texts), (_MISSING, *origins)) if end else (tuple(texts), tuple(origins))

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
        places = self._places
        own = (place for place in self._places_of(row) if self._modules[places.modules[place]] == first.module)
        address = next((int(places.addresses[place]) for place in own), 0)
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
        whole = unknown = deep = guessed_early = 0
        ends, deep_in, guesses = Counter[str](), Counter[str](), Counter[str]()
        processes = []
        for stack, weight in weights.items():
            row = self._rows.get(stack)
            if row is None:
                continue
            places = self._places_of(row)
            if self._are_cut:
                frames = list(self._frames_at(places[0])) if places else []
            else:
                frames = without_strays(
                    [*chain.from_iterable(map(self._frames_at, places))], self._keeps_frame_pointers
                )
            end, module = self._end(row, frames)
            is_early, guess = end is not End.WHOLE, self._first_guess(row)
            truncated = is_early and self._is_truncated(row)
            counts = weight * is_early, weight * truncated, weight * (guess is not None)
            processes.append(ProcessEnd(int(self._pids[row]), weight, *counts))
            if guess is not None:
                guesses[code_of(guess)] += weight
                guessed_early += weight * is_early
            elif is_early:
                deep += weight * truncated
                unknown += weight * (end is End.UNKNOWN and not truncated)
            else:
                whole += weight
            if is_early:
                ends[code_of(module)] += weight
                deep_in[code_of(module)] += weight * truncated
        sums = {"deep": deep, "guessed": guesses.total(), "guessed_early": guessed_early}
        return WholeStacks.from_counts(whole, unknown, ends, processes, deep_in=deep_in, guesses=guesses, **sums)

    def _first_guess(self, row: int) -> Module | None:
        """Returns the module in whose code a stack's innermost guess was made; None if it has no guess."""
        guesses = self._guesses_of(row)
        if not guesses.any():
            return None
        # The caller was guessed in the code one level further in.
        return self._modules[self._module_number(int(self._starts[row]) + max(int(guesses.argmax()) - 1, 0))]

    def _keeps_frame_pointers(self, module: Module) -> bool | None:
        """Tells whether a module was built with frame pointers; None if unknown."""
        names = self._names.get(module.identity)
        return names.symbolized.frame_pointers if names is not None else None

    def _find_text(self, frame: CpuFrame) -> str:
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
        chosen = [(self._rows[stack], weight) for stack, weight in weights.items() if stack in self._rows]
        rows, weight = np.array(chosen, np.int64).reshape(-1, 2).T
        modules = self._places.modules
        is_nowhere = np.array([module.path == NOWHERE for module in self._modules], bool)[modules]
        of_interpreter = np.array([is_interpreter(module) for module in self._modules], bool)[modules]
        replaced = self._python.have_frames[rows] & (not self._options.interpreter)
        shares = np.zeros((2, len(self._modules)), np.int64)
        for piece in batches(self._kept[rows], _FRAMES_AT_ONCE):
            kept = self._kept[rows[piece]]
            stack, level = np.repeat(np.arange(len(kept)), kept), ranges(0, kept)
            place = self._places.of_frame[ranges(self._starts[rows[piece]], kept)]
            # A walk by frame pointers often ends in addresses that are not code.
            last = np.full(len(kept), -1)
            known = ~is_nowhere[place]
            np.maximum.at(last, stack[known], level[known])
            counts = (level <= last[stack]) & ~(replaced[piece][stack] & of_interpreter[place])
            key = stack * len(self._modules) + self._identities[place]
            for share, which in zip(shares, (counts, counts & ~self._has_name[place]), strict=True):
                stack_of, identity = np.divmod(pc.unique(pa.array(key[which])).to_numpy(), len(self._modules))
                np.add.at(share, identity, weight[piece][stack_of])
        return {
            module.identity: (all_, unnamed)
            for module, all_, unnamed in zip(self._modules, *shares.tolist(), strict=True)
            if all_
        }


def _places(stacks: pa.Table, spaces: AddressSpaces) -> tuple[NDArray[np.int64], Places, NDArray[np.bool_]]:
    """Returns the number of frames of each stack, int64[n], the places of the frames, and which frames are guesses."""
    depths, places, guessed = [np.empty(0, np.int64)], [], [np.empty(0, bool)]
    for rows in batches(pc.list_value_length(stacks["ips"]).to_numpy(), _FRAMES_AT_ONCE):
        frames = calls(stacks.slice(rows.start, rows.stop - rows.start))
        depths.append(np.bincount(frames.stacks, minlength=rows.stop - rows.start))
        places.append(Places.of(*spaces.locate(frames.pids, frames.addresses, frames.times), frames.times))
        guessed.append(frames.guessed)
    return np.concatenate(depths), Places.joined(places), np.concatenate(guessed)


def _without_callback(frames: list[CpuFrame]) -> list[CpuFrame]:
    """Ends a stack, given outermost first, with the driver's function where NVIDIA's CUPTI called iaprof's library."""
    if not frames or os.path.basename(frames[-1].module.path) != _LIBRARY:
        return frames
    files = [os.path.basename(frame.module.path) for frame in frames]
    end = len(frames)
    while end and (files[end - 1] == _LIBRARY or files[end - 1].startswith(_CUPTI)):
        end -= 1
    while end > 1 and files[end - 1].startswith(_DRIVER) and files[end - 2] == files[end - 1]:
        end -= 1
    return frames[:end]


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
