"""The names of processes: their last ones, or those of who forked them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture.schema import KINDS
from iaprof.report.views.process_names import COLUMNS, process_names


def events(*rows: tuple[int, int, str, str | int | None]) -> pa.Table:
    """Process rows: time, pid, event, and the name or, of a fork, the parent."""
    columns = {
        "time_ns": [time for time, *_ in rows],
        "pid": [pid for _, pid, *_ in rows],
        "tid": [pid for _, pid, *_ in rows],
        "ppid": [of if isinstance(of, int) else None for *_, of in rows],
        "event": [event for _, _, event, _ in rows],
        "comm": [of if isinstance(of, str) else None for *_, of in rows],
    }
    schema = pa.schema([KINDS["process"].field(name) for name in COLUMNS])
    return pa.table({name: pa.array(column) for name, column in columns.items()}).cast(schema)


def test_the_last_name_counts() -> None:
    found = process_names(
        events((1, 7, "comm", "sh"), (5, 7, "exec", "python"), (3, 7, "exec", "env"), (4, 8, "exit", None))
    )
    assert found == {7: "python"}


def test_a_forked_process_has_the_name_that_its_parent_had_then() -> None:
    found = process_names(
        events(
            (1, 7, "comm", "sh"),
            (2, 8, "fork", 7),
            (3, 9, "fork", 8),
            (4, 7, "exec", "python"),
            (5, 10, "fork", 7),
            (6, 11, "fork", 10),
            (7, 11, "exec", "gcc"),
            (8, 12, "fork", 11),
            (9, 10, "comm", "worker"),
        )
    )
    assert found == {7: "python", 8: "sh", 9: "sh", 10: "worker", 11: "gcc", 12: "gcc"}


def test_who_is_forked_by_nobody_that_is_known_has_no_name() -> None:
    rows: list[tuple[int, int, str, str | int | None]] = [
        (1, 7, "fork", 7),
        (2, 8, "fork", 9),
        (2, 9, "fork", 8),
        (3, 10, "fork", 11),
        (9, 11, "comm", "late"),
    ]
    assert process_names(events(*rows)) == {11: "late"}
    assert process_names(events()) == {}


@pytest.mark.parametrize("seed", range(5))
def test_many_as_one_after_the_other(seed: int) -> None:
    # given processes that are named and fork, and whose numbers are used again, in the order of time
    random = np.random.default_rng(seed)
    rows: list[tuple[int, int, str, str | int | None]] = []
    names: dict[int, str] = {}
    for time in range(1000):
        pid, parent = (int(number) for number in random.integers(1, 60, 2))
        if random.random() < 0.2:
            rows.append((time, pid, "comm", f"name{time}"))
            names[pid] = f"name{time}"
        elif parent != pid:
            rows.append((time, pid, "fork", parent))
            names.pop(pid, None)
            names |= {pid: names[parent]} if parent in names else {}
    # when, whatever the order of the rows
    found = process_names(events(*rows))
    random.shuffle(rows)
    # then it is as when they are gone through
    assert found == process_names(events(*rows)) == names
