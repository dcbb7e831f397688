"""`iaprof recover`: from the spool of a recorder that died to a capture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from iaprof.cli.summary import end_line, say
from iaprof.formats.errors import UsageError
from iaprof.formats.files import check_output

EXAMPLES = """\b
Examples:
  sudo iaprof recover cap.parquet.spool                 writes cap.parquet
  sudo iaprof recover cap.parquet.spool -o saved.parquet
"""


def recover(
    spool: Annotated[Path, typer.Argument(metavar="SPOOL", help="What the recording left: CAPTURE.spool.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The capture to write; SPOOL less .spool without.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing capture.")] = False,
) -> None:
    """Save a recording whose recorder died.

    Turns its spool into a capture. Everything that was read before the recorder died is in it. The spool is kept.
    """
    from iaprof.record.finish import finish
    from iaprof.record.spool import SpoolReader

    if output is None:
        if spool.suffix != ".spool":
            raise UsageError(f"{spool} does not end in .spool: name the capture to write with -o")
        output = spool.with_suffix("")
    reader = SpoolReader(spool)
    check_output(output, force, spool)
    finished = finish(reader, output)
    reader.close()
    say(end_line("recover", output, finished.header, finished.size))
