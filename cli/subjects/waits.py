"""`iaprof top --by wait`: a table of who waited longest for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iaprof.basics.clean import clean
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.subjects.unmatched import check_has_rows, filters_of, names_of_samples, nothing_matches
from iaprof.cli.terminal.answers import Answers
from iaprof.cli.terminal.entry_names import BETWEEN_FRAMES, short_python
from iaprof.cli.terminal.facts import say_waits
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.table import STRONG, WEAK, Column, Table, terminal_width
from iaprof.formats.profile import UNKNOWN_PROCESS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from iaprof.report.join.selection import Selection
    from iaprof.report.views.waits import Entry, Waits

BY = "wait"
_SCALES = ((1e9, "s"), (1e6, "ms"), (1e3, "us"))


def table(
    verb: str,
    capture: Path,
    choice: SelectionOptions,
    limit: int,
    interval_s: float,
    answers: Answers,
    quiet: bool,
) -> None:
    """Prints the table, or, unless `interval_s` is 0, one for each interval with waits; then the summary.

    Raises:
        CaptureError: the file is not a capture, or is damaged.
        IaprofError: the capture has no waits, or none is selected.
        UsageError: the capture lacks something that the options name, such as a GPU.
    """
    from iaprof.basics.heap import return_large_blocks_when_freed
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.profile import ReportOptions
    from iaprof.report.views.waits import waits_of

    choice.refuse_filters_of_stalls(f"--by {BY}")
    return_large_blocks_when_freed()
    reader = CaptureReader(capture)
    check_has_rows(reader, "wait")

    def selected(selection: Selection) -> Waits:
        options = ReportOptions(selection, interval_s, choice.frame_options())
        return waits_of(reader, options, choice.symbol_options())

    waits = selected(choice.selection)
    if not len(waits.count) and filters_of(choice.selection):
        raise nothing_matches(
            "wait", choice.selection, reader, lambda only: names_of_samples(selected(only).as_samples(), reader, "wait")
        )
    with utf8_stdout():
        _show(waits, limit, interval_s, answers)
    if not quiet:
        say_waits(verb, reader)


def _show(waits: Waits, limit: int, interval_s: float, answers: Answers) -> None:
    from iaprof.report.views.waits import entries

    if not interval_s:
        found = entries(waits, limit)
        if answers.is_text:
            _table(*found).print()
        else:
            answers.write(_as_dict(*found))
        return
    tables = [(start, entries(waits, limit, rows)) for start, rows in _intervals(waits, interval_s)]
    if not answers.is_text:
        several = [{"start_s": start, **_as_dict(*found)} for start, found in tables]
        answers.write({"by": BY, "intervals": several})
        return
    for number, (start, found) in enumerate(tables):
        print(f"{chr(10) if number else ''}from {start:.3f} s")
        _table(*found).print()


def _intervals(waits: Waits, interval_s: float) -> Iterator[tuple[float, NDArray[np.bool_]]]:
    import numpy as np

    for number in np.unique(waits.interval).tolist():
        yield number * interval_s, waits.interval == number


def _table(found: list[Entry], more: int, total: Entry) -> Table:
    short = terminal_width() is not None
    any_left = bool(total.not_ended)
    heads = ["WAITED", "SHARE", "WAITS", "LONGEST", "OBJECTS", *(["NOT ENDED"] if any_left else [])]
    table = Table(*(Column(head, right=True) for head in heads), Column(BY.upper(), flexible=True))

    def add(entry: Entry, objects: str, title: str, style: str) -> None:
        cells = [duration(entry.waited_ns), _percent(entry.waited_ns, total.waited_ns), f"{entry.waits:,}"]
        cells += [duration(entry.longest_ns), objects, *([f"{entry.not_ended:,}"] if any_left else [])]
        table.add(*cells, title, style=style)

    for entry in found:
        add(entry, f"{entry.objects:,}", _title(entry, short), "")
    if more:
        table.add(*[""] * len(heads), f"({more:,} more)", style=WEAK)
    add(total, "", "(total)", STRONG)
    return table


def _title(entry: Entry, short: bool) -> str:
    """An entry's title: function, object if there is only one, caller and process."""
    function = f"{entry.function} 0x{entry.handle:x}" if entry.handle else entry.function
    process = " ".join(
        [entry.process or UNKNOWN_PROCESS, str(entry.pid), *([f"on {entry.host}"] if entry.host else [])]
    )
    caller = short_python(entry.launcher) if short else entry.launcher
    return clean(BETWEEN_FRAMES.join((function, caller, process)))


def duration(ns: int) -> str:
    """A duration in a suitable unit."""
    for size, unit in _SCALES:
        if ns >= size:
            return f"{ns / size:,.1f} {unit}"
    return f"{ns:,} ns"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"


def _as_dict(found: list[Entry], more: int, total: Entry) -> dict[str, Any]:
    def cleaned(entry: Entry) -> dict[str, Any]:
        values = {name: clean(value) if isinstance(value, str) else value for name, value in asdict(entry).items()}
        return values | {"handle": f"0x{entry.handle:x}" if entry.handle else None}

    sums = {name: getattr(total, name) for name in ("waited_ns", "waits", "longest_ns", "not_ended")}
    return {"by": BY, "entries": [cleaned(entry) for entry in found], "more": more, "total": sums}
