"""A report, and what it says about itself: what went in is what came out, and where it went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from iaprof.formats.header.python_counts import PythonCounts
from iaprof.formats.header.whole_stacks import WholeStacks
from iaprof.formats.profile import Profile
from iaprof.report.gpu.module import GpuKernel
from iaprof.symbols.names.cpu_frames import ModuleNames


@dataclass(frozen=True)
class CpuModule:
    """How one module of the launching stacks was named."""

    names: ModuleNames
    share: float  # of the samples with a stack, those with a frame in it
    unnamed: float  # and those with a frame in it that has no name


@dataclass(frozen=True)
class Matched:
    """How many samples found their place."""

    samples: int = 0
    kernel: int = 0  # in a known kernel
    instruction: int = 0  # at an instruction of it that could be decoded
    stack: int = 0  # which only one recorded stack can have launched
    ambiguous: int = 0  # which several processes can have launched

    def shares(self) -> dict[str, float]:
        """Each as a share of all; 1 where there are none."""
        names = ("kernel", "instruction", "stack")
        found = {name: getattr(self, name) / self.samples if self.samples else 1.0 for name in names}
        return found | {"ambiguous": self.ambiguous / self.samples if self.samples else 0.0}


@dataclass
class Facts:
    """What a report should say about itself."""

    records: int = 0
    stalls: int = 0  # samples: the sum of all counts
    unknown_kernel: int = 0  # of those, in no known kernel
    no_launch: int = 0  # in a known kernel of which no launch was recorded
    matched: Matched = field(default_factory=Matched)
    whole: WholeStacks = field(
        default_factory=lambda: WholeStacks(0, 0, 0)
    )  # samples by where the stack ends that launched them
    python: PythonCounts = field(default_factory=PythonCounts)  # samples by what their stacks tell of Python
    problems: dict[str, list[str]] = field(default_factory=dict)  # and the paths of the modules that have it
    cpu_modules: list[CpuModule] = field(default_factory=list)


@dataclass
class Report:
    """A profile, and what is to be said about it."""

    profile: Profile
    facts: Facts
    header: dict[str, Any] = field(default_factory=dict)  # of the capture
    binaries: Sequence[GpuKernel | None] = ()  # of each of the profile's kernels: what is known of its code

    def binary(self, kernel: int) -> GpuKernel | None:
        """The code of one of the profile's kernels, by index; None where it is not in the capture."""
        return self.binaries[kernel] if kernel < len(self.binaries) else None
