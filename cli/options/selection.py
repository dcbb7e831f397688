"""The options that select stalls, join them to launches, and find symbols."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from iaprof.basics.errors import UsageError
from iaprof.cli.options.declared import For, Of
from iaprof.cli.options.symbol_options import NAMES, Kallsyms, SymbolDirs, Symfs
from iaprof.cli.options.values import checked_choice, one_of, pids as pids_of, words_of
from iaprof.gpu.vendors import REASONS

if TYPE_CHECKING:
    from iaprof.report.cpu_names import SymbolOptions
    from iaprof.report.join.selection import Selection
    from iaprof.symbols.cpu_frames import FrameOptions

_WHICH, _HOW = "Filters", "Attribution"
_METHODS = ("proportional", "latest", "none")
_STACKS_OF = ("append", "execute")
_LIVE_TOO = For(Of.STALLS | Of.SEVERAL | Of.TREE | Of.LIVE)


@dataclass(frozen=True)
class SelectionOptions:
    """The options.

    Raises:
        UsageError: a value is invalid.
    """

    FOR: ClassVar[For] = For(Of.STALLS | Of.SEVERAL | Of.TREE)
    time: Annotated[
        str | None,
        typer.Option(
            "--time",
            metavar="SPAN",
            help="Only stalls of this part of the recording: 1s-10s, 500ms-, 10%-20%.",
            rich_help_panel=_WHICH,
        ),
    ] = None
    pid: Annotated[
        list[str] | None,
        typer.Option(
            "--pid", "-p", metavar="PID,...", help="Only stalls launched by these processes.", rich_help_panel=_WHICH
        ),
        _LIVE_TOO,
    ] = None
    tid: Annotated[
        list[str] | None,
        typer.Option("--tid", metavar="TID,...", help="Only stalls launched by these threads.", rich_help_panel=_WHICH),
    ] = None
    comm: Annotated[
        list[str] | None,
        typer.Option(
            "--comm", metavar="NAME,...", help="Only stalls launched by threads of these names.", rich_help_panel=_WHICH
        ),
    ] = None
    kernel: Annotated[
        str | None,
        typer.Option(
            "--kernel", metavar="REGEX", help="Only kernels whose name matches REGEX.", rich_help_panel=_WHICH
        ),
    ] = None
    python: Annotated[
        str | None,
        typer.Option(
            "--python",
            metavar="REGEX",
            help="Only stalls launched below Python functions whose name matches REGEX.",
            rich_help_panel=_WHICH,
        ),
    ] = None
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="GPU,...",
            help="Only these GPUs: card, render node or PCI address.",
            rich_help_panel=_WHICH,
        ),
        _LIVE_TOO,
    ] = None
    reason: Annotated[
        list[str] | None,
        typer.Option(
            "--reason",
            metavar="REASON,...",
            help=f"Only stalls of these reasons: {', '.join(REASONS)}.",
            rich_help_panel=_WHICH,
            autocompletion=one_of(REASONS),
        ),
    ] = None
    active: Annotated[
        bool,
        typer.Option(
            "--active/--no-active",
            help="Include samples in which a thread issued an instruction, or only stalls.",
            rich_help_panel=_WHICH,
        ),
    ] = True
    cgroup: Annotated[
        list[str] | None,
        typer.Option(
            "--cgroup",
            metavar="PATTERN",
            help="Only stalls launched in this cgroup or below, or in this container.",
            rich_help_panel=_WHICH,
        ),
    ] = None
    attribution: Annotated[
        str,
        typer.Option(
            "--attribution",
            metavar="METHOD",
            help="Attribute stalls to all launches that can be running (proportional), "
            "to the last one, as with Intel's tool (latest), or to the kernel alone (none).",
            rich_help_panel=_HOW,
            autocompletion=one_of(_METHODS),
        ),
    ] = "proportional"
    horizon: Annotated[
        float | None,
        typer.Option(
            "--horizon",
            metavar="SECONDS",
            help="Assume that a kernel runs at most this long after its launch.  [default: 0.5]",
            show_default=False,
            rich_help_panel=_HOW,
        ),
    ] = None
    split_ambiguous: Annotated[
        bool,
        typer.Option(
            "--split-ambiguous",
            help="Divide ambiguous stalls among processes instead of labelling them.",
            rich_help_panel=_HOW,
        ),
    ] = False
    stack_of: Annotated[
        str,
        typer.Option(
            "--stack-of",
            metavar="CALL",
            help="For kernels of closed command lists, show the stack, thread and process name that appended them "
            "(append) or that executed their list (execute).",
            rich_help_panel=_HOW,
            autocompletion=one_of(_STACKS_OF),
        ),
    ] = "append"
    inlines: Annotated[
        bool,
        typer.Option("--inlines/--no-inlines", help="Show inlined CPU functions as frames.", rich_help_panel=NAMES),
    ] = True
    mark_guesses: Annotated[
        bool,
        typer.Option(
            "--mark-guesses/--no-mark-guesses",
            help="End callers that were found by a guess in _[guessed].",
            rich_help_panel=NAMES,
        ),
    ] = True
    symfs: Symfs = None
    symbol_dirs: SymbolDirs = None
    kallsyms: Kallsyms = None

    def __post_init__(self) -> None:
        """Checks the values."""
        _ = self.selection

    @cached_property
    def selection(self) -> Selection:
        """The selection of stalls, and how they are joined to launches."""
        # Imported here, as the other verbs need not wait for it.
        from iaprof.report.join.candidates import DEFAULT_WINDOW_S, LONGEST_WINDOW_S, SHORTEST_WINDOW_S, Method, Rule
        from iaprof.report.join.executions import StackOf
        from iaprof.report.join.selection import Selection, TimeRange

        if self.reason is not None and not self.active:
            raise UsageError("--reason chooses the reasons, active among them: leave out --no-active")
        checked_choice(self.attribution, _METHODS, "--attribution")
        checked_choice(self.stack_of, _STACKS_OF, "--stack-of")
        seconds = DEFAULT_WINDOW_S if self.horizon is None else self.horizon
        if not SHORTEST_WINDOW_S <= seconds <= LONGEST_WINDOW_S:
            raise UsageError(f"--horizon takes seconds from {SHORTEST_WINDOW_S:g} to {LONGEST_WINDOW_S:g}")
        return Selection(
            Rule(Method(self.attribution), int(seconds * 1e9), self.split_ambiguous),
            None if self.time is None else TimeRange.parse(self.time),
            frozenset(pids_of(words_of(self.pid, "--pid"), "--pid")),
            frozenset(pids_of(words_of(self.tid, "--tid"), "--tid", "thread ids")),
            frozenset(words_of(self.comm, "--comm")),
            _pattern(self.kernel, "--kernel"),
            tuple(words_of(self.device, "--device")),
            _reasons(words_of(self.reason, "--reason")),
            tuple(words_of(self.cgroup, "--cgroup")),
            _pattern(self.python, "--python"),
            self.active,
            StackOf(self.stack_of),
        )

    def frame_options(self, lines: bool = False, interpreter: bool = False) -> FrameOptions:
        """The options for CPU frames.

        Args:
            lines: show file and line after a function.
            interpreter: show CPython's own frames between Python functions.
        """
        from iaprof.symbols.cpu_frames import FrameOptions

        return FrameOptions(self.inlines, lines, interpreter, self.mark_guesses)

    def symbol_options(self) -> SymbolOptions:
        """Where names of CPU frames are looked for."""
        from iaprof.report.cpu_names import SymbolOptions

        return SymbolOptions(self.symfs, tuple(self.symbol_dirs or ()), self.kallsyms)

    def refuse_filters_of_stalls(self, instead: str) -> None:
        """Checks that no filter is given that has no effect on what is shown instead of stalls.

        Args:
            instead: what shows it, such as `--waits`.

        Raises:
            UsageError: one is given.
        """
        chosen = self.selection
        for option, is_given in (
            ("--kernel", chosen.kernel is not None),
            ("--device", bool(chosen.devices)),
            ("--reason", bool(chosen.reasons)),
            ("--no-active", not chosen.active),
        ):
            if is_given:
                raise UsageError(f"{option} filters stalls and has no effect with {instead}: leave out one of them")


def _pattern(text: str | None, option: str) -> re.Pattern[str] | None:
    if text is None:
        return None
    if not text:  # it would match everything
        raise UsageError(f"{option} takes a regular expression, not an empty text")
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:  # the others: a{99999999999}, thousands of brackets
        raise UsageError(f"{option} takes a regular expression, and this is not one: {error}") from None


def _reasons(words: list[str]) -> frozenset[str]:
    for word in words:
        checked_choice(word, REASONS, "--reason")
    return frozenset(words)
