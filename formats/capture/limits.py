"""Limits on what a capture may declare, and the error for a capture that exceeds them or is damaged.

iaprof's own captures stay far below these limits. They bound the memory and time that an untrusted file can cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from iaprof.basics.errors import IaprofError

HEADER_KEY = b"iaprof"
MAX_ROWS = 1 << 23  # per row group
MAX_GROUP_BYTES = 1 << 31
MAX_HEADER_BYTES = 1 << 26
MAX_PARTS = (1 << 16) - 1
PARTS_PER_GROUP = 16  # bounds the overhead of reading a single part: at most this factor
MAX_TEXT_BYTES = 1 << 14  # a path of 4,096 bytes, every byte escaped
MAX_VALUE_BYTES = 1 << 30  # of one kind of row in memory, or, for a large capture:
MAX_EXPANSION = 1000  # times the file's size. Real stalls take 4 times their size in the file.


@dataclass(frozen=True)
class Ratio:
    """How many of something a capture may declare: so many in any file, or one for so many bytes of a larger one."""

    most: int
    bytes_each: int
    what: str

    def of(self, size: int) -> int:
        """Returns how many a file of this size may declare."""
        return max(self.most, size // self.bytes_each)


# Each of these costs time or memory in Python: with so many, a verb takes seconds. Captures of iaprof's have far fewer.
PARTS = Ratio(1024, 4096, "parts")
STREAMS = Ratio(1024, 4096, "streams")
PROCESSES = Ratio(50_000, 256, "processes with stacks")
MODULES = Ratio(16_384, 300, "mapped files with frames of stacks")
CPU_STACKS = Ratio(150_000, 64, "processes and stacks of CPU samples")
SENSORS = Ratio(4096, 16_384, "metrics of energy")
ADDRESSES = Ratio(500_000, 16, "addresses in stacks")
IMPORTED = Ratio(300_000, 32, "different imported samples")
PYTHON_LINES = Ratio(150_000, 64, "lines of Python functions in stacks")
INSTRUCTIONS = Ratio(500_000, 16, "addresses that stall")
GPU_MODULES = Ratio(8192, 1024, "GPU modules")
COMPILED = Ratio(1_000_000, 16, "kernels in the GPU modules that processes compiled")
RANKS = Ratio(8192, 1024, "ranks on time lines")
SITES = Ratio(65_536, 128, "kernels and stacks that stall")
EXECUTIONS = Ratio(1 << 22, 1, "executions of launches")
CANDIDATES = Ratio(1 << 24, 1, "launches and processes that can have caused its stalls")  # for each read and kernel


class _Trust:
    """Whether the user trusts the files: then they may declare as much as they like (`--large`)."""

    all = False


def allow_large() -> None:
    """Lets the captures that this process reads declare more than the ratios."""
    _Trust.all = True


def is_large_allowed() -> bool:
    """Tells whether this process reads captures that declare more than the ratios."""
    return _Trust.all


def check_ratio(name: object, size: int, number: int, ratio: Ratio) -> None:
    """Checks how many of something a capture declares.

    Args:
        name: the capture's, for the message.
        size: the capture's, in bytes.
        number: how many it declares.
        ratio: how many it may.

    Raises:
        CaptureError: these are too many, and the user did not allow it.
    """
    if number > ratio.of(size) and not _Trust.all:
        raise CaptureError(
            f"{name} declares {number:,} {ratio.what}, more than {ratio.of(size):,}, which is absurd for its size: it "
            "is damaged, or made to do damage; if you trust it, add --large"
        )


class CaptureError(IaprofError):
    """The file is not a capture, is incomplete or damaged, or has a format that this version cannot read."""
