"""Stacks of a test's own program, of its calls of probe_me (tests/stacks), as BPF and the learner have them.

No recorder sees these calls but this one, so other tests may record meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.libraries import LAUNCH
from iaprof.bpf.probes.usdt import Arg, Probe
from iaprof.bpf.sizes import Sizes
from iaprof.bpf.structs import ArgKind
from iaprof.formats.wire.launches import Counter, LaunchFlags
from iaprof.formats.wire.unwind_rules import Walked
from integration.walking import Walking
from stacks.debugger import offset_of

FUNCTION = "probe_me"
_BEHIND_ENDBR64 = 4  # bytes; the kernel emulates the nop there
_FIRST_ARGUMENT = Arg(ArgKind.REGISTER, base=5)  # rdi
_SIZES = Sizes(copied_pages=1 << 14)  # the test programs have nothing but new paths, and the learner may have to wait
_NONE = Arg(ArgKind.CONSTANT)


@dataclass(frozen=True)
class Call:
    """A call of probe_me."""

    pid: int
    tid: int
    number: int  # its argument
    presumed: bool  # it has the stack of another call of its path, which was on its way
    ips: tuple[int, ...]  # the innermost first
    walked: Walked
    kept: bool  # it was left to the recording's end
    guessed: tuple[bool, ...]  # of each address


class Probed:
    """The calls of probe_me in some files, from now on."""

    def __init__(self, walking: Walking, probes: LaunchProbes) -> None:
        self.walking, self._probes = walking, probes

    def calls(self) -> list[Call]:
        """All that came since this was asked last, with finished stacks."""
        launches: NDArray[np.void] = self._probes.launches.read()
        stacks = self.walking.stacks()
        return [
            Call(
                int(each["pid"]),
                int(each["tid"]),
                int(each["iba"]),
                bool(each["flags"] & LaunchFlags.PRESUMED),
                tuple(stacks[int(each["stack"])][0]),
                stacks[int(each["stack"])][1],
                int(each["stack"]) in self.walking.kept,
                tuple(self.walking.guessed[int(each["stack"])]),
            )
            for each in launches
        ]

    def probe(
        self, path: Path, function: str = FUNCTION, behind: int = _BEHIND_ENDBR64, number: Arg = _FIRST_ARGUMENT
    ) -> None:
        """Calls are seen there, too, so many bytes behind the start of a function; `number` tells them apart."""
        probe = Probe("", LAUNCH, offset_of(path, function) + behind, 0, (number, *[_NONE] * 3))
        with path.open("rb") as file:
            assert self._probes._attach(file.fileno(), [probe]) == ""

    def counted(self, counter: Counter) -> int:
        """What the BPF programs counted."""
        return self._probes.counters()[counter]


@contextlib.contextmanager
def probed(*files: Path, cpu_samples: bool = False) -> Iterator[Probed]:
    """Probes probe_me in these files, and what the C library loads; CPU samples, too, if wanted."""
    with contextlib.closing(LaunchProbes(_SIZES, cpu_samples=cpu_samples)) as probes:
        probes.libraries._watch_linker(os.getpid(), Path("/proc/self/maps").read_bytes())
        with Walking(probes) as walking:
            seen = Probed(walking, probes)
            for path in files:
                seen.probe(path)
            yield seen
