# SPDX-License-Identifier: Apache-2.0
"""A program that has Intel's real runtime copy and fill, and prints what that says of its own kernels.

    python own_kernels.py LIBRARY DEVICE

No call gives a program the handle of such a kernel: here it is taken from a call inside the runtime, as `iaprof
calibrate` does. With the handle, the runtime's public calls say name, GPU address and code. The calls go to functions
that the runtime exports, which no loader uses.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from iaprof.bpf.driver_layout import find_layout
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.record.calibrate import child as calibrate_child
from iaprof.record.calibrate.level_zero_driver import Driver
from iaprof.record.calibrate.level_zero_own import OwnKernels, find_own_kernels
from iaprof.record.calibrate.search import Memory, Search


class _Handles(OwnKernels):
    """Keeps every kernel's handle, in order."""

    def handles(self) -> list[int]:
        slots = [note.slot for _, note in self._notes]
        slot = max(self._passed, key=slots.count)
        return [note.second + self._passed[slot].kernel for _, note in self._notes if note.slot == slot]


def main(library: str, device: str) -> None:
    driver = Driver(library)
    memory = Memory()
    with open(library, "rb") as file:
        layout = find_layout(LibraryFile(file).build_id())
    assert layout is not None
    search = Search(memory, next(iter(driver.functions().values())))
    modules = Path(calibrate_child.__file__).with_name("modules")
    with driver.module((modules / f"searched.{device}.zebin").read_bytes()) as kernels:
        search.find(kernels)
        classes = [(path, number[0]) for path, number in search.candidates["kernel_class"]]
        own = _Handles(memory, classes, search.place, lambda place, length: b"")
        find_own_kernels(driver, own, kernels[0].handle)
    for handle in own.handles():
        name, address, code = driver.kernel(handle)
        print(json.dumps({"pid": os.getpid(), "name": name.decode(), "address": address, "code": code.hex()}))
    sys.stdout.flush()
    os._exit(0)


main(*sys.argv[1:])
