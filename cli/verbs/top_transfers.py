"""`iaprof top --by transfer`: a table of copies and fills."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iaprof.basics.quantities import in_bytes
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.terminal.answers import Answers
from iaprof.cli.terminal.summary import say
from iaprof.cli.terminal.table import STRONG, WEAK, Column, Table
from iaprof.cli.unmatched import check_has_rows, filters_of, names_of_transfers, nothing_matches
from iaprof.formats.header.launch_warnings import unrecorded

if TYPE_CHECKING:
    from iaprof.cli.unmatched import Names
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.join.selection import Selection
    from iaprof.report.views.transfers import Transfers


def show_transfers(capture: Path, choice: SelectionOptions, limit: int, answers: Answers) -> CaptureReader:
    """Prints the table of a capture's copies and fills; returns the capture's reader.

    Args:
        capture: the file.
        choice: the selection of transfers.
        limit: maximum number of rows; 0: all.
        answers: where the table goes.

    Raises:
        CaptureError: the file is not a capture, or is damaged.
        IaprofError: the capture has no copies and fills, or none is selected.
        UsageError: the selection uses properties that transfers do not have.
    """
    from iaprof.basics.heap import return_large_blocks_when_freed
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.views.transfers import sum_transfers, transfers

    return_large_blocks_when_freed()
    reader = CaptureReader(capture)
    check_has_rows(reader, "transfer")
    found = transfers(reader, choice.selection)

    def names_of(only: Selection) -> Names:
        return names_of_transfers([each.function for each in transfers(reader, only)], reader)

    if not found and filters_of(choice.selection):
        raise nothing_matches("transfer", choice.selection, reader, names_of)
    shown, more = (found[:limit], found[limit:]) if limit else (found, [])
    rest, total = sum_transfers(more, f"({len(more):,} more)"), sum_transfers(found, "(total)")
    if not answers.is_text:
        entries = [asdict(each) for each in shown]
        answers.write({"by": "transfer", "entries": entries, "more": _sums(rest), "total": _sums(total)})
        return reader
    table = Table(
        *(Column(heading, right=True) for heading in ("BYTES", "CALLS", "KERNELS")), Column("FUNCTION", flexible=True)
    )
    for each in shown:
        table.add(*_cells(each))
    if more:
        table.add(*_cells(rest), style=WEAK)
    table.add(*_cells(total), style=STRONG)
    table.print()
    return reader


def say_unrecorded(reader: CaptureReader) -> None:
    """Prints which drivers' copies and fills, or own kernels, are not recorded, over all parts."""
    for text in unrecorded(reader):
        say(f"iaprof: {text}")


def _cells(each: Transfers) -> tuple[str, ...]:
    size = in_bytes(each.bytes) if each.unknown < each.calls or not each.calls else "unknown"
    return size, f"{each.calls:,}", f"{each.kernels:,}", each.function


def _sums(each: Transfers) -> dict[str, Any]:
    return {name: value for name, value in asdict(each).items() if name != "function"}
