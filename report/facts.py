"""A report: a profile, and counts of how its samples were matched and symbolized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from iaprof.formats.energy import Energy
from iaprof.formats.export import Executions
from iaprof.formats.header.stack_counts import PythonCounts, WholeStacks
from iaprof.formats.profile import Profile, samples_text
from iaprof.report.gpu.module import GpuKernel
from iaprof.symbols.cpu_frames import ModuleNames


@dataclass(frozen=True)
class CpuModule:
    """How the frames of one module in launch stacks were symbolized."""

    names: ModuleNames
    share: float  # of the samples with a stack: those with a frame in this module
    unnamed: float  # of the samples with a stack: those with an unnamed frame in this module


@dataclass(frozen=True)
class Matched:
    """How many samples were matched."""

    samples: int = 0
    kernel: int = 0  # in a known kernel
    instruction: int = 0  # at a decoded instruction
    stack: int = 0  # only one recorded stack can have launched the kernel
    ambiguous: int = 0  # several processes can have launched the kernel

    def shares(self) -> dict[str, float]:
        """Returns each number as a share of all samples. Without samples, all are matched and none is ambiguous."""
        names = ("kernel", "instruction", "stack")
        found = {name: getattr(self, name) / self.samples if self.samples else 1.0 for name in names}
        return found | {"ambiguous": self.ambiguous / self.samples if self.samples else 0.0}


@dataclass
class Facts:
    """Facts about a report."""

    records: int = 0  # stall records
    stalls: int = 0  # samples: the sum of all counts
    active: int = 0  # samples in which the thread issued an instruction
    unknown_kernel: int = 0  # samples in no known kernel
    no_launch: int = 0  # samples in a known kernel without a recorded launch
    matched: Matched = field(default_factory=Matched)
    whole: WholeStacks = field(
        default_factory=lambda: WholeStacks(0, 0, 0)
    )  # samples, by where their launch stacks end
    python: PythonCounts = field(default_factory=PythonCounts)  # samples, by the Python frames of their launch stacks
    timed: bool = False  # samples of several stacks are divided by the times of their executions
    energy: Energy | None = None  # of the GPUs; None: unknown
    problems: dict[str, list[str]] = field(default_factory=dict)  # sentence -> paths of the modules concerned
    cpu_modules: list[CpuModule] = field(default_factory=list)

    def samples_text(self) -> str:
        """Returns the number of samples and the share that were active: `1,200 samples, 11.1 % active`."""
        return samples_text(self.stalls, self.active)

    @property
    def others_text(self) -> str:
        """How the samples are divided that belong to no single stack, unless it is by numbers of launches."""
        return " (the others by times of execution)" if self.timed and self.matched.stack < self.matched.samples else ""


@dataclass
class Report:
    """A profile, and facts about it."""

    profile: Profile
    facts: Facts
    header: dict[str, Any] = field(default_factory=dict)  # of the capture
    binaries: Sequence[GpuKernel | None] = ()  # the code of each of the profile's kernels; None: unknown
    executions: Executions | None = None  # None: not asked for, or unknown
    by_time: Profile | None = None  # the same stalls by time, without their instructions; None: not asked for

    def binary(self, kernel: int) -> GpuKernel | None:
        """Returns the code of one of the profile's kernels, by index; None if the capture does not have it."""
        return self.binaries[kernel] if kernel < len(self.binaries) else None
