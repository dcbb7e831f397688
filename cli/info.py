"""`iaprof info`: what a capture holds, and how it came to be."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iaprof.cli.stdout import answering
from iaprof.cli.summary import in_bytes
from iaprof.cli.table import HEADING, WARM, Column, Table, coloured, terminal_width

if TYPE_CHECKING:
    from iaprof.report.inventory import Cost, Inventory, Loss, Part

EXAMPLES = """\b
Examples:
  iaprof info cap.parquet                         what it has, what is missing
  iaprof info cap.parquet --json | jq .losses
  iaprof info all.parquet --json | jq '.parts[].host'
"""
_MARGIN = "  "
_NAME_WIDTH = 14
_NARROWEST, _WIDEST = 60, 100
_MOST_LINES = 6  # of one fact
_MOST_ROWS = 50  # of one table
_COUNTS = {
    "stalls": "stall records",
    "imported_samples": "imported rows",
    "launches": "launches",
    "stacks": "stacks",
    "modules": "GPU modules",
    "mappings": "mappings",
    "process_events": "process events",
    "cpu_samples": "CPU samples",
    "metrics": "metrics",
    "symbols": "symbols",
}
_MATCHED = {
    "kernel": "to a kernel",
    "instruction": "to an instruction",
    "stack": "to one stack",
    "ambiguous": "ambiguous",
}
_Fact = tuple[str, str]


def info(
    capture: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A file that 'iaprof record' wrote.")] = Path(
        "iaprof.parquet"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a capture holds.

    Where, when and how it was recorded, how much there is of everything, what is missing, and what recording cost.
    Reads no samples: it is as quick for any size.
    """
    from iaprof.formats.capture import CaptureReader
    from iaprof.report.inventory import inventory

    found = inventory(CaptureReader(capture))
    with answering():
        if as_json:
            print(json.dumps(asdict(found), indent=2))
        else:
            print("\n".join(text(found, terminal_width(), coloured())))


def text(found: Inventory, width: int | None, colours: bool) -> list[str]:
    """The lines that tell it all.

    Args:
        found: the capture.
        width: cells of a terminal; None where tables can be as wide as they are.
        colours: whether to use them.
    """
    page = _Page(width, colours)
    made = f", merged from {_count(len(found.parts), 'recording')}" if found.merged else ""
    page.lines.append(f"{found.file}: {in_bytes(found.bytes)}, format {found.format}{made}")
    first = found.parts[0]
    if found.merged:
        page.table("Parts", _parts(found.parts))
    else:
        page.facts("Recording", _recording(first))
        page.table("GPUs", _gpus(first))
    page.facts("Holds", _counts(found.counts))
    page.texts("Lost", _losses(found.losses), WARM if found.losses else "")
    if not found.merged:
        page.facts("Quality", _quality(first))
        page.facts("Own cost", _cost(first.cost))
        page.facts("Libraries", _libraries(first))
    return page.lines


class _Page:
    """Groups of lines, each below a heading; a group of nothing has none."""

    def __init__(self, width: int | None, colours: bool) -> None:
        self.lines: list[str] = []
        self._table_width = width and max(width, _NARROWEST) - len(_MARGIN)
        self._width = min(max(width or 80, _NARROWEST), _WIDEST) - len(_MARGIN)
        self._colours = colours

    def facts(self, heading: str, facts: Iterator[_Fact]) -> None:
        """Names, and what is to be said of each."""
        lines = []
        for name, fact in facts:
            first, *more = _wrapped(fact, self._width - _NAME_WIDTH - 1)
            lines += [f"{name:{_NAME_WIDTH}} {first}", *(f"{'':{_NAME_WIDTH}} {line}" for line in more)]
        self._group(heading, lines)

    def texts(self, heading: str, texts: Iterator[str], style: str) -> None:
        """Whole lines, in one style."""
        self._group(heading, [self._styled(line, style) for each in texts for line in _wrapped(each, self._width)])

    def table(self, heading: str, table: Table | None) -> None:
        """A table that lines up."""
        self._group(heading, table.lines(self._table_width, self._colours) if table is not None else [])

    def _group(self, heading: str, lines: list[str]) -> None:
        if lines:
            self.lines += ["", self._styled(heading, HEADING), *(_MARGIN + line for line in lines)]

    def _styled(self, line: str, style: str) -> str:
        return f"\x1b[{style}m{line}\x1b[0m" if self._colours and style else line


def _recording(part: Part) -> Iterator[_Fact]:
    if part.host or part.kernel:
        about = [part.kernel and f"Linux {part.kernel}", part.machine, part.cpus and _count(part.cpus, "CPU")]
        said = ", ".join(str(each) for each in about if each)
        yield "host", f"{part.host} ({said})" if said else part.host
    if part.command:
        yield "command", shlex.join(part.command)
    if part.arguments:
        yield "recorded by", shlex.join(part.arguments)
    if part.iaprof:
        yield "version", f"iaprof {part.iaprof}" + (f", Python {part.python}" if part.python else "")
    if part.begun:
        yield "begun", _moment(part.begun)
    if part.duration_s is not None:
        yield "duration", _seconds(part.duration_s)
    if part.paused:
        yield "paused", f"{_count(part.paused, 'time')}, {_seconds(part.paused_s)}"
    if part.scope is not None:
        yield "processes", ", ".join(map(str, part.scope[:_MOST_ROWS])) + _more(len(part.scope) - _MOST_ROWS)
    if kept := sorted({stream.subsample for stream in part.streams} - {1}):
        yield "kept", ", ".join(f"one record of {number:,}" for number in kept)
    if part.part:
        yield "file", f"number {part.part:,} of the recording; the first one is 0"
    if part.imported is not None:
        yield "imported", "from " + (part.imported or "another profiler's text")
    if part.redacted:
        yield "redacted", "names are hashes"
    if part.recovered:
        yield "recovered", "from the spool of a recording that did not end"


def _gpus(part: Part) -> Table | None:
    if not part.streams:
        return None
    table = Table(
        Column("CARD"),
        Column("PCI ADDRESS"),
        Column("TILE/GT"),
        Column("IP"),
        Column("XECORES", right=True),
        Column("CYCLES", right=True),
        Column("NAME", flexible=True),
    )
    for stream in part.streams[:_MOST_ROWS]:
        table.add(
            stream.card or stream.device.rpartition("/")[2] or "-",
            stream.pci_address or "-",
            f"{_or_dash(stream.tile)}/{_or_dash(stream.gt)}",
            stream.ip_version or "-",
            _or_dash(stream.xecores),
            _or_dash(stream.rate_cycles),
            stream.name or stream.generation or "-",
        )
    _add_more(table, len(part.streams), 7)
    return table


def _parts(parts: list[Part]) -> Table:
    table = Table(
        Column("#", right=True),
        Column("BEGUN (UTC)"),
        Column("DURATION", right=True),
        Column("RECORDS", right=True),
        Column("LAUNCHES", right=True),
        Column("LOST", right=True),
        Column("FROM", flexible=True),
    )
    for number, part in enumerate(parts[:_MOST_ROWS]):
        table.add(
            str(number),
            _moment(part.begun)[:19] if part.begun else "-",
            "-" if part.duration_s is None else _seconds(part.duration_s),
            _or_dash(part.counts["stalls"]),
            _or_dash(part.counts["launches"]),
            str(len(part.losses) or "-"),
            part.label,
        )
    _add_more(table, len(parts), 7)
    return table


def _add_more(table: Table, rows: int, columns: int) -> None:
    if rows > _MOST_ROWS:
        table.add(*[""] * (columns - 1), f"and {rows - _MOST_ROWS:,} more (--json has all)")


def _counts(counts: dict[str, int | None]) -> Iterator[_Fact]:
    remarks = {
        "stalls": _remark("in ", counts["stall_reads"], "read"),
        "launches": _remark("and ", counts["carried_launches"], "launch", "launches", " from before this file"),
        "symbols": _remark("in ", counts["named_modules"], "file"),
    }
    found = {name: "unknown" if (count := counts[name]) is None else f"{count:,}" for name in _COUNTS}
    shown = [name for name in _COUNTS if counts[name] != 0 or remarks.get(name)] or ["stalls"]
    width = max(len(found[name]) for name in shown)
    for name in shown:
        yield _COUNTS[name], f"{found[name]:>{width}}  {remarks.get(name, '')}".rstrip()


def _remark(before: str, number: int | None, what: str, many: str = "", behind: str = "") -> str:
    return f"{before}{_count(number, what, many)}{behind}" if number else ""


def _losses(losses: list[Loss]) -> Iterator[str]:
    for loss in losses[:_MOST_ROWS]:
        how_many = "an unknown number" if loss.count is None else f"{loss.count:,}"
        times = "" if loss.events is None else f", {_count(loss.events, 'time')}"
        what = f"{loss.source} {loss.what}".strip() or "something that the header does not describe"
        yield f"{what}: {how_many}{times}"
    if len(losses) > _MOST_ROWS:
        yield f"and {len(losses) - _MOST_ROWS:,} more"
    if not losses:
        yield "nothing"


def _quality(part: Part) -> Iterator[_Fact]:
    matched = part.matched or {}
    if shares := [f"{100 * matched[what]:.1f} % {text}" for what, text in _MATCHED.items() if what in matched]:
        yield "matched", ", ".join(shares)
    if (symbols := part.symbols) is not None:
        named = f"{_or_dash(symbols.named)} of {_or_dash(symbols.addresses)} CPU addresses"
        yield "named", f"{named} in {_or_dash(symbols.modules)} files"


def _cost(cost: Cost) -> Iterator[_Fact]:
    if cost.cpu_s is not None:
        parts = [f"{_seconds(cost.cpu_s)} recording"]
        if cost.cpu_percent is not None:
            parts[0] += f" ({cost.cpu_percent:.1f} % of one CPU)"
        if cost.compile_cpu_s is not None:
            parts.append(f"{_seconds(cost.compile_cpu_s)} of it compiling BPF")
        if cost.finish_cpu_s is not None:
            parts.append(f"{_seconds(cost.finish_cpu_s)} writing the capture")
        yield "CPU", ", ".join(parts)
    if cost.probe_ns_per_launch is not None:
        yield "probes", f"{cost.probe_ns_per_launch / 1000:,.1f} µs a launch"
    if cost.peak_bytes is not None:
        more = "" if cost.finish_peak_bytes is None else f", {in_bytes(cost.finish_peak_bytes)} writing the capture"
        yield "memory", f"{in_bytes(cost.peak_bytes)} recording{more}"
    if cost.spool_bytes is not None:
        yield "spool", in_bytes(cost.spool_bytes)


def _libraries(part: Part) -> Iterator[_Fact]:
    for library in part.libraries[:_MOST_ROWS]:
        probes = "unknown" if library.probes is None else _count(library.probes, "probe")
        yield probes, library.path or "-"
    if len(part.libraries) > _MOST_ROWS:
        yield "", _more(len(part.libraries) - _MOST_ROWS).strip(", ")


def _wrapped(text: str, width: int) -> list[str]:
    most = width * (_MOST_LINES + 1)  # long ones take long to wrap
    lines = textwrap.wrap(
        text[:most], width, max_lines=_MOST_LINES, placeholder=" ...", break_on_hyphens=False, drop_whitespace=True
    )
    return lines or [""]


def _moment(iso: str) -> str:
    """Of `2026-11-21T10:33:33.747495Z`."""
    return f"{iso[:10]} {iso[11:19]} UTC"


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def _count(number: int, what: str, many: str = "") -> str:
    return f"{number:,} {what if number == 1 else many or what + 's'}"


def _or_dash(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _more(number: int) -> str:
    return f", and {number:,} more" if number > 0 else ""
