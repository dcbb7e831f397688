"""`iaprof import`: makes a capture of Intel's iaprof text."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import check_output, replace_file
from iaprof.basics.quantities import in_bytes
from iaprof.cli.terminal.progress import Progress
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.summary import say
from iaprof.formats.profile import clean

if TYPE_CHECKING:
    from iaprof.formats.imports.iaprof_lines import Facts

EXAMPLES = """\b
Examples:
  iaprof import old.iaprof.txt                 writes old.parquet
  iaprof import old.txt -o cap.parquet         then: iaprof top cap.parquet
  zcat old.txt.gz | iaprof import - -o cap.parquet
"""
_STDIN = Path("-")
_EXTENSIONS = (".iaprof.txt", ".iaprof", ".txt")
_QUIET_S = 1.0  # before the first progress message


def import_(
    text: Annotated[Path, typer.Argument(metavar="FILE", help="Intel's iaprof text; '-' is stdin.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The capture to write; without, FILE with .parquet."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing capture.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was read as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Make a capture of Intel's iaprof text.

    Reads what Intel's iaprof 2026.2 or 0.5 printed, or 'iaprof report --format=iaprof', so that every verb works on it.
    """
    if output is None:
        output = _capture_of(text)
    check_output(output, force, None if text == _STDIN else text)
    from iaprof.formats.imports.iaprof_import import import_text

    progress = _Reading(quiet)
    name = "stdin" if text == _STDIN else str(text)
    try:
        with _opened(text) as source, replace_file(output) as file:
            facts = import_text(source, name, file, progress.tell)
            size = file.tell()
    except OSError as error:
        raise IaprofError(f"{name} cannot be read: {error.strerror or error}") from error
    finally:
        progress.clear()
    if as_json:
        with utf8_stdout():
            print(json.dumps(_as_dict(facts, output, size), indent=2))
    elif not quiet:
        _say(facts, output, size)


class _Reading:
    """Draws progress on a terminal if reading takes long."""

    def __init__(self, quiet: bool) -> None:
        """Starts the clock."""
        self._line = None if quiet or sys.stderr is None or not sys.stderr.isatty() else Progress()
        self._since = time.monotonic()

    def tell(self, done: int) -> None:
        """Draws the number of bytes read so far."""
        if self._line and time.monotonic() - self._since > _QUIET_S:
            self._line.reading(done)

    def clear(self) -> None:
        """Erases the progress line."""
        if self._line:
            self._line.clear()


def _opened(text: Path) -> BinaryIO:
    if text != _STDIN:
        return text.open("rb")
    if sys.stdin is None:
        raise IaprofError("there is no stdin: name a file")
    return sys.stdin.buffer


def _capture_of(text: Path) -> Path:
    """The default name of the capture, in the text's folder."""
    if text == _STDIN:
        return Path("iaprof.parquet")
    stem = next((text.name.removesuffix(end) for end in _EXTENSIONS if text.name.endswith(end)), text.name)
    return text.with_name(f"{stem or text.name}.parquet")


def _say(facts: Facts, output: Path, size: int) -> None:
    if facts.unknown_lines:
        lines = "1 line" if facts.unknown_lines == 1 else f"{facts.unknown_lines:,} lines"
        say(f"iaprof: warning: {lines} of unknown kinds left out, the first is line {facts.first_unknown:,}")
    if facts.cut_texts:
        texts = "1 text" if facts.cut_texts == 1 else f"{facts.cut_texts:,} texts"
        say(f"iaprof: warning: {texts} cut to the 16 KiB that a capture's may have")
    if facts.cut_line:
        say("iaprof: warning: the last line has no end and was left out: was the file cut short?")
    intervals = "1 interval" if facts.intervals == 1 else f"{facts.intervals:,} intervals"
    say(
        clean(
            f"[ iaprof import: wrote {in_bytes(size)} to {output}; "
            f"{facts.format}, {intervals}, {facts.rows:,} rows, {facts.samples:,} samples ]"
        )
    )


def _as_dict(facts: Facts, output: Path, size: int) -> dict[str, Any]:
    return {
        "output": clean(str(output)),
        "bytes": size,
        "format": facts.format,
        "intervals": facts.intervals,
        "interval_s": facts.interval_ns / 1e9,
        "rows": facts.rows,
        "samples": facts.samples,
        "metrics": facts.metrics,
        "cut_texts": facts.cut_texts,
        "unknown_lines": facts.unknown_lines,
        "last_line_cut": facts.cut_line,
    }
