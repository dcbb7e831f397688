"""`iaprof import`: makes a capture of Intel's iaprof text, or of traces in Chrome's format."""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import check_output, replace_file
from iaprof.basics.quantities import in_bytes
from iaprof.cli.terminal.progress import Progress
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.summary import say
from iaprof.formats.profile import clean

if TYPE_CHECKING:
    from iaprof.formats.imports.iaprof_lines import Facts
    from iaprof.report.traces.importing import FileFacts, TraceFacts

EXAMPLES = """\b
Examples:
  iaprof import old.iaprof.txt                 writes old.parquet
  iaprof import old.txt -o cap.parquet         then: iaprof top cap.parquet
  zcat old.txt.gz | iaprof import - -o cap.parquet
  iaprof import rank_*.json -o run.parquet     traces of accelerators: then iaprof timeline run.parquet
"""
_STDIN = Path("-")
_EXTENSIONS = (".iaprof.txt", ".iaprof", ".txt", ".pt.trace.json.gz", ".pt.trace.json", ".json.gz", ".json", ".gz")
_SNIFFED = 1 << 12  # bytes
_MOST_SAID = 8  # sentences of one kind
_QUIET_S = 1.0  # before the first progress message


def import_(
    texts: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Intel's iaprof text, or traces; '-' is stdin.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The capture to write; without, FILE with .parquet."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing capture.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was read as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Make a capture of Intel's iaprof text, or of traces in Chrome's JSON.

    Reads what Intel's iaprof 2026.2 or 0.5 printed, or 'iaprof report --format=iaprof', so that every verb works on it;
    or traces of accelerators, one for each job and rank, for 'iaprof timeline'.
    """
    _check_files(texts)
    if output is None:
        if len(texts) > 1:
            raise UsageError("several files become one capture: name it with -o")
        output = _capture_of(texts[0])
    for text in texts:
        check_output(output, force, None if text == _STDIN else text)
    progress = _Reading(quiet)
    name = "stdin" if texts[0] == _STDIN else str(texts[0])
    try:
        with _opened(texts[0]) as source:
            start = source.peek(_SNIFFED) if isinstance(source, io.BufferedReader) else b""
            from iaprof.report.traces.importing import is_trace

            if len(texts) > 1 or is_trace(start[:_SNIFFED]):
                _import_traces(texts, source, output, progress, as_json, quiet)
                return
            from iaprof.formats.imports.iaprof_import import import_text

            with replace_file(output) as file:
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


def _check_files(texts: Sequence[Path]) -> None:
    """Checks that no file is named twice.

    Raises:
        UsageError: one is.
    """
    seen: dict[tuple[int, int], Path] = {}
    for text in texts:
        if text == _STDIN:
            if len(texts) > 1:
                raise UsageError("stdin is imported alone: name only '-', or only files")
            continue
        try:
            status = text.stat()
        except OSError:
            continue  # reading it says why
        first = seen.setdefault((status.st_dev, status.st_ino), text)
        if first is not text:
            raise UsageError(f"{text} is the same file as {first}: name each file once")


def _import_traces(
    texts: Sequence[Path], source: BinaryIO, output: Path, progress: _Reading, as_json: bool, quiet: bool
) -> None:
    from iaprof.report.traces.importing import import_traces

    paths, names = list(texts), [*map(str, texts)]
    with tempfile.TemporaryFile() as spool:
        if texts[0] == _STDIN:  # traces are read from any place on
            while block := source.read(1 << 20):
                spool.write(block)
            spool.flush()
            paths, names = [Path(f"/proc/self/fd/{spool.fileno()}")], ["stdin"]
        with replace_file(output) as file:
            facts = import_traces(paths, file, progress.tell, names=names)
            size = file.tell()
    progress.clear()
    if as_json:
        files = [each.as_dict() for each in facts.files]
        described = {"output": clean(str(output)), "bytes": size, "format": "trace", "files": files}
        with utf8_stdout():
            print(json.dumps(described, indent=2))
    elif not quiet:
        _say_traces(facts, output, size)


def import_to(paths: Sequence[Path], output: Path, quiet: bool) -> None:
    """Imports traces on behalf of another verb, and says on stderr what was left out.

    Raises:
        UsageError: a file is named twice.
        IaprofError: a file is no trace.
    """
    from iaprof.report.traces.importing import import_traces

    _check_files(paths)
    progress = _Reading(quiet)
    try:
        with replace_file(output) as file:
            facts = import_traces(paths, file, progress.tell, names=[*map(str, paths)])
            size = file.tell()
    finally:
        progress.clear()
    if not quiet:
        _say_traces(facts, output, size)


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


def _say_traces(facts: TraceFacts, output: Path, size: int) -> None:
    said: dict[str, int] = {}
    for file in facts.files:
        for sentence in _sentences(file):
            kind = sentence.partition(": ")[0]
            said[kind] = said.get(kind, 0) + 1
            if said[kind] <= _MOST_SAID:
                say(clean(f"iaprof: warning: {file.name}: {sentence}"))
    for kind, number in said.items():
        if number > _MOST_SAID:
            say(clean(f"iaprof: warning: and of {number - _MOST_SAID:,} more files: {kind}"))
    counts = [file.counts for file in facts.files]
    events, slices = sum(each.events for each in counts), sum(each.slices for each in counts)
    files = "1 trace" if len(counts) == 1 else f"{len(counts):,} traces"
    say(
        clean(
            f"[ iaprof import: wrote {in_bytes(size)} to {output}; {files}, {_counted(events, 'event')}, "
            f"{_counted(slices, 'slice')} ]"
        )
    )


def _sentences(file: FileFacts) -> Sequence[str]:
    """Returns what is doubtful about a trace, with counts."""
    counts = file.counts
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(counts.dropped.items()))
    found = list(file.problems)
    if dropped:
        found.append(f"{_counted(sum(counts.dropped.values()), 'event')} dropped: {dropped}")
    if counts.zero_durations:
        found.append(f"slices without a length, which are kept: {counts.zero_durations:,}")
    if counts.unknown_phases:
        found.append(f"events of unknown phases, which are kept: {counts.unknown_phases:,}")
    if counts.bad_values:
        found.append(f"members that should be numbers or texts and are not: {counts.bad_values:,}")
    if counts.cut_texts or counts.cut_args:
        found.append(f"too long: {counts.cut_texts:,} names were cut, args of {counts.cut_args:,} events left out")
    if file.members_left_out:
        found.append(f"members beside the events that are too long or too many, left out: {file.members_left_out:,}")
    if not counts.events:
        found.append("it has no events")
    return found


def _counted(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"


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
