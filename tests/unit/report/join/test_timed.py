"""Executions with times: which launch each is of, how long each site ran, and how samples are divided by that."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.formats.capture import limits
from iaprof.formats.capture.limits import CaptureError, Ratio
from iaprof.formats.capture.reader import CaptureReader
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.join import timed
from iaprof.report.join.executions import read_launches
from iaprof.report.join.placements import LAUNCH_COLUMNS
from iaprof.report.join.timed import RunningTimes, sites_of_placements
from iaprof.report.profile import build
from unit.capturing import HEADER, capture, launch
from unit.gpu.nvidia.captures import GPU, reads

MS, S = 1_000_000, 1_000_000_000
LAST = (1 << 64) - 1
KERNEL, OTHER = 0x7_4000_1000, 0x7_4000_8000
Numbers = NDArray[np.int64]


# --- how long sites ran


def running(rows: list[tuple[int, int, int, int]], sites: int) -> RunningTimes:
    """Of executions: (site, stream, begin, end)."""
    site, stream, begin, end = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    return RunningTimes(np.array(site, np.int64), np.array(stream, np.int64), np.array(begin, np.uint64),
                        np.array(end, np.uint64), sites)  # fmt: skip


def overlap(rows: list[tuple[int, int, int, int]], site: int, stream: int, since: int, until: int) -> int:
    """The reference."""
    return sum(
        max(min(end, until) - max(begin, since), 0)
        for own, on, begin, end in rows
        if (own, on) == (site, stream) and begin > 0
    )


def asked(found: RunningTimes, sites: int, stream: int, since: int, until: int) -> list[float]:
    times = np.full(sites, since, np.uint64), np.full(sites, until, np.uint64)
    return list(map(float, found.between(np.arange(sites), stream, *times)))


@pytest.mark.parametrize("seed", range(20))
def test_times_are_those_of_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    sites, streams = rng.randrange(1, 6), rng.randrange(1, 4)
    origin, length = rng.choice([1, 10**9, 10**15, 1 << 52]), rng.choice([10, 1000, 10**11])
    rows = []
    for _ in range(rng.randrange(60)):
        begin = rng.choice([0, origin + rng.randrange(length)])
        end = max(begin + rng.randrange(-3, length), 0)
        rows.append((rng.randrange(sites), rng.randrange(streams), begin, end))
    found = running(rows, sites)
    for _ in range(60):
        moments = [rng.choice([0, 1, origin, LAST, rng.choice([(0, 0, 5, 9), *rows])[rng.choice([2, 3])],
                               origin + rng.randrange(2 * length)]) for _ in range(2)]  # fmt: skip
        since, until = sorted(moments)
        stream = rng.randrange(streams + 1)
        wanted = [overlap(rows, site, stream, since, until) for site in range(sites)]
        assert asked(found, sites, stream, since, until) == wanted
    assert found.has_any.tolist() == [
        any(row[0] == site and 0 < row[2] < row[3] for row in rows) for site in range(sites)
    ]


def test_nothing_ran() -> None:
    assert asked(running([], 3), 3, 0, 0, LAST) == [0, 0, 0]
    assert asked(running([(0, 0, 0, 5), (1, 0, 7, 7), (2, 0, 9, 8)], 3), 3, 0, 0, LAST) == [0, 0, 0]
    assert asked(running([(0, 0, 5, 6)], 1), 1, 65535, 0, LAST) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_times_of_a_hostile_capture(seed: int) -> None:
    # given times up to the largest, on GPUs up to the largest number
    rng = random.Random(seed)
    sites = rng.choice([1, 5, 3000])
    streams = [0, 1, 65535]
    rows = [
        (
            rng.randrange(sites),
            rng.choice(streams),
            rng.choice([1, 1 << 40, 1 << 63, LAST - 1]),
            rng.choice([1 << 50, LAST]),
        )
        for _ in range(40)
    ]
    # when
    found = running(rows, sites)
    # then what they take is right but for the resolution, which such times leave less of
    most = 1 << max((sites * 65536 + 1).bit_length() + 64 - 63, 0)
    for stream in streams:
        since, until = sorted(rng.choice([0, 1 << 41, 1 << 62, LAST]) for _ in range(2))
        for site, ran in enumerate(asked(found, min(sites, 5), stream, since, until)):
            many = sum(row[:2] == (site, stream) for row in rows)
            if many <= 1:
                assert ran == pytest.approx(overlap(rows, site, stream, since, until), rel=1e-9, abs=2 * most)
            assert np.isfinite(ran) and ran >= 0


def test_sites_of_placements() -> None:
    order, first = sites_of_placements(np.array([2, -1, 0, 2, 0]), 4)
    assert [order[first[each] : first[each + 1]].tolist() for each in range(4)] == [[2, 4], [], [0, 3], []]


# --- which launch an execution is of


def launched(
    time_ns: int, correlation: int | None, pid: int = 7, address: int = KERNEL, stack: int = 1, **more: Any
) -> dict[str, Any]:
    return launch(time_ns, pid, address, stack, 640, correlation=correlation, name="k", **more)


def ran(correlation: int, begin: int, end: int, pid: int = 7, address: int = 0, **more: int) -> dict[str, Any]:
    row = {"time_ns": begin, "end_ns": end, "pid": pid, "stream": 0, "correlation": correlation, "address": address}
    return row | {"queue": 3} | more


Joined = list[tuple[int, int, int, int]]


def joined(path: Path, launches: list[dict[str, Any]], executions: list[dict[str, Any]]) -> Joined:
    """What launches get: (time of the launch, pid, begin, end)."""
    table = read_launches(CaptureReader(capture(path / "c", launch=launches, execution=executions)), LAUNCH_COLUMNS)
    return sorted((row["time_ns"], row["pid"], row["begin_ns"], row["end_ns"]) for row in table.to_pylist())


def test_each_launch_has_its_executions(tmp_path: Path) -> None:
    launches = [launched(100, 5), launched(200, 6), launched(300, 5, pid=8), launched(400, None), launched(500, 0)]
    executions = [ran(6, 210, 220), ran(5, 110, 120), ran(5, 310, 330, pid=8), ran(5, 320, 340, pid=9), ran(7, 1, 2)]
    executions.append(ran(0, 9, 9))
    assert joined(tmp_path, launches, executions) == [
        (100, 7, 110, 120), (200, 7, 210, 220), (300, 8, 310, 330), (400, 7, 0, 0), (500, 7, 0, 0)
    ]  # fmt: skip


def test_a_graph_s_launch_has_many_kernels(tmp_path: Path) -> None:
    launches = [launched(100, 5, address=0) | {"name": "[graph]", "size": 0}, launched(200, 6)]
    executions = [ran(5, 110, 120, address=OTHER), ran(5, 120, 130, address=KERNEL), ran(5, 130, 150), ran(6, 210, 220)]
    path = capture(tmp_path / "c", launch=launches, execution=executions)
    columns = ("begin_ns", "end_ns", "address", "size", "queue", "stack")
    table = read_launches(CaptureReader(path), LAUNCH_COLUMNS)
    assert [tuple(row[name] for name in columns) for row in table.to_pylist()] == [
        (110, 120, OTHER, 0, 3, 1), (120, 130, KERNEL, 0, 3, 1), (130, 150, 0, 0, 3, 1), (210, 220, KERNEL, 640, 3, 1)
    ]  # fmt: skip


def test_another_program_in_the_process_begins_again(tmp_path: Path) -> None:
    # given a process that executes another program, whose launches have the same numbers
    launches = [launched(S + number * MS, number) for number in (1, 2, 3)]
    launches += [launched(5 * S + number * MS, number) for number in (1, 2, 3)]
    executions = [ran(number, S + number * MS + 10, S + number * MS + 20) for number in (1, 2, 3)]
    executions += [ran(number, 5 * S + number * MS + 10, 5 * S + number * MS + 20) for number in (1, 3)]
    random.Random(1).shuffle(executions)
    # then each execution is of its own program's launch; one was lost
    found = joined(tmp_path, launches, executions)
    assert [begin for _, _, begin, _ in found] == [
        S + MS + 10, S + 2 * MS + 10, S + 3 * MS + 10, 5 * S + MS + 10, 0, 5 * S + 3 * MS + 10
    ]  # fmt: skip


def test_a_call_that_ends_after_its_kernel(tmp_path: Path) -> None:
    # given a launch that waits for its kernel (CUDA_LAUNCH_BLOCKING), and one whose thread was held up
    launches = [launched(4 * S, 1), launched(5 * S, 2)]
    executions = [ran(1, S, 4 * S - 9), ran(2, S, 5 * S - 90 * MS)]
    assert joined(tmp_path, launches, executions) == [(4 * S, 7, S, 4 * S - 9), (5 * S, 7, S, 5 * S - 90 * MS)]
    # and one that ended long before any launch is of a launch that was lost
    assert joined(tmp_path, [launched(4 * S, 1)], [ran(1, S, S + 9)]) == [(4 * S, 7, 0, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_joining_is_that_of_the_reference(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    times = [*range(S, 6 * S, S // 2), 0, LAST, LAST - 50 * MS]
    launches = [
        launched(rng.choice(times), rng.choice([None, 0, 1, 2, LAST]), rng.choice([7, 8]))
        for _ in range(rng.randrange(1, 30))
    ]
    executions = []
    for _ in range(rng.randrange(1, 30)):
        begin, end = sorted((rng.choice(times), rng.choice(times)))
        executions.append(ran(rng.choice([0, 1, 2, 3, LAST]), begin, end, rng.choice([7, 8, 9])))
    by_launch: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for each in executions:
        before = [
            (row["time_ns"], number)
            for number, row in enumerate(launches)
            if row["correlation"] and (row["correlation"], row["pid"]) == (each["correlation"], each["pid"])
            if row["time_ns"] <= min(each["end_ns"] + 100 * MS, LAST)
        ]
        if before:
            by_launch[max(before)[1]].append((each["time_ns"], each["end_ns"]))
    wanted = [
        (row["time_ns"], row["pid"], *times_of)
        for number, row in enumerate(launches)
        for times_of in by_launch.get(number, [(0, 0)])
    ]
    assert joined(tmp_path, launches, executions) == sorted(wanted)


def test_columns_that_nobody_asked_for(tmp_path: Path) -> None:
    path = capture(tmp_path / "c", launch=[launched(100, 5)], execution=[ran(5, 110, 120)])
    table = read_launches(CaptureReader(path), ("time_ns", "pid", "list", "name"))
    assert set(table.column_names) == {"time_ns", "pid", "list", "name", "queue", "begin_ns", "end_ns", "stream"}
    assert table["queue"].to_pylist() == [3]


def test_launches_of_an_older_format_have_no_numbers(tmp_path: Path) -> None:
    row = launched(100, 5)
    del row["correlation"]
    assert joined(tmp_path, [row], [ran(5, 110, 120)]) == [(100, 7, 0, 0)]


def test_executions_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given as many launches as executions, all with one number: no more rows come of them than there are of both
    path = capture(tmp_path / "c", launch=[launched(100, 5)] * 3000, execution=[ran(5, 110, 120)] * 3000)
    assert len(read_launches(CaptureReader(path), LAUNCH_COLUMNS)) == 5999
    # and a capture that has too many for its size is refused
    monkeypatch.setattr(timed, "EXECUTIONS", Ratio(5000, limits.EXECUTIONS.bytes_each << 20, "executions"))
    with pytest.raises(CaptureError, match="absurd"):
        read_launches(CaptureReader(path), LAUNCH_COLUMNS)


# --- shares


def shares(
    path: Path, launches: list[dict[str, Any]], executions: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> Counter[tuple[str, str]]:
    """Samples by the GPU and the thread that launched."""
    header = HEADER | {"streams": [*GPU["streams"], {**GPU["streams"][0], "card": "nvidia1"}], "end_ns": 10 * S}
    made = capture(path / "c", header, launch=launches, execution=executions, pc_sample=rows)
    with GpuModuleLoader() as modules:
        profile = build(CaptureReader(made), modules).profile
    found: Counter[tuple[str, str]] = Counter()
    for row in range(len(profile)):
        by = profile.launches[profile.launch[row]]
        found[profile.devices[profile.device[row]], by.comm if by else ""] += int(profile.counts[row].sum())
    return found


def turns(
    length: int, *threads: tuple[str, int], stream: int = 0, number: int = 0, address: int = KERNEL
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Launches and executions of one kernel by turns for some ms: the threads, and ns that each takes."""
    launches, executions, now = [], [], S
    while now < S + length * MS:
        for thread, takes in threads:
            number += 1
            launches.append(launched(now, number, address=address, comm=thread))
            executions.append(ran(number, now + 1000, now + 1000 + takes, stream=stream))
            now += 1500 + takes
    return launches, executions


def drains(length: int, samples: int, stream: int = 0, address: int = KERNEL) -> list[dict[str, Any]]:
    """A drain in 100 ms, which begins somewhat before the one before it ended."""
    rows = [reads(S + (number + 1) * 100 * MS, [(address + 16, "wait", samples, 0)]) for number in range(length // 100)]
    return [{**row, "begin_ns": row["time_ns"] - 120 * MS, "stream": stream} for row in rows]


def parts(found: Counter[tuple[str, str]], gpu: str = "nvidia0") -> dict[str, float]:
    """The part of each thread in a GPU's samples."""
    own = {thread: samples for (device, thread), samples in found.items() if gpu in device}
    return {thread: samples / sum(own.values()) for thread, samples in own.items()}


def test_shares_are_the_times(tmp_path: Path) -> None:
    # given threads whose executions take different time, one as often as the other
    made = turns(2000, ("a", 1_000_000), ("b", 3_000_000), ("c", 50_000))
    # when
    found = shares(tmp_path, *made, drains(2000, 4050))
    # then
    assert found.total() == 20 * 4050
    assert parts(found) == pytest.approx({"a": 1000 / 4050, "b": 3000 / 4050, "c": 50 / 4050}, abs=0.01)


def test_executions_at_the_same_time_count_each(tmp_path: Path) -> None:
    # given two queues that run the kernel all the time, and one that does half of it
    all_the_time = [turns(1000, (thread, 2_000_000), number=1000 * at) for at, thread in enumerate("ab")]
    half = turns(1000, ("c", 2_000_000), number=5000)
    half = half[0][::2], half[1][::2]
    launches, executions = ([*a, *b, *c] for a, b, c in zip(*all_the_time, half, strict=True))
    # when
    found = shares(tmp_path, launches, executions, drains(1000, 5000))
    # then
    assert parts(found) == pytest.approx({"a": 0.4, "b": 0.4, "c": 0.2}, abs=0.01)


def test_each_gpu_has_its_own_executions(tmp_path: Path) -> None:
    # given two threads that launch the kernel on two GPUs
    first, second = turns(1000, ("a", 900_000)), turns(1000, ("b", 500_000), stream=1, number=9000)
    launches, executions = ([*one, *other] for one, other in zip(first, second, strict=True))
    # when
    found = shares(tmp_path, launches, executions, drains(1000, 700) + drains(1000, 300, stream=1))
    # then
    assert sum(parts(found, "nvidia0").values()) == sum(parts(found, "nvidia1").values()) == 1
    assert parts(found, "nvidia0") == {"a": 1}
    assert parts(found, "nvidia1") == {"b": 1}


def test_a_launch_that_runs_long_after_it_was_made(tmp_path: Path) -> None:
    # given 1,000 kernels of one thread that are queued at once, and then one of another thread, which runs last
    launches = [launched(S + number, number + 1, comm="a") for number in range(1000)] + [
        launched(S + 2000, 1001, comm="b")
    ]
    executions = [ran(number + 1, S + number * 5 * MS, S + (number + 1) * 5 * MS) for number in range(1000)]
    executions.append(ran(1001, 6 * S, 8 * S))
    # when
    found = shares(tmp_path, launches, executions, drains(7000, 100))
    # then the samples are of who ran then
    assert parts(found) == pytest.approx({"a": 5 / 7, "b": 2 / 7}, abs=0.02)


def test_hostile_executions_do_not_stop_a_report(tmp_path: Path) -> None:
    launches, executions = turns(300, ("a", 1_000_000))
    for number, (begin, end) in enumerate([(1, LAST), (LAST, LAST), (LAST - 1, LAST), (0, LAST), (9, 3), (1 << 63, 5)]):
        launches.append(launched(S, 5000 + number, comm="b"))
        executions.append(
            ran(5000 + number, begin, end, stream=(1 << 16) - 1 if number % 2 else 0, address=LAST * (number % 2))
        )
    assert shares(tmp_path, launches, executions, drains(300, 700)).total() == 2100
