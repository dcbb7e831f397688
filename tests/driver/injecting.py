# SPDX-License-Identifier: Apache-2.0
"""Programs with the library that --launches=inject preloads: what its probes tell, and what the programs leave."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driver import driver as level_zero, opencl
from driver.driver import WAYS
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.gpu.code import canonical
from iaprof.record.kernels.drivers import Injection

ALL_WAYS = ("--ways", ",".join(WAYS))  # options of the Level Zero workload
_PIDS = re.compile(r"^\d+(?=-)")


@dataclass(frozen=True)
class Recorder:
    """The library's probes, and nothing else of a recorder."""

    injection: Injection
    probes: LaunchProbes

    def launches(self) -> Counter[tuple[Any, ...]]:
        """How often, by process, thread, address, bytes and name; each launch is given once."""
        read = self.probes.launches.read()
        self.probes.stacks.read()
        assert (read["iba"] == read["address"] >> 32 << 32).all()
        launches = read[["pid", "tid", "address", "size", "name"]].tolist()
        return Counter((pid, tid, canonical(address), size, name) for pid, tid, address, size, name in launches)

    def elfs(self) -> Counter[tuple[int, bytes]]:
        """Debug ELFs, by process and content; each is given once, and forgotten."""
        found: Counter[tuple[int, bytes]] = Counter()
        for record in self.probes.compiled.read():
            path = record["path"].split(b"\0")[0]
            found[int(record["pid"]), Path(os.fsdecode(path)).read_bytes()] += 1
            self.injection.remove_elf(path)
        return found

    def left(self) -> set[str]:
        """Files that the library left."""
        return {path.name for path in self.injection.library.parent.iterdir()} - {"skip", self.injection.library.name}


def ledger_elfs(kernels: Sequence[level_zero.Kernel] | Sequence[opencl.Kernel]) -> Counter[tuple[int, bytes]]:
    """Returns how many debug ELFs the ledgers of workloads name, by process and content."""
    files = {kernel.debug_elf: kernel.pid for kernel in kernels}
    return Counter((pid, path.read_bytes()) for path, pid in files.items())


def run(words: Sequence[str | Path], environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )


def files_of(folder: Path) -> Counter[tuple[str, bytes | bool]]:
    """Names, without process ids, and contents of what a program left in its folder."""
    return Counter((_PIDS.sub("", path.name), path.is_file() and path.read_bytes()) for path in folder.iterdir())
