"""`iaprof info`: what a capture holds, and how it was recorded."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iaprof.basics.quantities import and_more, counted, in_bytes, in_ranges, in_time_units, in_utc, or_dash
from iaprof.cli.options.captures import DEFAULT, Capture, existing
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.table import HEADING, WARM, Column, Table, coloured, terminal_width
from iaprof.report.inventory_texts import (
    MOST_ROWS,
    Fact,
    holds,
    lost,
    own_cost,
    quality,
    recording,
    stack_quality,
    warnings,
)

if TYPE_CHECKING:
    from iaprof.report.inventory import Inventory, Part

EXAMPLES = """\b
Examples:
  iaprof info cap.parquet                         what it has, what is missing
  iaprof info cap.parquet --json | jq .losses
  iaprof info all.parquet --json | jq '.parts[].host'
"""
_MARGIN = "  "
_NAME_WIDTH = 14
_NARROWEST, _WIDEST = 60, 100
_MOST_LINES = 6  # per fact
_MOST_RANKS = 8  # per trace


def info(
    capture: Capture = DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a capture contains.

    Shows where, when and how it was recorded, how many rows of each kind it has, what is missing, and what
    recording cost. Reads no samples, so it is fast for captures of any size.
    """
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.inventory import inventory

    found = inventory(CaptureReader(existing(capture)))
    with utf8_stdout():
        if as_json:
            print(json.dumps(_as_dict(found), indent=2))
        else:
            print("\n".join(text(found, terminal_width(), coloured())))


def _as_dict(found: Inventory) -> dict[str, Any]:
    parts = [asdict(part) | {"stack_ends": _stack_ends(part)} for part in found.parts]
    return asdict(found) | {"parts": parts}


def _stack_ends(part: Part) -> dict[str, Any] | None:
    return None if part.stack_ends is None else {kind: ends.to_json() for kind, ends in part.stack_ends.items()}


def text(found: Inventory, width: int | None, colours: bool) -> list[str]:
    """The lines of the inventory.

    Args:
        found: the capture's inventory.
        width: of the terminal, cells; None for no limit.
        colours: whether to use styles.
    """
    page = _Page(width, colours)
    made = f", merged from {counted(len(found.parts), 'recording')}" if found.merged else ""
    page.lines.append(f"{found.file}: {in_bytes(found.bytes)}, format {found.format}{made}")
    first = found.parts[0]
    if found.merged:
        page.table("Parts", _parts(found.parts))
        page.table("Traces", _traces(found.parts))
    else:
        page.facts("Recording", recording(first))
        page.table("GPUs", _gpus(first))
        page.table("Traces", _traces([first]))
    page.texts("Warnings", warnings(found.parts), WARM)
    page.facts("Contents", holds(found.counts))
    missing = list(lost(found.losses, (part.stack_ends for part in found.parts)))
    page.texts("Lost", iter(missing), WARM if missing != ["nothing"] else "")
    if found.merged:
        page.facts("Quality", stack_quality(found.parts))
    else:
        page.facts("Quality", quality(first))
        page.facts("Own cost", own_cost(first.cost))
        page.facts("Libraries", _libraries(first))
    return page.lines


class _Page:
    """Groups of lines with headings; empty groups are omitted."""

    def __init__(self, width: int | None, colours: bool) -> None:
        self.lines: list[str] = []
        self._table_width = width and max(width, _NARROWEST) - len(_MARGIN)
        self._width = min(max(width or 80, _NARROWEST), _WIDEST) - len(_MARGIN)
        self._colours = colours

    def facts(self, heading: str, facts: Iterator[Fact]) -> None:
        """Adds a group of facts: a name and a text each."""
        lines = []
        for name, fact in facts:
            first, *more = _wrapped(fact, self._width - _NAME_WIDTH - 1)
            lines += [f"{name:{_NAME_WIDTH}} {first}", *(f"{'':{_NAME_WIDTH}} {line}" for line in more)]
        self._group(heading, lines)

    def texts(self, heading: str, texts: Iterator[str], style: str) -> None:
        """Adds a group of wrapped texts in one style."""
        self._group(heading, [self._styled(line, style) for each in texts for line in _wrapped(each, self._width)])

    def table(self, heading: str, table: Table | None) -> None:
        """Adds a table as a group."""
        self._group(heading, table.lines(self._table_width, self._colours) if table is not None else [])

    def _group(self, heading: str, lines: list[str]) -> None:
        if lines:
            self.lines += ["", self._styled(heading, HEADING), *(_MARGIN + line for line in lines)]

    def _styled(self, line: str, style: str) -> str:
        return f"\x1b[{style}m{line}\x1b[0m" if self._colours and style else line


def _gpus(part: Part) -> Table | None:
    if not part.streams:
        return None
    of_nvidia = all(stream.multiprocessors is not None for stream in part.streams)
    table = Table(
        Column("CARD"),
        Column("PCI ADDRESS"),
        Column("TILE/GT"),
        Column("COMPUTE" if of_nvidia else "IP"),
        Column("SMS" if of_nvidia else "XECORES", right=True),
        Column("CYCLES", right=True),
        Column("NAME", flexible=True),
    )
    for stream in part.streams[:MOST_ROWS]:
        table.add(
            stream.card or stream.device.rpartition("/")[2] or "-",
            stream.pci_address or "-",
            f"{or_dash(stream.tile)}/{or_dash(stream.gt)}",
            stream.ip_version or "-",
            or_dash(stream.multiprocessors if stream.xecores is None else stream.xecores),
            or_dash(stream.rate_cycles),
            stream.name or stream.generation or "-",
        )
    _add_more(table, len(part.streams), 7)
    return table


def _traces(parts: Sequence[Part]) -> Table | None:
    traces = [(of, number, file) for of, part in enumerate(parts) for number, file in enumerate(part.traces)]
    if not traces:
        return None
    of_parts = len(parts) > 1
    table = Table(
        *([Column("PART", right=True)] if of_parts else []),
        Column("#", right=True),
        Column("DIALECT"),
        Column("RANKS", right=True),
        Column("EVENTS", right=True),
        Column("DROPPED", right=True),
        Column("FILE", flexible=True),
    )
    for of, number, file in traces[:MOST_ROWS]:
        counts = (f"{file.events:,}", f"{file.dropped:,}" if file.dropped else "-")
        ranks = in_ranges(file.ranks[:_MOST_RANKS]) + and_more(len(file.ranks) - _MOST_RANKS)
        table.add(*([str(of)] if of_parts else []), str(number), file.dialect, ranks or "-", *counts, file.name)
    _add_more(table, len(traces), 6 + of_parts)
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
    for number, part in enumerate(parts[:MOST_ROWS]):
        table.add(
            str(number),
            in_utc(part.begun)[:19] if part.begun else "-",
            "-" if part.duration_s is None else in_time_units(part.duration_s),
            or_dash(part.counts["stalls"]),
            or_dash(part.counts["launches"]),
            str(len(part.losses) or "-"),
            part.label,
        )
    _add_more(table, len(parts), 7)
    return table


def _add_more(table: Table, rows: int, columns: int) -> None:
    if rows > MOST_ROWS:
        table.add(*[""] * (columns - 1), f"and {rows - MOST_ROWS:,} more (--json has all)")


def _libraries(part: Part) -> Iterator[Fact]:
    for library in part.libraries[:MOST_ROWS]:
        probes = "unknown" if library.probes is None else counted(library.probes, "probe")
        yield probes, library.path or "-"
    if len(part.libraries) > MOST_ROWS:
        yield "", and_more(len(part.libraries) - MOST_ROWS).strip(", ")


def _wrapped(text: str, width: int) -> list[str]:
    most = width * (_MOST_LINES + 1)  # bounds the time for wrapping long texts
    lines = textwrap.wrap(
        text[:most], width, max_lines=_MOST_LINES, placeholder=" ...", break_on_hyphens=False, drop_whitespace=True
    )
    return lines or [""]
