"""Folded stacks (stackcollapse): `frame;frame;...;frame COUNT`, a line per distinct stack, sorted.

From the root: process name and id, user frames, kernel frames `_[k]`, a `-`, then the GPU's part: source file and
functions `_[G]`, mnemonic, reason and offset `_[g]`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import IO

from iaprof.formats.profile import UNKNOWN_KERNEL, UNKNOWN_PROCESS, Instruction, Kernel, Launch, Profile, Shape, clean
from iaprof.formats.stalls import REASONS


class Folded:
    """The format of flamegraph.pl, speedscope and many others."""

    name = "folded"
    extensions: tuple[str, ...] = (".folded", ".collapsed")
    description = "one line per stack and a count, for flamegraph.pl, speedscope and others"
    hides_cpython = True
    per_interval = False

    def write(self, profile: Profile, shape: Shape, out: IO[str]) -> None:
        """Writes every stack with its count, sorted by the stack's text."""
        lines: dict[str, int] = defaultdict(int)
        launched = lru_cache(maxsize=4096)(_launch_frames)
        for row in profile.rows:
            head = launched(row.launch) + ";-;" + _gpu_frames(row.kernel, row.instruction, shape)
            tail = f"0x{row.instruction.offset:x}_[g]"
            for reason, count in zip(REASONS, row.counts, strict=True):
                if count:
                    lines[f"{head};{reason}_[g];{tail}"] += count
        for line in sorted(lines):
            out.write(f"{line} {lines[line]}\n")


def write_cpu(samples: Iterable[tuple[Launch, int]], out: IO[str]) -> None:
    """Writes CPU samples in the same way: process, user frames, kernel frames `_[k]`, and how often."""
    lines: dict[str, int] = defaultdict(int)
    for launch, count in samples:
        lines[_launch_frames(launch)] += count
    for line in sorted(lines):
        out.write(f"{line} {lines[line]}\n")


def _launch_frames(launch: Launch | None) -> str:
    if launch is None:
        return UNKNOWN_PROCESS
    frames = [launch.comm or UNKNOWN_PROCESS, str(launch.pid), *launch.stack]
    frames += [f"{frame}_[k]" for frame in launch.kernel_stack]
    return ";".join(_clean(frame) for frame in frames)


def _file_frames(file: str, shape: Shape) -> list[str]:
    """The source file as one frame, or as one for each folder and itself."""
    parts = [part for part in file.split("/") if part not in ("", ".")] if shape.gpu_dirs else [file]
    return [part for part in parts if part]


def _place(kernel: Kernel, instruction: Instruction, index: int, line: int) -> str:
    """Where in a function; with the file's name, unless it is the kernel's, which is a frame already."""
    file = instruction.files[index] if index < len(instruction.files) else ""
    return f" {os.path.basename(file)} line {line}" if file and file != kernel.file else f" line {line}"


def _gpu_frames(kernel: Kernel | None, instruction: Instruction, shape: Shape) -> str:
    frames = [f"{part}_[G]" for part in _file_frames(kernel.file, shape)] if kernel else []
    functions = instruction.functions if kernel else (UNKNOWN_KERNEL,)
    for index, function in enumerate(functions):
        line = instruction.lines[index] if kernel and index < len(instruction.lines) else 0
        place = _place(kernel, instruction, index, line) if kernel and shape.gpu_lines and line else ""
        frames.append(f"{function}{place}_[G]")
    if kernel:
        frames.append(f"{instruction.mnemonic}_[g]")
    return ";".join(_clean(frame) for frame in frames)


def _clean(frame: str) -> str:
    """A frame that stays one; a `-` alone is what stands before the GPU's part."""
    return "[-]" if frame == "-" else clean(frame, ";")
