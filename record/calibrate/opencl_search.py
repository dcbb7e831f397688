"""Searches an OpenCL driver for `iaprof calibrate`: what it keeps for each GPU, and what ends kernels and programs.

A cl_kernel has a table of kernels, one for each GPU: the search for paths (search.py) begins at these. What belongs to
a program is searched from the cl_kernel, in programs for one GPU each: one offset of a path may grow with the GPU's
number, by the same amount from each GPU to the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from iaprof.record.calibrate.level_zero_driver import DriverError
from iaprof.record.calibrate.level_zero_own import ENDS_COPYING, WatchedObject
from iaprof.record.calibrate.opencl_driver import GPUS, OpenCLDriver
from iaprof.record.calibrate.opencl_own import OurKernel, PreparedCopies
from iaprof.record.calibrate.search import (
    MAX_BIAS,
    MOST_ANSWERED,
    WINDOW,
    Candidate,
    Kernel,
    Memory,
    Path,
    Search,
    nearest,
)

_MAX_TABLES = 4
_ENDS_WATCHED = "it ends when breakpoints in its code show what it calls"
_KINDS = ("Kernel", "Program")


def search_opencl(
    library: str,
    memory: Memory,
    searched: bytes,
    checked: bytes,
    file: BinaryIO,
    write_answer: Callable[[dict[str, Any]], None],
) -> None:
    """Searches a driver that runs as one kind of GPU, and writes what it finds.

    Raises:
        DriverError: a call of the driver failed.
    """
    driver = OpenCLDriver(library)
    search = Search(memory, driver.table)
    findings: dict[str, Any] = {"version": driver.version(), "functions": search.places(driver.functions())}
    findings["candidates"] = _candidates(driver, memory, searched, checked)
    findings["candidates"]["number"] = [(path,) for path in gpu_numbers(memory, _queues(driver))]
    findings["gone"] = {kind: _find_destructor(driver, memory, search, kind, searched) for kind in _KINDS}
    write_answer({**findings, "no_own": ENDS_COPYING})
    if findings["candidates"]["code"]:  # without it there is no layout
        try:
            our_kernel = _make_our_kernel(driver, memory, findings["candidates"]["code"][0][0][0], searched)
            prepared = PreparedCopies(driver, our_kernel)
        except DriverError as error:
            write_answer({**findings, "no_own": str(error)})
            return
        write_answer({**findings, "no_own": _ENDS_WATCHED})
        write_answer({**findings, **prepared.find(memory, search, file.read())})


class _Paths:
    """Searches paths from a GPU's kernel, for each place of the table of kernels, and paths from each GPU's handles."""

    def __init__(self, driver: OpenCLDriver, memory: Memory, kernels_by_gpu: Sequence[Sequence[Kernel]]) -> None:
        self._memory = memory
        search = Search(memory, driver.table)
        self._of_gpu = {at: Search(memory, driver.table) for at in tables(memory, search, kernels_by_gpu)[:_MAX_TABLES]}
        for at, search in self._of_gpu.items():
            search.find(self._at(at, kernels_by_gpu))
        self._of_handle = [Search(memory, driver.table) for _ in kernels_by_gpu]
        for search, gpu_kernels in zip(self._of_handle, kernels_by_gpu, strict=True):
            search.find(gpu_kernels)

    def _at(self, at: int, kernels_by_gpu: Sequence[Sequence[Kernel]]) -> list[Kernel]:
        """Returns the GPUs' kernels of cl_kernels whose table is at this offset."""
        return [of_gpu(self._memory, at, gpu, each) for gpu, kernels in enumerate(kernels_by_gpu) for each in kernels]

    def keep(self, kernels: Sequence[Sequence[Kernel]]) -> None:
        """Drops paths that do not hold for these kernels, given for each GPU."""
        self._memory.refresh()
        for at, search in self._of_gpu.items():
            search.keep(self._at(at, kernels))
        for search, gpu_kernels in zip(self._of_handle, kernels, strict=True):
            search.keep(gpu_kernels)

    def candidates(self, kernel_by_gpu: Sequence[Kernel]) -> dict[str, list[Candidate]]:
        """Returns the candidates of each kind, nearest first.

        Args:
            kernel_by_gpu: what one handle has for each GPU; its address is not used.
        """
        memory = self._memory
        by_kind: dict[str, list[Candidate]] = {kind: [] for kind in OF_GPU}
        memory.refresh()
        for at, search in self._of_gpu.items():
            kernels = [of_gpu(memory, at, gpu, kernel) for gpu, kernel in enumerate(kernel_by_gpu)]
            for kind in OF_GPU:
                paths = 2 if kind in ("address", "allocation") else 1
                for candidate in search.candidates.get(kind, ())[:MOST_ANSWERED]:
                    if paths == 2 or all(search.holds(kind, candidate, kernel) for kernel in kernels):
                        prefixed = ((at, 0, *path) for path in candidate[:paths])
                        by_kind[kind].append((*prefixed, *candidate[paths:]))
        by_gpu = [search.candidates for search in self._of_handle]
        others = [set(candidates.get("module", ())) for candidates in by_gpu[1:]]
        by_kind["module"] = [
            candidate for candidate in by_gpu[0].get("module", ()) if all(candidate in modules for modules in others)
        ]
        by_kind["binary"] = [
            candidate
            for candidate in growing([candidates.get("binary", ()) for candidates in by_gpu])
            if all(
                self._of_handle[gpu].holds("binary", moved(candidate[:2], candidate[2], gpu), kernel)
                for gpu, kernel in enumerate(kernel_by_gpu)
            )
        ]
        return {kind: candidates[:MOST_ANSWERED] for kind, candidates in by_kind.items()}


def _candidates(driver: OpenCLDriver, memory: Memory, searched: bytes, checked: bytes) -> dict[str, list[Candidate]]:
    with contextlib.ExitStack() as living:
        paths = _Paths(
            driver,
            memory,
            [
                [kernel for _ in range(2) for kernel in living.enter_context(driver.program(gpu, searched))]
                for gpu in range(GPUS)
            ],
        )
    # Another program, other kernels, and other memory for the kernels of before.
    with contextlib.ExitStack() as living:
        again = [
            [
                *living.enter_context(driver.program(gpu, checked, copies=2)),
                *living.enter_context(driver.program(gpu, searched)),
            ]
            for gpu in range(GPUS)
        ]
        paths.keep(again)
        name = again[0][0].name
    return paths.candidates(_kernel_on_all_gpus(driver, checked, name))


def _kernel_on_all_gpus(driver: OpenCLDriver, binary: bytes, name: bytes) -> list[Kernel]:
    """Makes a kernel for all GPUs, whose binaries differ in length."""
    binaries = [binary + bytes(16 * gpu) for gpu in range(GPUS)]
    program = driver.build(driver.context(driver.gpus), driver.gpus, binaries)
    kernel = driver.kernel(program, name)
    return [driver.about(program, kernel, gpu_binary) for gpu_binary in binaries]


def _queues(driver: OpenCLDriver) -> list[tuple[int, int]]:
    """Makes queues of GPUs and of their tiles; returns them with the GPU's number."""
    common_context = driver.context(driver.gpus)
    queues = []
    for number, gpu in enumerate(driver.gpus):
        devices = [(driver.contexts[number], gpu), (common_context, gpu)]
        tiles = driver.tiles(gpu)
        if tiles:
            devices += [(driver.context(tiles), tile) for tile in tiles]
        queues += [(queue, number) for context, device in devices for queue in driver.queues(context, device)]
    return queues


def _make_our_kernel(driver: OpenCLDriver, memory: Memory, table: int, binary: bytes) -> OurKernel:
    """Makes a kernel on the first GPU."""
    program = driver.build(driver.contexts[0], driver.gpus[:1], [binary])
    handle = driver.kernels(program)[0]
    memory.refresh()
    return OurKernel(handle, memory.follow(handle, (table, 0)) or 0, table)


def _find_destructor(driver: OpenCLDriver, memory: Memory, search: Search, kind: str, binary: bytes) -> dict[str, Any]:
    """Finds what is called when a kernel or a program ends."""
    program = driver.build(driver.contexts[0], driver.gpus[:1], [binary])
    handles = driver.kernels(program)
    for handle in handles[1:] if kind == "Kernel" else handles:
        driver.release("Kernel", handle)
    handle = handles[0] if kind == "Kernel" else program
    ending = destructor(memory, search, handle, lambda: driver.release(kind, handle))
    places = [search.place(function) for function in ending.functions]
    if None in places:
        raise DriverError("its kernels and programs end outside of it")
    return {"functions": places, "bias": ending.bias}


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
