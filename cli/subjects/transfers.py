"""`iaprof top --by transfer`: a table of copies and fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iaprof.basics.errors import UsageError
from iaprof.basics.quantities import in_bytes
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.options.shown import Intervals
from iaprof.cli.subjects.unmatched import check_has_rows, filters_of, names_of_transfers, nothing_matches
from iaprof.cli.terminal.answers import Answers
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.summary import say
from iaprof.cli.terminal.table import STRONG, WEAK, Column, Table
from iaprof.formats.header.launch_warnings import unrecorded

if TYPE_CHECKING:
    from iaprof.cli.subjects.unmatched import Names
    from iaprof.report.join.selection import Selection
    from iaprof.report.views.transfers import Transfers

BY = "transfer"


def table(
    capture: Path, choice: SelectionOptions, limit: int, intervals: Intervals, answers: Answers, quiet: bool
) -> None:
    """Prints the table of a capture's copies and fills, and which of them are not recorded.

    Args:
        capture: the file.
        choice: the selection of transfers.
        limit: maximum number of rows; 0: all.
        intervals: those that have tables of their own, of which there can be none.
        answers: where the table goes.
        quiet: do not say what is not recorded.

    Raises:
        CaptureError: the file is not a capture, or is damaged.
        IaprofError: the capture has no copies and fills, or none is selected.
        UsageError: the options name properties that transfers do not have.
    """
    from iaprof.basics.heap import return_large_blocks_when_freed
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.views.transfers import transfers

    if intervals.per_interval:
        raise UsageError(f"--by {BY} has no table for each interval: choose times with --time")
    return_large_blocks_when_freed()
    reader = CaptureReader(capture)
    check_has_rows(reader, "transfer")
    found = transfers(reader, choice.selection)

    def names_of(only: Selection) -> Names:
        return names_of_transfers([each.function for each in transfers(reader, only)], reader)

    if not found and filters_of(choice.selection):
        raise nothing_matches("transfer", choice.selection, reader, names_of)
    with utf8_stdout():
        _show(found, limit, answers)
    if not quiet:
        for text in unrecorded(reader):  # over all parts
            say(f"iaprof: {text}")


def _show(found: Sequence[Transfers], limit: int, answers: Answers) -> None:
    from iaprof.report.views.transfers import sum_transfers

    shown, more = (found[:limit], found[limit:]) if limit else (found, [])
    rest, total = sum_transfers(more, f"({len(more):,} more)"), sum_transfers(found, "(total)")
    if not answers.is_text:
        entries = [asdict(each) for each in shown]
        answers.write({"by": BY, "entries": entries, "more": _sums(rest), "total": _sums(total)})
        return
    table = Table(
        *(Column(heading, right=True) for heading in ("BYTES", "CALLS", "KERNELS")), Column("FUNCTION", flexible=True)
    )
    for each in shown:
        table.add(*_cells(each))
    if more:
        table.add(*_cells(rest), style=WEAK)
    table.add(*_cells(total), style=STRONG)
    table.print()


def _cells(each: Transfers) -> tuple[str, ...]:
    size = in_bytes(each.bytes) if each.unknown < each.calls or not each.calls else "unknown"
    return size, f"{each.calls:,}", f"{each.kernels:,}", each.function


def _sums(each: Transfers) -> dict[str, Any]:
    return {name: value for name, value in asdict(each).items() if name != "function"}
