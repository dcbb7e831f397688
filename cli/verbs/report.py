"""`iaprof report`: writes a capture's profile in any output format."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Annotated

import typer

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import check_output, mode_of_report
from iaprof.cli.analysis import open_export, show_writing
from iaprof.cli.fleet_report import write_fleet
from iaprof.cli.interactive.opening import Interactive, check_interactive, view as view_interactively
from iaprof.cli.options.captures import check_report, existing
from iaprof.cli.options.choices import checked_choice, one_of
from iaprof.cli.options.fleet_options import ONE, Captures, FleetOptions, is_several, with_fleet
from iaprof.cli.options.output_format import output_format
from iaprof.cli.options.selection import SelectionOptions, with_selection
from iaprof.cli.terminal.browser import open_in_browser, opened_secretly
from iaprof.cli.terminal.facts import say_facts
from iaprof.cli.terminal.stdout import open_output, refuse_terminal
from iaprof.cli.terminal.summary import say
from iaprof.cli.terminal.symbol_sources import symbol_source_lines
from iaprof.cli.terminal.wait_facts import say_waits
from iaprof.cli.timelines.options import Freq
from iaprof.cli.timelines.reports import (
    check_options,
    holds_time_lines,
    open_traces,
    refuse_for_stalls,
    stage_options,
    write_report,
)
from iaprof.cli.viewing import is_viewed, view, view_time_lines
from iaprof.formats.header.left_out import left_out_text
from iaprof.formats.profile import COMPONENTS, DEFAULT_COMPONENTS, StackOptions
from iaprof.formats.writers.registry import EXTENSIONS, FORMATS, WRITERS, Format, Of
from iaprof.formats.writers.writer import Needs

OF_WAITS = [name for name, format_ in FORMATS.items() if Of.WAITS in format_.of]
"""The formats that can show waits instead of stalls."""
OF_TIME_LINES = frozenset(
    {"captures", "format_", "output", "force", "as_json", "inverted", "percent_limit", "max_stack", "open_", "serve"}
) | {"freq", "quiet", "memory_limit", "large"}
"""The options that a capture of time lines takes, too."""
OF_STACKS = (
    "frames", "inverted", "per_interval", "percent_limit", "max_stack", "gpu_lines", "gpu_dirs", "cpu_samples",
    "all_processes", "waits",
    "lines", "hide_cpython", "symbol_sources", "interval", "source_dirs",
)  # fmt: skip
"""The options that shape what formats show, and not the table on a terminal."""
SHOWN = [name for name, format_ in FORMATS.items() if format_.content_type]
"""The formats that browsers show."""
_FORMATS = "\n".join(f"  {format_.name:11} {format_.description}" for format_ in FORMATS.values())
EXAMPLES = f"""\b
Formats:
{_FORMATS}

\b
Examples:
  iaprof report                                          a table of kernels
  iaprof report cap.parquet -i                           browse it in the terminal
  iaprof report cap.parquet | flamegraph.pl > cap.svg    folded stacks
  iaprof report cap.parquet -o cap.html                  a page for a browser
  iaprof report cap.parquet -o cap.svg                   a flame graph
  iaprof report cap.parquet -o cap.iaprof.txt            Intel's iaprof text
  iaprof report cap.parquet --time 10%-20% --pid 4711    a part of it
  iaprof report cap.parquet --frames function,reason     why functions wait
  iaprof report cap.parquet --json | jq .matched         shares that were matched
  iaprof report 'captures/*.parquet' -o fleet.html       many captures, added up
"""


@with_fleet
@with_selection
def report(
    choice: SelectionOptions,
    fleet: FleetOptions,
    context: typer.Context,
    captures: Captures = ONE,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="One of the formats below. By default, -o's extension chooses; else a terminal shows a table, and a "
            "pipe gets folded stacks.",
            show_default=False,
            autocompletion=one_of(FORMATS),
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to FILE instead of stdout.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format=json.")] = False,
    frames: Annotated[
        str,
        typer.Option(
            "--frames",
            metavar="PART,...",
            help=f"The parts of a stack, from the root: {', '.join(COMPONENTS)}. By default, all but "
            f"{', '.join(each for each in COMPONENTS if each not in DEFAULT_COMPONENTS)}.",
            show_default=False,
            autocompletion=one_of(COMPONENTS),
        ),
    ] = ",".join(DEFAULT_COMPONENTS),
    inverted: Annotated[bool, typer.Option("--inverted", help="Print stacks from the leaf to the root.")] = False,
    per_interval: Annotated[
        bool, typer.Option("--per-interval", help="Make each interval the root of its stacks.")
    ] = False,
    percent_limit: Annotated[
        float, typer.Option("--percent-limit", metavar="PERCENT", help="Merge smaller stacks into one line.")
    ] = 0,
    max_stack: Annotated[
        int | None,
        typer.Option("--max-stack", metavar="N", help="Keep at most N innermost CPU frames.", min=1),
    ] = None,
    gpu_lines: Annotated[bool, typer.Option("--gpu-lines", help="Add source lines to GPU functions.")] = False,
    gpu_dirs: Annotated[bool, typer.Option("--gpu-dirs", help="Add folders of GPU source files as frames.")] = False,
    cpu_samples: Annotated[bool, typer.Option("--cpu-samples", help="Report CPU samples instead of stalls.")] = False,
    all_processes: Annotated[
        bool,
        typer.Option("--all-processes", help="Include CPU samples of the recorder and of processes out of scope."),
    ] = False,
    waits: Annotated[
        bool, typer.Option("--waits", help="Report microseconds that threads waited for the GPU, instead of stalls.")
    ] = False,
    lines: Annotated[bool, typer.Option("--lines", help="Add file and line to CPU functions.")] = False,
    hide_cpython: Annotated[
        bool | None,
        typer.Option(
            "--hide-cpython/--no-hide-cpython", help="Hide the interpreter's frames between Python functions."
        ),
    ] = None,
    symbol_sources: Annotated[
        bool, typer.Option("--symbol-sources", help="List where each file's names came from, and files without names.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option("--interval", metavar="SECONDS", help="Length of intervals.", show_default=False),
    ] = None,
    source_dirs: Annotated[
        list[Path] | None,
        typer.Option("--source-dir", metavar="DIR", help="Show source lines of files below DIR on the page."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show the page or picture in a browser.")] = False,
    interactive: Interactive = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page to browsers of this machine until Ctrl-C.")
    ] = False,
    freq: Freq = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print a summary to stderr.")] = False,
) -> None:
    """Print where the GPU stalled, or where the time of an imported trace went.

    Joins the stalls of a capture to kernels, source lines and the stacks that launched them. Runs on any machine,
    without a GPU and without root.
    """
    if interactive:
        check_interactive(context, captures, "inverted", "source_dirs", "freq")
        view_interactively("report", captures, choice, fleet, "stack", inverted, source_dirs or (), freq, quiet)
        return
    if interval is not None and not 0.001 <= interval < 1e9:
        raise UsageError("--interval must be a number of seconds, 0.001 or more")
    shown = open_ or serve
    named = format_ or ("html" if shown and output is None and not as_json else None)
    viewed = is_viewed(context, bool(named or as_json or output), OF_STACKS)
    chosen = FORMATS[output_format(EXTENSIONS, "folded", named=named, as_json=as_json, output=output)]
    writer = WRITERS[chosen.name]
    if shown and not chosen.content_type:
        raise UsageError(f"--open and --serve show {' and '.join(SHOWN)}: {chosen.name} is for other programs")
    if serve and output is not None:
        raise UsageError("--serve writes no file: leave out -o")
    if not writer.readable and output is None and not shown:
        refuse_terminal(chosen.name)
    if not 0 <= percent_limit <= 100:
        raise UsageError("--percent-limit takes a percentage, from 0 to 100")
    if source_dirs and Needs.LISTINGS not in writer.needs:
        raise UsageError(f"--source-dir is for --format=html: {chosen.name} shows no lines of source")
    components = _components(frames)
    if waits and (cpu_samples or Needs.TIME in writer.needs or chosen.name not in OF_WAITS):
        raise UsageError(f"--waits is for {', '.join(OF_WAITS)}, without --cpu-samples")
    if waits or (cpu_samples and chosen.name in OF_WAITS):  # others show stalls, too
        choice.refuse_filters_of_stalls("--waits" if waits else "--cpu-samples")
    if not writer.has_stacks and (components != DEFAULT_COMPONENTS or inverted or percent_limit or cpu_samples):
        raise UsageError(
            f"--frames, --inverted, --percent-limit and --cpu-samples shape stacks: {chosen.name} has none"
        )
    if per_interval and "interval" not in components:
        components = (*components, "interval") if inverted else ("interval", *components)
    stack_options = StackOptions(
        gpu_lines, gpu_dirs, components, inverted, max_stack or 0, percent_limit, cpu_samples or waits, waits
    )
    page = io.StringIO()
    if is_several(captures):
        if viewed:
            view(captures, choice, fleet, quiet)
            return
        mode = check_report(captures, output, force) if output is not None else 0o600
        with (
            contextlib.nullcontext(page)
            if shown and output is None
            else open_output(output, writer.binary, mode) as out,
        ):
            write_fleet(
                captures, choice, fleet, chosen.name, writer, stack_options, interval, out, lines=lines,
                interpreter=not (writer.hides_cpython if hide_cpython is None else hide_cpython), quiet=quiet,
            )  # fmt: skip
        _show(page.getvalue(), output or f"captures{chosen.extensions[0]}", chosen, serve, open_)
        return
    fleet.refuse_for_one("report")
    capture = existing(Path(captures[0]))
    mode = mode_of_report(capture)
    if output is not None:
        check_output(output, force, capture)
    if holds_time_lines(capture):
        check_options(context, capture, OF_TIME_LINES)
        if viewed:
            view_time_lines(capture, stage_options(freq), quiet)
            return
        with (
            contextlib.nullcontext(page) if shown and output is None else open_traces(output, chosen.name, mode) as out,
            show_writing(output),
        ):
            write_report(capture, chosen.name, stage_options(freq), stack_options, out, quiet)
        _show(page.getvalue(), output or f"{capture.stem}{chosen.extensions[0]}", chosen, serve, open_)
        return
    refuse_for_stalls(context, capture, ("freq",))
    if viewed:
        view(captures, choice, fleet, quiet)
        return
    hidden = writer.hides_cpython if hide_cpython is None else hide_cpython
    if "interval" in components and interval is None and not writer.interval_s:
        interval = 1.0
    with (
        open_export(
            capture,
            choice,
            writer,
            stack_options,
            interval,
            lines=lines,
            interpreter=not hidden,
            all_samples=all_processes,
            source_dirs=source_dirs or (),
        ) as (export, built),
        contextlib.nullcontext(page) if shown and output is None else open_output(output, writer.binary, mode) as out,
        show_writing(output),
    ):
        writer.write(export, stack_options, out)
    if symbol_sources and built is not None:
        for line in symbol_source_lines(built.facts.cpu_modules):
            say(line)
    if quiet:
        pass
    elif built is not None:
        say_facts("report", built.facts, built.header)
    elif waits:
        from iaprof.formats.capture.reader import CaptureReader

        say_waits("report", CaptureReader(capture))
    elif export.cpu is not None:
        left_out = f", without {text}" if (text := left_out_text(export.cpu.left_out)) else ""
        say(f"[ iaprof report: {int(export.cpu.count.sum()):,} CPU samples{left_out} ]")
    _show(page.getvalue(), output or f"{capture.stem}{chosen.extensions[0]}", chosen, serve, open_)


def _show(page: str, output: Path | str, chosen: Format, serve: bool, open_: bool) -> None:
    """Shows a page, or its file, in a browser, if that is asked for; `output` is a name where there is no file."""
    if serve:
        _serve(page, chosen.content_type, open_)
    elif open_:
        open_in_browser((output if isinstance(output, Path) else _kept(page, output)).absolute().as_uri())


def _serve(page: str, content_type: str, is_opened: bool) -> None:
    # Imported here, as other verbs do not need it.
    from iaprof.cli.terminal.serving import Server

    server = Server(page.encode(), content_type)

    def begun() -> None:
        say(f"iaprof: serving {server.address} until Ctrl-C")

    with opened_secretly(server.address) if is_opened else contextlib.nullcontext():
        server.run(begun)


def _kept(page: str, name: str) -> Path:
    """Writes the page to a temporary file, which stays, as nobody knows when the browser is done with it."""
    import tempfile

    try:
        folder = Path(tempfile.mkdtemp(prefix="iaprof-"))
    except OSError as error:
        raise IaprofError(f"there is no room for temporary files ({error.strerror}): name a file with -o") from error
    try:
        with open_output(folder / name, mode=0o600) as out:
            out.write(page)
    except BaseException:
        folder.rmdir()
        raise
    return folder / name


def _components(frames: str) -> tuple[str, ...]:
    """The components that `--frames` names; UsageError if one is unknown or repeated."""
    components = tuple(each.strip() for each in frames.split(",") if each.strip())
    for each in components:
        checked_choice(each, COMPONENTS, "--frames")
    if not components or len(set(components)) < len(components):
        raise UsageError("--frames takes at least one part, and each once")
    return components
