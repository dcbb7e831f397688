"""Checks the answers of the processes of `iaprof calibrate`: anyone may have written them.

What Layout.from_json checks is not checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iaprof.basics.clean import clean
from iaprof.bpf.driver_layout import MAX_ENTRIES
from iaprof.record.calibrate.code import Problem
from iaprof.record.calibrate.search import Candidate, Path, nearest

# By kind: of how many paths, or paths and numbers, candidates consist.
LENGTHS = {
    "address": (1, 2),
    "allocation": (2,),
    "binary": (2,),
    "code": (1,),
    "kernel_class": (2,),
    "module": (2,),
    "name": (1,),
    "size": (1,),
}
OWN_KERNELS = "launch of the driver's own kernels"  # in place of a function's name
MAX_PROBLEM = 300  # characters
_MAX_PLACE = 1 << 48
Candidates = Mapping[str, frozenset[Candidate]]


@dataclass(frozen=True)
class Answer:
    """The answer of one process."""

    version: str
    functions: Mapping[str, int]  # by name: place in the file
    candidates: Candidates
    no_own: str  # why it is unknown where the driver launches kernels of its own; empty if known


def read_place(raw: Any) -> int:
    """Reads a place in the file, in bytes.

    Raises:
        ValueError, TypeError, OverflowError: it is not a place.
    """
    place = int(raw)
    if not 0 <= place < _MAX_PLACE:
        raise ValueError("place")
    return place


def read_places(raw: Any, names: Iterable[str]) -> dict[str, int]:
    """Reads the places in the file of those functions that the answer has."""
    return {name: read_place(raw[name]) for name in names if name in raw}


def read_list(raw: Any) -> list[Any]:
    """Reads a list of launches of the driver's own kernels, all of them: a layout with fewer would look complete.

    Raises:
        ValueError, TypeError: it is not a list, or longer than layouts allow.
    """
    if len(raw) > MAX_ENTRIES:
        raise ValueError("own")
    return list(raw)


def _candidates(raw: Any, kind: str, many: tuple[int, ...]) -> Iterator[Candidate]:
    for paths in raw:
        candidate = tuple(tuple(map(int, path)) for path in paths)
        if len(candidate) not in many or not all(candidate):
            raise ValueError(kind)
        yield candidate


def read_common(raw: Any, functions: Iterable[str], lengths: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Reads the members of Answer.

    Args:
        raw: the answer.
        functions: names of those whose places are read.
        lengths: LENGTHS, or a similar mapping.

    Raises:
        Problem: the answer says why there is none.
        ValueError, KeyError, TypeError, AttributeError, OverflowError: the answer makes no sense.
    """
    if "problem" in raw:
        raise Problem(clean(str(raw["problem"])[:MAX_PROBLEM]))
    found, no_own = raw["candidates"], clean(str(raw.get("no_own", ""))[:MAX_PROBLEM])
    return {
        "version": clean(str(raw["version"])[:64]),
        "functions": read_places(raw["functions"], functions),
        "candidates": {kind: frozenset(_candidates(found.get(kind, ()), kind, many)) for kind, many in lengths.items()},
        "no_own": no_own or ("" if raw.get("own") else "its copies are unknown"),
    }


def common_functions(answers: Sequence[Answer], needed: Iterable[str]) -> dict[str, int]:
    """Returns the places of the functions on which all answers agree.

    Raises:
        Problem: a needed function is missing.
    """
    functions = dict(set.intersection(*(set(answer.functions.items()) for answer in answers)))
    if missing := [name for name in needed if name not in functions]:
        raise Problem(f"it has no {missing[0]}")
    return functions


def best(answers: Sequence[Answer], kind: str, key: Callable[[Candidate], Any] = nearest) -> Candidate:
    """Returns a candidate on which all answers agree; of several, always the same one.

    Raises:
        Problem: they agree on none.
    """
    common = frozenset.intersection(*(answer.candidates[kind] for answer in answers))
    if not common:
        raise Problem(f"no way from a kernel's handle leads to its {kind} in all modules on all devices")
    return min(common, key=key)


def best_address(answers: Sequence[Answer]) -> tuple[Candidate, Candidate]:
    """Returns the best candidates for the address, and for the allocation around it."""
    address = best(answers, "address", lambda candidate: (not _is_of_one_object(candidate), nearest(candidate)))
    return address, best(answers, "allocation", lambda candidate: (candidate[0] != address[0], nearest(candidate)))


def _is_of_one_object(address: Candidate) -> bool:
    """Whether the same object leads to the allocation and to the code's offset in it.

    Some other objects that lead to the same allocation do so for small modules only.
    """
    return len(address) == 1 or address[0][:-2] == address[1][:-1]


def best_class(objects: Iterable[Path], answers: Sequence[Answer]) -> tuple[Path, list[int]]:
    """Returns the path to a virtual table, of the first object that has one, and its places in the file on the devices.

    Args:
        objects: paths to objects, in order of preference.
        answers: of all devices.

    Raises:
        Problem: no object has one.
    """
    by_path = [{path: place[0] for path, place in answer.candidates["kernel_class"]} for answer in answers]
    common = set.intersection(*map(set, by_path))
    for prefix in objects:
        fitting = [path for path in common if path[:-1] == prefix]
        if fitting:
            return min(fitting), sorted({places[min(fitting)] for places in by_path})
    raise Problem("no virtual table tells its kernels from other objects")
