"""Removes CPython's own frames from stacks with Python functions.

Python frames are named `py::function:file`, as CPython itself names them in perf maps. Between two of them are C
functions of the interpreter, and before the first one the C functions that started it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
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
    def name(self) -> str:
        """The name of its function."""

    @property
    def module(self) -> Module | None:
        """The module with its code; None if unknown."""


AnyFrame = TypeVar("AnyFrame", bound=StackFrame)


def without_interpreter(frames: Sequence[AnyFrame]) -> list[AnyFrame]:
    """Returns the frames without CPython's own if there are Python functions among them; else all frames.

    C and C++ functions of other files stay, whether Python calls them or they call Python.
    """
    if not any(frame.name.startswith(PYTHON_FUNCTION) for frame in set(frames)):
        return list(frames)
    return [frame for frame in frames if frame.name.startswith(PYTHON_FUNCTION) or not is_interpreter(frame.module)]


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
