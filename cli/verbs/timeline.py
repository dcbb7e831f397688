"""`iaprof timeline`: what an accelerator did over time."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import mode_of_report, replace_file
from iaprof.cli.options.captures import DEFAULT, existing
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.table import WEAK, Column, Table
from iaprof.cli.timelines.options import StageOptions
from iaprof.cli.timelines.tables import print_messages, show
from iaprof.cli.verbs.import_ import expanded, import_to

if TYPE_CHECKING:
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.timelines.arguments import Arguments
    from iaprof.timelines.registry import Stage
    from iaprof.timelines.trace import Trace

EXAMPLES = """\b
Examples:
  iaprof timeline run.parquet                        what the device did, and warnings
  iaprof timeline run.parquet -c compile.log -o out  tables, and a trace for https://ui.perfetto.dev
  iaprof timeline job-*.json -o out                  imports the traces first
  iaprof timeline --list-stages
"""
_MANY = 3 << 20  # slices: what is prepared for Perfetto's format would need too much memory beside another writer
_TEXT_TOO = ("categories",)  # tables that are also written as text


@dataclass(frozen=True)
class FolderOptions:
    """The options that say what is written to a folder.

    Raises:
        UsageError: an option needs a folder, and none is named.
    """

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Write traces and tables to FOLDER.",
            show_default=False,
        ),
    ] = None
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace what an earlier run wrote to FOLDER.")] = False
    tensorboard: Annotated[
        bool, typer.Option("--tb", help="Also write the traces for TensorBoard, one file for each rank.")
    ] = False
    html: Annotated[bool, typer.Option("--html", help="Also write page.html, for a browser.")] = False
    pddf: Annotated[
        bool, typer.Option("--pddf", help="Also write pddf.csv: a row for each slice, by rank and time.")
    ] = False


@dataclass(frozen=True)
class StagesRun:
    """The options that say which stages run, and what is written between them."""

    profile: Annotated[
        str,
        typer.Option(
            "--profile", "-P", metavar="NAME", help="Run the stages of everything, minimal, torch, or a file."
        ),
    ] = "everything"
    stages: Annotated[
        str, typer.Option("--stages", metavar="NAME,...", help="Turn stages on, or off with '-' before the name.")
    ] = ""
    dump_after: Annotated[
        list[str] | None,
        typer.Option(
            "--dump-after", metavar="STAGE", help="Write the trace as it is after STAGE; all: after each stage."
        ),
    ] = None
    list_stages: Annotated[bool, typer.Option("--list-stages", help="List the stages and exit.")] = False

    def enabled(self) -> list[bool]:
        """Tells for each stage whether it runs; UsageError if the profile or a stage is unknown."""
        from iaprof.timelines.registry import STAGES
        from iaprof.timelines.stage_profiles import enabled

        chosen = [name.strip() for name in self.stages.split(",") if name.strip()]
        return enabled([(stage.name, *stage.others) for stage in STAGES], self.profile, chosen)

    def dumped(self) -> list[str]:
        """Returns the names of the stages after which the trace is written; UsageError if one is unknown."""
        from iaprof.timelines.registry import STAGES

        names = [stage.name for stage in STAGES]
        dumped = names if "all" in (self.dump_after or ()) else list(self.dump_after or ())
        if unknown := [name for name in dumped if name not in names]:
            raise UsageError(f"there is no stage {unknown[0]}: --list-stages prints them")
        return dumped


def timeline(
    *,
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...", help="A capture that 'iaprof import' made from traces, or the traces themselves."
        ),
    ] = None,
    written: FolderOptions,
    most: Annotated[int, typer.Option("--rows", "-n", metavar="ROWS", min=0, help="Print ROWS kernels; 0: all.")] = 10,
    run: StagesRun,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print messages to stderr.")] = False,
    stages: StageOptions,
) -> None:
    """Show what an accelerator did over time, and align the clocks of its traces.

    Reads traces of the AIU's runtime or PyTorch's profiler, or a capture that 'iaprof import' made from them.
    """
    on = run.enabled()
    if run.list_stages:
        _print_stages(on)
        return
    traces = expanded(traces or [existing(DEFAULT)])
    if written.output is None and run.dump_after:
        raise UsageError("--dump-after needs a folder: give -o")
    if written.output is None and (written.tensorboard or written.html or written.pddf):
        raise UsageError("--tb, --html and --pddf need a folder: give -o")
    dumped, mode = run.dumped(), mode_of_report(*traces)
    with _folder(written.output, written.force), _captured(traces, quiet) as capture, contextlib.ExitStack() as opened:
        from iaprof.basics.heap import return_free_memory
        from iaprof.timelines.load import load
        from iaprof.timelines.registry import run as run_stages

        trace = load(capture)
        files = None if written.output is None else _Files(trace, capture, written.output, mode, opened)
        run_stages(trace, stages.options, on, _nothing if files is None else partial(files.dump, dumped))
        return_free_memory()
        if files is not None:
            files.write(written, {*traces, *map(Path, stages.options.compiler_logs)})
        with utf8_stdout():
            if as_json:
                from iaprof.timelines.outputs.tables import write_document

                write_document(trace, sys.stdout)
            else:
                show(trace, most)
        if not quiet:
            print_messages(trace)


def _nothing(*_: object) -> None:
    pass


class _Files:
    """What a run writes into a folder.

    A thread gets the arguments of imported events from the capture while stages work.
    """

    def __init__(
        self, trace: Trace, capture: CaptureReader, folder: Path, mode: int, opened: contextlib.ExitStack
    ) -> None:
        """Starts the thread. `opened` closes what it opens."""
        from concurrent.futures import ThreadPoolExecutor

        self._trace, self._capture, self._folder, self._mode = trace, capture, folder, mode
        self._dumps: list[Path] = []
        self._opened = opened.enter_context(contextlib.ExitStack())
        self._made = opened.enter_context(ThreadPoolExecutor(1)).submit(self._arguments)

    def _arguments(self) -> Mapping[str, Arguments]:
        """Opens the arguments, by kind of row."""
        from iaprof.timelines.load import arguments

        kinds = ("slice", "flow", "instant")
        return {kind: self._opened.enter_context(arguments(self._capture, kind)) for kind in kinds}

    def dump(self, dumped: Sequence[str], number: int, stage: Stage) -> None:
        """Writes the trace after a stage, if that is one of `dumped`.

        It names no files, as its events are not those of the final trace.
        """
        if stage.name not in dumped:
            return
        from iaprof.timelines.outputs.chrome import write_chrome

        path = self._folder / f"{number:02}_{stage.name}.json"
        self._dumps.append(path)
        with replace_file(path, self._mode) as file:
            write_chrome(self._trace, self._made.result(), {"CmdLine": " ".join(sys.argv[1:])}, file)

    def write(self, written: FolderOptions, read: Set[Path]) -> None:
        """Writes the trace after its stages, its tables and what else is asked for, in place of an earlier run's.

        Args:
            written: the options.
            read: files of this run that it read, which stay.
        """
        from iaprof.timelines.registry import STAGES

        _remove_earlier(self._folder, [stage.name for stage in STAGES], {*self._dumps, *read})
        self._write_traces(written.tensorboard)
        self._write_tables()
        if written.html:
            self._write_page()
        if written.pddf:
            from iaprof.timelines.outputs.pddf import write_pddf

            with replace_file(self._folder / "pddf.csv", self._mode) as file:
                write_pddf(self._trace, file)

    def _write_traces(self, tensorboard: bool) -> None:
        import threading
        from concurrent.futures import ThreadPoolExecutor

        from iaprof.basics.heap import keep_freed_blocks

        keep_freed_blocks()
        with ThreadPoolExecutor(1) as threads:  # Arrow does most of the work, without Python's lock
            prepared = threading.Event()
            perfetto = threads.submit(self._write_perfetto, prepared.set)
            perfetto.add_done_callback(lambda _: prepared.set())
            if len(self._trace.slices) >= _MANY:
                prepared.wait()
            self._write_chrome(tensorboard)
            perfetto.result()

    def _write_perfetto(self, prepared: Callable[[], None]) -> None:
        from iaprof.timelines.outputs.perfetto import write_perfetto

        with replace_file(self._folder / "trace.pftrace", self._mode) as file:
            write_perfetto(self._trace, self._made.result(), file, prepared)

    def _write_chrome(self, tensorboard: bool) -> None:
        from iaprof.timelines.outputs.chrome import ChromeWriter, step_of, workers
        from iaprof.timelines.own_output import FILES, described

        about = {"CmdLine": " ".join(sys.argv[1:]), FILES: described(self._trace)}
        writer = ChromeWriter(self._trace, self._made.result(), about)
        with replace_file(self._folder / "trace.json", self._mode) as file:
            writer.write(file)
        for rank, rows in workers(self._trace) if tensorboard else ():
            with replace_file(self._folder / f"trace_worker_{rank}.pt.trace.json", self._mode) as file:
                writer.write(file, rows, rank, step_of(self._trace, rank, rows))

    def _write_tables(self) -> None:
        from iaprof.timelines.outputs.tables import write_csv, write_text

        for name, table in self._trace.tables.items():
            with replace_file(self._folder / f"{name}.csv", self._mode) as file:
                write_csv(table, file)
            if name in _TEXT_TOO:
                with replace_file(self._folder / f"{name}.txt", self._mode) as file:
                    write_text(table, file)

    def _write_page(self) -> None:
        from iaprof.formats.profile import StackOptions
        from iaprof.report.about import about
        from iaprof.timelines.outputs.formats import TimeLine
        from iaprof.timelines.outputs.page import write_html

        page = io.StringIO()
        write_html(TimeLine(self._trace, self._capture, about), StackOptions(), page)
        with replace_file(self._folder / "page.html", self._mode) as file:
            file.write(page.getvalue().encode())


@contextlib.contextmanager
def _captured(paths: Sequence[Path], quiet: bool) -> Iterator[CaptureReader]:
    """Opens a capture, or makes a temporary one of traces."""
    from iaprof.formats.capture.reader import CaptureReader

    if len(paths) == 1 and _is_capture(paths[0]):
        yield CaptureReader(paths[0])
        return
    import tempfile

    from iaprof.basics.heap import keep_freed_blocks

    keep_freed_blocks()
    with tempfile.TemporaryDirectory(prefix="iaprof-") as folder:
        made = Path(folder) / "trace.parquet"
        import_to(paths, made, "timeline", quiet)
        yield CaptureReader(made)


def _is_capture(path: Path) -> bool:
    if path.is_fifo() or path.is_char_device():
        return False  # importing it says what to do
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError as error:
        raise IaprofError(f"{path} cannot be opened: {error.strerror}") from None


@contextlib.contextmanager
def _folder(folder: Path | None, force: bool) -> Iterator[None]:
    """Makes the folder of the output, with those that it is in; a run that fails removes those that are empty."""
    if folder is None:
        yield
        return
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        _make_folder(folder, force)
        yield
    except BaseException:
        for each in made:
            with contextlib.suppress(OSError):  # it was not made, or has files
                each.rmdir()
        raise


def _make_folder(folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise IaprofError(f"{folder} is not a folder: -o names one for several files")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise IaprofError(f"{folder} is not empty: name another folder, or add --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IaprofError(f"{folder} cannot be made: {error.strerror}") from None


def _remove_earlier(folder: Path, stages: Sequence[str], kept: Set[Path]) -> None:
    """Removes what an earlier run wrote into a folder, so that the files there are of one run.

    Args:
        folder: of the output.
        stages: the names of all stages.
        kept: files of this run: what it read, and what it wrote.
    """
    from iaprof.timelines.outputs.tables import TABLES

    stay = {path.resolve() for path in kept}
    for path in folder.iterdir():
        written = re.fullmatch(
            rf"trace\.(json|pftrace)|trace_worker_\d+\.pt\.trace\.json|page\.html|pddf\.csv"
            rf"|({'|'.join(TABLES)})\.csv|({'|'.join(_TEXT_TOO)})\.txt|\d\d_({'|'.join(stages)})\.json",
            path.name,
        )
        if written and path.is_file() and path.resolve() not in stay:
            try:
                path.unlink()
            except OSError as error:
                raise IaprofError(f"{path}, of an earlier run, cannot be removed: {error.strerror}") from None


def _print_stages(on: Sequence[bool]) -> None:
    from iaprof.timelines.registry import STAGES

    table = Table(Column("", right=True), Column("STAGE"), Column(""), Column("WHAT IT DOES", flexible=True))
    for number, (stage, is_on) in enumerate(zip(STAGES, on, strict=True)):
        state = "" if is_on else "off"
        table.add(str(number), stage.name, state, stage.description, style="" if is_on else WEAK)
    with utf8_stdout():
        table.print()
