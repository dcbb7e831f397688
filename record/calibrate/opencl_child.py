"""The part of calibrate_child.py for OpenCL's driver: runs it as three GPUs of one kind, and searches its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from iaprof.record.calibrate.level_zero_driver import DriverError
from iaprof.record.calibrate.level_zero_own import ENDS_COPYING
from iaprof.record.calibrate.opencl_driver import GPUS, OpenCLDriver
from iaprof.record.calibrate.opencl_own import Ours, Prepared
from iaprof.record.calibrate.opencl_search import OF_GPU, destructor, gpu_numbers, growing, moved, of_gpu, tables
from iaprof.record.calibrate.search import MOST_TOLD, Candidate, Kernel, Memory, Search

_MAX_TABLES = 4
_ENDS_WATCHED = "it ends when breakpoints in its code show what it calls"
_KINDS = ("Kernel", "Program")


def search_opencl(
    library: str,
    memory: Memory,
    searched: bytes,
    checked: bytes,
    file: BinaryIO,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """Tells what there is to know of a driver that runs as one kind of GPU.

    Raises:
        DriverError: it does not do what is asked.
    """
    driver = OpenCLDriver(library)
    search = Search(memory, driver.table)
    found: dict[str, Any] = {"version": driver.version(), "functions": search.places(driver.functions())}
    found["candidates"] = _candidates(driver, memory, searched, checked)
    found["candidates"]["number"] = [(path,) for path in gpu_numbers(memory, _queues(driver))]
    found["gone"] = {kind: _gone(driver, memory, search, kind, searched) for kind in _KINDS}
    tell({**found, "no_own": ENDS_COPYING})
    if found["candidates"]["code"]:  # without, there is no layout
        try:
            ours = _ours(driver, memory, found["candidates"]["code"][0][0][0], searched)
            prepared = Prepared(driver, ours)
        except DriverError as error:
            tell({**found, "no_own": str(error)})
            return
        tell({**found, "no_own": _ENDS_WATCHED})
        tell({**found, **prepared.find(memory, search, file.read())})


class _Paths:
    """What is searched: from a GPU's kernel, whose table is at each of some places, and from a handle for each GPU."""

    def __init__(self, driver: OpenCLDriver, memory: Memory, found_with: Sequence[Sequence[Kernel]]) -> None:
        self._memory = memory
        search = Search(memory, driver.table)
        self._of_gpu = {at: Search(memory, driver.table) for at in tables(memory, search, found_with)[:_MAX_TABLES]}
        for at, search in self._of_gpu.items():
            search.find([of_gpu(memory, at, gpu, kernel) for gpu, of in enumerate(found_with) for kernel in of])
        self._of_handle = [Search(memory, driver.table) for _ in found_with]
        for search, of in zip(self._of_handle, found_with, strict=True):
            search.find(of)

    def keep(self, kernels: Sequence[Sequence[Kernel]]) -> None:
        """Drops what does not hold for these, for each GPU its own."""
        self._memory.look_again()
        for at, search in self._of_gpu.items():
            search.keep([of_gpu(self._memory, at, gpu, kernel) for gpu, of in enumerate(kernels) for kernel in of])
        for search, of in zip(self._of_handle, kernels, strict=True):
            search.keep(of)

    def candidates(self, together: Sequence[Kernel]) -> dict[str, list[Candidate]]:
        """Of each kind, nearest first.

        Args:
            together: for each GPU what one and the same handle has of it; the address is not looked at.
        """
        memory = self._memory
        found: dict[str, list[Candidate]] = {kind: [] for kind in OF_GPU}
        memory.look_again()
        for at, search in self._of_gpu.items():
            kernels = [of_gpu(memory, at, gpu, kernel) for gpu, kernel in enumerate(together)]
            for kind in OF_GPU:
                paths = 2 if kind in ("address", "allocation") else 1
                for candidate in search.candidates.get(kind, ())[:MOST_TOLD]:
                    if paths == 2 or all(search.holds(kind, candidate, kernel) for kernel in kernels):
                        prefixed = ((at, 0, *path) for path in candidate[:paths])
                        found[kind].append((*prefixed, *candidate[paths:]))
        by_gpu = [search.candidates for search in self._of_handle]
        others = [set(of.get("module", ())) for of in by_gpu[1:]]
        found["module"] = [each for each in by_gpu[0].get("module", ()) if all(each in of for of in others)]
        found["binary"] = [
            candidate
            for candidate in growing([of.get("binary", ()) for of in by_gpu])
            if all(
                self._of_handle[gpu].holds("binary", moved(candidate[:2], candidate[2], gpu), kernel)
                for gpu, kernel in enumerate(together)
            )
        ]
        return {kind: of[:MOST_TOLD] for kind, of in found.items()}


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
    # Another program, other kernels, and other memory for those that were there before.
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
    return paths.candidates(_together(driver, checked, name))


def _together(driver: OpenCLDriver, binary: bytes, name: bytes) -> list[Kernel]:
    """A kernel on all GPUs, whose binaries differ in their length."""
    binaries = [binary + bytes(16 * gpu) for gpu in range(GPUS)]
    program = driver.build(driver.context(driver.gpus), driver.gpus, binaries)
    kernel = driver.kernel(program, name)
    return [driver.about(program, kernel, each) for each in binaries]


def _queues(driver: OpenCLDriver) -> list[tuple[int, int]]:
    """Queues of GPUs and of their tiles, with the number of the GPU."""
    everything = driver.context(driver.gpus)
    queues = []
    for number, gpu in enumerate(driver.gpus):
        of = [(driver.contexts[number], gpu), (everything, gpu)]
        parts = driver.parts(gpu)
        if parts:
            of += [(driver.context(parts), part) for part in parts]
        queues += [(queue, number) for context, device in of for queue in driver.queues(context, device)]
    return queues


def _ours(driver: OpenCLDriver, memory: Memory, table: int, binary: bytes) -> Ours:
    """A kernel on the first GPU."""
    program = driver.build(driver.contexts[0], driver.gpus[:1], [binary])
    handle = driver.kernels(program)[0]
    memory.look_again()
    return Ours(handle, memory.follow(handle, (table, 0)) or 0, table)


def _gone(driver: OpenCLDriver, memory: Memory, search: Search, kind: str, binary: bytes) -> dict[str, Any]:
    """What is called when a kernel or a program ends."""
    program = driver.build(driver.contexts[0], driver.gpus[:1], [binary])
    handles = driver.kernels(program)
    for handle in handles[1:] if kind == "Kernel" else handles:
        driver.release("Kernel", handle)
    handle = handles[0] if kind == "Kernel" else program
    found = destructor(memory, search, handle, lambda: driver.release(kind, handle))
    places = [search.place(function) for function in found.functions]
    if None in places:
        raise DriverError("its kernels and programs end outside of it")
    return {"functions": places, "bias": found.bias}
