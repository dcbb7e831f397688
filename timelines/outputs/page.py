"""The page of a time line: `iaprof report --format=html`, and `iaprof timeline --html`.

Its data is of bounded size however long the trace is. Names are cleaned here, and the page sets them as text only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from iaprof.basics.clean import clean
from iaprof.formats.page.data import packed, planes, short_texts
from iaprof.formats.page.html import TIME_LINES, write_page
from iaprof.formats.page.panels import about_data
from iaprof.formats.profile import StackOptions
from iaprof.timelines.grouped import Groups
from iaprof.timelines.outputs.formats import TimeLine
from iaprof.timelines.stages.energy import TABLE
from iaprof.timelines.trace import Level, Trace
from iaprof.timelines.views.busy import CLASSES, Busy, busy
from iaprof.timelines.views.counter_curves import curves
from iaprof.timelines.views.energy import over_time
from iaprof.timelines.views.picture import SEVERAL, Picture, picture

_MOST_TABLE_ROWS = 500
_ENERGY = "Energy"  # the table whose rows follow the selected time
_FIRST = {name: at for at, name in enumerate(("pid", "Pid", "Name", "CollGroup", "Category", "Wait"))}
_MOST_MESSAGES = 50
_MOST_POINTS = 600  # of a rank's iterations
_MOST_RANKS = 64  # with a chart of iterations
_LONGEST = 500  # characters of a text
_OF_TIMES = dict.fromkeys(("Mean", "Median", "Min", "Max", "StDev"), "us")
_UNITS: Mapping[str, Mapping[str, str]] = {
    "Ranks": {
        "Elapsed Time": "us", "Total Kernel Time": "us", "Active percentage": "%", "Communication": "us",
        "Overlap Percent": "%",
    },
    "Iterations": {**_OF_TIMES, "Slower By": "us", "Idle Excess": "us", "Kernel Excess": "us"},
    "Kernels": {**_OF_TIMES, "Time": "%", "Total Time": "us"},
    "Kernels by cycles": {"Execute Percent": "%", "Mean Watts": "W"},
    "Energy": {"Energy": "uJ", "Mean Energy": "uJ", "Energy Percent": "%"},
    "Categories": {"Kernel_Time": "us", "Ideal_Time": "us"},
    "Who waits for whom": {"Waits": "us", "Longest Wait": "us", "Longest Waits for It": "us"},
    "Collectives": {"First Arrival": "us", "Last Arrival": "us", "Wait": "us"},
}  # fmt: skip
"""The units of columns, by the title of a table."""
_OF_ITERATIONS = (
    "pid",
    "Iterations",
    "Mean",
    "StDev",
    "Min",
    "Max",
    "Slowest",
    "Kernel",
    "Idle Excess",
    "Kernel Excess",
)


def write_html(shown: TimeLine, _: StackOptions, out: IO[str]) -> None:
    """Writes the page."""
    title = _title(shown.trace)
    heat, boxes = busy(shown.trace), picture(shown.trace)
    tables = [table for table in _tables(shown.trace) if table is not None]
    energy = next((table for table in tables if table["title"] == _ENERGY), None)
    head, arrays = _arrays(shown.trace, heat, boxes, energy)
    panels = {
        "title": title,
        "about": about_data(shown.about(shown.capture)),
        "warnings": _messages(shown.trace, Level.WARNING),
        "notes": [*_messages(shown.trace, Level.NOTE), *_counts(shown.trace)],
        "seconds": heat.length / 1e9,
        "tables": tables,
        "iterations": _iterations(shown.trace),
        "counters": _counters(shown.trace),
    }
    write_page(TIME_LINES, title, packed({"panels": panels, "trees": head}, arrays), out)


def _title(trace: Trace) -> str:
    names = [clean(file.name)[:_LONGEST] for file in trace.files if file.name]
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}" or "Time line"


def _messages(trace: Trace, level: Level) -> list[str]:
    found = [f"{each.stage}: {clean(each.text)[:_LONGEST]}" for each in trace.messages.said if each.level is level]
    more = [f"{len(found) - _MOST_MESSAGES:,} more: iaprof timeline prints them"] if len(found) > _MOST_MESSAGES else []
    return found[:_MOST_MESSAGES] + more


def _counts(trace: Trace) -> list[str]:
    found = []
    for what, counts in (("dropped", trace.dropped), ("merged", trace.merged), ("made", trace.made)):
        if some := +counts:
            found.append(f"events {what}: {', '.join(f'{count:,} {clean(reason)}' for reason, count in some.items())}")
    return found


def _arrays(
    trace: Trace, heat: Busy, boxes: Picture, energy: dict[str, Any] | None
) -> tuple[dict[str, Any], list[bytes]]:
    """Returns the description of the page's arrays, and their bytes."""
    names, name = np.unique(boxes.name, return_inverse=True)
    texts = [trace.texts[code] if code >= 0 else "" for code in names.tolist()]
    described: dict[str, Any] = {
        "busy": {
            "classes": CLASSES, "ranks": heat.ranks, "more": heat.more, "bins": heat.percent.shape[2],
            "mean": np.round(heat.mean, 2).tolist(), "ns": heat.length,
        },
        "tracks": {
            "rows": [[row.rank, row.is_device, row.pid, row.tid, row.depth] for row in boxes.rows],
            "more": boxes.more, "hidden": boxes.hidden, "binNs": boxes.bin_ns, "ns": heat.length,
            "names": short_texts(texts), "several": int(np.searchsorted(names, SEVERAL)),
        },
    }  # fmt: skip
    columns = {
        "busy": {"percent": heat.percent.ravel()},
        "tracks": {
            "row": boxes.row, "start": boxes.start, "length": boxes.length, "busy": boxes.busy,
            "name": name, "slices": boxes.slices, "kind": boxes.kind + 1,
        },
    }  # fmt: skip
    if energy is not None:
        shown = trace.tables[TABLE].sort_by([("Energy", "descending")]).slice(0, len(energy["rows"]))
        spans = over_time(trace, list(zip(shown["pid"].to_pylist(), shown["Name"].to_pylist(), strict=True)))
        described["energy"] = {"bins": spans.bins, "ranks": spans.ranks}
        columns["energy"] = {
            "nanojoules": spans.nanojoules.ravel(), "calls": spans.calls.ravel(), "totals": spans.totals.ravel(),
        }  # fmt: skip
    arrays = []
    for section, values in columns.items():
        described[section]["arrays"] = []
        for key, column in values.items():
            width, count, data = planes(column.astype(np.int64))
            described[section]["arrays"].append((key, width, count))
            arrays.append(data)
    return described, arrays


def _tables(trace: Trace) -> list[dict[str, Any] | None]:
    return [
        _table(
            "Ranks", _ranks(trace), "pid",
            "Times in us. The overlap is the share of the communication time during which the rank also computed.",
        ),
        _table(
            "Iterations", _with_iterations(trace.tables.get("iterations")), "pid",
            "Times in us. The excess is how much longer idle time and a kernel were in the slowest iteration.",
        ),
        _table(
            "Kernels", trace.tables.get("summary"), "Total Time",
            "Times in us. Time is the share of the rank's kernels.",
        ),
        _table("Kernels by cycles", trace.tables.get("kernels"), "Cycles", "Cycles of the device, by purpose."),
        _table(
            _ENERGY, trace.tables.get(TABLE), "Energy",
            "Energy in uJ of kernels, copies and the idle device, where power is known.",
        ),
        _table(
            "Categories", trace.tables.get("categories"), "",
            "Times in us. PT_Util is ideal time divided by kernel time.",
        ),
        _table("Who waits for whom", trace.tables.get("imbalance_ranks"), "pid", "Times in us, in collectives."),
        _table(
            "Collectives", trace.tables.get("imbalance"), "Wait",
            "Times in us. The wait is from the first to the last arrival.",
        ),
    ]  # fmt: skip


def _with_iterations(table: pa.Table | None) -> pa.Table | None:
    return None if table is None else table.filter(pc.greater(table["Iterations"], 0))


def _ranks(trace: Trace) -> pa.Table | None:
    """The tables of ranks, beside each other."""
    active = trace.tables.get("active")
    if active is None:
        return None
    names = ("pid", "Elapsed Time", "Total Kernel Time", "Active percentage")
    found = active.select(names)
    overlap = trace.tables.get("overlap")
    if overlap is not None:
        found = found.join(overlap.select(("pid", "Communication", "Overlap Percent")), "pid").sort_by("pid")
    return found


def _table(title: str, table: pa.Table | None, by: str, caption: str = "") -> dict[str, Any] | None:
    """A table for the page: its first rows, by a column."""
    if table is None or not table.num_rows:
        return None
    units = _UNITS.get(title, {})
    order = "ascending" if by == "pid" else "descending"
    shown = (table.sort_by([(by, order)]) if by else table).slice(0, _MOST_TABLE_ROWS)
    # Ranks and names first, as narrow windows do not show all columns.
    shown = shown.select(sorted(shown.column_names, key=lambda name: (name not in _FIRST, _FIRST.get(name, 0))))
    columns = [
        {
            "name": "Rank" if name in ("pid", "Pid") else name,
            "number": pa.types.is_floating(type_) or pa.types.is_integer(type_),
            "unit": units.get(name, ""),
        }
        for name, type_ in zip(shown.column_names, shown.schema.types, strict=True)
    ]
    rows = [[_cell(value) for value in row.values()] for row in shown.to_pylist()]
    return {"title": title, "caption": caption, "columns": columns, "rows": rows, "more": table.num_rows - len(rows)}


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)[:_LONGEST]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value


def _counters(trace: Trace) -> dict[str, Any]:
    found, more = curves(trace)
    described = [
        {
            "owner": each.owner, "name": clean(each.name)[:_LONGEST], "unit": clean(each.unit)[:_LONGEST],
            "x": each.time.tolist(), "y": [_cell(value) for value in each.value.tolist()],
        }
        for each in found
    ]  # fmt: skip
    return {"curves": described, "more": more}


def _iterations(trace: Trace) -> list[dict[str, Any]]:
    """How long each rank's iterations took: of several that share a point, the slowest."""
    times, table = trace.tables.get("iteration_times"), trace.tables.get("iterations")
    if times is None or table is None:
        return []
    pids, number, us = (times[name].to_numpy() for name in ("pid", "Iteration", "Time"))
    found = []
    for row in [row for row in table.to_pylist() if row["Iterations"]][:_MOST_RANKS]:
        mine = pids == row["pid"]
        each = -(-row["Iterations"] // _MOST_POINTS)
        points = Groups(number[mine] // each).max(us[mine])
        found.append(
            {name: _cell(row[name]) for name in _OF_ITERATIONS}
            | {"each": each, "us": [_cell(float(value)) or 0 for value in points.tolist()]}
        )  # fmt: skip
    return found
