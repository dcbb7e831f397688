"""The process in which `iaprof calibrate` runs a driver and searches its memory: as one device, without a GPU.

A Vulkan driver has no such simulation, and runs on the machine's GPUs.

It gives up root's rights before it loads the driver. It writes its findings to stdout as one JSON object: the driver's
version, places in its file, and paths; or a problem. The parent checks all of it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from iaprof.record.calibrate.level_zero_driver import Driver, DriverError
from iaprof.record.calibrate.level_zero_own import ENDS_COPYING, OwnKernels, OwnKernelsError, find_own_kernels
from iaprof.record.calibrate.opencl_search import search_opencl
from iaprof.record.calibrate.search import MOST_ANSWERED, Memory, Search
from iaprof.record.calibrate.vulkan_search import search_vulkan
from iaprof.sandbox.privileges import NOBODY, give_up_privileges, stay_alone

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MODULES = Path(__file__).with_name("modules")
# As vulkan_driver.STAGES; the one that dispatches is not used here.
_DRAWING = ("vertex", "control", "evaluation", "geometry", "fragment", "searched", "task", "mesh")
_LIMITS = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_CPU: 60,  # seconds; a search takes half a second
    resource.RLIMIT_DATA: 4 << 30,  # bytes
    resource.RLIMIT_FSIZE: 1 << 20,
    resource.RLIMIT_NOFILE: 256,
}
_MOST_FILE_BYTES = {"vulkan": 2 << 30}  # by kind, if it is more: Mesa makes empty files of 1 GiB in memory


def main(library: str, device: str, kind: str) -> None:
    """Runs a driver, of a process.Kind, as one of calibrate.DEVICES; nobody else may enter the working folder.

    A Vulkan driver runs on the machine's GPUs; `device` is then the group whose members may use these, or empty.
    """
    answer = os.dup(1)
    os.dup2(2, 1)  # what the driver prints must not mix with the answer
    suffix = "spv" if kind == "vulkan" else f"{device}.zebin"
    searched, checked = ((_MODULES / f"{name}.{suffix}").read_bytes() for name in ("searched", "checked"))
    drawing = [(_MODULES / f"{name}.spv").read_bytes() for name in _DRAWING] if kind == "vulkan" else []
    memory = Memory()
    limits = _LIMITS | {resource.RLIMIT_FSIZE: _MOST_FILE_BYTES.get(kind, _LIMITS[resource.RLIMIT_FSIZE])}
    give_up_privileges(limits, (NOBODY, int(device) if kind == "vulkan" and device else NOBODY))
    # This process ends with its parent. Set after the change of user, which would undo it.
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, *map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0)))
    if kind == "vulkan":  # recordings run it unasked; Intel's other drivers may need more
        stay_alone(libc)
    try:
        with open(library, "rb") as file:
            if kind == "vulkan":
                search_vulkan(
                    library, memory, searched, checked, drawing, lambda findings: _write_answer(answer, findings)
                )
            else:
                search = search_opencl if kind == "opencl" else _search
                search(library, memory, searched, checked, file, lambda findings: _write_answer(answer, findings))
    except DriverError as error:
        _write_answer(answer, {"problem": str(error)})
    os._exit(0)  # the driver's own exit code is not needed, and may wait for the GPU that is not there


def _write_answer(answer: int, findings: dict[str, Any]) -> None:
    """Writes the answer, replacing an earlier one."""
    os.ftruncate(answer, 0)
    os.pwrite(answer, json.dumps(findings).encode(), 0)


def _search(
    library: str,
    memory: Memory,
    searched: bytes,
    checked: bytes,
    file: BinaryIO,
    write_answer: Callable[[dict[str, Any]], None],
) -> None:
    driver = Driver(library)
    functions = driver.functions()
    if not functions:
        raise DriverError("it has no functions that launch kernels")
    search = Search(memory, next(iter(functions.values())))
    with driver.module(searched) as kernels, driver.module(searched) as again:
        search.find([*kernels, *again])
    # Another module, other kernels, and other memory for the kernels of before.
    with driver.module(checked, copies=2) as kernels, driver.module(searched) as again:
        search.keep([*kernels, *again])
        findings = _findings(driver, search, functions)
        write_answer({**findings, "no_own": ENDS_COPYING})
        write_answer({**findings, **_own_kernels(driver, memory, search, again[0].handle, file)})


def _findings(driver: Driver, search: Search, functions: dict[str, int]) -> dict[str, Any]:
    return {
        "version": driver.version(),
        "functions": search.places(functions),
        "exports": search.places(driver.exports()),
        "candidates": {kind: candidates[:MOST_ANSWERED] for kind, candidates in search.candidates.items()},
    }


def _own_kernels(driver: Driver, memory: Memory, search: Search, kernel: int, file: BinaryIO) -> dict[str, Any]:
    """Finds where the driver launches kernels of its own; or returns why that is unknown, as `no_own`."""
    classes = [(path, number[0]) for path, number in search.candidates.get("kernel_class", ())]
    own = OwnKernels(memory, classes, search.place, lambda place, length: os.pread(file.fileno(), length, place))
    try:
        find_own_kernels(driver, own, kernel)
        places = sorted(own.places())
    except (DriverError, OwnKernelsError, OSError) as error:
        return {"no_own": str(error)}
    return {"own": [dataclasses.astuple(place) for place in places]}
