"""What writers get: columns that are joined and named, ready to be printed, and nothing of how they came to be.

A profile is a table of distinct (interval, launch, kernel, code, offset) with ten counts. What rows share, such as a
stack, stands once beside the columns, and they say its index: work on texts is done once per text, not once per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # who only wants to know of a format needs no NumPy
    import numpy as np
    from numpy.typing import NDArray

    from iaprof.formats.header.python_counts import PythonCounts
    from iaprof.formats.header.whole_stacks import WholeStacks


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as it was placed in one process."""

    address: int  # canonical, 48 bits; 0 where it is not known
    symbol: str
    file: str  # "" when unknown


class Kind(StrEnum):
    """What code is; the values are what legends say."""

    PROCESS = "process"  # no code: whose
    CPP = "C++"  # and what else demangles to names with `::`
    C = "C"
    PYTHON = "Python"
    JIT = "JIT"
    KERNEL = "OS kernel"
    SOURCE = "GPU source"
    INSTRUCTION = "GPU instruction"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a CPU frame is from."""

    kind: Kind
    module: str = ""  # path of the file that has the code; "[kernel]", "[vdso]"; "" when unknown
    file: str = ""  # of its source; "" when unknown
    line: int = 0  # 0 when unknown
    inlined: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """Where kernels were launched from; of a CPU sample, where it was taken."""

    comm: str
    pid: int
    stack: tuple[str, ...]  # user frames, outermost first
    kernel_stack: tuple[str, ...] = ()  # of the operating system's kernel, outermost first
    host: str = ""  # where it ran; "" unless captures of several were merged
    origins: tuple[Origin, ...] = ()  # of the user frames; empty where nobody knows them


@dataclass(frozen=True, slots=True)
class Code:
    """What is the same for all instructions of a kernel that have one mnemonic and one place in the source."""

    mnemonic: str
    functions: tuple[str, ...]  # the kernel first, inlined functions inside
    lines: tuple[int, ...]  # of each function; 0 when unknown
    files: tuple[str, ...] = ()  # those that the lines are in; "" when unknown


@dataclass(frozen=True, slots=True)
class Gauges:
    """How the GPUs were in an interval; 0 where nothing was measured."""

    frequency_mhz: float = 0.0  # mean of all GTs
    busy_percent: float = 0.0  # mean of all GTs, each as busy as its busiest class of engines


def all_reasons(profiles: Sequence[Profile]) -> tuple[str, ...]:
    """The reasons of several profiles, each once."""
    return tuple(dict.fromkeys(reason for profile in profiles for reason in profile.reasons))


@dataclass(frozen=True, eq=False)
class Profile:
    """All rows, sorted by interval, then by launch and kernel; and what their indices refer to."""

    launches: Sequence[Launch | None]  # None: where no launch could be found
    kernels: Sequence[Kernel | None]  # None: the address is in no known kernel
    codes: Sequence[Code]
    interval: NDArray[np.int64]  # [n]
    launch: NDArray[np.int64]  # [n], index into launches
    kernel: NDArray[np.int64]  # [n], index into kernels
    code: NDArray[np.int64]  # [n], index into codes
    offset: NDArray[np.uint64]  # [n], bytes from the kernel's first instruction; in no known kernel the address itself
    counts: NDArray[np.uint64]  # [n, m] samples, in the order of `reasons`
    device: NDArray[np.int64]  # [n], index into devices
    reasons: Sequence[str]  # [m], why instructions waited
    intervals: Sequence[float]  # seconds, CLOCK_MONOTONIC, at which each starts
    devices: Sequence[str] = ("",)  # what the GPUs are called; "" where nobody knows
    gauges: dict[int, Gauges] = field(default_factory=dict)  # by interval, of those with any
    launch_counts: dict[int, int] = field(default_factory=dict)  # launches that were recorded, by index of kernels
    matched: dict[str, float] = field(default_factory=dict)  # shares of samples that found their place: report.profile
    whole: WholeStacks | None = None  # samples by where the stack ends that launched them; None where that is not known
    # The same of all launches and CPU samples that were recorded, whatever is selected: formats.whole_stacks.recorded.
    recorded: Mapping[str, WholeStacks] = field(default_factory=dict)
    python: PythonCounts | None = None  # samples by what the stack that launched them tells of Python
    recorded_python: Mapping[str, PythonCounts] = field(default_factory=dict)  # the same of all, as `recorded`

    def __len__(self) -> int:
        return len(self.interval)

    def counts_of(self, reasons: Sequence[str]) -> NDArray[np.uint64]:
        """Samples in the order of other reasons, of which the profile's may be a part: [n, len(reasons)]."""
        if tuple(reasons) == tuple(self.reasons):
            return self.counts
        found = np.zeros((len(self), len(reasons)), np.uint64)
        found[:, [reasons.index(reason) for reason in self.reasons]] = self.counts
        return found

    def only(self, rows: NDArray[Any]) -> Self:
        """The profile with some of its rows: bool[n], or indices int64[m] in ascending order."""
        names = ("interval", "launch", "kernel", "code", "offset", "counts", "device")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})


PARTS = {
    "interval": "when, in seconds",
    "host": "the machine, of merged captures",
    "process": "its name",
    "pid": "its number",
    "cpu": "the stack that launched the kernel",
    "file": "the kernel's source file",
    "function": "the kernel and the functions inlined in it",
    "line": "the instruction's source line",
    "instruction": "its mnemonic",
    "reason": "why it waited",
    "offset": "its place in the kernel",
}
"""What a stack can consist of."""
USUAL_PARTS = ("process", "pid", "cpu", "file", "function", "instruction", "reason", "offset")


@dataclass(frozen=True)
class Shape:
    """How the user wants stacks to look."""

    gpu_lines: bool = False
    gpu_dirs: bool = False  # each folder of a source path as a frame
    parts: tuple[str, ...] = USUAL_PARTS  # of PARTS, from the root
    inverted: bool = False  # the leaf first
    max_stack: int = 0  # frames of a CPU stack, the innermost; 0 for all
    percent_limit: float = 0.0  # what has less than this share is added up in one line
    cpu_samples: bool = False  # the stacks of CPU samples, in place of those of stalls
    waits: bool = False  # then these are microseconds that were waited for the GPU


UNKNOWN_PROCESS = "[unknown process]"
UNKNOWN_KERNEL = "[unknown kernel]"


def kernel_name(kernel: Kernel | None, code: Code) -> str:
    """What a row's kernel is called; where it is in no known one, what is known of that. Not cleaned."""
    if kernel is not None:
        return kernel.symbol
    return (code.functions[0] if code.functions else "") or UNKNOWN_KERNEL


def clean(frame: str, separators: str = "") -> str:
    """A frame that keeps to its place: no control or invisible characters, and none of `separators`.

    Names come from binaries, processes and captures of anybody: they must not break a line, a terminal or a format.
    """
    if frame.isascii() and frame.isprintable() and not any(mark in frame for mark in separators):
        return frame
    return "".join(
        ":" if character in separators else character if character.isprintable() else _escaped(ord(character))
        for character in frame
    )


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
