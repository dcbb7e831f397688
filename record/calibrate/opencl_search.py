"""The search of `iaprof calibrate` in an OpenCL driver: what is kept for each GPU, and what ends kernels and programs.

A cl_kernel has a table of kernels, of which each is one GPU's: at these the search for paths (calibrate_search.py)
begins. What belongs to a program is searched from the cl_kernel, in a program for each GPU alone: one offset of a path
may grow with the GPU's number, by the same from each to the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from iaprof.record.calibrate.level_zero_driver import DriverError
from iaprof.record.calibrate.level_zero_own import Watched
from iaprof.record.calibrate.search import MAX_BIAS, WINDOW, Candidate, Kernel, Memory, Path, Search, nearest

OF_GPU = ("address", "allocation", "code", "kernel_class", "name", "size")  # what is searched from one GPU's kernel
STEPS = 3  # of the path from a queue to its GPU's number
MAX_NUMBERS = 2_000  # such paths
_WORD, _HALF = 8, 4


def tables(memory: Memory, search: Search, kernels: Sequence[Sequence[Kernel]]) -> list[int]:
    """Where in a cl_kernel the pointer to the kernels of each GPU is: offsets, smallest first.

    Args:
        memory: of this process.
        search: in this driver.
        kernels: for each GPU, those of programs that are for it alone.
    """
    memory.look_again()

    def is_table(at: int) -> bool:
        classes = set()
        for gpu, of in enumerate(kernels):
            for kernel in of:
                table = memory.number(kernel.handle + at) or 0
                if not memory.is_object(table) or any(memory.number(table + _WORD * each) for each in range(gpu)):
                    return False
                classes.add(search.class_of(memory.number(table + _WORD * gpu) or 0))
        return len(classes) == 1 and None not in classes

    return [at for at in range(0, WINDOW, _WORD) if is_table(at)]


def of_gpu(memory: Memory, at: int, gpu: int, kernel: Kernel) -> Kernel:
    """A cl_kernel's kernel for a GPU, if its table is there."""
    table = memory.number(kernel.handle + at) or 0
    return dataclasses.replace(kernel, handle=memory.number(table + _WORD * gpu) or 0)


def growing(found: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """Two paths, and how much their offsets grow from GPU to GPU: what was found for each GPU agrees with that.

    Args:
        found: for each GPU, pairs of paths.
    """
    others = [set(of) for of in found[1:]]
    second: dict[
        tuple[int, ...], list[tuple[int, Path]]
    ] = {}  # by all but one of the offsets of the first path: what that one is
    for first, also in found[1]:
        for at in range(len(first)):
            second.setdefault((at, *first[:at], *first[at + 1 :]), []).append((first[at], also))
    grown = []
    for first, also in found[0]:
        for at in range(len(first)):
            for offset, _ in second.get((at, *first[:at], *first[at + 1 :]), ()):
                more = tuple(max(offset - first[at], 0) if each == at else 0 for each in range(len(first)))
                if len(also) == len(first) and all(
                    moved((first, also), more, gpu) in of for gpu, of in enumerate(others, 1)
                ):
                    grown.append((first, also, more))
    return sorted(set(grown), key=nearest)


def moved(candidate: Candidate, more: Path, gpu: int) -> Candidate:
    """The same paths for a GPU."""
    return tuple(tuple(offset + gpu * each for offset, each in zip(path, more, strict=True)) for path in candidate)


def gpu_numbers(memory: Memory, queues: Sequence[tuple[int, int]]) -> list[Path]:
    """Paths of three offsets from a queue to the number of its GPU, nearest first.

    Args:
        memory: of this process.
        queues: handle and number.
    """
    memory.look_again()
    highest = max(queues, key=lambda queue: queue[1])
    ordered = sorted(queues, key=lambda queue: queue is not highest)
    level: list[tuple[Path, list[int]]] = [((), [handle for handle, _ in ordered])]
    for _ in range(STEPS - 1):
        further, met = [], set()
        for prefix, addresses in level:
            for index, word in enumerate(memory.words(addresses[0])):
                if not word or not memory.is_object(word):
                    continue
                pointers = [memory.number(address + _WORD * index) or 0 for address in addresses]
                # A number is not that of a GPU if it is the same object's for all.
                if all(map(memory.is_object, pointers)) and tuple(pointers) not in met:
                    met.add(tuple(pointers))
                    further.append(((*prefix, _WORD * index), pointers))
        level = further
    return list(_numbers(memory, level, [number for _, number in ordered]))[:MAX_NUMBERS]


def _numbers(memory: Memory, objects: list[tuple[Path, list[int]]], numbers: list[int]) -> Iterator[Path]:
    for prefix, addresses in objects:
        block = memory.read(addresses[0], WINDOW)
        at = block.find(numbers[0].to_bytes(_HALF, "little"))
        while at >= 0:
            if at % _HALF == 0 and all(
                memory.number(address + at, _HALF) == number for address, number in zip(addresses, numbers, strict=True)
            ):
                yield (*prefix, at)
            at = block.find(numbers[0].to_bytes(_HALF, "little"), at + 1)


@dataclass(frozen=True)
class Destructor:
    """What ends an object."""

    functions: tuple[int, ...]  # of which one is called, once
    bias: int  # bytes from the object, their first argument, to its handle


def destructor(memory: Memory, search: Search, handle: int, release: Callable[[], None]) -> Destructor:
    """The functions in which an object ends.

    Args:
        memory: of this process.
        search: in this driver.
        handle: the object's.
        release: a call that ends it.

    Raises:
        DriverError: it is not known.
    """
    memory.look_again()
    for bias in range(_WORD, MAX_BIAS + 1, _WORD):  # at 0 is the table that loaders call through
        if search.class_of(handle - bias) is None:
            continue
        watched = Watched(memory, handle, bias)
        notes = watched.notes(release, ends=True)
        if {note.slot for note in notes if note.first == handle - bias and note.slot < 2} == {1}:
            return Destructor(tuple(watched.functions[:2]), bias)
        break
    raise DriverError("what ends its kernels and programs is not known")
