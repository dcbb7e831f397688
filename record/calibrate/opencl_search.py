"""Searches an OpenCL driver for `iaprof calibrate`: what it keeps for each GPU, and what ends kernels and programs.

A cl_kernel has a table of kernels, one for each GPU: the search for paths (search.py) begins at these. What belongs to
a program is searched from the cl_kernel, in programs for one GPU each: one offset of a path may grow with the GPU's
number, by the same amount from each GPU to the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from iaprof.record.calibrate.level_zero_driver import DriverError
from iaprof.record.calibrate.level_zero_own import WatchedObject
from iaprof.record.calibrate.search import MAX_BIAS, WINDOW, Candidate, Kernel, Memory, Path, Search, nearest

OF_GPU = ("address", "allocation", "code", "kernel_class", "name", "size")  # kinds searched from one GPU's kernel
STEPS = 3  # offsets of the path from a queue to its GPU's number
MAX_NUMBERS = 2_000  # such paths
_WORD, _HALF = 8, 4


def tables(memory: Memory, search: Search, kernels: Sequence[Sequence[Kernel]]) -> list[int]:
    """Returns the offsets in a cl_kernel of what may be the table of kernels, smallest first.

    Args:
        memory: of this process.
        search: of this driver.
        kernels: for each GPU, kernels of programs for that GPU only.
    """
    memory.refresh()

    def is_table(at: int) -> bool:
        classes = set()
        for gpu, gpu_kernels in enumerate(kernels):
            for kernel in gpu_kernels:
                table = memory.number(kernel.handle + at) or 0
                if not memory.is_object(table) or any(memory.number(table + _WORD * number) for number in range(gpu)):
                    return False
                classes.add(search.class_of(memory.number(table + _WORD * gpu) or 0))
        return len(classes) == 1 and None not in classes

    return [at for at in range(0, WINDOW, _WORD) if is_table(at)]


def of_gpu(memory: Memory, at: int, gpu: int, kernel: Kernel) -> Kernel:
    """Returns a cl_kernel's kernel for a GPU, if the table is at offset `at`."""
    table = memory.number(kernel.handle + at) or 0
    return dataclasses.replace(kernel, handle=memory.number(table + _WORD * gpu) or 0)


def growing(pairs_by_gpu: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """Returns pairs of paths, and how much their offsets grow from GPU to GPU, that fit the pairs of each GPU.

    Args:
        pairs_by_gpu: for each GPU, pairs of paths.
    """
    others = [set(candidates) for candidates in pairs_by_gpu[1:]]
    # By index of an offset in the first path and that path's other offsets: the offset and the second path.
    second: dict[tuple[int, ...], list[tuple[int, Path]]] = {}
    for first, second_path in pairs_by_gpu[1]:
        for at in range(len(first)):
            second.setdefault((at, *first[:at], *first[at + 1 :]), []).append((first[at], second_path))
    grown = []
    for first, second_path in pairs_by_gpu[0]:
        for at in range(len(first)):
            for offset, _ in second.get((at, *first[:at], *first[at + 1 :]), ()):
                growth = tuple(max(offset - first[at], 0) if index == at else 0 for index in range(len(first)))
                if len(second_path) == len(first) and all(
                    moved((first, second_path), growth, gpu) in candidates for gpu, candidates in enumerate(others, 1)
                ):
                    grown.append((first, second_path, growth))
    return sorted(set(grown), key=nearest)


def moved(candidate: Candidate, growth: Path, gpu: int) -> Candidate:
    """Returns a candidate's paths for a GPU."""
    return tuple(tuple(offset + gpu * step for offset, step in zip(path, growth, strict=True)) for path in candidate)


def gpu_numbers(memory: Memory, queues: Sequence[tuple[int, int]]) -> list[Path]:
    """Returns paths of three offsets from a queue to the number of its GPU, nearest first.

    Args:
        memory: of this process.
        queues: handles of queues, and their GPUs' numbers.
    """
    memory.refresh()
    highest = max(queues, key=lambda queue: queue[1])
    ordered = sorted(queues, key=lambda queue: queue is not highest)
    level: list[tuple[Path, list[int]]] = [((), [handle for handle, _ in ordered])]
    for _ in range(STEPS - 1):
        further, known = [], set()
        for prefix, addresses in level:
            for index, word in enumerate(memory.words(addresses[0])):
                if not word or not memory.is_object(word):
                    continue
                pointers = [memory.number(address + _WORD * index) or 0 for address in addresses]
                # The GPU's number is not in an object that all queues share.
                if all(map(memory.is_object, pointers)) and tuple(pointers) not in known:
                    known.add(tuple(pointers))
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
    """How an object ends."""

    functions: tuple[int, ...]  # one of which is called, once
    bias: int  # bytes from the object, which is their first argument, to its handle


def destructor(memory: Memory, search: Search, handle: int, release: Callable[[], None]) -> Destructor:
    """Finds the functions that end an object.

    Args:
        memory: of this process.
        search: of this driver.
        handle: the object's handle.
        release: calls the driver to end it.

    Raises:
        DriverError: they are unknown.
    """
    memory.refresh()
    for bias in range(_WORD, MAX_BIAS + 1, _WORD):  # the first word is the table that loaders call through
        if search.class_of(handle - bias) is None:
            continue
        watched = WatchedObject(memory, handle, bias)
        notes = watched.notes(release, ends=True)
        if {note.slot for note in notes if note.first == handle - bias and note.slot < 2} == {1}:
            return Destructor(tuple(watched.functions[:2]), bias)
        break
    raise DriverError("it is not known what ends its kernels and programs")
