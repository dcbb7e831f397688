"""Python's functions without the interpreter that runs them.

Frames of Python are named `py::function:file`, as CPython itself names them in perf maps. Between two of them are C
functions of the interpreter, and before the first those that started it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

from iaprof.symbols.names.modules import Module, ModuleKind

PYTHON_FUNCTION = "py::"
NOT_COPIED = "[unknown]"
"""In place of the name of a function of Python whose code object could not be read."""
_DELETED = " (deleted)"
# The executable and the library, of debug (d), free-threaded (t) and old (m) builds too.
_INTERPRETER = re.compile(r"python(3(\.\d{1,3}[dmt]{0,2})?)?|libpython3\.\d{1,3}[dmt]{0,2}\.so[0-9.]*")


class StackFrame(Protocol):
    """A frame of a stack, as far as it matters what it is."""

    @property
    def name(self) -> str:
        """Its function."""

    @property
    def module(self) -> Module | None:
        """Whose code it is; None where that is not known."""


Each = TypeVar("Each", bound=StackFrame)


def without_interpreter(frames: Sequence[Each]) -> list[Each]:
    """The frames but for CPython's own, where functions of Python are among them; else all of them.

    What C and C++ functions of other files do, called by Python or calling it, stays.
    """
    if not any(frame.name.startswith(PYTHON_FUNCTION) for frame in frames):
        return list(frames)
    return [frame for frame in frames if frame.name.startswith(PYTHON_FUNCTION) or not is_interpreter(frame.module)]


def python_function(frame: str) -> str | None:
    """The name of the Python function that a frame's text tells of, without its file; None where there is none."""
    if not frame.startswith(PYTHON_FUNCTION):
        return None
    name = frame.removeprefix(PYTHON_FUNCTION).partition(":")[0]
    return name if name != NOT_COPIED else None


def is_interpreter(module: Module | None) -> bool:
    """Whether a module is CPython, the executable or its library."""
    if module is None or module.kind is not ModuleKind.FILE:
        return False
    return _INTERPRETER.fullmatch(os.path.basename(module.path.removesuffix(_DELETED))) is not None
