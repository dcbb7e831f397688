"""Runs of launches, compared with plain Python; no launch is lost, however large the gap grows."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.formats.export import Launches, Thread
from iaprof.formats.profile import Code, Kernel, Launch, Profile, empty_profile
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.report.join.selection import Selection, TimeRange
from iaprof.report.merging import merge
from iaprof.report.profile import ReportOptions
from iaprof.report.views.thread_runs import launch_runs
from unit.capturing import HEADER, capture, launch
from unit.profiles import Row, counts, profile

BEGUN = HEADER["clock"]["monotonic_ns"]
SECOND = 1_000_000_000
ALL = Selection()
Run = tuple[str, str, int, int, float, float, int]  # kernel, comm, pid, tid, begin, end, count


def at(second: float, pid: int = 7, address: int = 0x1000, **more: Any) -> dict[str, Any]:
    return launch(BEGUN + round(second * SECOND), pid, address, **{"name": "k", **more})


def runs(found: Launches) -> list[Run]:
    return [
        (found.kernels[kernel], thread.comm, thread.pid, thread.tid, begin, end, count)
        for kernel, thread, begin, end, count in zip(
            found.kernel.tolist(),
            [found.threads[number] for number in found.thread.tolist()],
            *(column.tolist() for column in (found.begin, found.end, found.count)),
            strict=True,
        )
    ]


def of(path: Path, selection: Selection = ALL, joined: Profile | None = None, **more: Any) -> Launches:
    return launch_runs(CaptureReader(path), ReportOptions(selection), joined or empty_profile(), **more)


def test_launches_in_close_succession_are_one_run(tmp_path: Path) -> None:
    # given two kernels launched alternately, and a pause
    rows = [at(second + of, address=address, name=name)
            for second in (0, 0.0005, 0.0015, 0.0025, 1)
            for of, address, name in ((0, 0x1000, "_Z3fooPf"), (0.0001, 0x2000, "bar"))]  # fmt: skip
    # when
    found = of(capture(tmp_path / "c", launch=rows))
    # then
    assert found.gap == 0.001
    assert runs(found) == [
        ("foo(float*)", "app", 7, 7, 0, 0.0025, 4),
        ("bar", "app", 7, 7, pytest.approx(0.0001), pytest.approx(0.0026), 4),
        ("foo(float*)", "app", 7, 7, 1, 1, 1),
        ("bar", "app", 7, 7, pytest.approx(1.0001), pytest.approx(1.0001), 1),
    ]


def test_unknown_and_carried_launches_are_left_out(tmp_path: Path) -> None:
    rows = [
        at(0, flags=int(LaunchFlags.OTHER)),
        at(0, flags=int(LaunchFlags.CARRIED)),
        at(0, pid=99, comm="stranger"),
        at(1, flags=int(LaunchFlags.NO_STACK)),
        at(2, name="", address=0xFFFF_8000_0000_1000),
        at(3, name="", address=0, flags=int(LaunchFlags.BAD_ARGS)),
    ]
    found = of(capture(tmp_path / "c", HEADER | {"scope": [7]}, launch=rows))
    assert [(kernel, begin) for kernel, _, _, _, begin, _, _ in runs(found)] == [
        ("k", 1),
        ("0x800000001000", 2),
        ("[unknown kernel]", 3),
    ]


def test_copies_are_runs_of_the_function_that_makes_them(tmp_path: Path) -> None:
    def copied(second: float, function: str, **more: Any) -> dict[str, Any]:
        row = {"time_ns": BEGUN + round(second * SECOND), "pid": 7, "tid": 7, "cpu": 0, "comm": "app", "stack": 1,
               "function": function, "bytes": 10, "flags": 0}  # fmt: skip
        return row | more

    # given copies, two of them in close succession, a launch, and a copy from before the capture
    copies = [copied(0, "zeCommandListAppendMemoryCopy"), copied(0.0005, "zeCommandListAppendMemoryCopy"),
              copied(1, "zeCommandListAppendMemoryFill", bytes=None),
              copied(2, "zeCommandListAppendMemoryFill", flags=int(LaunchFlags.CARRIED))]  # fmt: skip
    path = capture(tmp_path / "c", launch=[at(0)], transfer=copies)
    # then
    assert runs(of(path)) == [
        ("k", "app", 7, 7, 0, 0, 1),
        ("zeCommandListAppendMemoryCopy", "app", 7, 7, 0, 0.0005, 2),
        ("zeCommandListAppendMemoryFill", "app", 7, 7, 1, 1, 1),
    ]
    assert runs(of(path, Selection(kernel=re.compile("MemoryCopy")))) == runs(of(path))[1:2]


def test_kernels_have_their_names_in_the_profile(tmp_path: Path) -> None:
    # given a profile with a kernel's whole name, and with two kernels that had the same address
    long = "gemm<" + "float, " * 20 + "8>"
    code = Code("send", (), ())
    rows = [
        Row(0, Launch("app", 7, ()), Kernel(address, symbol, ""), code, 0, counts(sbid=1))
        for address, symbol in ((0x1000, long), (0x2000, "older"), (0x2000, "newer"))
    ]
    joined = profile(rows)
    # when that process and another one launch the kernel
    launches = [at(0, name=long[:63]), at(0.1, pid=8, name="other"), at(0.2, address=0x2000, name="newer")]
    found = of(capture(tmp_path / "c", launch=launches), joined=joined)
    # then
    assert [run[0] for run in runs(found)] == [long, "other", "newer"]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(pids=frozenset({8})), [2, 3]),
        (Selection(tids=frozenset({9})), [3]),
        (Selection(comms=frozenset({"b"})), [1]),
        (Selection(kernel=re.compile("^foo")), [2]),
        (Selection(time_range=TimeRange(1, 2)), [1]),
        (Selection(cgroups=("/job",)), [2, 3]),
        (Selection(pids=frozenset({4711})), []),
    ],
)
def test_selections_apply(selection: Selection, expected: list[int], tmp_path: Path) -> None:
    where = {"ppid": None, "event": "described", "comm": None, "ns_pid": None, "container": None, "uid": 0, "gid": 0}
    path = capture(
        tmp_path / "c",
        launch=[at(0), at(1, comm="b"), at(2, pid=8, name="foo", address=0x2000), at(3, pid=8, tid=9)],
        process=[{**where, "time_ns": 0, "pid": 8, "tid": 8, "cgroup": "/job/1"}],
    )
    assert of(path, selection).begin.tolist() == expected


def test_merged_captures_have_hosts_and_a_common_time_0(tmp_path: Path) -> None:
    for name, monotonic, wall in (("one", 1, 100), ("two", 500, 110)):
        clock = {"monotonic_ns": monotonic * SECOND, "realtime_ns": wall * SECOND}
        rows = [launch((monotonic + 1) * SECOND, 7, 0x1000, name=name)]
        capture(tmp_path / name, HEADER | {"host": {"name": name, "boot_id": name}, "clock": clock}, launch=rows)
    merge([tmp_path / "one", tmp_path / "two"], tmp_path / "m")
    found = of(tmp_path / "m")
    assert found.threads == [Thread("app", 7, 7, "one"), Thread("app", 7, 7, "two")]
    assert (found.begin.tolist(), found.kernels) == ([1, 11], ["one", "two"])


def in_plain_python(rows: list[dict[str, Any]], gap_ns: int) -> list[Run]:
    times: dict[tuple[str, str, int, int], list[int]] = defaultdict(list)
    for row in rows:
        times[row["name"], row["comm"], row["pid"], row["tid"]].append(row["time_ns"] - BEGUN)
    found = []
    for who, all_ in times.items():
        run: list[int] = []
        for time in sorted(all_):
            if run and time - run[-1] > gap_ns:
                found.append((*who, run[0] / 1e9, run[-1] / 1e9, len(run)))
                run = []
            run.append(time)
        found.append((*who, run[0] / 1e9, run[-1] / 1e9, len(run)))
    return sorted(found)


@pytest.mark.parametrize("most", [200_000, 60])
def test_runs_match_plain_python_in_any_order_of_rows(most: int, tmp_path: Path) -> None:
    # given unordered bursts of launches in many row groups
    chance = random.Random(4)
    rows = [
        at(chance.randrange(20) + chance.expovariate(300), chance.choice((7, 8)), kernel, tid=chance.choice((7, 9)),
           name=f"k{kernel}")
        for kernel in (0x1000, 0x2000, 0x3000) for _ in range(1000)
    ]  # fmt: skip
    chance.shuffle(rows)
    with (tmp_path / "c").open("wb") as file:
        writer = CaptureWriter(file)
        for start in range(0, len(rows), 170):
            writer.write("launch", pa.array(rows[start : start + 170], KINDS["launch"]))
        writer.close(HEADER)
    # when
    found = of(tmp_path / "c", max_runs=most)
    # then the gap is as large as necessary
    expected = in_plain_python(rows, round(found.gap * 1e9))
    assert sorted(runs(found)) == expected
    assert len(expected) <= most
    assert found.gap == 0.001 or len(in_plain_python(rows, round(found.gap * 1e9) // 2)) > most
    assert found.begin.tolist() == sorted(found.begin.tolist())


def test_threads_beyond_the_limit_share_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iaprof.report.runs.MAX_PAIRS", 3)
    found = of(capture(tmp_path / "c", launch=[at(n, tid=n) for n in (1, 2, 3, 4, 5, 1)]), max_runs=10)
    assert [(run[0], run[3], run[6]) for run in runs(found)] == [
        ("k", 1, 2),
        ("k", 2, 1),
        ("k", 3, 1),
        ("[others]", 0, 1),
        ("[others]", 0, 1),
    ]
    # and with a lower limit on runs, the gap grows
    assert [run[6] for run in runs(of(tmp_path / "c", max_runs=4))] == [2, 1, 1, 2]


def test_absurd_times_are_harmless(tmp_path: Path) -> None:
    late = [{**at(0), "time_ns": time} for time in (0, (1 << 64) - 1, 1 << 63)]
    found = of(capture(tmp_path / "c", launch=late))
    assert found.count.sum() == 3
    assert found.begin[0] == -1


def test_a_capture_without_launches_has_none(tmp_path: Path) -> None:
    found = of(capture(tmp_path / "c"))
    assert (runs(found), found.kernels, found.threads) == ([], [], [])
