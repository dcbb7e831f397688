"""Finds the kernel that a compile unit belongs to, if the unit's addresses are wrong.

Addresses in DWARF are relocations against symbols named after the kernels' sections. Intel's compiler leaves some of
these names empty, different ones in each compilation. The driver cannot resolve such relocations, so the unit's
functions, lines or both stay at address 0, while the kernel's code lies elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from iaprof.gpu.code import CodeKernel
from iaprof.report.gpu.functions import FunctionTree, Scope
from iaprof.report.gpu.lines import LineRange


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
