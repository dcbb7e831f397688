"""The option --memory-limit, for all verbs that read captures and other untrusted files."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Annotated, TypeAlias

import typer

from iaprof.basics.errors import UsageError
from iaprof.basics.files import remove_unfinished
from iaprof.cli.options.added import add_options
from iaprof.cli.options.quantities import size
from iaprof.sandbox.memory import MIN_BYTES, default_limit, lift_limit, limit, limit_memory, on_uncaught_bad_alloc

_OPTION = "--memory-limit"
_OBJECTS_UNTIL_COLLECTION = 50_000  # not 700: stacks are millions of objects that stay, and looking at them is slow
MemoryLimit: TypeAlias = Annotated[
    str | None,
    typer.Option(
        _OPTION,
        metavar="SIZE",
        help="Use at most SIZE of memory.  [default: 2G, or half of what is available if that is less]",
        show_default=False,
    ),
]
Large: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--large",
        help="Read captures whose contents are implausibly large for their file size. Only if you trust them.",
    ),
]


def with_memory_limit(verb: Callable[..., None]) -> Callable[..., None]:
    """Returns the verb with the additional option `--memory-limit`."""
    return add_options(verb, _limit, lambda _, own: verb(**own))


def with_limits(verb: Callable[..., None]) -> Callable[..., None]:
    """Returns the verb with the additional options `--memory-limit` and `--large`, for verbs that read captures."""
    return add_options(verb, _limits, lambda _, own: verb(**own))


def _limit(memory_limit: MemoryLimit = None) -> None:
    _remove_unfinished_when_ended()
    gc.set_threshold(_OBJECTS_UNTIL_COLLECTION)
    apply_limit(memory_bytes(memory_limit) or default_limit())


def _remove_unfinished_when_ended() -> None:
    """Makes SIGTERM and SIGHUP, where they end the process, remove its unfinished files before."""

    def end(number: int, _: object) -> None:
        remove_unfinished()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(number, end)


def _limits(memory_limit: MemoryLimit = None, large: Large = False) -> None:
    _limit(memory_limit)
    if large:
        from iaprof.formats.capture.limits import allow_large

        allow_large()


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
