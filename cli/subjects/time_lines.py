"""Time lines of accelerators in captures: reports, their energy, differences and trees."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import check_output, mode_of_report
from iaprof.basics.quantities import counted
from iaprof.cli.options.declared import Of
from iaprof.cli.options.shown import Comparison, Intervals, StackShape
from iaprof.cli.options.values import checked_choice
from iaprof.cli.subjects.subject import Recorded, browse
from iaprof.cli.terminal.answers import TABLE, Answers
from iaprof.cli.terminal.destination import Destination
from iaprof.cli.terminal.pager import paged
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.summary import say
from iaprof.cli.timelines.options import DeviceOptions
from iaprof.cli.timelines.tables import energy_dict, energy_lines, print_messages, show, show_difference
from iaprof.formats.writers.registry import Format

if TYPE_CHECKING:
    from iaprof.timelines.trace import Trace

BY = ("kernel", "category")
_ALL_ROWS = 0


def first_holds_time_lines(words: Sequence[str]) -> bool:
    """Whether the first of several captures that can be read holds time lines.

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


@dataclass(frozen=True)
class TimeLines(Recorded):
    """Time lines of a capture, or of several captures, whose energy is added up.

    Attributes:
        captures: paths, patterns, folders and URLs; one file where anything but energy is shown.
        device: what is known of the devices.
    """

    of: ClassVar = Of.TIME_LINES
    captures: Sequence[str]
    device: DeviceOptions

    @property
    def capture(self) -> Path:
        """The first capture."""
        return Path(self.captures[0])

    def _refusal(self, option: str, of: Of) -> str:
        return f"{option} is for stalls, and {self.capture.name} holds time lines: leave it out"

    def output_mode(self, output: Path, force: bool) -> int:
        """See Recorded."""
        check_output(output, force, self.capture)
        return mode_of_report(self.capture)

    def table(self, by: str, limit: int, intervals: Intervals, answers: Answers, quiet: bool) -> None:
        """Prints or writes the energy of kernels and copies, and of idle devices; see Subject.

        That of several captures is added up by rank and name; each has its own clocks, and is read alone.
        """
        from iaprof.formats.capture.reader import CaptureReader
        from iaprof.report.fleet.sources import find_sources
        from iaprof.timelines.outputs.formats import finished
        from iaprof.timelines.presence import shows_time_lines
        from iaprof.timelines.stages.energy import TABLE as ENERGY, summed

        sources, options = find_sources(self.captures), self.device.stage_options()
        energy, without = None, []
        for source in sources:
            with source.opened() as file:
                capture = CaptureReader(file)
                if not shows_time_lines(capture):
                    raise UsageError(f"{source.shown} holds no time lines, as others do: name captures of one kind")
                trace = finished(capture, options)
            table = trace.tables.get(ENERGY)
            if table is None:
                without.append(source.shown)
            else:
                energy = table if energy is None else summed([energy, table])
            if not quiet:
                print_messages(trace, source.shown if len(sources) > 1 else "")
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

    def view(self, quiet: bool) -> None:
        """Shows the tables of `iaprof timeline`; see Recorded."""
        trace = self._finished()
        with paged():
            show(trace, _ALL_ROWS)
        if not quiet:
            print_messages(trace)

    def export(self, format_: Format, shape: StackShape, destination: Destination, quiet: bool) -> None:
        """See Recorded."""
        from iaprof.formats.capture.reader import CaptureReader
        from iaprof.report.about import about
        from iaprof.timelines.outputs.formats import TimeLine, finished, format_of, writer_of

        options = self.device.stage_options()
        with destination.opened(format_of(format_.name).binary) as out:
            capture = CaptureReader(self.capture)
            trace = finished(capture, options)
            line = TimeLine(trace, capture, about, clean(" ".join(sys.argv[1:])))
            writer_of(format_.name)(line, shape.stack_options(), out)
            if not quiet:
                print_messages(trace)

    def tree(self, by: str, shape: StackShape, quiet: bool) -> None:
        """See Recorded."""
        from iaprof.cli.interactive.contents import SLICES, Contents
        from iaprof.timelines.views.stacks import browsable

        trace = self._finished()
        browse(Contents(str(self.capture), browsable(trace), is_inverted=shape.inverted, measure=SLICES))
        if not quiet:
            print_messages(trace)

    def difference(
        self, after: Self, by: str, limit: int | None, comparison: Comparison, answers: Answers, quiet: bool
    ) -> None:
        """See Recorded."""
        from iaprof.timelines.views.totals import difference, uses

        checked_choice(by, BY, "--by")
        checked_choice(answers.format or TABLE, (TABLE, "json"), "--format")
        found = []
        for each in (self, after):
            trace = each._finished()
            found.append(uses(trace, by, comparison.per_rank))
            if not quiet:
                print_messages(trace, each.capture.name)
            del trace  # before the next one is read
        changes = difference(found[0], found[1], by, answers.rows(limit), comparison.normalize == "total")
        show_difference(changes, as_json=not answers.is_text)

    def _finished(self) -> Trace:
        """Reads the capture, and runs the stages."""
        from iaprof.formats.capture.reader import CaptureReader
        from iaprof.timelines.outputs.formats import finished

        return finished(CaptureReader(self.capture), self.device.stage_options())
