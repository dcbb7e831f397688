"""`iaprof timeline`: what an accelerator did over time."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import mode_of_report, replace_file
from iaprof.cli.options.captures import DEFAULT, existing
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.table import WEAK, Column, Table
from iaprof.cli.timelines.messages import say_messages
from iaprof.cli.timelines.options import with_timeline_options
from iaprof.cli.timelines.tables import show

if TYPE_CHECKING:
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.timelines.arguments import Arguments
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


@with_timeline_options
def timeline(
    options: Any,  # timelines.options.Options
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE...", help="A capture that 'iaprof import' made from traces, or the traces themselves."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Write traces and tables to FOLDER.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace what an earlier run wrote to FOLDER.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tb", help="Also write the traces for TensorBoard, one file for each rank.")
    ] = False,
    html: Annotated[bool, typer.Option("--html", help="Also write page.html, for a browser.")] = False,
    pddf: Annotated[
        bool, typer.Option("--pddf", help="Also write pddf.csv: a row for each slice, by rank and time.")
    ] = False,
    most: Annotated[int, typer.Option("--rows", "-n", metavar="ROWS", min=0, help="Print ROWS kernels; 0: all.")] = 10,
    profile: Annotated[
        str,
        typer.Option(
            "--profile", "-P", metavar="NAME", help="Run the stages of everything, minimal, torch, or a file."
        ),
    ] = "everything",
    stages: Annotated[
        str, typer.Option("--stages", metavar="NAME,...", help="Turn stages on, or off with '-' before the name.")
    ] = "",
    dump_after: Annotated[
        list[str] | None,
        typer.Option(
            "--dump-after", metavar="STAGE", help="Write the trace as it is after STAGE; all: after each stage."
        ),
    ] = None,
    list_stages: Annotated[bool, typer.Option("--list-stages", help="List the stages and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print messages to stderr.")] = False,
) -> None:
    """Show what an accelerator did over time, and align the clocks of its traces.

    Reads traces of the AIU's runtime or PyTorch's profiler, or a capture that 'iaprof import' made from them.
    """
    from iaprof.timelines.profiles import enabled
    from iaprof.timelines.registry import STAGES, Stage, run

    names = [stage.name for stage in STAGES]
    on = enabled(
        [(stage.name, *stage.others) for stage in STAGES],
        profile,
        [name.strip() for name in stages.split(",") if name.strip()],
    )
    if list_stages:
        _print_stages(on)
        return
    from iaprof.cli.verbs.import_ import expanded

    traces = expanded(traces or [existing(DEFAULT)])
    if dump_after and output is None:
        raise UsageError("--dump-after needs a folder: give -o")
    if output is None and (tensorboard or html or pddf):
        raise UsageError("--tb, --html and --pddf need a folder: give -o")
    dumped = names if dump_after and "all" in dump_after else list(dump_after or ())
    if unknown := [name for name in dumped if name not in names]:
        raise UsageError(f"there is no stage {unknown[0]}: --list-stages prints them")
    mode = mode_of_report(*traces)
    with _folder(output, force), _captured(traces, quiet) as capture, contextlib.ExitStack() as opened:
        from iaprof.basics.freed_memory import return_free_memory
        from iaprof.timelines.load import load

        trace = load(capture)
        given = _Given(capture, opened) if output is not None else None

        dumps: list[Path] = []

        def dump(number: int, stage: Stage) -> None:
            if stage.name in dumped and output is not None and given is not None:
                dumps.append(output / f"{number:02}_{stage.name}.json")
                _write_dump(trace, given.read(), dumps[-1], mode)

        run(trace, options, on, dump)
        return_free_memory()
        if output is not None and given is not None:
            _remove_earlier(output, names, {*dumps, *traces, *map(Path, options.compiler_logs)})
            _write_all(trace, given.read(), output, mode, tensorboard)
            if html:
                _write_page(trace, capture, output / "page.html", mode)
            if pddf:
                from iaprof.timelines.outputs.pddf import write_pddf

                with replace_file(output / "pddf.csv", mode) as file:
                    write_pddf(trace, file)
        with utf8_stdout():
            if as_json:
                from iaprof.timelines.outputs.tables import write_document

                write_document(trace, sys.stdout)
            else:
                show(trace, most)
        if not quiet:
            say_messages(trace)


class _Given:
    """The arguments of imported events, by kind: a thread gets them from the capture while stages work."""

    def __init__(self, capture: CaptureReader, opened: contextlib.ExitStack) -> None:
        """Starts the thread. `opened` closes what it opens."""
        from concurrent.futures import ThreadPoolExecutor

        files = opened.enter_context(contextlib.ExitStack())
        thread = opened.enter_context(ThreadPoolExecutor(1))
        self._made = thread.submit(self._open, capture, files)

    @staticmethod
    def _open(capture: CaptureReader, files: contextlib.ExitStack) -> Mapping[str, Arguments]:
        from iaprof.timelines.load import arguments

        return {kind: files.enter_context(arguments(capture, kind)) for kind in ("slice", "flow", "instant")}

    def read(self) -> Mapping[str, Arguments]:
        """Returns them once the capture is read."""
        return self._made.result()


@contextlib.contextmanager
def _captured(paths: Sequence[Path], quiet: bool) -> Iterator[CaptureReader]:
    """Opens a capture, or makes a temporary one of traces."""
    from iaprof.cli.verbs.import_ import import_to
    from iaprof.formats.capture.reader import CaptureReader

    if len(paths) == 1 and _is_capture(paths[0]):
        yield CaptureReader(paths[0])
        return
    import tempfile

    from iaprof.basics.freed_memory import keep_freed_blocks

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


def _write_all(trace: Trace, given: Mapping[str, Arguments], folder: Path, mode: int, tensorboard: bool) -> None:
    """Writes the trace, with the arguments of its imported events by kind, and its tables into a folder."""
    import threading
    from concurrent.futures import ThreadPoolExecutor

    from iaprof.basics.freed_memory import keep_freed_blocks
    from iaprof.timelines.outputs.tables import write_csv, write_text

    keep_freed_blocks()
    with ThreadPoolExecutor(1) as threads:  # Arrow does most of the work, without Python's lock
        prepared = threading.Event()
        perfetto = threads.submit(_write_perfetto, trace, given, folder / "trace.pftrace", mode, prepared.set)
        perfetto.add_done_callback(lambda _: prepared.set())
        if len(trace.slices) >= _MANY:
            prepared.wait()
        _write_trace(trace, given, folder / "trace.json", mode, tensorboard)
        perfetto.result()
    for name, table in trace.tables.items():
        with replace_file(folder / f"{name}.csv", mode) as file:
            write_csv(table, file)
        if name in _TEXT_TOO:
            with replace_file(folder / f"{name}.txt", mode) as file:
                write_text(table, file)


def _write_trace(trace: Trace, given: Mapping[str, Arguments], path: Path, mode: int, tensorboard: bool) -> None:
    from iaprof.timelines.outputs.chrome import ChromeWriter, step_of, workers
    from iaprof.timelines.own_output import FILES, described

    writer = ChromeWriter(trace, given, {"CmdLine": " ".join(sys.argv[1:]), FILES: described(trace)})
    with replace_file(path, mode) as file:
        writer.write(file)
    for rank, rows in workers(trace) if tensorboard else ():
        with replace_file(path.with_name(f"trace_worker_{rank}.pt.trace.json"), mode) as file:
            writer.write(file, rows, rank, step_of(trace, rank, rows))


def _write_dump(trace: Trace, given: Mapping[str, Arguments], path: Path, mode: int) -> None:
    """Writes a trace between two stages: it names no files, as its events are not those of the final trace."""
    from iaprof.timelines.outputs.chrome import write_chrome

    with replace_file(path, mode) as file:
        write_chrome(trace, given, {"CmdLine": " ".join(sys.argv[1:])}, file)


def _write_page(trace: Trace, capture: CaptureReader, path: Path, mode: int) -> None:
    from iaprof.formats.profile import StackOptions
    from iaprof.report.about import about
    from iaprof.timelines.outputs.formats import TimeLine
    from iaprof.timelines.outputs.page import write_html

    page = io.StringIO()
    write_html(TimeLine(trace, capture, about), StackOptions(), page)
    with replace_file(path, mode) as file:
        file.write(page.getvalue().encode())


def _write_perfetto(
    trace: Trace, given: Mapping[str, Arguments], path: Path, mode: int, prepared: Callable[[], None]
) -> None:
    from iaprof.timelines.outputs.perfetto import write_perfetto

    with replace_file(path, mode) as file:
        write_perfetto(trace, given, file, prepared)


def _print_stages(on: Sequence[bool]) -> None:
    from iaprof.timelines.registry import STAGES

    table = Table(Column("", right=True), Column("STAGE"), Column(""), Column("WHAT IT DOES", flexible=True))
    for number, (stage, is_on) in enumerate(zip(STAGES, on, strict=True)):
        state = "" if is_on else "off"
        table.add(str(number), stage.name, state, stage.description, style="" if is_on else WEAK)
    with utf8_stdout():
        table.print()
