"""`iaprof annotate`: a kernel's instructions with their stalls, between its source lines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iaprof.basics.errors import IaprofError
from iaprof.cli.options.captures import FirstCapture, capture_and
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.options.values import meant
from iaprof.cli.subjects.stalls import open_report
from iaprof.cli.terminal.answers import TABLE, Answers, Force
from iaprof.cli.terminal.facts import say_facts
from iaprof.cli.terminal.listing_lines import lines
from iaprof.cli.terminal.stdout import open_output
from iaprof.cli.terminal.summary import say
from iaprof.cli.terminal.table import coloured, shortened, terminal_width
from iaprof.gpu.vendors import meanings

if TYPE_CHECKING:
    from iaprof.formats.profile import Profile
    from iaprof.report.views.annotation import Listing

EXAMPLES = """\b
Examples:
  iaprof annotate                                        the kernel that stalls most, of iaprof.parquet
  iaprof annotate cap.parquet matmul                     where in this kernel
  iaprof annotate cap.parquet matmul --source-dir src    with its source
  iaprof annotate cap.parquet 'attn_.*' --reason sbid    who waits for what
  iaprof annotate cap.parquet matmul --json | jq '.kernels[0].instructions'
"""
_FORMATS = {".txt": TABLE, ".json": "json"}
MOST_KERNELS = 5  # matching one name; more are probably a mistake
_MOST_NAMES = 10  # per message


def annotate(
    *,
    first: FirstCapture = None,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="KERNEL", help="A kernel's name, or a regular expression. By default, the kernel that stalls most."
        ),
    ] = None,
    source_dirs: Annotated[
        list[Path] | None,
        typer.Option("--source-dir", metavar="DIR", help="Show source lines of files below DIR."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="A .txt or .json file.", show_default=False),
    ] = None,
    force: Force = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print a summary to stderr.")] = False,
    choice: SelectionOptions,
) -> None:
    """Print a kernel's instructions and how each of them stalled.

    A stall is counted at the instruction that waits; the next line names the instruction it waits for. Source lines
    are shown if they are found below a --source-dir.
    """
    capture, which = capture_and(first, second)
    answers = Answers.chosen(output, as_json, force, [str(capture)], _FORMATS)
    from iaprof.report.gpu.source_files import SourceFiles
    from iaprof.report.views.annotation import as_dict, listings

    sources = SourceFiles(source_dirs or ())
    with open_report(capture, choice, texts=True) as report:
        names = chosen(report.profile, which)
        found = listings(report.profile, names, report.binary)
    with open_output(output, mode=answers.mode) as out:
        if answers.format == "json":
            told = {"kernels": [as_dict(each, sources) for each in found], "meanings": _meanings(found)}
            print(json.dumps(told, indent=2), file=out)
        else:
            width, colours = (terminal_width(), coloured()) if output is None else (None, False)
            print("\n".join(lines(found, sources, width, colours)), file=out)
    if source_dirs:
        for path in sources.newer_than(_began(report.header))[:_MOST_NAMES]:
            say(f"iaprof: warning: {path} was changed after the recording began: its lines may differ")
    if not quiet:
        say_facts("annotate", report.facts, report.header)


def chosen(profile: Profile, pattern: str | None) -> list[str]:
    """The names of the kernels that match a pattern; without one, that of the kernel with most samples.

    Raises:
        IaprofError: none match, or too many.
    """
    from iaprof.report.views.annotation import matching_kernels

    if pattern is None:
        if not (hottest := matching_kernels(profile, "")[:1]):
            raise IaprofError("no stall is in a known kernel: 'iaprof info' says what the capture contains")
        return hottest
    names = matching_kernels(profile, pattern)
    if not names:
        there = meant(pattern, matching_kernels(profile, "")) or ": run 'iaprof top' to list kernels"
        raise IaprofError(f"no kernel with stalls is called '{pattern}'{there}")
    if len(names) > MOST_KERNELS:
        shown = ", ".join(f"'{shortened(name, 60)}'" for name in names[:_MOST_NAMES])
        more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
        raise IaprofError(f"{len(names):,} kernels match '{pattern}': name one of {shown}{more}")
    return names


def _meanings(listings: Sequence[Listing]) -> dict[str, str]:
    """What the reasons mean that these kernels have."""
    counted = (pair for each in listings for pair in zip(each.reasons, each.counts, strict=True))
    reasons = list(dict.fromkeys(reason for reason, count in counted if count))
    return dict(zip(reasons, meanings(reasons), strict=True))


def _began(header: dict[str, Any]) -> float:
    """The start of the recording, seconds since 1970; infinite if the capture does not say."""
    clock = header.get("clock")
    began = clock.get("realtime_ns") if isinstance(clock, dict) else None
    return began / 1e9 if type(began) is int and 0 < began < 1 << 63 else math.inf
