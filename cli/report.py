"""`iaprof report`: from a capture to text that people and other programs read."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated

import typer

from iaprof.cli.summary import losses
from iaprof.formats.capture import CaptureReader
from iaprof.formats.errors import UsageError
from iaprof.formats.files import check_output, replacing
from iaprof.formats.profile import Shape, Writer, clean
from iaprof.formats.writers import WRITERS, for_file

FORMATS = ", ".join(f"'{writer.name}': {writer.description}" for writer in WRITERS.values())
EXAMPLES = """\b
Examples:
  iaprof report cap.parquet                              folded stacks
  iaprof report cap.parquet | flamegraph.pl > cap.svg    a flame graph
  iaprof report cap.parquet -o cap.iaprof.txt            Intel's iaprof text
"""


def report(
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
    gpu_lines: Annotated[bool, typer.Option("--gpu-lines", help="Source lines beside GPU functions.")] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=0.001, help="Length of intervals, in formats with them."),
    ] = 1.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary on stderr.")] = False,
) -> None:
    """Print where the GPU stalled.

    Joins the stalls of a capture to kernels, source lines and the stacks that launched them. Runs anywhere: it
    needs neither a GPU nor root.
    """
    writer = _writer(format_, output)
    if output is not None:
        check_output(output, force)
    from iaprof.report.gpu_module import GpuModules
    from iaprof.report.profile import build

    reader = CaptureReader(capture)
    with GpuModules() as modules:
        built = build(reader, modules, interval if writer.per_interval else 0.0)
        with _destination(output) as out:
            writer.write(built.profile, Shape(gpu_lines=gpu_lines), out)
    if not quiet:
        facts = built.facts
        for problem in facts.problems:
            print(clean(f"iaprof: warning: {problem}"), file=sys.stderr)
        matched = facts.stalls - facts.unknown_kernel
        share = 100 * matched / facts.stalls if facts.stalls else 100.0
        print(
            f"[ iaprof report: {facts.records:,} stall records, {facts.stalls:,} samples; "
            f"{share:.1f} % in known kernels, {facts.no_launch:,} without a launch; "
            f"lost while recording: {clean(losses(reader.header))} ]",
            file=sys.stderr,
        )


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


@contextlib.contextmanager
def _destination(output: Path | None) -> Iterator[IO[str]]:
    """Stdout, or a file that gets its name when it is whole."""
    if output is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    with replacing(output, 0o644) as file, io.TextIOWrapper(file, encoding="utf-8", newline="\n") as text:
        yield text
