"""`iaprof merge`: merges captures into one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from iaprof.basics.clean import clean
from iaprof.basics.errors import UsageError
from iaprof.basics.files import check_output
from iaprof.basics.quantities import in_bytes
from iaprof.cli.terminal.progress import Progress
from iaprof.cli.terminal.summary import losses, say
from iaprof.cli.verbs.info import info

EXAMPLES = """\b
Examples:
  iaprof merge rank*.parquet -o job.parquet    the ranks of a job
  iaprof merge cap.*.parquet cap.parquet       the files of one recording
  iaprof report merged.parquet                 all of them in one report
"""


def merge(
    captures: Annotated[list[Path], typer.Argument(metavar="CAPTURE", help="Two or more captures.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The capture to write.")] = Path(
        "merged.parquet"
    ),
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing capture.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the same as 'iaprof info --json' for the new capture.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Merge several captures into one.

    The captures can be of several ranks or hosts, or the files of one recording. The new capture contains each of
    them as a part, and works with every verb.
    """
    if len(captures) < 2:
        raise UsageError("merging takes two captures or more")
    for capture in captures:
        check_output(output, force, capture)
    from iaprof.report.merging import merge as write

    progress = Progress()
    on_terminal = not quiet and sys.stderr is not None and sys.stderr.isatty()
    merged = write(captures, output, progress.merging if on_terminal else _nothing)
    progress.clear()
    if as_json:
        info(output, as_json=True)
    if not quiet:
        totals, parts = merged.header["totals"], merged.header["parts"]
        counts = [f"{totals.get('stalls', 0):,} stall records", f"{totals.get('launches', 0):,} launches"]
        if slices := totals.get("slices", 0):
            recorded = [text for text in counts if not text.startswith("0 ")]
            counts = [*recorded, f"{slices:,} slices"]
        say(
            clean(
                f"[ iaprof merge: wrote {in_bytes(merged.size)} to {output}; {len(parts):,} recordings; "
                f"{'; '.join(counts)}; lost: {losses(merged.header)} ]"
            )
        )


def _nothing(*_: object) -> None:
    pass
