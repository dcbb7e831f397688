"""The frames of a stack as text: those of the CPU that launched, and those of the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from iaprof.formats.profile import UNKNOWN_KERNEL, UNKNOWN_PROCESS, Code, Kernel, Launch, Shape, clean

BETWEEN = "-"  # CPU and GPU
CPU_PARTS = ("host", "process", "pid", "cpu")
GPU_PARTS = ("file", "function", "line", "instruction")
NOTHING = "[unknown]"  # in place of a name that is empty, and of a stack of none of the parts that were chosen
_TRUNCATED = "[truncated]"


def launch_frames(launch: Launch | None, shape: Shape, parts: Sequence[str] = ("process", "pid", "cpu")) -> list[str]:
    """The CPU's frames of a stack, from the root."""
    if launch is None:
        return [UNKNOWN_PROCESS]
    stack = [*launch.stack, *(f"{frame}_[k]" for frame in launch.kernel_stack)]
    if shape.max_stack and len(stack) > shape.max_stack:
        stack = [_TRUNCATED, *stack[-shape.max_stack :]]
    frames = {
        "host": [launch.host] if launch.host else [],
        "process": [launch.comm or UNKNOWN_PROCESS],
        "pid": [str(launch.pid)] if launch.pid else [],  # 0: of several processes
        "cpu": stack,
    }
    return [frame for part in parts for frame in frames[part]]


def gpu_frames(kernel: Kernel | None, code: Code, shape: Shape, parts: Sequence[str] = GPU_PARTS) -> list[str]:
    """The GPU's frames of a stack, from the kernel to the mnemonic."""
    makers: dict[str, Callable[[Kernel, Code, Shape], list[str]]] = {
        "file": _file_frames,
        "function": _function_frames,
        "line": _line_frames,
        "instruction": lambda _kernel, code, _shape: [f"{code.mnemonic}_[g]"],
    }
    if kernel is None:
        return [f"{code.functions[0] if code.functions else UNKNOWN_KERNEL}_[G]"] if "function" in parts else []
    return [frame for part in parts for frame in makers[part](kernel, code, shape)]


def _file_frames(kernel: Kernel, _code: Code, shape: Shape) -> list[str]:
    """The source file as one frame, or as one for each folder and itself."""
    parts = [part for part in kernel.file.split("/") if part not in ("", ".")] if shape.gpu_dirs else [kernel.file]
    return [f"{part}_[G]" for part in parts if part]


def _function_frames(kernel: Kernel, code: Code, shape: Shape) -> list[str]:
    frames = []
    for index, function in enumerate(code.functions):
        line = code.lines[index] if index < len(code.lines) else 0
        place = f" {_place(kernel, code, index, line)}" if shape.gpu_lines and line else ""
        frames.append(f"{function}{place}_[G]")
    return frames


def _line_frames(kernel: Kernel, code: Code, _shape: Shape) -> list[str]:
    """Where the instruction itself comes from."""
    line = code.lines[-1] if code.lines else 0
    return [f"{_place(kernel, code, len(code.lines) - 1, line)}_[G]"] if line else []


def _place(kernel: Kernel, code: Code, index: int, line: int) -> str:
    """Where in a function; with the file's name, unless it is the kernel's, which is a frame already."""
    file = code.files[index] if index < len(code.files) else ""
    return f"{os.path.basename(file)} line {line}" if file and file != kernel.file else f"line {line}"


def clean_frame(frame: str) -> str:
    """A frame as it can stand between semicolons."""
    return f"[{frame}]" if frame == BETWEEN else clean(frame, ";") or NOTHING
