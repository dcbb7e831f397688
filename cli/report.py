"""`iaprof report`: from a capture to text that people and other programs read."""

from __future__ import annotations

import contextlib
import io
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from iaprof.cli.stdout import answering
from iaprof.cli.summary import losses, say
from iaprof.cli.symbol_options import Kallsyms, SymbolDirs, Symfs
from iaprof.cli.symbol_sources import sources
from iaprof.formats.errors import UsageError
from iaprof.formats.files import check_output, replacing
from iaprof.formats.folded import write_cpu
from iaprof.formats.profile import Shape, Writer, clean
from iaprof.formats.writers import WRITERS, for_file

if TYPE_CHECKING:
    from iaprof.report.cpu_profile import CpuProfile

FORMATS = ", ".join(f"'{writer.name}': {writer.description}" for writer in WRITERS.values())
MOST_PROBLEMS = 50  # that are printed
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
    gpu_dirs: Annotated[bool, typer.Option("--gpu-dirs", help="Folders of GPU source files as frames.")] = False,
    cpu_samples: Annotated[
        bool, typer.Option("--cpu-samples", help="What the CPUs did meanwhile, in place of the stalls; folded only.")
    ] = False,
    inlines: Annotated[bool, typer.Option("--inlines/--no-inlines", help="Inlined CPU functions as frames.")] = True,
    lines: Annotated[bool, typer.Option("--lines", help="File and line beside CPU functions.")] = False,
    hide_cpython: Annotated[
        bool | None,
        typer.Option("--hide-cpython/--no-hide-cpython", help="Leave out the interpreter between Python functions."),
    ] = None,
    symfs: Symfs = None,
    symbol_dirs: SymbolDirs = None,
    kallsyms: Kallsyms = None,
    symbol_sources: Annotated[
        bool, typer.Option("--symbol-sources", help="Say which file was named from where, and what was not.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", help="Length of intervals, in formats with them."),
    ] = 1.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary on stderr.")] = False,
) -> None:
    """Print where the GPU stalled.

    Joins the stalls of a capture to kernels, source lines and the stacks that launched them. Runs anywhere: it
    needs neither a GPU nor root.
    """
    if not 0.001 <= interval < 1e9:
        raise UsageError("--interval must be a number of seconds, 0.001 or more")
    writer = _writer(format_, output)
    if output is not None:
        check_output(output, force, capture)
    # Imported here, as the other verbs need not wait for it.
    from iaprof.formats.capture import CaptureReader
    from iaprof.report.cpu_names import Places, naming
    from iaprof.report.cpu_profile import build_cpu
    from iaprof.report.gpu_module import GpuModules
    from iaprof.report.profile import build
    from iaprof.symbols.cpu_frames import Look

    _limit_memory(capture.stat().st_size if capture.is_file() else 0)
    reader = CaptureReader(capture)
    if cpu_samples and writer.name != "folded":
        raise UsageError("--cpu-samples are printed as folded stacks only")
    places = Places(symfs, tuple(symbol_dirs or ()), kallsyms)
    hidden = writer.hides_cpython if hide_cpython is None else hide_cpython
    look = Look(inlines, lines, interpreter=not hidden)
    if cpu_samples:
        with naming(reader, places) as names:
            _print_cpu_samples(build_cpu(reader, names, look), output, quiet)
        return
    with GpuModules() as modules, naming(reader, places) as names:
        built = build(reader, modules, interval if writer.per_interval else 0.0, names, look)
        with _destination(output) as out:
            writer.write(built.profile, Shape(gpu_lines, gpu_dirs), out)
    if symbol_sources:
        for line in sources(built.facts.cpu_modules):
            say(line)
    if not quiet and sys.stderr is not None:  # else `print` would take stdout
        facts = built.facts
        for problem, paths in list(facts.problems.items())[:MOST_PROBLEMS]:
            more = f" (and {len(paths) - 1:,} more)" if len(paths) > 1 else ""
            print(clean(f"iaprof: warning: {paths[0]}{more}: {problem}"), file=sys.stderr)
        if len(facts.problems) > MOST_PROBLEMS:
            print(f"iaprof: warning: and {len(facts.problems) - MOST_PROBLEMS:,} more problems", file=sys.stderr)
        matched = facts.stalls - facts.unknown_kernel
        share = 100 * matched / facts.stalls if facts.stalls else 100.0
        print(
            f"[ iaprof report: {facts.records:,} stall records, {facts.stalls:,} samples; "
            f"{_scaled(reader.header)}"
            f"{share:.1f} % in known kernels, {facts.no_launch:,} without a launch; "
            f"lost while recording: {clean(losses(reader.header))} ]",
            file=sys.stderr,
        )


def _print_cpu_samples(profile: CpuProfile, output: Path | None, quiet: bool) -> None:
    with _destination(output) as out:
        write_cpu(profile.samples, out)
    if not quiet:
        say(f"[ iaprof report: {sum(count for _, count in profile.samples):,} CPU samples ]")


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


def _scaled(header: dict[str, Any]) -> str:
    """What the counts were multiplied with, where not every record was kept."""
    streams = header.get("streams")
    kept = {s.get("subsample", 1) for s in streams} if isinstance(streams, list) else {1}
    return "".join(f"one record of {n:,} was kept and stands for all; " for n in sorted(kept) if n > 1)


def _limit_memory(capture_bytes: int) -> None:
    """Makes a capture that expands without bound an error here, before the whole machine has no memory left.

    A report of a real capture takes far less: some hundred MB, and a multiple of the capture's size.
    """
    limit = (4 << 30) + 64 * capture_bytes
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


@contextlib.contextmanager
def _destination(output: Path | None) -> Iterator[IO[str]]:
    """Stdout, or a file that gets its name when it is whole; UTF-8 either way."""
    if output is not None:
        with replacing(output, 0o644) as file, io.TextIOWrapper(file, encoding="utf-8", newline="\n") as text:
            yield text
        return
    with answering():
        yield sys.stdout
