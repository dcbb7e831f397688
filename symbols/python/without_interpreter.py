"""Removes CPython's own frames from stacks with Python functions.

Python frames are named `py::function:file`, as CPython itself names them in perf maps. Between two of them are C
functions of the interpreter, and before the first one the C functions that started it.
"""

from __future__ import annotations

import os
import re
from typing import Protocol, TypeVar

from iaprof.symbols.names.modules import Module, ModuleKind

PYTHON_FUNCTION = "py::"
NOT_COPIED = "[unknown]"
"""Replaces the name of a Python function whose code object could not be read."""
_DELETED = " (deleted)"
# The executable and the library, also of debug (d), free-threaded (t) and old (m) builds.
_INTERPRETER = re.compile(r"python(3(\.\d{1,3}[dmt]{0,2})?)?|libpython3\.\d{1,3}[dmt]{0,2}\.so[0-9.]*")


class StackFrame(Protocol):
    """What `without_interpreter` needs to know about a frame."""

    @property
    def is_python(self) -> bool:
        """Whether it is a Python function."""

    @property
    def is_of_interpreter(self) -> bool:
        """Whether its code is CPython's own."""


AnyFrame = TypeVar("AnyFrame", bound=StackFrame)


def without_interpreter(frames: list[AnyFrame]) -> list[AnyFrame]:
    """Returns the frames without CPython's own if there are Python functions among them; else all frames.

    C and C++ functions of other files stay, whether Python calls them or they call Python.
    """
    if True not in [frame.is_python for frame in frames]:
        return frames
    return [frame for frame in frames if frame.is_python or not frame.is_of_interpreter]


def python_function(frame: str) -> str | None:
    """Returns the name of the Python function in a frame's text, without its file; None if there is none."""
    if not frame.startswith(PYTHON_FUNCTION):
        return None
    name = frame.removeprefix(PYTHON_FUNCTION).partition(":")[0]
    return name if name != NOT_COPIED else None


def is_interpreter(module: Module | None) -> bool:
    """Tells whether a module is CPython: its executable or its library."""
    if module is None or module.kind is not ModuleKind.FILE:
        return False
    return _INTERPRETER.fullmatch(os.path.basename(module.path.removesuffix(_DELETED))) is not None
