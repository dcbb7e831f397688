"""What `iaprof report`, `top` and `diff` ask of what they show: the options that shape it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from iaprof.basics.errors import UsageError
from iaprof.cli.options.declared import For, Of
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.options.values import checked_choice, one_of
from iaprof.formats.profile import COMPONENTS, DEFAULT_COMPONENTS, StackOptions
from iaprof.formats.writers.registry import FORMATS, Format, Of as Shows
from iaprof.formats.writers.writer import Needs, Writer

_OF_WAITS = [name for name, format_ in FORMATS.items() if Shows.WAITS in format_.of]
_RECORDED = Of.STALLS | Of.SEVERAL | Of.TIME_LINES
_ALL_STACKS = For(_RECORDED)
_OF_ONE = For(Of.STALLS)
_OF_GROUPS = "--{} is for several captures, with --group-by"
_LEFT_OUT = ", ".join(each for each in COMPONENTS if each not in DEFAULT_COMPONENTS)
NORMALIZED = ("total", "none")
Interactive = Annotated[
    bool, typer.Option("--interactive", "-i", help="Browse in the terminal: tree, search, filters.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not print a summary to stderr.")]


@dataclass(frozen=True)
class StackShape:
    """The options of `iaprof report` that shape stacks, and not the table on a terminal.

    Raises:
        UsageError: a value is invalid.
    """

    FOR: ClassVar[For] = For(Of.STALLS | Of.SEVERAL)
    frames: Annotated[
        str,
        typer.Option(
            "--frames",
            metavar="PART,...",
            help=f"The parts of a stack, from the root: {', '.join(COMPONENTS)}. By default, all but {_LEFT_OUT}.",
            show_default=False,
            autocompletion=one_of(COMPONENTS),
        ),
    ] = ",".join(DEFAULT_COMPONENTS)
    inverted: Annotated[
        bool,
        typer.Option("--inverted", help="Print stacks from the leaf to the root."),
        For(_RECORDED | Of.TREE),
    ] = False
    per_interval: Annotated[bool, typer.Option("--per-interval", help="Make each interval the root of its stacks.")] = (
        False
    )
    percent_limit: Annotated[
        float,
        typer.Option("--percent-limit", metavar="PERCENT", help="Merge smaller stacks into one line."),
        _ALL_STACKS,
    ] = 0
    max_stack: Annotated[
        int | None,
        typer.Option("--max-stack", metavar="N", help="Keep at most N innermost CPU frames.", min=1),
        _ALL_STACKS,
    ] = None
    gpu_lines: Annotated[bool, typer.Option("--gpu-lines", help="Add source lines to GPU functions.")] = False
    gpu_dirs: Annotated[bool, typer.Option("--gpu-dirs", help="Add folders of GPU source files as frames.")] = False
    cpu_samples: Annotated[
        bool, typer.Option("--cpu-samples", help="Report CPU samples instead of stalls."), _OF_ONE
    ] = False
    all_processes: Annotated[
        bool,
        typer.Option("--all-processes", help="Include CPU samples of the recorder and of processes out of scope."),
        _OF_ONE,
    ] = False
    waits: Annotated[
        bool,
        typer.Option("--waits", help="Report microseconds that threads waited for the GPU, instead of stalls."),
        _OF_ONE,
    ] = False
    lines: Annotated[bool, typer.Option("--lines", help="Add file and line to CPU functions.")] = False
    hide_cpython: Annotated[
        bool | None,
        typer.Option(
            "--hide-cpython/--no-hide-cpython", help="Hide the interpreter's frames between Python functions."
        ),
    ] = None
    symbol_sources: Annotated[
        bool,
        typer.Option("--symbol-sources", help="List where each file's names came from, and files without names."),
        _OF_ONE,
    ] = False
    interval: Annotated[
        float | None,
        typer.Option("--interval", metavar="SECONDS", help="Length of intervals.", show_default=False),
    ] = None
    source_dirs: Annotated[
        list[Path] | None,
        typer.Option("--source-dir", metavar="DIR", help="Show source lines of files below DIR on the page."),
        For(Of.STALLS | Of.TREE),
    ] = None

    def __post_init__(self) -> None:
        """Checks the values."""
        _check_interval(self.interval)
        if not 0 <= self.percent_limit <= 100:
            raise UsageError("--percent-limit takes a percentage, from 0 to 100")
        _ = self._of_frames

    @cached_property
    def _of_frames(self) -> tuple[str, ...]:
        """The components that `--frames` names."""
        found = tuple(each.strip() for each in self.frames.split(",") if each.strip())
        for each in found:
            checked_choice(each, COMPONENTS, "--frames")
        if not found or len(set(found)) < len(found):
            raise UsageError("--frames takes at least one part, and each once")
        return found

    @property
    def components(self) -> tuple[str, ...]:
        """The components of stacks."""
        if not self.per_interval or "interval" in self._of_frames:
            return self._of_frames
        return (*self._of_frames, "interval") if self.inverted else ("interval", *self._of_frames)

    def check(self, format_: Format, writer: Writer, choice: SelectionOptions) -> None:
        """Checks whether a format can show what is asked for.

        Raises:
            UsageError: it cannot, or a filter has no effect on it.
        """
        if self.source_dirs and Needs.LISTINGS not in writer.needs:
            raise UsageError(f"--source-dir is for --format=html: {format_.name} shows no lines of source")
        has_waits = format_.name in _OF_WAITS
        if self.waits and (self.cpu_samples or Needs.TIME in writer.needs or not has_waits):
            raise UsageError(f"--waits is for {', '.join(_OF_WAITS)}, without --cpu-samples")
        if self.waits or (self.cpu_samples and has_waits):  # others show stalls, too
            choice.refuse_filters_of_stalls("--waits" if self.waits else "--cpu-samples")
        is_shaped = self._of_frames != DEFAULT_COMPONENTS or self.inverted or self.percent_limit or self.cpu_samples
        if is_shaped and not writer.has_stacks:
            raise UsageError(
                f"--frames, --inverted, --percent-limit and --cpu-samples shape stacks: {format_.name} has none"
            )

    def stack_options(self) -> StackOptions:
        """Returns the shape of stacks for writers."""
        return StackOptions(
            self.gpu_lines,
            self.gpu_dirs,
            self.components,
            self.inverted,
            self.max_stack or 0,
            self.percent_limit,
            self.cpu_samples or self.waits,
            self.waits,
        )

    def has_interpreter(self, writer: Writer) -> bool:
        """Whether stacks have CPython's own frames: if no option says so, as a format does by default."""
        return not (writer.hides_cpython if self.hide_cpython is None else self.hide_cpython)


@dataclass(frozen=True)
class Intervals:
    """The options of `iaprof top` for intervals and groups.

    Raises:
        UsageError: a value is invalid.
    """

    per_interval: Annotated[
        bool,
        typer.Option("--per-interval", help="Print a table for each interval."),
        For(Of.STALLS, "--per-interval is for one capture; --group-by day or hour divides several"),
    ] = False
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="Length of intervals."), _OF_ONE] = (
        1.0
    )
    outliers: Annotated[
        bool,
        typer.Option("--outliers", help="With --group-by: show kernels whose stalls differ between groups."),
        For(Of.SEVERAL, _OF_GROUPS.format("outliers")),
    ] = False
    percentiles: Annotated[
        bool,
        typer.Option("--percentiles", help="With --group-by: show p50, p90 and p99 of each row's share in the groups."),
        For(Of.SEVERAL, _OF_GROUPS.format("percentiles")),
    ] = False

    def __post_init__(self) -> None:
        """Checks the values."""
        _check_interval(self.interval)
        if self.outliers and self.percentiles:
            raise UsageError("--outliers and --percentiles are two tables: leave one of them out")

    @property
    def seconds(self) -> float:
        """The length of the intervals that have tables; 0: one table shows all."""
        return self.interval if self.per_interval else 0.0


@dataclass(frozen=True)
class Comparison:
    """The options of `iaprof diff` that say how sides are compared.

    Raises:
        UsageError: a value is invalid.
    """

    normalize: Annotated[
        str | None,
        typer.Option(
            "--normalize",
            metavar="HOW",
            help="total: compare shares of the total; none: compare samples, or us for time lines (their default).",
            show_default=False,
            autocompletion=one_of(NORMALIZED),
        ),
    ] = None
    per_rank: Annotated[
        bool,
        typer.Option("--per-rank", help="For time lines: compare each rank separately."),
        For(Of.TIME_LINES),
    ] = False

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.normalize is not None:
            checked_choice(self.normalize, NORMALIZED, "--normalize")

    @property
    def is_relative(self) -> bool:
        """Whether shares of stalls are compared, not samples."""
        return self.normalize != "none"


def _check_interval(seconds: float | None) -> None:
    if seconds is not None and not 0.001 <= seconds < 1e9:
        raise UsageError("--interval must be a number of seconds, 0.001 or more")
