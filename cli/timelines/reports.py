"""Reports of captures that hold time lines, for verbs that otherwise show stalls."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.quantities import counted
from iaprof.cli.terminal.stdout import open_output, utf8_stdout
from iaprof.cli.terminal.summary import say
from iaprof.formats.profile import StackOptions

if TYPE_CHECKING:
    from iaprof.cli.terminal.answers import Answers
    from iaprof.timelines.options import Options


def holds_time_lines(path: Path) -> bool:
    """Tells whether a report of a capture shows time lines, not stalls.

    Raises:
        CaptureError: the file is not a capture, or is damaged.
    """
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.timelines.presence import shows_time_lines

    return shows_time_lines(CaptureReader(path))


def both_hold_time_lines(before: Path, after: Path) -> bool:
    """Tells whether two captures hold time lines.

    Raises:
        CaptureError: a file is not a capture, or is damaged.
        UsageError: one of them holds stalls.
    """
    first, second = holds_time_lines(before), holds_time_lines(after)
    if first != second:
        one, other = (before, after) if first else (after, before)
        raise UsageError(f"{one.name} holds time lines and {other.name} stalls: compare two captures of the same kind")
    return first


def show_difference(
    before: Path,
    after: Path,
    by: str,
    limit: int,
    is_relative: bool,
    per_rank: bool,
    stage_options: Options,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prints what changed between two captures that hold time lines."""
    from iaprof.cli.timelines.difference import show
    from iaprof.cli.timelines.messages import say_messages
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.timelines.outputs.formats import finished
    from iaprof.timelines.views.totals import difference, uses

    found = []
    for path in (before, after):
        trace = finished(CaptureReader(path), stage_options)
        found.append(uses(trace, by, per_rank))
        if not quiet:
            say_messages(trace, path.name)
        del trace  # before the next one is read
    show(difference(found[0], found[1], by, limit, is_relative), as_json)


def hold_time_lines(words: Sequence[str]) -> bool:
    """Tells whether several captures hold time lines: whether the first one that can be read does.

    Raises:
        UsageError: a word names nothing.
        SourceError: captures cannot be found.
    """
    from iaprof.formats.capture.limits import CaptureError
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.fleet.sources import SourceError, find_sources
    from iaprof.timelines.presence import shows_time_lines

    for source in find_sources(words):
        with contextlib.suppress(CaptureError, SourceError), source.opened() as file:
            return shows_time_lines(CaptureReader(file))
    return False


def show_energy(words: Sequence[str], stage_options: Options, limit: int, answers: Answers, quiet: bool) -> None:
    """Prints or writes the energy of kernels and copies, and of idle devices, of captures that hold time lines.

    That of several captures is added up by rank and name; each has its own clocks, and is read alone.

    Raises:
        IaprofError: none has power, or one cannot be read.
        UsageError: one holds stalls.
    """
    from iaprof.cli.timelines.messages import say_messages
    from iaprof.cli.timelines.tables import energy_dict, energy_lines
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.fleet.sources import find_sources
    from iaprof.timelines.outputs.formats import finished
    from iaprof.timelines.presence import shows_time_lines
    from iaprof.timelines.stages.energy import TABLE, summed

    sources = find_sources(words)
    energy, without = None, []
    for source in sources:
        with source.opened() as file:
            capture = CaptureReader(file)
            if not shows_time_lines(capture):
                raise UsageError(f"{source.shown} holds no time lines, as others do: name captures of one kind")
            trace = finished(capture, stage_options)
        table = trace.tables.get(TABLE)
        if table is None:
            without.append(source.shown)
        else:
            energy = table if energy is None else summed([energy, table])
        if not quiet:
            say_messages(trace, source.shown if len(sources) > 1 else "")
        del trace  # before the next one is read
    if energy is None:
        which = f"{without[0]} has no" if len(sources) == 1 else f"none of {counted(len(sources), 'capture')} has"
        raise IaprofError(
            f"{which} power of its devices, as charge counters or as counters of Watts, W or mW have it: "
            "'iaprof timeline' says what was left out"
        )
    if answers.is_text:
        with utf8_stdout():
            print("\n".join(energy_lines(energy, limit)))
    else:
        several = {"captures": len(sources), "without_power": without} if len(sources) > 1 else {}
        answers.write({**energy_dict(energy, limit), **several})
    if without and not quiet:
        say(clean(f"iaprof: warning: {counted(len(without), 'capture')} without power, the first is {without[0]}"))


def check_options(context: typer.Context, path: Path, taken: Collection[str]) -> None:
    """Refuses options that choose or shape stalls.

    Args:
        context: of the verb.
        path: of a capture that holds time lines.
        taken: names of the verb's parameters that mean something for them.

    Raises:
        UsageError: another one was given.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in taken and is_given(context, name):
            option = max(parameter.opts, key=len)
            raise UsageError(f"{option} is for stalls, and {path.name} holds time lines: leave it out")


def open_traces(output: Path | None, format_: str, mode: int) -> AbstractContextManager[IO[Any]]:
    """Opens what a report of time lines is written to; UsageError if there is no such report."""
    from iaprof.timelines.outputs.formats import format_of

    return open_output(output, format_of(format_).binary, mode)


def refuse_for_stalls(context: typer.Context, path: Path, names: Collection[str]) -> None:
    """Refuses options that only time lines take; `names` are those of the verb's parameters."""
    for parameter in context.command.params:
        if parameter.name in names and is_given(context, parameter.name):
            raise UsageError(f"{parameter.opts[0]} is for time lines, and {path.name} holds stalls: leave it out")


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the user gave one of the verb's parameters."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def stage_options(freq: str | None, compiler_logs: Sequence[str] = ()) -> Options:
    """Returns the options of the stages; UsageError if the frequencies are none, IaprofError if a log is not there."""
    from iaprof.cli.timelines.options import DEFAULT_FREQ, existing_logs, frequencies
    from iaprof.timelines.options import Options

    soc, core = frequencies(freq or DEFAULT_FREQ)
    return Options(soc_mhz=soc, core_mhz=core, compiler_logs=existing_logs(compiler_logs))


def write_report(
    path: Path, format_: str, stage_options: Options, options: StackOptions, out: IO[Any], quiet: bool
) -> None:
    """Writes a report of a capture that holds time lines.

    Args:
        path: the capture.
        stage_options: of the stages.
        format_: one of timelines.outputs.formats.FORMATS.
        options: the shape of stacks.
        out: receives the report, bytes where the format is binary.
        quiet: do not say on stderr what the stages found.
    """
    from iaprof.cli.timelines.messages import say_messages
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.about import about
    from iaprof.timelines.outputs.formats import TimeLine, finished, writer_of

    capture = CaptureReader(path)
    trace = finished(capture, stage_options)
    writer_of(format_)(TimeLine(trace, capture, about, clean(" ".join(sys.argv[1:]))), options, out)
    if not quiet:
        say_messages(trace)
