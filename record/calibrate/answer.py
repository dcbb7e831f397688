"""What the processes of `iaprof calibrate` answer: it is checked, as anybody may have written it.

What Layout.from_json checks is left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from iaprof.bpf.probes.driver_layout import MAX_ENTRIES
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.formats.elf import PF_EXECUTE
from iaprof.formats.profile import clean
from iaprof.record.calibrate.calls import CALL, CALL_BYTES, JUMP, calls_in
from iaprof.record.calibrate.entry import LENGTH, probe_offset
from iaprof.record.calibrate.search import Candidate, Path, nearest

# Of how many paths, or a path and a number, candidates consist.
PARTS = {
    "address": (1, 2),
    "allocation": (2,),
    "binary": (2,),
    "code": (1,),
    "kernel_class": (2,),
    "module": (2,),
    "name": (1,),
    "size": (1,),
}
OWN_KERNELS = "launch of the driver's own kernels"  # in place of a function's name, where they are launched
MAX_PROBLEM = 300  # characters
_MAX_PLACE = 1 << 48
_NO_CODE = "it answers with an address that is in no segment of code"
_CALL_BY_RAX = b"\xff\x90"
Candidates = Mapping[str, frozenset[Candidate]]


class Problem(Exception):
    """Why there is no layout: a clause about the library."""


@dataclass(frozen=True)
class Answer:
    """Of one process."""

    version: str
    functions: Mapping[str, int]  # by name: place in the file
    candidates: Candidates
    no_own: str  # why it is not known from where the driver launches kernels of its own; empty where it is


def read_version(told: Any) -> str:
    """The driver's own word.

    Raises:
        Problem: the process told of one.
    """
    if "problem" in told:
        raise Problem(clean(str(told["problem"])[:MAX_PROBLEM]))
    return clean(str(told["version"])[:64])


def read_place(told: Any) -> int:
    """A place in the file, in bytes.

    Raises:
        ValueError, TypeError, OverflowError: it is none.
    """
    place = int(told)
    if not 0 <= place < _MAX_PLACE:
        raise ValueError("place")
    return place


def read_places(told: Any, names: Iterable[str]) -> dict[str, int]:
    """Places in the file of those of these functions that it told of."""
    return {name: read_place(told[name]) for name in names if name in told}


def read_list(told: Any) -> list[Any]:
    """Launches of the driver's own kernels: all of them, as a layout with a part of them would look complete.

    Raises:
        ValueError, TypeError: it is no list, or a longer one than layouts have.
    """
    if len(told) > MAX_ENTRIES:
        raise ValueError("own")
    return list(told)


def read_candidates(told: Any, parts: Mapping[str, tuple[int, ...]]) -> Candidates:
    """Candidates of the kinds that PARTS, or the like, has."""
    return {kind: frozenset(_candidates(told.get(kind, ()), kind, many)) for kind, many in parts.items()}


def _candidates(told: Any, kind: str, many: tuple[int, ...]) -> Iterator[Candidate]:
    for each in told:
        candidate = tuple(tuple(map(int, part)) for part in each)
        if len(candidate) not in many or not all(candidate):
            raise ValueError(kind)
        yield candidate


def read_no_own(told: Any) -> str:
    """Why launches of the driver's own kernels are not known."""
    return clean(str(told.get("no_own", ""))[:MAX_PROBLEM]) or ("" if told.get("own") else "its copies are unknown")


def common_functions(answers: Sequence[Answer], needed: Iterable[str]) -> dict[str, int]:
    """Places of the functions on which all agree.

    Raises:
        Problem: one that is needed is missing.
    """
    functions = dict(set.intersection(*(set(answer.functions.items()) for answer in answers)))
    if missing := [name for name in needed if name not in functions]:
        raise Problem(f"it has no {missing[0]}")
    return functions


def best(answers: Sequence[Answer], kind: str, key: Callable[[Candidate], Any] = nearest) -> Candidate:
    """What all agree on, of several always the same.

    Raises:
        Problem: they do not agree.
    """
    common = frozenset.intersection(*(answer.candidates[kind] for answer in answers))
    if not common:
        raise Problem(f"no way from a kernel's handle leads to its {kind} in all modules on all devices")
    return min(common, key=key)


def best_address(answers: Sequence[Answer]) -> tuple[Candidate, Candidate]:
    """The same for the address, and the allocation around it."""
    address = best(answers, "address", lambda candidate: (not _is_of_one_object(candidate), nearest(candidate)))
    return address, best(answers, "allocation", lambda candidate: (candidate[0] != address[0], nearest(candidate)))


def _is_of_one_object(address: Candidate) -> bool:
    """Whether one object leads to the allocation and knows where in it the code is.

    Of other objects that lead to the same allocation some do so for small modules only.
    """
    return len(address) == 1 or address[0][:-2] == address[1][:-1]


def best_class(objects: Iterable[Path], answers: Sequence[Answer]) -> tuple[Path, list[int]]:
    """A virtual table in the first of some objects that has one, and where in the file it lies on some device.

    Args:
        objects: paths to them.
        answers: of all devices.

    Raises:
        Problem: there is none.
    """
    found = [{path: place[0] for path, place in answer.candidates["kernel_class"]} for answer in answers]
    common = set.intersection(*map(set, found))
    for prefix in objects:
        here = [path for path in common if path[:-1] == prefix]
        if here:
            return min(here), sorted({of[min(here)] for of in found})
    raise Problem("no virtual table tells its kernels from other objects")


def address_of(elf: LibraryFile, place: int, executable: bool) -> int:
    """The virtual address of a place in the file, in a segment of code or of data.

    Raises:
        Problem: it is in none.
    """
    for segment in elf.loads:
        if 0 <= place - segment.offset < segment.size and bool(segment.flags & PF_EXECUTE) is executable:
            return place - segment.offset + segment.address
    raise Problem(_NO_CODE if executable else "it answers with an address that is in no segment of data")


@dataclass(frozen=True)
class Code:
    """The driver's file."""

    elf: LibraryFile
    file: BinaryIO

    def beginning(self, place: int) -> bytes:
        """As much of a function as is looked at."""
        self.file.seek(place)
        return self.file.read(LENGTH)

    def probe(self, place: int, needed: set[int], keeps_stack: bool = False, keeps_memory: bool = True) -> int:
        """Where to probe a function: calibrate_entry.probe_offset, as a virtual address.

        Raises:
            Problem: it is no code of the driver.
        """
        start = address_of(self.elf, place, executable=True)
        return start + probe_offset(self.beginning(place), needed, keeps_stack, keeps_memory)

    def call(self, place: int) -> int:
        """The virtual address of an instruction that calls a function: directly, or by what is at disp32(%rax).

        Raises:
            Problem: there is none: a probe there would change other code.
        """
        address = address_of(self.elf, place, executable=True)
        if not self.beginning(place).startswith((bytes([CALL]), _CALL_BY_RAX)):
            raise Problem("it answers with a call that is none")
        return address

    def segment(self, place: int) -> tuple[int, int, int]:
        """The segment of code in which a place of the file lies: place and address of its beginning, and bytes.

        Raises:
            Problem: it is in none.
        """
        for segment in self.elf.loads:
            if segment.flags & PF_EXECUTE and 0 <= place - segment.offset < segment.size:
                return segment.offset, segment.address, segment.size
        raise Problem(_NO_CODE)

    def called(self, places: Set[int]) -> frozenset[int]:
        """Those of some functions that are called in the segment of code in which the first of them lies."""
        if not places:
            return frozenset()
        wanted = np.array(sorted(places), np.int64)
        start, _, length = self.segment(int(wanted[0]))
        self.file.seek(start)
        code = np.frombuffer(self.file.read(length), np.uint8)
        _, targets = calls_in(code, start)
        return frozenset(wanted[np.isin(wanted, targets)].tolist())

    def calls(self, function: int, other: int) -> bool:
        """Whether a function calls or jumps to another in what is looked at of it."""
        code = self.beginning(function)
        return any(
            function + at + CALL_BYTES + int.from_bytes(code[at + 1 : at + CALL_BYTES], "little", signed=True) == other
            for at in range(len(code) - CALL_BYTES + 1)
            if code[at] in (CALL, JUMP)
        )
