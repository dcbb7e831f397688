"""The process in which `iaprof calibrate` runs a driver as one device, without a GPU, and searches its memory.

It gives up root's rights before it loads the driver. What it finds it writes to stdout as one JSON object: the driver's
version, places in its file, and paths; or why there are none. The parent believes none of it unseen.
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

from iaprof.record.calibrate.level_zero_copies import find_own_kernels
from iaprof.record.calibrate.level_zero_driver import Driver, DriverError
from iaprof.record.calibrate.level_zero_own import ENDS_COPYING, OwnKernels, OwnKernelsError
from iaprof.record.calibrate.opencl_child import search_opencl
from iaprof.record.calibrate.search import MOST_TOLD, Memory, Search
from iaprof.sandbox.privileges import give_up_privileges

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MODULES = Path(__file__).with_name("modules")
_LIMITS = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_CPU: 60,  # seconds; a search takes half a one
    resource.RLIMIT_DATA: 4 << 30,  # bytes
    resource.RLIMIT_FSIZE: 1 << 20,
    resource.RLIMIT_NOFILE: 256,
}


def main(library: str, device: str, kind: str) -> None:
    """Runs a driver, of a calibrate_process.Kind, as one of calibrate.DEVICES; nobody else has the working folder."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what the driver prints is no answer
    searched, checked = ((_MODULES / f"{name}.{device}.zebin").read_bytes() for name in ("searched", "checked"))
    memory = Memory()
    give_up_privileges(_LIMITS)
    # Ends with its parent. A change of the user would undo this.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, *map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0)))
    try:
        with open(library, "rb") as file:
            search = search_opencl if kind == "opencl" else _search
            search(library, memory, searched, checked, file, lambda found: _tell(answer, found))
    except DriverError as error:
        _tell(answer, {"problem": str(error)})
    os._exit(0)  # the driver's own end is not needed, and may wait for a GPU that there is not


def _tell(answer: int, found: dict[str, Any]) -> None:
    """Writes the answer, in place of what was told before."""
    os.ftruncate(answer, 0)
    os.pwrite(answer, json.dumps(found).encode(), 0)


def _search(
    library: str,
    memory: Memory,
    searched: bytes,
    checked: bytes,
    file: BinaryIO,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    driver = Driver(library)
    functions = driver.functions()
    if not functions:
        raise DriverError("it has no functions that launch kernels")
    search = Search(memory, next(iter(functions.values())))
    with driver.module(searched) as kernels, driver.module(searched) as again:
        search.find([*kernels, *again])
    # Another module, other kernels, and other memory for those that were there before.
    with driver.module(checked, copies=2) as kernels, driver.module(searched) as again:
        search.keep([*kernels, *again])
        found = _found(driver, search, functions)
        tell({**found, "no_own": ENDS_COPYING})
        tell({**found, **_own_kernels(driver, memory, search, again[0].handle, file)})


def _found(driver: Driver, search: Search, functions: dict[str, int]) -> dict[str, Any]:
    return {
        "version": driver.version(),
        "functions": search.places(functions),
        "exports": search.places(driver.exports()),
        "candidates": {kind: of[:MOST_TOLD] for kind, of in search.candidates.items()},
    }


def _own_kernels(driver: Driver, memory: Memory, search: Search, kernel: int, file: BinaryIO) -> dict[str, Any]:
    """From where the driver launches kernels of its own; or why that is not known, as `no_own`."""
    classes = [(path, number[0]) for path, number in search.candidates.get("kernel_class", ())]
    own = OwnKernels(memory, classes, search.place, lambda place, length: os.pread(file.fileno(), length, place))
    try:
        find_own_kernels(driver, own, kernel)
        places = sorted(own.places())
    except (DriverError, OwnKernelsError, OSError) as error:
        return {"no_own": str(error)}
    return {"own": [dataclasses.astuple(place) for place in places]}
