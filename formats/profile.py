"""The profile: stalls joined to launches, kernels and source lines, as columns, independent of how they were joined.

A profile is a table of distinct (interval, launch, kernel, code, offset) rows with a count per stall reason. Values
that rows share, such as stacks, are stored once and referred to by index, so that texts are processed once each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from iaprof.basics.quantities import counted, percent
from iaprof.gpu.samples import ACTIVE

if TYPE_CHECKING:  # without NumPy, the registry of formats imports fast
    import numpy as np
    from numpy.typing import NDArray

    from iaprof.formats.header.stack_counts import PythonCounts, WholeStacks


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel at its address in one process."""

    address: int  # canonical, 48 bits; 0 if unknown
    symbol: str
    file: str  # "" when unknown


class CodeKind(StrEnum):
    """The kind of code that a frame stands for; the values appear in legends."""

    PROCESS = "process"  # no code, but the process, host or the like
    CPP = "C++"  # and other languages whose demangled names contain `::`
    C = "C"
    PYTHON = "Python"
    JIT = "JIT"
    KERNEL = "OS kernel"
    SOURCE = "GPU source"
    INSTRUCTION = "GPU instruction"
    UNKNOWN = "unknown"


class Origin(NamedTuple):
    """The origin of a CPU frame. Stacks are compared by the origins of millions of frames, which tuples do fast."""

    kind: CodeKind
    module: str = ""  # path of the file with the code; "[kernel]", "[vdso]"; "" if unknown
    file: str = ""  # source file; "" if unknown
    line: int = 0  # 0 if unknown
    inlined: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """The stack of a launch, or of a CPU sample."""

    comm: str
    pid: int
    stack: tuple[str, ...]  # user frames, outermost first
    kernel_stack: tuple[str, ...] = ()  # of the Linux kernel, outermost first
    host: str = ""  # "" unless the capture is merged
    origins: tuple[Origin, ...] = ()  # of the user frames; empty if unknown
    operators: tuple[str, ...] = ()  # of the framework, in which it launched, outermost first; empty if unknown
    container: str = ""  # known in reports of several captures only
    pod: str = ""  # uid of the Kubernetes pod; likewise


@dataclass(frozen=True, slots=True)
class Code:
    """Properties that instructions of a kernel share: mnemonic and source location."""

    mnemonic: str
    functions: tuple[str, ...]  # the kernel first, then inlined functions
    lines: tuple[int, ...]  # of each function; 0 if unknown
    files: tuple[str, ...] = ()  # of each line; "" if unknown


@dataclass(frozen=True, slots=True)
class Gauges:
    """The GPUs' state in an interval; 0 where nothing was measured."""

    frequency_mhz: float = 0.0  # mean over all GTs
    busy_percent: float = 0.0  # mean over all GTs of each GT's busiest engine class


def all_reasons(profiles: Sequence[Profile]) -> tuple[str, ...]:
    """The union of the reasons of several profiles, in order of appearance."""
    return tuple(dict.fromkeys(reason for profile in profiles for reason in profile.reasons))


@dataclass(frozen=True, eq=False)
class Profile:
    """Rows sorted by interval, launch and kernel, and the tables that their indices refer to."""

    launches: Sequence[Launch | None]  # None: no launch was found
    kernels: Sequence[Kernel | None]  # None: the address lies in no known kernel
    codes: Sequence[Code]
    interval: NDArray[np.int64]  # [n]
    launch: NDArray[np.int64]  # [n], index into launches
    kernel: NDArray[np.int64]  # [n], index into kernels
    code: NDArray[np.int64]  # [n], index into codes
    offset: NDArray[np.uint64]  # [n], bytes from the first instruction; the address if no kernel is known
    counts: NDArray[np.uint64]  # [n, m], samples, in the order of `reasons`
    device: NDArray[np.int64]  # [n], index into devices
    reasons: Sequence[str]  # [m], stall reasons
    intervals: Sequence[float]  # seconds, CLOCK_MONOTONIC: the start of each interval
    devices: Sequence[str] = ("",)  # names of GPUs; "" if unknown
    gauges: dict[int, Gauges] = field(default_factory=dict)  # by interval
    launch_counts: dict[int, int] = field(default_factory=dict)  # recorded launches, by index into kernels
    matched: dict[str, float] = field(default_factory=dict)  # match rates: report.facts.Matched
    whole: WholeStacks | None = None  # where the launching stacks of the samples end; None if unknown
    # The same for all recorded launches and CPU samples, whatever is selected: header.whole_stacks.recorded.
    recorded: Mapping[str, WholeStacks] = field(default_factory=dict)
    python: PythonCounts | None = None  # Python frames of the launching stacks of the samples
    recorded_python: Mapping[str, PythonCounts] = field(default_factory=dict)  # the same for all recorded ones
    divided: NDArray[np.uint64] | None = None
    """[n], samples of the row for which several stacks can have launched the kernel; None: unknown."""
    timed: bool = False  # they are divided by the time that each stack's executions ran, not by numbers of launches
    place: NDArray[np.int64] | None = None
    """[n]: divided samples of one number are divided among their stacks; None: those of one kernel are."""
    energy: NDArray[np.int64] | None = None  # [n], nJ that the GPU used for the row's samples; None: unknown

    def __len__(self) -> int:
        return len(self.interval)

    @property
    def active(self) -> int:
        """Samples in which the thread issued an instruction."""
        return sum(int(self.counts[:, at].sum()) for at, reason in enumerate(self.reasons) if reason == ACTIVE)

    @property
    def divided_samples(self) -> int:
        """Samples that are divided among launching stacks."""
        return 0 if self.divided is None else int(self.divided.sum())

    @property
    def places(self) -> NDArray[np.int64]:
        """Divided samples of one number are divided among their stacks: int64[n]."""
        return self.kernel if self.place is None else self.place

    def counts_for(self, reasons: Sequence[str]) -> NDArray[np.uint64]:
        """Counts in the order of `reasons`, which must include all of the profile's: uint64[n, len(reasons)]."""
        if tuple(reasons) == tuple(self.reasons):
            return self.counts
        import numpy as np

        found = np.zeros((len(self), len(reasons)), np.uint64)
        found[:, [reasons.index(reason) for reason in self.reasons]] = self.counts
        return found

    def entries(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The counts that are not 0: the row, the index of the reason, and the samples of each: int64[k]."""
        import numpy as np

        some = self.counts != 0
        row, reason = np.divmod(np.flatnonzero(some), self.counts.shape[1])  # in a third of np.nonzero's time
        return row, reason, self.counts[some].astype(np.int64)

    def stack_ends(self) -> dict[str, Any]:
        """The completeness of stacks and of their Python frames, for JSON: of the samples, and of all recorded ones."""
        found: dict[str, Any] = {}
        if self.whole is not None:
            found["stack_ends"] = self.whole.to_json()
            found["recorded_stack_ends"] = {kind: ends.to_json() for kind, ends in self.recorded.items()}
        if self.python is not None:
            found["python_stacks"] = self.python.to_json()
            found["recorded_python_stacks"] = {kind: each.to_json() for kind, each in self.recorded_python.items()}
        return found

    def only(self, rows: NDArray[Any]) -> Self:
        """A profile with a subset of the rows: bool[n], or ascending indices int64[m]."""
        names = ("interval", "launch", "kernel", "code", "offset", "counts", "device")
        known = [name for name in ("divided", "place", "energy") if getattr(self, name) is not None]
        return replace(self, **{name: getattr(self, name)[rows] for name in (*names, *known)})


COMPONENTS = {
    "interval": "when, in seconds",
    "host": "the machine, of merged captures",
    "process": "its name",
    "pid": "its number",
    "operator": "the operators of the framework that launched the kernel",
    "cpu": "the stack that launched it",
    "file": "the kernel's source file",
    "function": "the kernel and the functions inlined in it",
    "line": "the instruction's source line",
    "instruction": "its mnemonic",
    "reason": "why it waited",
    "offset": "its place in the kernel",
}
"""The components of a stack that `--frames` can choose, with their descriptions."""
DEFAULT_COMPONENTS = ("process", "pid", "operator", "cpu", "file", "function", "instruction", "reason", "offset")


@dataclass(frozen=True)
class StackOptions:
    """Options for the shape of stacks: which components they have, and how these look."""

    gpu_lines: bool = False
    gpu_dirs: bool = False  # one frame per folder of a source path
    components: tuple[str, ...] = DEFAULT_COMPONENTS  # keys of COMPONENTS, from the root
    inverted: bool = False  # leaf first
    max_stack: int = 0  # maximum number of CPU frames, the innermost; 0: all
    percent_limit: float = 0.0  # stacks with a smaller share are added up in one line
    cpu_samples: bool = False  # stacks of CPU samples instead of stalls
    waits: bool = False  # `cpu_samples` is set, too, and counts are microseconds of waiting
    slices: bool = False  # `cpu_samples` is set, too, and counts are ns of slices of a time line


def reason_name(reason: str) -> str:
    """The name of a stall reason among other names: instructions are called `send` and `sync`, too."""
    return reason if reason == ACTIVE else f"stall: {reason}"


def samples_text(samples: int, active: int) -> str:
    """The number of samples and the share that were active: `1,200 samples, 11.1 % active`."""
    share = f", {percent(active / samples)} active" if active else ""
    return f"{counted(samples, 'sample')}{share}"


UNKNOWN_PROCESS = "[unknown process]"
UNKNOWN_KERNEL = "[unknown kernel]"


def kernel_name(kernel: Kernel | None, code: Code) -> str:
    """A row's kernel name, not cleaned; if the kernel is unknown, the best description there is."""
    if kernel is not None:
        return kernel.symbol
    return (code.functions[0] if code.functions else "") or UNKNOWN_KERNEL


def empty_profile() -> Profile:
    """Returns a profile without stalls."""
    import numpy as np

    from iaprof.gpu.vendors import REASONS

    none = np.empty(0, np.int64)
    counts = np.empty((0, len(REASONS)), np.uint64)
    return Profile((), (), (), none, none, none, none, none.astype(np.uint64), counts, none, REASONS, ())
