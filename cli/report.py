"""`iaprof report`: from a capture to text that people and other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from iaprof.cli.analysis import analysed, limit_memory, places
from iaprof.cli.facts import say_facts
from iaprof.cli.selection import Choice, selecting
from iaprof.cli.stdout import destination
from iaprof.cli.summary import say
from iaprof.cli.symbol_sources import sources
from iaprof.formats.errors import UsageError
from iaprof.formats.files import check_output
from iaprof.formats.folded import write_cpu
from iaprof.formats.profile import PARTS, USUAL_PARTS, Shape, Writer
from iaprof.formats.writers import WRITERS, for_file

FORMATS = ", ".join(f"'{writer.name}': {writer.description}" for writer in WRITERS.values())
EXAMPLES = """\b
Examples:
  iaprof report cap.parquet                              folded stacks
  iaprof report cap.parquet | flamegraph.pl > cap.svg    a flame graph
  iaprof report cap.parquet -o cap.iaprof.txt            Intel's iaprof text
  iaprof report cap.parquet --time 10%-20% --pid 4711    a part of all
  iaprof report cap.parquet --frames function,reason     why functions wait
  iaprof report cap.parquet --json | jq .matched         what found its place
"""


@selecting
def report(
    choice: Choice,
    capture: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A file that 'iaprof record' wrote.")] = Path(
        "iaprof.parquet"
    ),
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="FORMAT", help=f"{FORMATS}. By -o's extension, else folded.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to; stdout without.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format=json.")] = False,
    frames: Annotated[
        str,
        typer.Option(
            "--frames",
            metavar="PART,...",
            help=f"What a stack consists of, from the root: {', '.join(PARTS)}. Without, all but "
            f"{', '.join(part for part in PARTS if part not in USUAL_PARTS)}.",
            show_default=False,
        ),
    ] = ",".join(USUAL_PARTS),
    inverted: Annotated[bool, typer.Option("--inverted", help="Stacks from the leaf to the root.")] = False,
    per_interval: Annotated[
        bool, typer.Option("--per-interval", help="Each interval for itself, as the root of its stacks.")
    ] = False,
    percent_limit: Annotated[
        float, typer.Option("--percent-limit", metavar="PERCENT", help="Add up in one line what has a smaller share.")
    ] = 0,
    max_stack: Annotated[
        int | None,
        typer.Option("--max-stack", metavar="FRAMES", help="So many CPU frames at most, the innermost.", min=1),
    ] = None,
    gpu_lines: Annotated[bool, typer.Option("--gpu-lines", help="Source lines beside GPU functions.")] = False,
    gpu_dirs: Annotated[bool, typer.Option("--gpu-dirs", help="Folders of GPU source files as frames.")] = False,
    cpu_samples: Annotated[
        bool, typer.Option("--cpu-samples", help="What the CPUs did meanwhile, in place of the stalls.")
    ] = False,
    lines: Annotated[bool, typer.Option("--lines", help="File and line beside CPU functions.")] = False,
    hide_cpython: Annotated[
        bool | None,
        typer.Option("--hide-cpython/--no-hide-cpython", help="Leave out the interpreter between Python functions."),
    ] = None,
    symbol_sources: Annotated[
        bool, typer.Option("--symbol-sources", help="Say which file was named from where, and what was not.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", help="Length of intervals, where there are any."),
    ] = 1.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary on stderr.")] = False,
) -> None:
    """Print where the GPU stalled.

    Joins the stalls of a capture to kernels, source lines and the stacks that launched them. Runs anywhere: it
    needs neither a GPU nor root.
    """
    if not 0.001 <= interval < 1e9:
        raise UsageError("--interval must be a number of seconds, 0.001 or more")
    if as_json and format_ not in (None, "json"):
        raise UsageError(f"--json and --format={format_} contradict each other: leave one of them out")
    writer = _writer("json" if as_json else format_, output)
    if not 0 <= percent_limit <= 100:
        raise UsageError("--percent-limit takes a percentage, from 0 to 100")
    parts = _parts(frames)
    if writer.name != "folded" and (parts != USUAL_PARTS or inverted or percent_limit):
        raise UsageError("--frames, --inverted and --percent-limit shape folded stacks: other formats have everything")
    if per_interval and "interval" not in parts:
        parts = (*parts, "interval") if inverted else ("interval", *parts)
    shape = Shape(gpu_lines, gpu_dirs, parts, inverted, max_stack or 0, percent_limit)
    if cpu_samples and (writer.name != "folded" or shape != Shape() or _chooses(choice)):
        raise UsageError("--cpu-samples prints all of them as folded stacks: leave out filters, --format and shapes")
    if output is not None:
        check_output(output, force, capture)
    hidden = writer.hides_cpython if hide_cpython is None else hide_cpython
    if cpu_samples:
        _print_cpu_samples(capture, choice, lines, not hidden, output, quiet)
        return
    seconds = interval if writer.per_interval or "interval" in shape.parts else 0.0
    with analysed(capture, choice, seconds, lines=lines, interpreter=not hidden) as built, destination(output) as out:
        writer.write(built.profile, shape, out)
    if symbol_sources:
        for line in sources(built.facts.cpu_modules):
            say(line)
    if not quiet:
        say_facts("report", built.facts, built.header)


def _chooses(choice: Choice) -> bool:
    """Whether it is about some of the stalls only, or about how they are joined."""
    from iaprof.report.selection import Selection

    return choice.selection != Selection()


def _parts(frames: str) -> tuple[str, ...]:
    """The parts that `--frames` names."""
    parts = tuple(part.strip() for part in frames.split(",") if part.strip())
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--frames knows no part '{part}': choose of {', '.join(PARTS)}")
    if not parts or len(set(parts)) < len(parts):
        raise UsageError("--frames takes at least one part, and each once")
    return parts


def _print_cpu_samples(
    capture: Path, choice: Choice, lines: bool, interpreter: bool, output: Path | None, quiet: bool
) -> None:
    # Imported here, as the other verbs need not wait for it.
    from iaprof.formats.capture import CaptureReader
    from iaprof.report.cpu_names import naming
    from iaprof.report.cpu_profile import build_cpu
    from iaprof.symbols.cpu_frames import Look

    limit_memory(capture)
    samples = []
    for part in CaptureReader(capture).parts:
        with naming(part, places(choice)) as names:
            samples += build_cpu(part, names, Look(choice.inlines, lines, interpreter)).samples
    with destination(output) as out:
        write_cpu(samples, out)
    if not quiet:
        say(f"[ iaprof report: {sum(count for _, count in samples):,} CPU samples ]")


def _writer(name: str | None, output: Path | None) -> Writer:
    if name is not None:
        if name not in WRITERS:
            raise UsageError(f"there is no format '{name}': choose one of {', '.join(WRITERS)}")
        return WRITERS[name]
    if output is None:
        return WRITERS["folded"]
    writer = for_file(output)
    if writer is None:
        raise UsageError(f"the name {output} does not tell the format: choose one with --format ({', '.join(WRITERS)})")
    return writer
