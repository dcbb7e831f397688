"""`iaprof import`: makes a capture of Intel's iaprof text, or of traces in Chrome's format."""

from __future__ import annotations

import glob
import io
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import check_output, replace_file
from iaprof.basics.quantities import counted, in_bytes
from iaprof.cli.terminal.progress import Progress
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.summary import say

if TYPE_CHECKING:
    from iaprof.formats.imports.iaprof_import import Facts
    from iaprof.report.together.joining import JoinedTrace
    from iaprof.timelines.reading.imported_file import FileFacts
    from iaprof.timelines.reading.importing import TraceFacts

EXAMPLES = """\b
Examples:
  iaprof import old.iaprof.txt                 writes old.parquet
  iaprof import old.txt -o cap.parquet         then: iaprof top cap.parquet
  zcat old.txt.gz | iaprof import - -o cap.parquet
  iaprof import rank_*.json -o run.parquet     traces of accelerators: then iaprof timeline run.parquet
  iaprof import trace.pt.trace.json --with cap.parquet -o both.parquet
                                               a trace of the same run: then iaprof top both.parquet --by operator
  iaprof import trace.pftrace                  a Perfetto trace
"""
_STDIN = Path("-")
_EXTENSIONS = (
    ".iaprof.txt", ".iaprof", ".txt", ".pt.trace.json.gz", ".pt.trace.json", ".json.gz", ".json", ".pftrace.gz",
    ".pftrace", ".perfetto-trace", ".gz",
)  # fmt: skip
_SNIFFED = 1 << 12  # bytes
_MOST_SAID = 8  # sentences of one kind
_QUIET_S = 1.0  # before the first progress message


def import_(
    texts: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Intel's iaprof text, or traces; '-' is stdin.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The capture to write.  [default: FILE with .parquet]"),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--with", metavar="CAPTURE", help="Join the traces to CAPTURE, which was recorded in the same run."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing capture.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was read as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Convert Intel's iaprof text, or traces in Chrome's JSON or Perfetto's format, into a capture.

    Reads the output of Intel's iaprof 2026.2 or 0.5, or of 'iaprof report --format=iaprof', so that every verb
    works on it; or traces of accelerators, one for each job and rank, for 'iaprof timeline'.
    """
    texts = expanded(texts)
    _check_files(texts)
    output = output or _capture_of(texts)
    for text in texts:
        check_output(output, force, None if text == _STDIN else text)
    if recorded is not None:
        check_output(output, force, recorded)
    progress = _Reading(quiet)
    name = "stdin" if texts[0] == _STDIN else str(texts[0])
    try:
        with _opened(texts[0]) as source:
            start = source.peek(_SNIFFED) if isinstance(source, io.BufferedReader) else b""
            from iaprof.formats.imports.encoded_text import refuse_compressed
            from iaprof.timelines.reading.importing import is_trace

            refuse_compressed(start, name)
            if len(texts) > 1 or is_trace(start[:_SNIFFED]):
                _import_traces(texts, source, output, progress, as_json, quiet, recorded)
                return
            if recorded is not None:
                raise UsageError("--with joins traces to a capture: an imported text has stalls of its own")
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


def expanded(paths: Sequence[Path]) -> list[Path]:
    """Returns the files that patterns such as `job-*.json` match, for shells that do not expand them.

    Raises:
        IaprofError: a pattern matches no file.
    """
    found: list[Path] = []
    for path in paths:
        if path == _STDIN or path.exists() or not glob.has_magic(str(path)):
            found.append(path)
            continue
        matches = sorted(glob.glob(str(path)))
        if not matches:
            raise IaprofError(f"no file matches {path}")
        found += map(Path, matches)
    return found


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
    texts: Sequence[Path],
    source: BinaryIO,
    output: Path,
    progress: _Reading,
    as_json: bool,
    quiet: bool,
    recorded: Path | None,
) -> None:
    import tempfile

    if recorded is not None:
        from iaprof.formats.capture.reader import CaptureReader
        from iaprof.report.together.joining import check_stalls

        check_stalls(CaptureReader(recorded))  # before the traces are read, which takes long

    paths, names = list(texts), [*map(str, texts)]
    joined: list[JoinedTrace] = []
    with tempfile.TemporaryFile() as spool:
        if texts[0] == _STDIN or (len(texts) == 1 and not texts[0].is_file()):  # traces are read from any place on
            while block := source.read(1 << 20):
                spool.write(block)
            spool.flush()
            paths = [Path(f"/proc/self/fd/{spool.fileno()}")]
            names = ["stdin" if texts[0] == _STDIN else str(texts[0])]
        if recorded is None:
            facts, size = _write_capture(paths, names, output, progress)
        else:
            facts, joined, size = _join(recorded, paths, names, output, progress)
    progress.clear()
    if as_json:
        files = [each.as_dict() for each in facts.files]
        for each, trace in zip(files, joined, strict=False):
            each["clock"] = trace.clock.as_dict()
        described = {"output": clean(str(output)), "bytes": size, "format": "trace", "files": files}
        with utf8_stdout():
            print(json.dumps(described, indent=2))
    elif not quiet:
        _say_clocks(joined)
        _say_traces(facts, f"iaprof import: wrote {in_bytes(size)} to {output};")


def _join(
    recorded: Path, paths: Sequence[Path], names: Sequence[str], output: Path, progress: _Reading
) -> tuple[TraceFacts, list[JoinedTrace], int]:
    """Imports traces into a file without a name, and writes them together with the capture's rows.

    Returns:
        what was read of traces, how their clocks were joined, and the capture's bytes.
    """
    import tempfile

    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.together.joining import join_traces
    from iaprof.timelines.reading.importing import import_traces

    with replace_file(output) as file, tempfile.TemporaryFile() as spool:
        facts = import_traces(paths, spool, progress.tell, names=names)
        spool.flush()
        traces = CaptureReader(Path(f"/proc/self/fd/{spool.fileno()}"))
        return facts, join_traces(CaptureReader(recorded), traces, file), file.tell()


def import_to(paths: Sequence[Path], output: Path, verb: str, quiet: bool) -> None:
    """Imports traces on behalf of another verb, and says on stderr what was left out.

    Raises:
        UsageError: a file is named twice.
        IaprofError: a file is not a trace.
    """
    _check_files(paths)
    progress = _Reading(quiet)
    try:
        facts, _ = _write_capture(paths, [*map(str, paths)], output, progress)
    finally:
        progress.clear()
    if not quiet:
        _say_traces(facts, f"iaprof {verb}: read")


def _write_capture(
    paths: Sequence[Path], names: Sequence[str], output: Path, progress: _Reading
) -> tuple[TraceFacts, int]:
    """Returns what was read of traces, and the capture's bytes."""
    from iaprof.timelines.reading.importing import import_traces

    with replace_file(output) as file:
        return import_traces(paths, file, progress.tell, names=names), file.tell()


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


def _capture_of(texts: Sequence[Path]) -> Path:
    """The default name of the capture, in the text's folder; UsageError if there are several texts."""
    if len(texts) > 1:
        raise UsageError("several files become one capture: name it with -o")
    text = texts[0]
    if text == _STDIN:
        return Path("iaprof.parquet")
    stem = next((text.name.removesuffix(end) for end in _EXTENSIONS if text.name.endswith(end)), text.name)
    return text.with_name(f"{stem or text.name}.parquet")


def _say(facts: Facts, output: Path, size: int) -> None:
    if facts.unknown_lines:
        lines = counted(facts.unknown_lines, "line")
        say(f"iaprof: warning: {lines} of unknown kinds left out, the first is line {facts.first_unknown:,}")
    if facts.cut_texts:
        say(f"iaprof: warning: {counted(facts.cut_texts, 'text')} cut to the 16 KiB that a capture's may have")
    if facts.cut_line:
        say("iaprof: warning: the last line has no end and was left out: was the file cut short?")
    say(
        clean(
            f"[ iaprof import: wrote {in_bytes(size)} to {output}; "
            f"{facts.format}, {counted(facts.intervals, 'interval')}, {counted(facts.samples, 'sample')} "
            f"in {counted(facts.rows, 'row')} ]"
        )
    )


def _say_traces(facts: TraceFacts, begin: str) -> None:
    """Says what is doubtful about traces, and what became of their events; `begin` begins the last line."""
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
    numbers = {
        "slice": sum(each.slices for each in counts),
        "counter": sum(each.counters for each in counts),
        "flow": sum(each.flows for each in counts),
        "other": sum(each.instants for each in counts),
    }
    kinds = [counted(number, kind) for kind, number in numbers.items() if number or kind == "slice"]
    for what, found in (("merged", [each.merged for each in counts]), ("dropped", [each.dropped for each in counts])):
        if number := sum(sum(each.values()) for each in found):
            kinds.append(f"{number:,} {what}")
    say(
        clean(
            f"[ {begin} {counted(len(counts), 'trace')}, "
            f"{counted(sum(each.events for each in counts), 'event')}: {', '.join(kinds)} ]"
        )
    )


def _say_clocks(joined: Sequence[JoinedTrace]) -> None:
    from iaprof.formats.header.traces import describe_clock

    for trace in joined[:_MOST_SAID]:
        say(clean(f"iaprof: {trace.name}: {describe_clock(trace.clock)}"))
    if len(joined) > _MOST_SAID:
        guesses = sum(trace.clock.is_guess for trace in joined[_MOST_SAID:])
        say(f"iaprof: and the clocks of {len(joined) - _MOST_SAID:,} more traces, of which {guesses:,} are guesses")


def _sentences(file: FileFacts) -> Sequence[str]:
    """Returns what is doubtful about a trace, with counts."""
    counts = file.counts
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(counts.dropped.items()))
    found = list(file.problems)
    if file.dialect == "unknown":
        found.append(
            "unknown dialect: its slices, counters and flows are read as they are, and only slices whose category has "
            "'kernel' or 'gpu' count as a device's"
        )
    if dropped:
        found.append(f"{counted(sum(counts.dropped.values()), 'event')} dropped: {dropped}")
    if counts.zero_durations:
        cycles = f" ({counts.zero_durations_with_cycles:,} with cycles)" if counts.zero_durations_with_cycles else ""
        found.append(f"slices without a length, which are kept: {counts.zero_durations:,}{cycles}")
    if counts.unknown_phases:
        found.append(f"events of unknown phases, which are kept: {counts.unknown_phases:,}")
    if counts.bad_values:
        found.append(f"members that should be numbers or texts and are not: {counts.bad_values:,}")
    if counts.bad_bytes:
        found.append(f"bytes that are not UTF-8, each of which became '?': {counts.bad_bytes:,}")
    if counts.cut_texts or counts.cut_args:
        found.append(f"too long: {counts.cut_texts:,} names were cut, args of {counts.cut_args:,} events left out")
    if file.members_left_out:
        found.append(f"members beside the events that are too long or too many, left out: {file.members_left_out:,}")
    if not counts.events:
        found.append("it has no events")
    return found


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
