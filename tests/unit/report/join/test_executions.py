"""Launches by closed command lists: compared with plain Python, one event after another; and in reports."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.profile import empty_profile
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.report.join.executions import StackOf, count_launches, expand_executions, find_fillings, read_launches
from iaprof.report.join.joining import Task, join, samples_ahead
from iaprof.report.join.placements import LAUNCH_COLUMNS, place_kernels
from iaprof.report.join.selection import Selection
from iaprof.report.profile import ReportOptions
from iaprof.report.views.thread_runs import launch_runs
from unit.capturing import capture, launch, record, stall
from unit.in_process import iaprof

LIST, OTHER_LIST = 0x5000, 0x6000
A, B = 0x10000, 0x20000
S = 1_000_000_000
COLUMNS = (*LAUNCH_COLUMNS, "cpu")
Launched = Counter[tuple[int, int, int, int, str]]
"""Number of launches by time, pid, address, stack, comm."""


def appended(time_ns: int, address: int = A, stack: int = 11, list_: int = LIST, **more: Any) -> dict[str, Any]:
    """A launch that was appended to a list."""
    return launch(time_ns, more.pop("pid", 7), address, stack, **{"name": "k", "list": list_, **more})


def event(what: str, time_ns: int, list_: int = LIST, stack: int = 0, **more: Any) -> dict[str, Any]:
    """A `command_list` row."""
    row = {"time_ns": time_ns, "pid": 7, "tid": 8, "cpu": 0, "comm": "", "event": what, "list": list_, "queue": 0}
    return row | {"stack": stack, "flags": 0} | more


def executed(time_ns: int, list_: int = LIST, stack: int = 21, **more: Any) -> dict[str, Any]:
    """A `command_list` row of an execution."""
    return event("execute", time_ns, list_, stack, **{"comm": "runner", "queue": 0x900, **more})


def read(path: Path, stack_of: StackOf = StackOf.APPEND, most: int = 1 << 22) -> Launched:
    """Returns the launches of a capture."""
    found: Launched = Counter()
    for row in read_launches(CaptureReader(path), COLUMNS, stack_of, most).to_pylist():
        found[row["time_ns"], row["pid"], row["address"], row["stack"], row["comm"]] += row.get("count", 1)
    return found


# --- the reference in plain Python


@dataclass
class List:
    """A command list, as its program knows it."""

    is_regular: bool
    holds: list[dict[str, Any]] = field(default_factory=list)
    is_closed: bool = False


class Program:
    """A random program that uses command lists, and knows what it launched."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.launches: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.truth: dict[StackOf, Launched] = defaultdict(Counter)
        self.executions = self.now = 0
        self.lists = {pid: {1 + n: self._new() for n in range(4)} for pid in (7, 9)}

    def _new(self) -> List:
        return List(self.random.random() < 0.7)

    def step(self) -> None:
        self.now += self.random.choice([1, 10, 1000, 5_000_000])
        pid = self.random.choice(list(self.lists))
        handle, it = self.random.choice(list(self.lists[pid].items()))
        what = self.random.choice(["append", "append", "close", "execute", "execute", "reset", "destroy"])
        if what == "destroy" and self.random.random() < 0.3:
            self._event("destroy", pid, handle)
            self.lists[pid][handle] = self._new()
        elif what == "append" and not it.is_closed:
            self._append(pid, handle, it)
        elif it.is_regular and what == "close" and not it.is_closed:
            it.is_closed = True
            self._event("close", pid, handle)
        elif it.is_regular and what == "reset" and it.is_closed:
            it.holds, it.is_closed = [], False
            self._event("reset", pid, handle)
        elif it.is_regular and what == "execute" and it.is_closed:
            self._execute(pid, handle, it)

    def _event(self, what: str, pid: int, handle: int) -> None:
        self.events.append(event(what, self.now, handle, pid=pid))

    def _append(self, pid: int, handle: int, it: List) -> None:
        address, stack = self.random.choice([A, B]), self.random.choice([11, 12, 13])
        row = appended(self.now, address, stack, handle, pid=pid, comm=self.random.choice(["one", "two"]))
        self.launches.append(row)
        it.holds.append(row)
        if not it.is_regular:
            for stack_of in StackOf:
                self._launched(stack_of, row, row)

    def _execute(self, pid: int, handle: int, it: List) -> None:
        self.executions += 1
        row = executed(
            self.now, handle, self.random.choice([21, 22]), pid=pid, comm=self.random.choice(["three", "four"])
        )
        self.events.append(row)
        for held in it.holds:
            self._launched(StackOf.APPEND, held, held)
            self._launched(StackOf.EXECUTE, held, row)

    def _launched(self, stack_of: StackOf, kernel: dict[str, Any], by: dict[str, Any]) -> None:
        self.truth[stack_of][self.now, kernel["pid"], kernel["address"], by["stack"], by["comm"]] += 1


@pytest.mark.parametrize("seed", range(20))
def test_every_execution_launches_the_kernels_in_its_list(seed: int, tmp_path: Path) -> None:
    # given a program whose regular lists are all closed in the end: lists that never are look like immediate ones
    program = Program(seed)
    for _ in range(3000):
        program.step()
    for pid, lists in program.lists.items():
        for handle, it in lists.items():
            if it.is_regular and not it.is_closed:
                program.now += 1
                program._event("close", pid, handle)
    # lists that were destroyed while open look like immediate ones, too
    path = capture(tmp_path / "c", launch=program.launches, command_list=program.events)
    reader = CaptureReader(path)

    # when, then
    unknown = open_when_destroyed(program)
    for stack_of in StackOf:
        assert read(path, stack_of) == program.truth[stack_of] + unknown
    found = count_launches(reader)
    assert found is not None
    assert found.launches == (program.truth[StackOf.APPEND] + unknown).total()
    assert (found.executions, found.unknown) == (program.executions, 0)


def open_when_destroyed(program: Program) -> Launched:
    """Launches appended to lists that were never closed: they are taken to be immediate."""
    found: Launched = Counter()
    by_list = defaultdict(list)
    for row in sorted([*program.launches, *program.events], key=lambda row: row["time_ns"]):
        by_list[row["pid"], row["list"]].append(row)
    for rows in by_list.values():
        life: list[dict[str, Any]] = []
        for row in [*rows, {"event": "destroy"}]:
            if row.get("event") != "destroy":
                life.append(row)
                continue
            if not any(each.get("event") in ("close", "execute") for each in life):
                for each in life:
                    found[each["time_ns"], each["pid"], each["address"], each["stack"], each["comm"]] += 1
            life = []
    return found - program.truth[StackOf.APPEND]


def test_a_list_that_is_never_executed_launches_nothing(tmp_path: Path) -> None:
    assert read(capture(tmp_path / "c", launch=[appended(1)], command_list=[event("close", 2)])) == {}


def test_launches_without_lists_are_unchanged(tmp_path: Path) -> None:
    rows = [appended(1), launch(2, 7, B, 12, name="k")]
    table = read_launches(CaptureReader(capture(tmp_path / "c", launch=rows)), COLUMNS)
    assert table.select(["time_ns", "address", "stack"]).to_pylist() == [
        {"time_ns": row["time_ns"], "address": row["address"], "stack": row["stack"]} for row in rows
    ]


def test_a_list_that_is_appended_to_after_close_is_immediate(tmp_path: Path) -> None:
    """Some programs close immediate lists, which has no effect."""
    rows = [appended(1), appended(3, B)]
    path = capture(tmp_path / "c", launch=rows, command_list=[event("close", 2), event("close", 4)])
    assert read(path) == {(1, 7, A, 11, "app"): 1, (3, 7, B, 11, "app"): 1}


def test_appending_after_execution_begins_a_filling_if_a_reset_was_lost(tmp_path: Path) -> None:
    path = capture(tmp_path / "c", launch=[appended(1), appended(3, B)], command_list=[executed(2), executed(4)])
    assert read(path) == {(2, 7, A, 11, "app"): 1, (4, 7, B, 11, "app"): 1}


def included(time_ns: int, list_: int, by: int) -> dict[str, Any]:
    """A `command_list` row: executing the list `by` executes `list_`, too."""
    return event("include", time_ns, list_, queue=by)


def test_a_list_is_executed_with_those_that_include_it(tmp_path: Path) -> None:
    # given: a list twice in another, beside a kernel of that one, and once in a second filling of it
    inner, outer = LIST, OTHER_LIST
    rows = [appended(2, A, list_=inner), appended(6, B, list_=outer)]
    events = [
        *(event("reset", 1, inner), event("close", 3, inner)),
        *(event("reset", 4, outer), included(5, inner, outer), included(7, inner, outer), event("close", 8, outer)),
        *(executed(9, outer), executed(10, outer)),
        *(event("reset", 11, outer), included(12, inner, outer), event("close", 13, outer), executed(14, outer)),
        *(event("reset", 15, outer), event("close", 16, outer), executed(17, outer)),
        executed(18, outer, pid=8),  # of another process
    ]
    path = capture(tmp_path / "c", launch=rows, command_list=events)
    # then
    assert read(path) == {
        **{(time, 7, A, 11, "app"): 2 for time in (9, 10)},
        **{(time, 7, B, 11, "app"): 1 for time in (9, 10)},
        (14, 7, A, 11, "app"): 1,
    }
    found = count_launches(CaptureReader(path))
    assert found is not None
    assert (found.launches, found.unknown) == (7, 1)
    by_execute = {(time, address, stack) for time, _, address, stack, _ in read(path, StackOf.EXECUTE)}
    assert by_execute == {(9, A, 21), (10, A, 21), (9, B, 21), (10, B, 21), (14, A, 21)}


def test_handles_are_not_carried_over_to_the_process_s_next_program(tmp_path: Path) -> None:
    row = dict.fromkeys(KINDS["process"].names) | {"time_ns": 3, "pid": 7, "tid": 7, "event": "exec", "comm": "next"}
    lists = [executed(2), executed(5)]
    path = capture(tmp_path / "c", launch=[appended(1)], command_list=lists, process=[row])
    assert read(path) == {(2, 7, A, 11, "app"): 1}
    found = count_launches(CaptureReader(path))
    assert found is not None
    assert (found.launches, found.executions, found.unknown) == (1, 2, 1)


def test_executions_of_lists_filled_before_the_recording_are_reported(tmp_path: Path) -> None:
    # given a list from before the recording that is then reset and has no kernels, and one that was closed since
    lists = [executed(1), executed(2), event("reset", 3), executed(4)]
    lists += [event("close", 5, OTHER_LIST), executed(6, OTHER_LIST)]
    path = capture(tmp_path / "c", stall=[stall(9, record(A, sbid=1))], command_list=lists)
    found = count_launches(CaptureReader(path))
    assert found is not None
    assert (found.launches, found.executions, found.unknown) == (0, 4, 2)
    assert "2 executions of command lists that were filled before the recording" in iaprof("info", path).out


def test_launches_carried_over_from_another_file_are_not_counted_again(tmp_path: Path) -> None:
    # given a list that was filled and executed in the previous file, and is executed in this one
    carried = int(LaunchFlags.CARRIED)
    lists = [event("close", 2, flags=carried), executed(3, flags=carried), executed(12)]
    path = capture(tmp_path / "c", launch=[appended(1, flags=carried)], command_list=lists)
    found = count_launches(CaptureReader(path))
    assert found is not None
    assert (found.launches, found.executions, found.unknown) == (1, 1, 0)
    flags = {row["time_ns"]: row["flags"] for row in read_launches(CaptureReader(path), COLUMNS).to_pylist()}
    assert flags == {3: carried, 12: 0}


# --- large numbers


def test_a_million_executions_of_ten_thousand_kernels(tmp_path: Path) -> None:
    # given 10,000 kernels at 300 sites, and an execution each millisecond
    kernels, executions = 10_000, 1_000_000
    number = np.arange(kernels)
    launches = _table(
        "launch", kernels, time_ns=number, address=A + number % 50 * 64, stack=1 + number % 300, list=LIST
    )
    times = S + np.arange(executions) * 1_000_000
    events = _table("command_list", executions, time_ns=times, event="execute", list=LIST, stack=21)
    empty = pa.Table.from_pylist([], pa.schema(list(KINDS["process"])))
    known = find_fillings(launches, events, empty)

    # when
    table = expand_executions(launches, known, events, max_rows=1 << 20)

    # then there are at most max_rows rows, and all launches are counted, none later than it ran
    assert len(table) <= 1 << 20
    count = table["count"].to_numpy()
    assert int(count.sum()) == kernels * executions
    spans = (table["last_ns"].to_numpy() - table["time_ns"].to_numpy()).astype(np.int64)
    assert spans.min() >= 0
    assert spans.max() < 1 << 30
    per_place = Counter[int]()
    for stack, places in zip(table["stack"].to_pylist(), count.tolist(), strict=True):
        per_place[stack] += places
    assert per_place == Counter({1 + place: np.sum(number % 300 == place) * executions for place in range(300)})


def test_few_executions_keep_their_times(tmp_path: Path) -> None:
    lists = [executed(time) for time in range(2, 1002)]
    path = capture(tmp_path / "c", launch=[appended(1), appended(1)], command_list=lists)
    assert read(path) == {(time, 7, A, 11, "app"): 2 for time in range(2, 1002)}


def test_too_many_places_of_execution_are_refused(tmp_path: Path) -> None:
    rows = [appended(1 + n, A + n * 64) for n in range(100)]
    lists = [executed(1000 + n, stack=1000 + n) for n in range(100)]
    path = capture(tmp_path / "c", launch=rows, command_list=lists)
    assert read(path, StackOf.EXECUTE).total() == 10_000
    with pytest.raises(CaptureError, match="choose --stack-of=append"):
        read(path, StackOf.EXECUTE, most=1000)
    assert read(path, StackOf.APPEND, most=1000).total() == 10_000


def _table(kind: str, rows: int, **columns: Any) -> pa.Table:
    """Rows of a kind; columns that are not given are 0 or empty."""
    arrays = []
    for member in KINDS[kind]:
        value = columns.get(member.name, "" if pa.types.is_string(member.type) else 0)
        value = value if isinstance(value, np.ndarray) else [value] * rows
        arrays.append(pa.array(value, member.type))
    return pa.Table.from_arrays(arrays, schema=pa.schema(list(KINDS[kind])))


# --- in reports


def joined(path: Path, stack_of: StackOf = StackOf.APPEND) -> Counter[tuple[int, str, int]]:
    """Samples by stack, process's name and address."""
    reader = CaptureReader(path)
    placed = place_kernels(read_launches(reader, LAUNCH_COLUMNS, stack_of), [])
    with samples_ahead(reader) as samples:
        result, *_ = join(reader, Task(placed, 0), samples)
    found: Counter[tuple[int, str, int]] = Counter()
    for index, ip, counts in zip(result.site.tolist(), result.ip.tolist(), result.counts.tolist(), strict=True):
        site = placed.sites[index]
        found[site.stack, site.comm, ip] += sum(counts)
    return found


def test_stalls_belong_to_the_execution_before_them(tmp_path: Path) -> None:
    # given a list that was executed long after it was filled, alternately from two places
    lists = [executed(10 * S, stack=21), executed(20 * S, stack=22)]
    stalls = [
        stall(time, record(A, sbid=count), begin_ns=time - 1000)
        for time, count in ((10 * S + 5000, 5), (20 * S + 5000, 3))
    ]
    path = capture(tmp_path / "c", stall=stalls, launch=[appended(1)], command_list=lists)
    assert joined(path) == {(11, "app", A): 8}
    assert joined(path, StackOf.EXECUTE) == {(21, "runner", A): 5, (22, "runner", A): 3}


def test_two_alternating_lists_have_their_own_stalls(tmp_path: Path) -> None:
    # given the same kernel in two lists, appended at two places, and executed a second apart
    launches = [appended(1, stack=11), appended(2, stack=12, list_=OTHER_LIST)]
    lists = [executed(n * S, LIST if n % 2 else OTHER_LIST, 21) for n in range(1, 9)]
    stalls = [stall(n * S + 5000, record(A, sbid=n), begin_ns=n * S + 1000) for n in range(1, 9)]
    path = capture(tmp_path / "c", stall=stalls, launch=launches, command_list=lists)
    assert joined(path) == {(11, "app", A): 1 + 3 + 5 + 7, (12, "app", A): 2 + 4 + 6 + 8}


def test_a_refilled_list_launches_its_new_kernels(tmp_path: Path) -> None:
    launches = [appended(1, stack=11), appended(5 * S, stack=12)]
    lists = [executed(2 * S), event("reset", 4 * S), executed(6 * S)]
    stalls = [stall(n * S + 5000, record(A, sbid=n), begin_ns=n * S + 1000) for n in (2, 6)]
    path = capture(tmp_path / "c", stall=stalls, launch=launches, command_list=lists)
    assert joined(path) == {(11, "app", A): 2, (12, "app", A): 6}


def test_a_site_that_is_twice_in_a_list_gets_two_thirds(tmp_path: Path) -> None:
    launches = [appended(1, stack=11), appended(2, stack=11), appended(3, stack=12)]
    path = capture(tmp_path / "c", stall=[stall(9, record(A, sbid=30))], launch=launches, command_list=[executed(5)])
    assert joined(path) == {(11, "app", A): 20, (12, "app", A): 10}


def test_reports_count_executions(tmp_path: Path) -> None:
    # given a kernel in a list that is executed three times, and one immediate launch
    lists = [event("close", 2), *(executed(2 + n) for n in range(1, 4))]
    launches = [appended(1), launch(6, 7, A, 13, name="k")]
    path = capture(tmp_path / "c", stall=[stall(9, record(A, sbid=4))], launch=launches, command_list=lists)
    top = iaprof("top", path)
    assert top.code == 0, top.err
    assert [line.split()[-3] for line in top.out.splitlines() if line.endswith(" k")] == ["4"]
    assert "with 3 executions of command lists" in iaprof("info", path).out


@pytest.mark.parametrize(
    ("stack_of", "threads"), [("append", {("app", 7): 4}), ("execute", {("runner", 8): 3, ("app", 7): 1})]
)
def test_time_lines_have_executions(stack_of: str, threads: dict[tuple[str, int], int], tmp_path: Path) -> None:
    lists = [event("close", 2), *(executed(2 + n * S) for n in range(1, 4))]
    launches = [appended(1), launch(6, 7, A, 13, name="k")]
    path = capture(tmp_path / "c", launch=launches, command_list=lists)
    found = launch_runs(CaptureReader(path), ReportOptions(Selection(stack_of=StackOf(stack_of))), empty_profile())
    counted: Counter[tuple[str, int]] = Counter()
    for thread, count in zip(found.thread.tolist(), found.count.tolist(), strict=True):
        counted[found.threads[thread].comm, found.threads[thread].tid] += count
    assert counted == threads
    if stack_of == "append":
        assert [round(begin) for begin in found.begin.tolist()] == [-1, 0, 1, 2]  # the header's clock begins at 1 s


def test_an_unknown_stack_of_is_refused(tmp_path: Path) -> None:
    done = iaprof("report", capture(tmp_path / "c"), "--stack-of", "both")
    assert (done.code, done.err) == (2, "iaprof: --stack-of takes append, execute, not 'both'\n")


def test_a_launch_has_the_queue_that_executed_its_list(tmp_path: Path) -> None:
    # given a list that one queue executes, one that two do, one that is immediate, and a launch without a list
    launches = [
        appended(1, list_=LIST), appended(1, list_=OTHER_LIST), appended(5, list_=0x7000), appended(6, list_=0),
    ]  # fmt: skip
    events = [
        executed(2, queue=0x900), executed(3, queue=0x900),
        executed(2, OTHER_LIST, queue=0x900), executed(3, OTHER_LIST, queue=0xA00),
    ]  # fmt: skip
    path = capture(tmp_path / "c", launch=launches, command_list=events)
    # when
    rows = read_launches(CaptureReader(path), COLUMNS).to_pylist()
    # then
    assert {(row["list"], row["queue"]) for row in rows} == {
        (LIST, 0x900), (OTHER_LIST, 0), (0x7000, 0x7000), (0, 0),
    }  # fmt: skip
    # and without executions each list is immediate
    path = capture(tmp_path / "immediate", launch=launches)
    assert {(row["list"], row["queue"]) for row in read_launches(CaptureReader(path), COLUMNS).to_pylist()} == {
        (each, each) for each in (LIST, OTHER_LIST, 0x7000, 0)
    }


def mixed(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A capture of `launch` and `command_list` rows."""
    of_lists = [row for row in rows if "event" in row]
    return capture(path, launch=[row for row in rows if "event" not in row], command_list=of_lists)


def test_lists_in_included_lists_are_executed_too(tmp_path: Path) -> None:
    # given: a list in a list in a list that is executed three times
    first, second, third = 0x7000, 0x8000, 0x9000
    rows = [
        *(event("reset", 1, third), appended(2, list_=third), event("close", 3, third)),
        *(event("reset", 4, second), included(5, third, second), included(6, third, second), event("close", 7, second)),
        *(event("reset", 8, first), included(9, second, first), event("close", 10, first)),
        *(executed(time, first) for time in (11, 12, 13)),
    ]
    path = mixed(tmp_path / "c", rows)
    # then: by each of its two places in the second one
    assert Counter({time: count for (time, *_), count in read(path).items()}) == {11: 2, 12: 2, 13: 2}
    assert (totals := count_launches(CaptureReader(path))) is not None and totals.launches == 6


def test_lists_that_include_themselves_end(tmp_path: Path) -> None:
    one, other = 0x7000, 0x8000
    rows = [event("reset", 1, one), event("reset", 1, other), appended(2, list_=one)]
    rows += [
        included(3 + number, *lists) for number in range(300) for lists in ((one, other), (other, one), (one, one))
    ]
    path = mixed(tmp_path / "c", [*rows, executed(1000, one), executed(1001, other), executed(1002, 0x5000)])
    totals = count_launches(CaptureReader(path))
    assert totals is not None and 0 < totals.launches < 1 << 62
    assert 0 < sum(read(path).values()) < 1 << 62


@pytest.mark.parametrize("stack_of", StackOf)
def test_lists_included_too_often_for_a_row_each_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack_of: StackOf
) -> None:
    # given: sixty lists in one that is executed often, and another program
    monkeypatch.setattr("iaprof.report.join.executions.MAX_ROWS", 2_000)
    outer, inner = 0x7000, range(0x8000, 0x8000 + 60)
    rows = [row for each in inner for row in (event("reset", 1, each), appended(2, A + each, list_=each))]
    rows += [event("reset", 3, outer), *(included(4, each, outer) for each in inner), event("close", 5, outer)]
    rows += [executed(10 + time, outer) for time in range(500)]
    rows += [event("reset", 1, pid=9), appended(2, B, pid=9), executed(20, pid=9), executed(30, pid=9)]
    path = mixed(tmp_path / "c", rows)
    # then: each is counted as often as it was executed, between the first time and the last
    launches = read_launches(CaptureReader(path), COLUMNS, stack_of).to_pylist()
    counts: Counter[int] = Counter()
    for row in launches:
        counts[row["address"]] += row["count"]
        assert 10 <= row["time_ns"] <= row["last_ns"] < 510
    assert counts == Counter({A + each: 500 for each in inner}) + Counter({B: 2})
    assert len(launches) < 3_000
    assert [row["time_ns"] for row in launches if row["pid"] == 9] == [20, 30]
    totals = count_launches(CaptureReader(path))
    assert totals is not None and (totals.launches, totals.executions) == (60 * 500 + 2, 61 * 500 + 2)
