"""`iaprof timeline`: what an accelerator did over time."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import replace_file
from iaprof.cli.options.timeline_options import with_timeline_options
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.table import STRONG, WEAK, Column, Table, coloured, terminal_width

if TYPE_CHECKING:
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.timeline.trace import Trace

EXAMPLES = """\b
Examples:
  iaprof timeline run.parquet                       what the device did, and what is odd
  iaprof timeline run.parquet -c compile.log -o out tables, and a trace for https://ui.perfetto.dev
  iaprof timeline job-*.json -o out                 imports the traces first
  iaprof timeline --list-stages
"""
_TEXT_TOO = ("categories",)  # tables that are also written as text


@with_timeline_options
def timeline(
    options: Any,  # report.timeline.options.Options
    traces: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="A capture that 'iaprof import' made of traces, or the traces."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Write trace.json and tables there.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace existing files.")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tb", help="Write the traces as TensorBoard reads them, a file for each rank, too.")
    ] = False,
    most: Annotated[int, typer.Option("--rows", "-n", metavar="ROWS", min=0, help="Kernels to print; 0: all.")] = 10,
    profile: Annotated[
        str, typer.Option("--profile", "-P", metavar="NAME", help="Stages: everything, minimal, torch, or a file.")
    ] = "everything",
    stages: Annotated[
        str, typer.Option("--stages", metavar="NAME,...", help="Turn stages on, or off with '-' before the name.")
    ] = "",
    dump_after: Annotated[
        list[str] | None,
        typer.Option("--dump-after", metavar="STAGE", help="Write the trace as it is after a stage; all: after each."),
    ] = None,
    list_stages: Annotated[bool, typer.Option("--list-stages", help="Print the stages, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No messages on stderr.")] = False,
) -> None:
    """Show what an accelerator did over time, and put the clocks of its traces right.

    Reads traces of the AIU's runtime and of PyTorch's profiler, which 'iaprof import' has made a capture of.
    """
    from iaprof.report.timeline.profiles import enabled
    from iaprof.report.timeline.registry import STAGES, Stage, run

    names = [stage.name for stage in STAGES]
    on = enabled(
        [(stage.name, *stage.others) for stage in STAGES],
        profile,
        [name.strip() for name in stages.split(",") if name.strip()],
    )
    if list_stages:
        _print_stages(on)
        return
    if not traces:
        raise UsageError("name a capture or traces")
    if dump_after and output is None:
        raise UsageError("--dump-after needs a folder: give -o")
    dumped = names if dump_after and "all" in dump_after else list(dump_after or ())
    if unknown := [name for name in dumped if name not in names]:
        raise UsageError(f"there is no stage {unknown[0]}: --list-stages prints them")
    if output is not None:
        _check_folder(output, force)
    with _captured(traces, quiet) as capture:
        from iaprof.report.timeline.load import load

        trace = load(capture)

        def dump(number: int, stage: Stage) -> None:
            if stage.name in dumped and output is not None:
                _write_trace(trace, capture, output / f"{number:02}_{stage.name}.json")

        run(trace, options, on, dump)
        if output is not None:
            _write_all(trace, capture, output, tensorboard)
        with utf8_stdout():
            if as_json:
                print(json.dumps(_as_dict(trace), indent=2))
            else:
                show(trace, most)
        if not quiet:
            _say(trace)


@contextlib.contextmanager
def _captured(paths: Sequence[Path], quiet: bool) -> Iterator[CaptureReader]:
    """Opens a capture, or makes a temporary one of traces."""
    from iaprof.formats.capture.reader import CaptureReader

    if len(paths) == 1 and _is_capture(paths[0]):
        yield CaptureReader(paths[0])
        return
    from iaprof.cli.verbs.import_ import import_to

    with tempfile.TemporaryDirectory(prefix="iaprof-") as folder:
        made = Path(folder) / "trace.parquet"
        import_to(paths, made, quiet)
        yield CaptureReader(made)


def _is_capture(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError as error:
        raise IaprofError(f"{path} cannot be opened: {error.strerror}") from None


def _check_folder(folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise IaprofError(f"{folder} is no folder: -o names one for several files")
    if not force and folder.is_dir() and any(folder.iterdir()):
        raise IaprofError(f"{folder} is not empty: name another folder, or add --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IaprofError(f"{folder} cannot be made: {error.strerror}") from None


def _write_all(trace: Trace, capture: CaptureReader, folder: Path, tensorboard: bool) -> None:
    """Writes the trace and its tables into a folder."""
    from iaprof.report.timeline.outputs.tables import write_csv, write_text

    _write_trace(trace, capture, folder / "trace.json", tensorboard)
    for name, table in trace.tables.items():
        with replace_file(folder / f"{name}.csv", 0o644) as file:
            write_csv(table, file)
        if name in _TEXT_TOO:
            with replace_file(folder / f"{name}.txt", 0o644) as file:
                write_text(table, file)


def _write_trace(trace: Trace, capture: CaptureReader, path: Path, tensorboard: bool = False) -> None:
    from iaprof.report.timeline.load import arguments
    from iaprof.report.timeline.outputs.chrome import write_chrome
    from iaprof.report.timeline.outputs.tensorboard import workers

    settings = {"CmdLine": " ".join(sys.argv[1:])}
    with contextlib.ExitStack() as opened:
        given = {kind: opened.enter_context(arguments(capture, kind)) for kind in ("slice", "flow", "instant")}
        with replace_file(path, 0o644) as file:
            write_chrome(trace, given, settings, file)
        for rank, rows in workers(trace) if tensorboard else ():
            with replace_file(path.with_name(f"trace_worker_{rank}.pt.trace.json"), 0o644) as file:
                write_chrome(trace, given, settings, file, rows)


def _print_stages(on: Sequence[bool]) -> None:
    from iaprof.report.timeline.registry import STAGES

    table = Table(Column("", right=True), Column("STAGE"), Column(""), Column("WHAT IT DOES", flexible=True))
    for number, (stage, is_on) in enumerate(zip(STAGES, on, strict=True)):
        state = "" if is_on else "off"
        table.add(str(number), stage.name, state, stage.description, style="" if is_on else WEAK)
    with utf8_stdout():
        table.print()


def show(trace: Trace, limit: int) -> None:
    """Prints what the devices did: a line for each rank, the kernels that took longest, and what they were."""
    blocks = [block for block in (_ranks(trace), _kernels(trace, limit), _categories(trace)) if block]
    if not blocks:
        print("no kernels: nothing in these traces ran on a device")
    print("\n\n".join("\n".join(block) for block in blocks))


def _ranks(trace: Trace) -> list[str]:
    active = trace.tables.get("active")
    if active is None or not active.num_rows:
        return []
    table = Table(
        Column("RANK", right=True),
        Column("ELAPSED", right=True),
        Column("KERNELS", right=True),
        Column("BUSY", right=True),
    )
    for row in active.to_pylist():
        values = (row["Elapsed Time"], row["Total Kernel Time"])
        table.add(str(row["pid"]), *(f"{value:,.3f} us" for value in values), f"{row['Active percentage']:.2f} %")
    return table.lines(terminal_width(), coloured())


def _kernels(trace: Trace, limit: int) -> list[str]:
    summary = trace.tables.get("summary")
    if summary is None or not summary.num_rows:
        return []
    table = Table(
        *(Column(name, right=True) for name in ("TIME", "TOTAL US", "CALLS", "MEAN", "MIN", "MAX", "RANK")),
        Column("KERNEL", flexible=True),
    )
    rows = summary.to_pylist()
    rows.sort(key=lambda row: -row["Total Time"])
    for row in rows[: limit or None]:
        numbers = [f"{row[name]:,.3f}" for name in ("Mean", "Min", "Max")]
        share, total = f"{row['Time']:.2f} %", f"{row['Total Time']:,.3f}"
        table.add(share, total, f"{row['Calls']:,}", *numbers, str(row["pid"]), row["Name"])
    if limit and len(rows) > limit:
        table.add("", "", "", "", "", "", "", f"({len(rows) - limit:,} more)", style=WEAK)
    return table.lines(terminal_width(), coloured())


def _categories(trace: Trace) -> list[str]:
    categories = trace.tables.get("categories")
    if categories is None or not categories.num_rows:
        return []
    table = Table(
        Column("RANK", right=True),
        Column("CATEGORY"),
        *(Column(name, right=True) for name in ("TIME", "US", "CALLS", "IDEAL US", "PT UTIL")),
    )
    for row in categories.to_pylist():
        style = STRONG if row["Category"] == "Total" else ""
        times = (f"{100 * row['Frac_Time']:.2f} %", f"{row['Kernel_Time']:,.3f}", f"{row['Calls']:,}")
        table.add(
            str(row["Pid"]), row["Category"], *times, f"{row['Ideal_Time']:,.3f}", f"{row['PT_Util']:.4f}", style=style
        )
    return table.lines(terminal_width(), coloured())


def _as_dict(trace: Trace) -> dict[str, Any]:
    from iaprof.report.timeline.outputs.tables import rounded

    return {
        "files": [{"name": file.name, "dialect": str(file.dialect), "rank": file.rank} for file in trace.files],
        "events": {
            "slices": len(trace.slices),
            "counters": len(trace.points),
            "flows": len(trace.flows),
            "instants": len(trace.instants),
            "dropped": dict(trace.dropped),
            "merged": dict(trace.merged),
            "made": dict(trace.made),
        },
        "tables": {name: rounded(table).to_pylist() for name, table in trace.tables.items()},
        "messages": [
            {"level": each.level.name.lower(), "stage": each.stage, "text": each.text} for each in trace.messages.said
        ],
    }


def _say(trace: Trace) -> None:
    from iaprof.report.timeline.messages import Level

    for message in trace.messages.said:
        level = "warning: " if message.level is Level.WARNING else ""
        print(f"iaprof: {level}{message.stage}: {message.text}", file=sys.stderr)
    for what, counts in (("dropped", trace.dropped), ("merged", trace.merged), ("made", trace.made)):
        if counts:
            texts = ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
            print(f"iaprof: events {what}: {texts}", file=sys.stderr)
