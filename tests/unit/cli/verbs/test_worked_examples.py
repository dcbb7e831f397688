"""The specification's small inputs through the command, files in and files out: the numbers that it names."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from unit.in_process import iaprof
from unit.timelines.clock_examples import E1, E2, E4, E4B, E7, E8, E9_FLEX, E9_TORCH, E12, e6
from unit.timelines.examples import launch
from unit.timelines.traces import Event, slice_

LOG = """
 Ideal/Total Cycles \nk_1-opCatBmm_fp16 {cycles}\nm_2-opCatScalar 0\n====== Perf Summary End ======
"""
ALL_COUNTERS = "power_ts4,coll_bw,bandwidth,prep_queue,rcu_util"


class Results:
    """What the command wrote and said."""

    def __init__(self, folder: Path, said: list[str]) -> None:
        self.folder, self.said = folder, said
        self.events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]

    def slices(self, *members: str) -> list[tuple[Any, ...]]:
        """These members of all slices, or of their args, sorted."""
        found = [event for event in self.events if event["ph"] == "X"]
        rows = [tuple(each.get(name, each["args"].get(name)) for name in members) for each in found]
        return sorted(rows, key=lambda row: [(value is None, value) for value in row])

    def points(self, track: str) -> list[tuple[float, float]]:
        """Time and value of a counter of one series."""
        found = [event for event in self.events if event["ph"] == "C" and event["name"] == track]
        return [(event["ts"], *event["args"].values()) for event in found]

    def rows(self, table: str) -> list[dict[str, str]]:
        """The rows of a table."""
        return list(csv.DictReader((self.folder / f"{table}.csv").read_text().splitlines()))


def run(folder: Path, files: Sequence[Any], *options: str) -> Results:
    """Writes files, and what the command makes of them."""
    paths = [folder / f"job-{number}.json" for number in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_text(json.dumps(content))
    done = iaprof("timeline", *paths, "-o", folder / "out", *options)
    assert done.code == 0, done.err
    return Results(folder / "out", done.err.splitlines())


def test_e1(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG.format(cycles=22000))
    found = run(tmp_path, [E1], "-c", str(tmp_path / "log"))
    assert len(found.slices("name")) == 6
    assert found.points("ConcurrentPreps") == [(980, 1), (1000, 0), (1010, 1), (1060, 0)]
    # between two samples 16.796875 W; that it ends is said, too, which the reference does not
    assert found.points("Power") == [(1050, 16.796875), (1110, 16.796875)]
    assert found.points("PT Active") == [(1000, 40), (1050, 0)]
    slices = [event["args"] for event in found.events if event["ph"] == "X"]
    classes = {args.get("orig_name"): args["class"] for args in slices}
    assert classes["k_1 DmaO"] == "MAIU_PROTOCOL_SEND_DATA"
    (active,) = found.rows("active")
    assert [float(each) for each in active.values()] == [90, 110, 1000, 1110, 81.82, 0]
    first, second = found.rows("summary")
    assert list(first.values()) == [
        "55.56", "50.0000", "1", "50.0000", "50.0000", "50.0000", "50.0000", "0.0000", "0", "k_[N] Cmpt Exec",
    ]  # fmt: skip
    assert (second["Time"], second["Total Time"]) == ("44.44", "40.0000")
    cycles = found.rows("ts_analysis")[0]
    assert [float(cycles[f"TS{n + 1}-{n}_Mean"]) for n in range(1, 5)] == [10000, 20000, 50000, 5000]
    categories = {row["Category"]: [float(row[name]) for name in ("Kernel_Time", "Frac_Time", "Calls", "Ideal_Time",
                  "Ideal_Cyc", "Frac_Ideal", "PT_Util")] for row in found.rows("categories")}  # fmt: skip
    assert categories["Bmm_fp16"] == [50, 0.5556, 1, 20, 22000, 1, 0.4]
    assert categories["Total"] == [90, 1, 2, 20, 22000, 1, 0.2222]
    assert {"other", "StcdpHbm"} <= categories.keys()
    of_cycles = {row["Category"]: row for row in found.rows("categories_cycles")}
    assert [of_cycles["Bmm_fp16"][name] for name in ("Cycles", "Cycles(core)", "Ideal_Cyc")] == [
        "50000", "55000", "22000",
    ]  # fmt: skip
    assert any("avg_mm_util=40.000, avg_util=22.222, t_mm=50.000, t_sf=40.000, ratio_mm/sf=55.56:44.44" in line
               for line in found.said)  # fmt: skip


def test_e1_with_more_ideal_cycles_than_there_is_time(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG.format(cycles=66000))
    found = run(tmp_path, [E1], "-c", str(tmp_path / "log"), "-q")
    assert found.points("PT Active") == [(1000, 101), (1050, 0)]
    assert max(ratio for (ratio,) in found.slices("pt_active") if ratio) == pytest.approx(1.2)
    ideal = {row["Category"]: row["Ideal_Cyc"] for row in found.rows("categories")}
    assert ideal["Bmm_fp16"] == "0"


def test_e1_with_a_limit_and_rows(tmp_path: Path) -> None:
    found = run(tmp_path, [E1], "--limit", '{"skip": 2, "count": 3}', "-q", "--keep-prep", "--keep-names")
    assert found.slices("name") == [("k_1 Cmpt Exec",), ("k_1 Cmpt Prep",), ("k_1 DmaI",)]
    (tmp_path / "other").mkdir()
    whole = run(tmp_path / "other", [E1], "--keep-prep", "-q")
    device = sorted({tid for pid, tid in whole.slices("pid", "tid") if pid == 0})
    assert device == [1200, 1300, 1400, 1500]  # of tids 13 to 16; the host's are in one row


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("tid", [1000, 1000, 1001, 1002, 1000, 1000, 1000, 1001]),
        ("drop", [1000] * 5),
        ("shift", [1000] * 8),
        ("warn", [1000] * 8),
    ],
)
def test_e2(tmp_path: Path, how: str, expected: list[int]) -> None:
    found = run(tmp_path, [E2], "--overlap", how, "-q")
    assert [tid for _, tid in found.slices("name", "tid")] == expected
    if how == "shift":
        shifted = {name: rest for name, *rest in found.slices("name", "ts", "dur", "orig_ts", "orig_dur")}
        assert shifted["s7"] == [1350.001, 19.996, 1349.997, 20]


@pytest.mark.parametrize(
    ("preparations", "points"),
    [
        ([(0, 100), (20, 40)], [(0, 1), (20, 2), (60, 1), (100, 0)]),  # the reference says 0 at 60
        ([(0, 30), (10, 40), (50, 10)], [(0, 1), (10, 2), (30, 1), (50, 1), (60, 0)]),
        ([(50, 10), (10, 40), (0, 30)], [(0, 1), (10, 2), (30, 1), (50, 1), (60, 0)]),
    ],
)
def test_e3(tmp_path: Path, preparations: list[tuple[int, int]], points: list[tuple[int, int]]) -> None:
    events = [slice_(f"p{number} Cmpt Prep", *times) for number, times in enumerate(preparations)]
    assert run(tmp_path, [events], "-q").points("ConcurrentPreps") == points


@pytest.mark.parametrize(
    ("events", "wraps", "first"),
    [
        (E4, [0, 1, 3], [4284967296, 2**32 + 5000000, 3 * 2**32 + 1000]),
        (E4B, [0, 0, 1], [4284967296, 4294917296, 2**32 + 5000000]),
    ],
    ids=["E4", "E4b"],
)
def test_e4(tmp_path: Path, events: list[Event], wraps: list[int], first: list[int]) -> None:
    found = run(tmp_path, [events])
    rows = found.slices("ts", "OVC", "TS1", "TSxOF")
    assert [row[1] for row in rows] == wraps
    assert [int(row[2]) for row in rows] == first
    if events is E4B:
        assert [row[3] for row in rows] == [None, "TS3", None]
    assert not any("-285331" in line or "--freq" in line for line in found.said)


def test_e5(tmp_path: Path) -> None:
    names = ["ax_1", "bx_1", "cx_1", "dx_1", "ex_1"]
    starts = [
        ("warm_9", 1000),
        *((name, begin + 10 * n) for begin in (1020, 1120, 1220) for n, name in enumerate(names)),
    ]
    events = [slice_(f"{name} Cmpt Exec", ts, 5, [1000 * ts] * 3 + [1000 * ts + 5000] * 2) for name, ts in starts]
    assert "iaprof: ITSTATS: [0] avg_iteration_time=100.0, iterations=2" in run(tmp_path, [events]).said


def test_e6_without_alignment(tmp_path: Path) -> None:
    found = run(tmp_path, e6(0), "--align-ranks", "none", "--flow", "--collectives", "--counters", ALL_COUNTERS, "-q")
    arrows = sorted((event["id"], event["ts"]) for event in found.events if event["ph"] in "sf")
    assert arrows == [(1000001, 998), (1000001, 1069.999), (1000002, 1086), (1000002, 1139.999)]
    calls = [row for row in found.slices("name", "pid", "tid", "ts", "dur", "Coll_data_size") if "gloo" in row[0]]
    assert calls == [("gloo:all_reduce", 1000 + rank, 10000 + rank, 1040, 100, 8000) for rank in (0, 1)]
    assert found.points("Coll_Bandwidth") == [(1040, 0.08), (1140, 0)]
    assert (998, 55.556) in found.points("BW DmaI")  # 4000 bytes in 72 us
    summary = found.rows("stats_summary")[0]
    assert [float(each) for each in summary.values()] == [0, 200, 80, 100, 0.4, 0.5]


def test_e6_without_slices_of_collectives(tmp_path: Path) -> None:
    found = run(tmp_path, e6(0), "--align-ranks", "none", "--merge-sends", "-q")
    assert found.points("BW allreduce") == [(1040, 0.04), (1140, 0)]
    assert found.points("BW all-pcie") == [(1040, 0.08), (1140, 0)]
    assert ("SenRdmaSend", 1085, 55) in found.slices("name", "ts", "dur")


def test_e6_with_alignment(tmp_path: Path) -> None:
    """Rank 1's counter is 500 us ahead: it is moved by that, not by 430, and the bandwidth is that of equal clocks."""
    found = run(tmp_path, e6(500), "--flow", "--collectives")
    assert any("The device of pid 1 is moved by -500.000 us" in line for line in found.said)
    assert found.points("Coll_Bandwidth") == [(1040, 0.08), (1140, 0)]


def test_e7(tmp_path: Path) -> None:
    said = run(tmp_path, E7, "--freq", "550").said
    assert any(line.endswith("use --freq=560.000") for line in said)
    assert sum("560.00/560.00/560.00 MHz (min/mean/max); rel_range=0.0, input_soc_freq/detected=0.982" in line
               for line in said) == 2  # fmt: skip


def test_e8(tmp_path: Path) -> None:
    found = run(tmp_path, [E8], "--align-jobs")
    kernels = [row for row in found.slices("name", "ts", "ts_adj", "OVC") if "Exec" in row[0]]
    assert kernels == [("k Cmpt Exec", 1000, -600, 0), ("l Cmpt Exec", 1100, -600, 0)]
    assert not any("--freq" in line for line in found.said)


def test_e9(tmp_path: Path) -> None:
    torch = {"deviceProperties": [{"id": 0}], "distributedInfo": {"rank": 0}, "traceEvents": E9_TORCH}
    found = run(tmp_path, [torch, *E9_FLEX])
    kernels = [ts for name, ts in found.slices("name", "ts") if "Exec" in name]
    assert kernels == [2220, 3220, 4220]
    assert next(ts for name, ts in found.slices("name", "ts") if name == "Flex RoundTrip") == 2040
    assert not any("--freq" in line for line in found.said)  # the reference recommends 955.0, which is wrong


def test_e10(tmp_path: Path) -> None:
    charges = (1000, 201000, 301000, 4294967000, 99704)
    events = []
    for number, charge in enumerate(charges):
        ts = 1000 + 100 * number
        counters = [1000 * ts] * 3 + [1000 * ts + 60000] * 2
        events.append(slice_("k Cmpt Exec", ts, 60, counters, Power=charge))
    found = run(tmp_path, [events])
    # the third value, above 100 W, is left out and said; the last one ends when the last sample was taken
    assert found.points("Power") == [(1060, 46.875), (1160, 23.4375), (1360, 23.4375), (1460, 23.4375)]
    assert any("1 of 4 values of power are above 100 W" in line for line in found.said)
    (tmp_path / "ts3").mkdir()
    by_cycles = run(tmp_path / "ts3", [events], "--counters", "power_ts3", "-q").points("Power Cmpt Exec")
    assert [value for _, value in by_cycles if value] == [2.0, 1.0, 42946.66, 1.0]


def test_e11(tmp_path: Path) -> None:
    file = {"deviceProperties": [{"id": 0}], "distributedInfo": {"rank": 0}, "traceEvents": launch()}
    found = run(tmp_path, [file], "-q")
    arrows = sorted((event["id"], event["ph"], event["ts"]) for event in found.events if event["ph"] in "sf")
    # the reference keeps the launch's own start, which has no end
    assert arrows == [
        (10, "f", 1070), (10, "s", 1010), (11, "f", 1130), (11, "s", 1010),
        (12, "f", 1240), (12, "s", 1159.999),
    ]  # fmt: skip
    assert found.points("TransferBW") == [(1050, 4), (1060, 0)]
    # the reference's is empty
    assert [(row["Name"], float(row["Total Time"])) for row in found.rows("summary")] == [
        ("mm_[N]", 50),
        ("add_[N]", 30),
    ]


def test_e12(tmp_path: Path) -> None:
    found = run(tmp_path, E12, "--align-ranks", "dilated")
    kernel = next((ts, dur) for name, ts, dur in found.slices("name", "ts", "dur") if name == "k Cmpt Exec")
    assert sum(kernel) == 1500
    assert any("its clock is 1.001000 times as fast" in line for line in found.said)
