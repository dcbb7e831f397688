"""The option --memory-limit, for all verbs that read captures and other untrusted files."""

from __future__ import annotations

import gc
import os
import signal
import threading
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import typer

from iaprof.basics.errors import UsageError
from iaprof.basics.files import remove_unfinished
from iaprof.cli.options.declared import ALL, For, Of
from iaprof.cli.options.values import size
from iaprof.sandbox.memory import MIN_BYTES, default_limit, lift_limit, limit, limit_memory, on_uncaught_bad_alloc

_OPTION = "--memory-limit"
_OBJECTS_UNTIL_COLLECTION = 50_000  # not 700: stacks are millions of objects that stay, and looking at them is slow
_BUT_LIVE = For(ALL & ~Of.LIVE)
MemoryLimit: TypeAlias = Annotated[
    str | None,
    typer.Option(
        _OPTION,
        metavar="SIZE",
        help="Use at most SIZE of memory.  [default: 2G, or half of what is available if that is less]",
        show_default=False,
    ),
    _BUT_LIVE,
]
Large: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--large",
        help="Read captures whose contents are implausibly large for their file size. Only if you trust them.",
    ),
    _BUT_LIVE,
]


@dataclass(frozen=True)
class OneLimit:
    """The option `--memory-limit`."""

    memory_limit: MemoryLimit = None

    def apply(self) -> None:
        """Limits this process."""
        _remove_unfinished_when_ended()
        gc.set_threshold(_OBJECTS_UNTIL_COLLECTION)
        apply_limit(memory_bytes(self.memory_limit) or default_limit())


@dataclass(frozen=True)
class Limits(OneLimit):
    """The options `--memory-limit` and `--large`, of verbs that read captures."""

    large: Large = False

    def apply(self) -> None:
        """Limits this process, and what captures may be like."""
        super().apply()
        if self.large:
            from iaprof.formats.capture.limits import allow_large

            allow_large()


def _remove_unfinished_when_ended() -> None:
    """Makes SIGTERM and SIGHUP, where they end the process, remove its unfinished files before."""

    def end(number: int, _: object) -> None:
        remove_unfinished()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(number, end)


def apply_limit(bytes_: int) -> None:
    """Limits the process's memory; beyond it, the process ends with one sentence on stderr."""
    limit_memory(bytes_)
    message = f"iaprof: {out_of_memory()}\n".encode()

    def give_up() -> None:
        lift_limit()
        remove_unfinished()
        os.write(2, message)
        os._exit(1)

    on_uncaught_bad_alloc(give_up)


def memory_bytes(text: str | None) -> int | None:
    """The value of `--memory-limit` in bytes; None if not given.

    Raises:
        UsageError: the value is not a size, or too small for iaprof.
    """
    bytes_ = None if text is None else size(text, _OPTION)
    if bytes_ is not None and bytes_ < MIN_BYTES:
        raise UsageError(f"{_OPTION} takes {MIN_BYTES >> 20}M or more: iaprof itself needs some")
    return bytes_


def out_of_memory() -> str:
    """The message if a verb runs out of memory."""
    there = limit()
    if there is None:
        return "this needs more memory than there is"
    most = f"{there >> 30}G" if there % (1 << 30) == 0 else f"{there >> 20}M"
    return f"this needs more memory than the {most} that it may take: if you trust the files, allow more with {_OPTION}"
