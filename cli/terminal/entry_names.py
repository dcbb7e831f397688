"""Names of the entries of `iaprof top` and `iaprof diff`, in tables and in JSON."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from iaprof.basics.clean import clean

if TYPE_CHECKING:
    from iaprof.report.views.ranking import Key

BETWEEN_FRAMES = " < "  # callee < caller
_CUT = "…"
_PYTHON = "py::"
_ARGUMENTS = re.compile(r"(?<!operator)\((?!anonymous namespace\))[^()]*\)(?: const)?")
_DEEPEST = 8  # nesting of parentheses in arguments


def entry_titles(by: str, keys: Sequence[Key], short: bool) -> list[str]:
    """A text for each key.

    Args:
        by: a key of ranking.KEYS.
        keys: of all entries that are shown.
        short: omit the frames that all stacks share (the runtime's and those of main), and the folders of Python
            functions' files.
            functions without the folder of their file.
    """
    if by in ("kernel", "energy", "instruction"):  # add the file if several kernels have the name
        often = Counter(kernel for kernel, _file in {key[:2] for key in keys})
        return [f"{_TEXTS[by](*key)} {key[1] if often[key[0]] > 1 else ''}".rstrip() for key in keys]
    if by == "stack":
        return _stacks(keys, short)
    if by == "launcher" and short:
        return [short_python(str(launcher)) for (launcher,) in keys]
    return [_TEXTS[by](*key) for key in keys]


def key_fields(by: str, key: Key) -> dict[str, Any]:
    """The components of a key, for JSON."""
    from iaprof.report.views.ranking import KEYS

    return {name: _cleaned(part) for name, part in zip(KEYS[by], key, strict=True)}


def _stacks(keys: Sequence[Key], short: bool) -> list[str]:
    """Stacks as texts: innermost frame first, the process last."""
    stacks = [tuple(map(str, (*frames, process))) for process, frames in keys if isinstance(frames, tuple)]
    if short:
        walked = [stack for stack in stacks if len(stack) > 2]  # others are labels instead of stacks
        inner = _shared(walked)
        outer = _shared([stack[inner:][::-1] for stack in walked])
        stacks = [_shortened_stack(stack, inner, outer) if len(stack) > 2 else stack for stack in stacks]
    return [BETWEEN_FRAMES.join(stack) for stack in stacks]


def _shared(stacks: Sequence[Sequence[str]]) -> int:
    """The number of leading frames that all stacks share."""
    levels = zip(*stacks, strict=False) if len(stacks) > 1 else ()
    return len(list(takewhile(lambda level: len(set(level)) == 1, levels)))


def _shortened_stack(stack: Sequence[str], inner: int, outer: int) -> tuple[str, ...]:
    """A stack without the frames that all share, and without arguments."""
    frames = (_without_arguments(short_python(frame)) for frame in stack[inner : len(stack) - outer])
    return (*([_CUT] if inner else []), *frames, *([_CUT] if outer else []))


def short_python(frame: str) -> str:
    """Shortens a Python frame's path to its base name, `py::Layer.forward:model.py`; leaves other frames alone."""
    function, separator, file = frame.removeprefix(_PYTHON).partition(":")
    if not frame.startswith(_PYTHON) or not separator:
        return frame
    return f"{_PYTHON}{function}:{os.path.basename(file) or file}"


def _without_arguments(frame: str) -> str:
    for _ in range(_DEEPEST):
        shorter = _ARGUMENTS.sub("", frame)
        if shorter in ("", frame):
            break
        frame = shorter
    return frame


def _line(file: str, line: int, kernel: str) -> str:
    if file:
        return f"{file}:{line}"
    return f"{kernel} line {line}" if line else f"{kernel} [no line]"


def _process(host: str, process: str, pid: int) -> str:
    return " ".join([process, *([str(pid)] if pid else []), *([f"on {host}"] if host else [])])


def _cleaned(part: object) -> object:
    if isinstance(part, tuple):
        return [clean(each) for each in part]
    return clean(part) if isinstance(part, str) else part


_TEXTS: dict[str, Callable[..., str]] = {
    "kernel": lambda kernel, _file: str(kernel),
    "energy": lambda kernel, _file: str(kernel),
    "function": str,
    "line": _line,
    "instruction": lambda kernel, _file, offset, mnemonic: f"{kernel}+0x{offset:x} {mnemonic}",
    "reason": str,
    "process": _process,
    "launcher": str,
    "operator": str,
}
