"""What writers get: rows that are joined and named, ready to be printed, and nothing of how they came to be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Protocol

Counts = tuple[int, ...]
"""Ten counts in samples, in the order of formats.stalls.REASONS."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as it was placed in one process."""

    address: int  # canonical, 48 bits
    symbol: str
    file: str  # "" when unknown


@dataclass(frozen=True, slots=True)
class Launch:
    """Where kernels were launched from."""

    comm: str
    pid: int
    stack: tuple[str, ...]  # user frames, outermost first
    kernel_stack: tuple[str, ...] = ()  # of the operating system's kernel, outermost first


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a kernel."""

    offset: int  # bytes from the kernel's first instruction; the address itself in an unknown kernel
    mnemonic: str
    functions: tuple[str, ...]  # the kernel first, inlined functions inside
    lines: tuple[int, ...]  # of each function; 0 when unknown
    files: tuple[str, ...] = ()  # those that the lines are in; "" when unknown


@dataclass(frozen=True, slots=True)
class Row:
    """Stalls of one instruction of one kernel, launched from one place, in one interval."""

    interval: int
    launch: Launch | None  # None where no launch could be found
    kernel: Kernel | None  # None where the address is in no known kernel
    instruction: Instruction
    counts: Counts


@dataclass(frozen=True, slots=True)
class Gauges:
    """How the GPUs were in an interval; 0 where nothing was measured."""

    frequency_mhz: float = 0.0  # mean of all GTs
    busy_percent: float = 0.0  # mean of all GTs, each as busy as its busiest class of engines


@dataclass(frozen=True)
class Profile:
    """All rows, sorted by interval, and when each interval starts."""

    rows: Iterator[Row] | list[Row]
    intervals: list[float]  # seconds, CLOCK_MONOTONIC
    gauges: dict[int, Gauges] = field(default_factory=dict)  # by interval, of those with any


@dataclass(frozen=True)
class Shape:
    """How the user wants frames to look."""

    gpu_lines: bool = False
    gpu_dirs: bool = False  # each folder of a source path as a frame


class Writer(Protocol):
    """One output format."""

    name: str
    extensions: tuple[str, ...]
    description: str
    hides_cpython: bool  # unless the user says otherwise
    per_interval: bool  # whether rows are wanted by interval, or all together

    def write(self, profile: Profile, shape: Shape, out: IO[str]) -> None:
        """Writes the whole profile as text."""


UNKNOWN_PROCESS = "[unknown process]"
UNKNOWN_KERNEL = "[unknown kernel]"


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
