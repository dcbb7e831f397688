"""The frames of a stack: of the launching CPU code, and of the GPU code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from iaprof.basics.clean import clean
from iaprof.formats.guesses import unmarked
from iaprof.formats.profile import Code, CodeKind, Kernel, Launch, Origin, StackOptions, kernel_name, reason_name

CPU_GPU_SEPARATOR = "-"
CPU_COMPONENTS = ("host", "process", "pid", "operator", "cpu")
GPU_COMPONENTS = ("file", "function", "line", "instruction")
UNKNOWN_FRAME = "[unknown]"  # for empty names, and for stacks without any of the chosen components
_TRUNCATED = "[truncated]"
_NO_NAME = re.compile(r"0x[0-9a-f]+|\[.*\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a stack."""

    text: str  # with a suffix such as `_[G]`, but for reasons; not cleaned
    kind: CodeKind
    module: str = ""  # path of the CPU code's file; "" if unknown, and for other frames
    file: str = ""  # source file; "" if unknown
    line: int = 0  # 0 if unknown
    name: str = ""  # without the suffix
    folded: str = ""  # the text in folded stacks; "" if it is `text`

    @property
    def on_gpu(self) -> bool:
        """Whether the frame stands for GPU code."""
        return (self.folded or self.text).endswith(("_[G]", "_[g]"))


class StackTexts:
    """Texts of CPU stacks: their clean frames, the outermost first, separated by semicolons."""

    def __init__(self, options: StackOptions) -> None:
        """Takes the options for stacks, which limit their length."""
        self._most = options.max_stack
        self._clean = _Clean()

    def of(self, launch: Launch | None) -> str:
        """Returns the text of a launch's stack; "" if there is none."""
        if launch is None:
            return ""
        texts: Sequence[str] = launch.stack
        if launch.kernel_stack:
            texts = (*texts, *(kernel_frame(text).text for text in launch.kernel_stack))
        if self._most and len(texts) > self._most:
            texts = (_TRUNCATED, *texts[-self._most :])
        return ";".join(map(self._clean.__getitem__, texts))


class _Clean(dict[str, str]):
    """Clean texts of frames, by the text."""

    def __missing__(self, text: str) -> str:
        """Cleans a text."""
        found = self[text] = clean(text, ";")
        return found


def process_frame(text: str) -> Frame:
    """The frame of a process, host, or the like."""
    return Frame(text, CodeKind.PROCESS, name=text)


def kernel_frame(text: str) -> Frame:
    """The frame of a function of the Linux kernel."""
    return Frame(f"{text}_[k]", CodeKind.KERNEL, "[kernel]", name=text)


def truncated_frame() -> Frame:
    """The frame that replaces the outermost frames of a stack that is deeper than the limit."""
    return Frame(_TRUNCATED, CodeKind.UNKNOWN, name=_TRUNCATED)


def cpu_frame(text: str, origin: Origin | None = None) -> Frame:
    """The frame of a function with this text."""
    origin = origin or Origin(code_kind(text))
    return Frame(text, origin.kind, origin.module, origin.file, origin.line, text)


def code_kind(text: str) -> CodeKind:
    """The kind of code of a CPU frame, judged by its name, for profiles from other tools."""
    if text.startswith("py::"):
        return CodeKind.PYTHON
    text = unmarked(text)
    if _NO_NAME.fullmatch(text):
        return CodeKind.UNKNOWN
    return CodeKind.CPP if "::" in text or "(" in text else CodeKind.C


def gpu_frames(
    kernel: Kernel | None, code: Code, options: StackOptions, components: Sequence[str] = GPU_COMPONENTS
) -> list[Frame]:
    """The GPU frames of a stack, of some components in their order."""
    makers: dict[str, Callable[[Kernel, Code, StackOptions], list[Frame]]] = {
        "file": _file_frames,
        "function": _function_frames,
        "line": _line_frames,
        "instruction": _instruction_frames,
    }
    if kernel is None:
        return [_source(kernel_name(kernel, code))] if "function" in components else []
    return [frame for component in components for frame in makers[component](kernel, code, options)]


def _source(text: str, file: str = "", line: int = 0) -> Frame:
    kind = CodeKind.UNKNOWN if text.startswith("[") and text.endswith("]") else CodeKind.SOURCE
    return Frame(f"{text}_[G]", kind, "", file, line, text)


def _file_frames(kernel: Kernel, _code: Code, options: StackOptions) -> list[Frame]:
    """The kernel's source file as one frame, or as one frame per component of its path."""
    names = [name for name in kernel.file.split("/") if name not in ("", ".")] if options.gpu_dirs else [kernel.file]
    return [_source(name, kernel.file) for name in names if name]


def _function_frames(kernel: Kernel, code: Code, options: StackOptions) -> list[Frame]:
    frames = []
    for index, function in enumerate(code.functions):
        line = code.lines[index] if index < len(code.lines) else 0
        place = f" {_place(kernel, code, index, line)}" if options.gpu_lines and line else ""
        frames.append(_source(f"{function}{place}", _file(kernel, code, index), line))
    return frames


def _line_frames(kernel: Kernel, code: Code, _shape: StackOptions) -> list[Frame]:
    """The source location of the instruction itself."""
    index = len(code.lines) - 1
    line = code.lines[-1] if code.lines else 0
    return [_source(_place(kernel, code, index, line), _file(kernel, code, index), line)] if line else []


def _instruction_frames(_kernel: Kernel, code: Code, _shape: StackOptions) -> list[Frame]:
    kind = CodeKind.UNKNOWN if code.mnemonic.startswith("[") else CodeKind.INSTRUCTION
    return [Frame(f"{code.mnemonic}_[g]", kind, name=code.mnemonic)]


def reason_frame(reason: str) -> Frame:
    """The frame of a stall reason. Folded stacks call it as they always did, for the scripts that read them."""
    name = reason_name(reason)
    return Frame(name, CodeKind.INSTRUCTION, name=name, folded=f"{reason}_[g]")


def _file(kernel: Kernel, code: Code, index: int) -> str:
    return (code.files[index] if index < len(code.files) else "") or kernel.file


def _place(kernel: Kernel, code: Code, index: int, line: int) -> str:
    """The line, with the file's base name if it is not the kernel's file."""
    file = code.files[index] if index < len(code.files) else ""
    return f"{os.path.basename(file)} line {line}" if file and file != kernel.file else f"line {line}"


def clean_frame(frame: str) -> str:
    """A frame's text for stacks separated by semicolons."""
    return f"[{frame}]" if frame == CPU_GPU_SEPARATOR else clean(frame, ";") or UNKNOWN_FRAME
