"""Builds the report or export of a capture from the user's options, for all verbs that show stalls."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from iaprof.basics.clean import clean
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.unmatched import check_has_rows, filters_of, names_of_profile, names_of_samples, nothing_matches
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.writer import Needs, Writer

if TYPE_CHECKING:
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.formats.export import CpuSamples, Export
    from iaprof.report.cpu_names import SymbolOptions
    from iaprof.report.facts import Report
    from iaprof.report.join.selection import Selection
    from iaprof.report.profile import ReportOptions

_PROGRESS_AFTER_S = 1.0  # before the first progress message


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
    from iaprof.report.parts import build_parts
    from iaprof.report.profile import ReportOptions

    return_large_blocks_when_freed()
    reader = CaptureReader(capture)
    wanted = ReportOptions(choice.selection, interval_s, choice.frame_options(lines, interpreter), texts)
    with GpuModuleLoader() as modules:

        def built(selection: Selection) -> Report:
            options = replace(wanted, selection=selection)
            with show_joining(reader.stall_records) as progress:
                return build_parts(reader, modules, options, symbol_options(choice), progress)

        report = built(choice.selection)
        if not report.facts.stalls and filters_of(choice.selection) and not may_be_empty:
            raise nothing_matches(
                "stall", choice.selection, reader, lambda only: names_of_profile(built(only).profile, reader)
            )
        yield report


@contextlib.contextmanager
def open_export(
    capture: Path,
    choice: SelectionOptions,
    writer: Writer,
    stack_options: StackOptions,
    interval_s: float | None,
    *,
    lines: bool = False,
    interpreter: bool = False,
    all_samples: bool = False,
    source_dirs: Sequence[Path] = (),
) -> Iterator[tuple[Export, Report | None]]:
    """A writer's input, and the report it comes from, or None if only CPU samples or waits are exported.

    Args:
        capture: the file.
        choice: the selection of stalls, and where to look for symbols.
        writer: the writer of the format.
        stack_options: the stack options.
        interval_s: length of intervals; None: the format's default.
        lines: CPU frames have file and line.
        interpreter: keep CPython's own frames between Python functions.
        all_samples: CPU samples of the recorder and of processes out of scope, too.
        source_dirs: folders with the source files of GPU code.

    Raises:
        CaptureError: the file is not a capture, or is damaged.
        IaprofError: filters select nothing, or the capture has no waits or CPU samples, which the options ask for.
        UsageError: the capture lacks something that the options name, or a folder cannot be read.
    """
    from iaprof.basics.heap import return_large_blocks_when_freed
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.formats.export import Export
    from iaprof.formats.profile import empty_profile
    from iaprof.report.about import about
    from iaprof.report.exporting import build_export, cpu_samples, fitting_interval
    from iaprof.report.gpu.module import GpuModuleLoader
    from iaprof.report.gpu.source_files import SourceFiles
    from iaprof.report.profile import ReportOptions
    from iaprof.report.views.waits import waits_of

    folders = SourceFiles(source_dirs)
    return_large_blocks_when_freed()
    reader = CaptureReader(capture)
    interval = fitting_interval(reader, writer.interval_s) if interval_s is None else interval_s
    wanted = ReportOptions(
        choice.selection, interval, choice.frame_options(lines, interpreter), all_samples=all_samples
    )
    if stack_options.waits or stack_options.cpu_samples:
        check_has_rows(reader, "wait" if stack_options.waits else "cpu_sample")
    if stack_options.waits:

        def waits(options: ReportOptions) -> CpuSamples:
            return waits_of(reader, options, symbol_options(choice)).as_samples()

        yield Export(empty_profile(), about(reader), interval, cpu=_selected("wait", waits, wanted, reader)), None
        return
    if stack_options.cpu_samples and Needs.CPU not in writer.needs:

        def samples(options: ReportOptions) -> CpuSamples:
            return cpu_samples(reader, options, symbol_options(choice))

        found = _selected("cpu_sample", samples, wanted, reader)
        yield Export(empty_profile(), about(reader), interval, cpu=found), None
        return
    with GpuModuleLoader() as modules:
        with show_joining(reader.stall_records) as progress:
            built = build_export(reader, modules, wanted, symbol_options(choice), writer.needs, progress, folders)
        others = built[0].cpu  # a process without stalls can have CPU samples
        if not built[1].facts.stalls and filters_of(choice.selection) and not (others and len(others.count)):
            with open_report(capture, choice):  # raises the error
                pass
        yield built


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


@contextlib.contextmanager
def show_writing(output: Path | None) -> Iterator[None]:
    """Shows on a terminal that a file is being written, unless the output goes to stdout."""
    if output is None or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(f"writing {clean(output.name)}")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")


def symbol_options(choice: SelectionOptions) -> SymbolOptions:
    """Where names of CPU frames are looked for."""
    from iaprof.report.cpu_names import SymbolOptions

    return SymbolOptions(choice.symfs, choice.symbol_dirs, choice.kallsyms)


@contextlib.contextmanager
def show_joining(records: int) -> Iterator[Callable[[int], None]]:
    """Yields a progress callback (records done), which writes to a terminal once joining takes over a second."""

    def line(done: int) -> str:
        share = f" ({100 * done / records:.0f} %)" if 0 < records >= done else ""
        return f"joining stalls to launches: {done / 1e6:,.1f} M records{share}"

    with show_progress(line) as progress:
        yield progress


@contextlib.contextmanager
def show_progress(line: Callable[[int], str]) -> Iterator[Callable[[int], None]]:
    """Yields a progress callback (what is done), which writes `line` of it to a terminal after a second."""
    begun = time.monotonic()
    drawn = False

    def progress(done: int) -> None:
        nonlocal drawn
        if time.monotonic() - begun > _PROGRESS_AFTER_S:
            sys.stderr.write(f"\r\x1b[K{line(done)}")
            sys.stderr.flush()
            drawn = True

    terminal = sys.stderr is not None and sys.stderr.isatty()
    try:
        yield progress if terminal else lambda done: None
    finally:
        if drawn:
            sys.stderr.write("\r\x1b[K")
