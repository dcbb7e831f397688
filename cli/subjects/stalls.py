"""Stalls of one capture, and its waits, CPU samples and transfers: tables, reports, differences and trees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import check_output, mode_of_report
from iaprof.cli.options.declared import Of
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.options.shown import Comparison, Intervals, StackShape
from iaprof.cli.options.values import checked_choice
from iaprof.cli.subjects.subject import Recorded, browse, grouping_of
from iaprof.cli.subjects.transfers import BY as TRANSFER, table as table_of_transfers
from iaprof.cli.subjects.unmatched import (
    check_has_rows,
    filters_of,
    names_of_profile,
    names_of_samples,
    nothing_matches,
)
from iaprof.cli.subjects.waits import BY as WAIT, table as table_of_waits
from iaprof.cli.terminal.answers import OF_STACKS, Answers
from iaprof.cli.terminal.destination import Destination
from iaprof.cli.terminal.difference_tables import BY as OF_DIFFERENCES, show as show_difference
from iaprof.cli.terminal.facts import say_facts, say_waits, symbol_source_lines
from iaprof.cli.terminal.pager import paged
from iaprof.cli.terminal.progress import show_joining
from iaprof.cli.terminal.ranking_tables import ENERGY, OPERATOR, show
from iaprof.cli.terminal.stdout import open_output, utf8_stdout
from iaprof.cli.terminal.summary import say
from iaprof.formats.header.left_out import left_out_text
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.registry import WRITERS, Format
from iaprof.formats.writers.writer import Needs, Writer

if TYPE_CHECKING:
    from iaprof.cli.interactive.contents import Listing
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.formats.export import CpuSamples, Export
    from iaprof.formats.profile import Profile
    from iaprof.report.facts import Report
    from iaprof.report.gpu.module import GpuModuleLoader
    from iaprof.report.join.selection import Selection
    from iaprof.report.profile import ReportOptions

_KERNEL = "kernel"
_ALL_ROWS = 0
_INTERVALS = 200  # of a recording in a tree, at most
_STEPS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600)
_MOST_RECORDS_BY_TIME = 4_000_000  # stall records; each can become a row of an interval


@dataclass(frozen=True)
class Stalls(Recorded):
    """Stalls of one capture.

    Attributes:
        capture: the file.
        choice: the selection of stalls, and where to look for symbols.
        reader: the file, if it is open.
    """

    of: ClassVar = Of.STALLS
    capture: Path
    choice: SelectionOptions
    reader: CaptureReader | None = None

    def _refusal(self, option: str, of: Of) -> str:
        if Of.TIME_LINES in of:
            return f"{option} is for time lines, and {self.capture.name} holds stalls: leave it out"
        return f"{option} is for several captures: 'iaprof {self.verb}' got one file"

    def output_mode(self, output: Path, force: bool) -> int:
        """See Recorded."""
        check_output(output, force, self.capture)
        return mode_of_report(self.capture)

    def table(self, by: str, limit: int, intervals: Intervals, answers: Answers, quiet: bool) -> None:
        """See Subject."""
        if by == TRANSFER:
            table_of_transfers(self.capture, self.choice, limit, intervals, answers, quiet)
        elif by == WAIT:
            table_of_waits(self.verb, self.capture, self.choice, limit, intervals.seconds, answers, quiet)
        else:
            self._table(by, limit, intervals, answers, quiet)

    def _table(self, by: str, limit: int, intervals: Intervals, answers: Answers, quiet: bool) -> None:
        with open_report(self.capture, self.choice, intervals.seconds) as report, utf8_stdout():
            energy = report.facts.energy
            if by == ENERGY and energy is None:
                raise IaprofError(
                    f"{self.capture} has no energy of its GPUs: record with metrics where the driver has a sensor "
                    "(iaprof check)"
                )
            show(report.profile, by, limit, answers, intervals.per_interval, energy)
            has_operators = by != OPERATOR or any(launch and launch.operators for launch in report.profile.launches)
        if quiet:
            return
        if not has_operators:
            say("iaprof: warning: the capture has no operators: join a trace of the same run with iaprof import --with")
        say_facts(self.verb, report.facts, report.header)

    def view(self, quiet: bool) -> None:
        """See Recorded."""
        with open_report(self.capture, self.choice) as report, paged():
            show(report.profile, _KERNEL, _ALL_ROWS, Answers(), per_interval=False)
        if not quiet:
            say_facts(self.verb, report.facts, report.header)

    def export(self, format_: Format, shape: StackShape, destination: Destination, quiet: bool) -> None:
        """See Recorded."""
        writer, options = WRITERS[format_.name], shape.stack_options()
        with (
            _open_export(self.capture, self.reader, self.choice, writer, shape) as (export, built),
            destination.opened(writer.binary) as out,
        ):
            writer.write(export, options, out)
        if built is not None and shape.symbol_sources:
            for line in symbol_source_lines(built.facts.cpu_modules):
                say(line)
        if quiet:
            return
        if built is not None:
            say_facts(self.verb, built.facts, built.header)
        elif shape.waits:
            from iaprof.formats.capture.reader import CaptureReader

            say_waits(self.verb, CaptureReader(self.capture))
        elif export.cpu is not None:
            left_out = f", without {text}" if (text := left_out_text(export.cpu.left_out)) else ""
            say(f"[ iaprof {self.verb}: {int(export.cpu.count.sum()):,} CPU samples{left_out} ]")

    def tree(self, by: str, shape: StackShape, quiet: bool) -> None:
        """See Recorded."""
        from iaprof.cli.interactive.contents import Contents
        from iaprof.formats.capture.reader import CaptureReader
        from iaprof.report.about import about

        grouping, interval_s = grouping_of(by), interval_of(self.capture)
        with open_report(self.capture, self.choice, interval_s, texts=True) as report:
            title = " · ".join(filter(None, (str(self.capture), about(CaptureReader(self.capture)).title)))
            listing = _listing(report, shape.source_dirs or ())
            browse(Contents(title, report.profile, grouping, shape.inverted, interval_s=interval_s, listing=listing))
        if not quiet:
            say_facts(self.verb, report.facts, report.header)

    def difference(
        self, after: Self, by: str, limit: int | None, comparison: Comparison, answers: Answers, quiet: bool
    ) -> None:
        """See Recorded."""
        checked_choice(by, OF_DIFFERENCES, "--by")
        # Imported here, as other verbs start faster without it.
        from iaprof.report.views.difference import difference, joined

        with (
            open_report(self.capture, self.choice, may_be_empty=True) as old,
            open_report(after.capture, self.choice, may_be_empty=old.facts.stalls > 0) as new,
        ):
            both = joined(old.profile, new.profile)
        sides = [(self.capture, old), (after.capture, new)]
        if answers.format in OF_STACKS.values():
            _write_stacks(both, (self.capture.name, after.capture.name), comparison, answers)
        else:
            facts = [(path.name, report.facts) for path, report in sides]
            found = difference(both, by, answers.rows(limit), comparison.is_relative)
            show_difference(found, answers, comparison.is_relative, facts, both=both)
        if not quiet:
            for path, report in sides:
                say_facts(f"{self.verb} {path.name}", report.facts, report.header)

    def tree_of_difference(self, after: Self, by: str, comparison: Comparison, quiet: bool) -> None:
        """Annotates the kernels of the second capture; see Recorded."""
        from iaprof.cli.interactive.contents import Contents
        from iaprof.report.views.difference import joined

        checked_choice(by, OF_DIFFERENCES, "--by")
        with open_report(self.capture, self.choice) as old:
            pass
        with open_report(after.capture, self.choice, texts=True) as new:
            both, grouping = joined(old.profile, new.profile), grouping_of(by)
            title, listing = (
                f"{self.capture} before, {after.capture} after",
                _listing(new, (), len(old.profile.kernels)),
            )
            browse(Contents(title, both, grouping, sides=2, is_relative=comparison.is_relative, listing=listing))
        if not quiet:
            for path, report in ((self.capture, old), (after.capture, new)):
                say_facts(f"{self.verb} {path.name}", report.facts, report.header)


@contextlib.contextmanager
def open_report(
    capture: Path,
    choice: SelectionOptions,
    interval_s: float = 0.0,
    *,
    texts: bool = False,
    lines: bool = False,
    interpreter: bool = False,
    may_be_empty: bool = False,
) -> Iterator[Report]:
    """The report of a capture; usable within the block.

    Args:
        capture: the file.
        choice: the selection of stalls, and where to look for symbols.
        interval_s: length of an interval; 0: a single one.
        texts: disassemble whole GPU instructions, not only mnemonics.
        lines: CPU frames have file and line.
        interpreter: keep CPython's own frames between Python functions.
        may_be_empty: whether filters may select no stalls.

    Raises:
        CaptureError: the file is not a capture, or is damaged.
        IaprofError: filters select no stalls.
        UsageError: the capture lacks something that the options name, such as a GPU.
    """
    from iaprof.basics.heap import return_large_blocks_when_freed
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.gpu.module import GpuModuleLoader

    return_large_blocks_when_freed()
    reader = CaptureReader(capture)
    with GpuModuleLoader() as modules:
        _begin(modules, reader)
        from iaprof.report.parts import build_parts
        from iaprof.report.profile import ReportOptions

        wanted = ReportOptions(choice.selection, interval_s, choice.frame_options(lines, interpreter), texts)

        def built(selection: Selection) -> Report:
            options = replace(wanted, selection=selection)
            with show_joining(reader.stall_records) as progress:
                return build_parts(reader, modules, options, choice.symbol_options(), progress)

        report = built(choice.selection)
        if not report.facts.stalls and filters_of(choice.selection) and not may_be_empty:
            raise nothing_matches(
                "stall", choice.selection, reader, lambda only: names_of_profile(built(only).profile, reader)
            )
        yield report


def _begin(modules: GpuModuleLoader, reader: CaptureReader) -> None:
    """Starts the child that reads GPU code, if there is any: it gets ready while this process imports the join."""
    if any(part.count("kernel") for part in reader.parts):
        modules.begin()


@contextlib.contextmanager
def _open_export(
    capture: Path, opened: CaptureReader | None, choice: SelectionOptions, writer: Writer, shape: StackShape
) -> Iterator[tuple[Export, Report | None]]:
    """A writer's input, and the report it comes from, or None if only CPU samples or waits are exported.

    Raises:
        CaptureError: the file is not a capture, or is damaged.
        IaprofError: filters select nothing, or the capture has no waits or CPU samples, which the options ask for.
        UsageError: the capture lacks something that the options name, or a folder cannot be read.
    """
    from iaprof.basics.heap import return_large_blocks_when_freed
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.gpu.module import GpuModuleLoader
    from iaprof.report.gpu.source_files import SourceFiles

    folders = SourceFiles(shape.source_dirs or ())
    return_large_blocks_when_freed()
    reader = opened or CaptureReader(capture)
    with GpuModuleLoader() as modules:
        if shape.waits or (shape.cpu_samples and Needs.CPU not in writer.needs):
            yield _export_of_samples(reader, choice, writer, shape), None
            return
        _begin(modules, reader)
        from iaprof.report.exporting import build_export

        wanted = _report_options(reader, choice, writer, shape)
        if shape.cpu_samples:
            check_has_rows(reader, "cpu_sample")
        with show_joining(reader.stall_records) as progress:
            built = build_export(reader, modules, wanted, choice.symbol_options(), writer.needs, progress, folders)
        others = built[0].cpu  # a process without stalls can have CPU samples
        if not built[1].facts.stalls and filters_of(choice.selection) and not (others and len(others.count)):
            with open_report(capture, choice):  # raises the error
                pass
        yield built


def _export_of_samples(reader: CaptureReader, choice: SelectionOptions, writer: Writer, shape: StackShape) -> Export:
    """An export that has nothing but waits or CPU samples; the errors are those of `_open_export`."""
    from iaprof.formats.export import Export
    from iaprof.formats.profile import empty_profile
    from iaprof.report.about import about
    from iaprof.report.exporting import cpu_samples
    from iaprof.report.views.waits import waits_of

    wanted = _report_options(reader, choice, writer, shape)
    kind = "wait" if shape.waits else "cpu_sample"
    check_has_rows(reader, kind)

    def samples(options: ReportOptions) -> CpuSamples:
        if shape.waits:
            return waits_of(reader, options, choice.symbol_options()).as_samples()
        return cpu_samples(reader, options, choice.symbol_options())

    found = _selected(kind, samples, wanted, reader)
    return Export(empty_profile(), about(reader), wanted.interval_s, cpu=found)


def _report_options(
    reader: CaptureReader, choice: SelectionOptions, writer: Writer, shape: StackShape
) -> ReportOptions:
    from iaprof.report.exporting import fitting_interval
    from iaprof.report.profile import ReportOptions

    interval = shape.interval
    if interval is None and "interval" in shape.components and not writer.interval_s:
        interval = 1.0
    if interval is None:
        interval = fitting_interval(reader, writer.interval_s)
    frames = choice.frame_options(shape.lines, shape.has_interpreter(writer))
    return ReportOptions(choice.selection, interval, frames, all_samples=shape.all_processes)


def _selected(
    kind: str, samples_of: Callable[[ReportOptions], CpuSamples], options: ReportOptions, reader: CaptureReader
) -> CpuSamples:
    """The selected rows of a kind as samples; IaprofError if filters select none."""
    samples = samples_of(options)
    if not len(samples.count) and filters_of(options.selection):
        raise nothing_matches(
            "wait" if kind == "wait" else "CPU sample",
            options.selection,
            reader,
            lambda only: names_of_samples(samples_of(replace(options, selection=only)), reader, kind),
        )
    return samples


def _write_stacks(both: Profile, sides: tuple[str, str], comparison: Comparison, answers: Answers) -> None:
    """Writes the stacks of two captures."""
    from iaprof.formats.writers import flame_svg, folded

    stacks = StackOptions(components=folded.DIFFERENCE_COMPONENTS)
    with open_output(answers.output, mode=answers.mode) as out:
        if answers.format == "svg":
            flame_svg.write_difference(both, sides, stacks, comparison.is_relative, out)
        else:
            folded.write_difference(both, stacks, comparison.is_relative, out)


def _listing(report: Report, source_dirs: Sequence[Path], kernels_before: int | None = None) -> Listing:
    """Lists kernels of a report; with `kernels_before`, of a difference, in which so many kernels are before them."""
    from iaprof.cli.terminal.listing_lines import lines
    from iaprof.report.gpu.source_files import SourceFiles
    from iaprof.report.views.annotation import listings

    sources, first = SourceFiles(source_dirs), kernels_before or 0
    counts = {first + kernel: count for kernel, count in report.profile.launch_counts.items()}

    def listing(profile: Profile, kernel: str, width: int) -> list[str]:
        own = profile if kernels_before is None else replace(profile.only(profile.interval == 1), launch_counts=counts)
        return list(lines(listings(own, [kernel], lambda index: report.binary(index - first)), sources, width, True))

    return listing


def interval_of(capture: Path) -> float:
    """The length of intervals, for at most _INTERVALS; 0 if the capture is too large for a profile by time."""
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.parts import whole_ns

    reader = CaptureReader(capture)
    seconds = whole_ns(reader) / 1e9
    if reader.stall_records > _MOST_RECORDS_BY_TIME or not seconds:
        return 0.0
    return next((step for step in _STEPS_S if seconds <= step * _INTERVALS), 0.0)
