"""The rules of attribution: a small capture for each."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.gpu.intel.reasons import REASONS
from iaprof.report.gpu.module import GpuKernel, GpuModule
from iaprof.report.join.candidates import AMBIGUOUS, Method, Rule
from iaprof.report.join.jobs import jobs_of
from iaprof.report.join.joining import Task, join, samples_ahead
from iaprof.report.join.placements import Compilation, place_kernels
from iaprof.report.join.shares import JoinedShares, to_whole_counts
from unit.capturing import HEADER, capture, launch, record, stall


def module(*kernels: tuple[str, int, int]) -> GpuModule:
    """A module of kernels (name, address, size) without code."""
    made = []
    for name, address, size in kernels:
        kernel = GpuKernel.__new__(GpuKernel)
        for field, value in {
            "name": name,
            "demangled": name,
            "address": address,
            "size": size,
            "fingerprint": name,
        }.items():
            object.__setattr__(kernel, field, value)
        made.append(kernel)
    return GpuModule(kernels=tuple(made), problems=())


def joined(
    path: Path,
    compilations: list[Compilation] | None = None,
    *,
    rule: Rule | None = None,
    starts: dict[str, list[int]] | None = None,
    process: list[dict[str, Any]] | None = None,
    **kinds: list[dict[str, Any]],
) -> Counter[tuple[int, int, str, str, int]]:
    """Samples by process, stack, kernel's name, note and address.

    `starts` are the offsets at which instructions of kernels of that name start, `process` has `process` rows.
    """
    reader = CaptureReader(capture(path / "c", **kinds))
    launches = pa.Table.from_pylist(kinds.get("launch", []), pa.schema(list(KINDS["launch"])))
    processes = pa.Table.from_pylist(process or [], pa.schema(list(KINDS["process"])))
    placed = place_kernels(launches, compilations or [], processes=processes)
    placed.jobs = jobs_of(reader, (each.pid for each in placed.placements))
    starts = starts or {}
    known = {i: np.array(starts[p.name], np.uint64) for i, p in enumerate(placed.placements) if p.name in starts}
    with samples_ahead(reader) as samples:
        result, *_ = join(reader, Task(placed, 0, rule=rule or Rule(), starts=known), samples)
    found: Counter[tuple[int, int, str, str, int]] = Counter()
    for index, ip, counts in zip(result.site.tolist(), result.ip.tolist(), result.counts.tolist(), strict=True):
        site = placed.sites[index]
        name = placed.placements[site.placement].name if site.placement is not None else "-"
        found[site.pid, site.stack, name, site.comm if site.note == AMBIGUOUS else site.note, ip] += sum(counts)
    return found


LATEST, NONE, SPLIT = Rule(Method.LATEST), Rule(Method.NONE), Rule(split_ambiguous=True)
TWO = "[ambiguous: 2 processes]"


def within(ns: int) -> Rule:
    """A rule with this attribution window."""
    return Rule(window_ns=ns)


def event(time_ns: int, pid: int, event: str, tid: int = 0) -> dict[str, Any]:
    """A `process` row."""
    return {"time_ns": time_ns, "pid": pid, "tid": tid or pid, "event": event}


A, B = 0xFFFF8000_00010000, 0xFFFF8000_00020000  # sign-extended, as some devices report them
LOW_A, LOW_B = 0x10000, 0x20000


def test_a_stall_goes_to_the_kernel_whose_low_address_bits_it_has(tmp_path: Path) -> None:
    # given two kernels, whose launches carry a wrong iba, as they do on integrated devices
    launches = [launch(1, 7, A, 11, name="a", iba=5 << 40), launch(2, 7, B, 12, name="b", iba=5 << 40)]
    # when
    found = joined(
        tmp_path, stall=[stall(9, record(A, sbid=3), record(A + 8, send=1), record(B + 56, sync=2))], launch=launches
    )
    # then
    assert found == {
        (7, 11, "a", "", LOW_A): 3,
        (7, 11, "a", "", LOW_A + 8): 1,
        (7, 12, "b", "", LOW_B + 56): 2,
    }


def test_stalls_outside_all_kernels_are_counted(tmp_path: Path) -> None:
    # given stalls one instruction before, and right after, a kernel of 64 bytes
    stalls = [stall(9, record(A - 8, sbid=3), record(A + 64, send=1), record(A + 63 & ~7, sync=2))]
    found = joined(tmp_path, stall=stalls, launch=[launch(1, 7, A, 11, name="a")])
    assert found == {
        (0, 0, "-", "", LOW_A - 8): 3,
        (0, 0, "-", "", LOW_A + 64): 1,
        (7, 11, "a", "", LOW_A + 56): 2,
    }


def test_a_capture_without_launches_and_kernels(tmp_path: Path) -> None:
    assert joined(tmp_path, stall=[stall(9, record(A, sbid=3))]) == {(0, 0, "-", "", LOW_A): 3}


def test_a_single_site_gets_all_samples(tmp_path: Path) -> None:
    launches = [launch(10, 7, A, 11, name="a"), launch(20, 7, A, 11, name="a")]
    found = joined(tmp_path, stall=[stall(30, record(A, sbid=5))], launch=launches)
    assert found == {(7, 11, "a", "", LOW_A): 5}


def test_several_sites_share_samples_by_launches(tmp_path: Path) -> None:
    # given three launches from one site and one from another, before the read's end, and one after it
    launches = [launch(time, 7, A, stack, name="a") for time, stack in ((1, 11), (2, 11), (3, 12), (4, 11), (9, 12))]
    stalls = [stall(8, record(A, sbid=100), record(A + 8, send=4))]
    found = joined(tmp_path, stall=stalls, launch=launches)
    # then
    assert found == {
        (7, 11, "a", "", LOW_A): 75,
        (7, 12, "a", "", LOW_A): 25,
        (7, 11, "a", "", LOW_A + 8): 3,
        (7, 12, "a", "", LOW_A + 8): 1,
    }


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 50, 101])
def test_counts_are_whole_and_add_up(tmp_path: Path, count: int) -> None:
    # given seven sites with 1 to 7 launches, and reads of a few samples each
    launches = [launch(n, 7, A, 10 + n, name="a") for n in range(1, 8) for _ in range(n)]
    stalls = [stall(20 + n, record(A, sbid=1)) for n in range(count)]
    found = joined(tmp_path, stall=stalls, launch=launches)
    # then no count is further than one from its share
    assert sum(found.values()) == count
    for n in range(1, 8):
        assert abs(found[7, 10 + n, "a", "", LOW_A] - count * n / 28) < 1


@pytest.mark.parametrize(("intervals", "addresses"), [(1, 3000), (3000, 1), (60, 50)])
def test_single_samples_are_divided_fairly_over_time(intervals: int, addresses: int) -> None:
    # given single samples, each of which is shared by two sites, one third and two thirds
    interval, address = (each.ravel() for each in np.mgrid[0:intervals, 0:addresses])
    count = len(interval)
    shares = np.zeros((len(REASONS) + 2, 2 * count))
    shares[REASONS.index("sbid")] = np.tile([1 / 3, 2 / 3], count)
    ips = np.repeat(0x10000 + 8 * address, 2).astype(np.uint64)
    site = np.tile([0, 1], count)
    result = JoinedShares(np.repeat(interval, 2), np.zeros(2 * count, np.int64), site, ips, shares)
    # when
    found = to_whole_counts(result)
    # then each sample has a site, and each site has its share of all samples, to within a hundredth
    assert (found.counts.sum(axis=1) == 1).all()
    assert len({*zip(found.interval.tolist(), found.ip.tolist(), strict=True)}) == count == len(found.site)
    assert np.bincount(found.site) == pytest.approx([count / 3, 2 * count / 3], abs=count / 100)


def test_launches_before_the_window_do_not_count(tmp_path: Path) -> None:
    # given a kernel at one address in two processes; one process launches it long before the other
    launches = [launch(10, 7, A, 11, name="a"), launch(100, 8, A, 12, name="a")]
    stalls = [stall(120, record(A, sbid=8), begin_ns=110)]
    assert joined(tmp_path, stall=stalls, launch=launches, rule=within(99)) == {(8, 12, "a", "", LOW_A): 8}
    assert joined(tmp_path, stall=stalls, launch=launches, rule=within(100)) == {(0, 0, "a", TWO, LOW_A): 8}


def test_only_the_latest_burst_of_launches_counts(tmp_path: Path) -> None:
    # given launches in two bursts, and reads 12 ns after the second and long after it
    launches = [
        launch(time, 7, A, stack, name="a") for time, stack in ((10, 11), (12, 11), (50, 12), (52, 11), (53, 12))
    ]
    early, late = (stall(time, record(A, sbid=90), begin_ns=time - 1) for time in (65, 150))
    # then only the second burst can be running, until both are about as old
    assert joined(tmp_path, stall=[early], launch=launches) == {
        (7, 11, "a", "", LOW_A): 30,
        (7, 12, "a", "", LOW_A): 60,
    }
    assert joined(tmp_path, stall=[late], launch=launches) == {(7, 11, "a", "", LOW_A): 54, (7, 12, "a", "", LOW_A): 36}


def test_launches_during_a_read_count(tmp_path: Path) -> None:
    launches = [launch(time, 7, A, stack, name="a") for time, stack in ((101, 11), (110, 12), (119, 12))]
    found = joined(tmp_path, stall=[stall(120, record(A, sbid=9), begin_ns=100)], launch=launches)
    assert found == {(7, 11, "a", "", LOW_A): 3, (7, 12, "a", "", LOW_A): 6}


def test_a_kernel_that_runs_longer_than_the_window_is_the_last_launch(tmp_path: Path) -> None:
    launches = [launch(10, 7, A, 11, name="a"), launch(20, 7, A, 12, name="a")]
    found = joined(tmp_path, stall=[stall(900, record(A, sbid=8), begin_ns=895)], launch=launches, rule=within(50))
    assert found == {(7, 12, "a", "", LOW_A): 8}


def test_launches_in_many_time_buckets_add_up(tmp_path: Path) -> None:
    # given alternating launches of two sites every 10 ns, and reads of 5 ns at changing phases
    launches = [launch(10 * n, 7, A, 11 + n % 2, name="a") for n in range(1, 400)]
    for horizon in (1, 7, 64, 1000):
        expected: defaultdict[int, float] = defaultdict(float)
        stalls = []
        for n in range(60):
            begin, end = 61 * n + 20, 61 * n + 25
            stalls.append(stall(end, *[record(A, sbid=200)] * 6, begin_ns=begin))
            age = end - max(one["time_ns"] for one in launches if one["time_ns"] <= end)
            since = max(begin - horizon, min(begin, end - age - age // 2))
            inside = [one["stack"] for one in launches if since <= one["time_ns"] <= end]
            inside = inside or [[one["stack"] for one in launches if one["time_ns"] <= end][-1]]
            for stack in inside:
                expected[stack] += 1200 / len(inside)
        # when
        found = joined(tmp_path, stall=stalls, launch=launches, rule=within(horizon))
        # then
        assert sum(found.values()) == 60 * 1200
        for stack in (11, 12):
            assert abs(found[7, stack, "a", "", LOW_A] - expected[stack]) < 1


def test_latest_attributes_all_to_the_last_launch(tmp_path: Path) -> None:
    # given a kernel launched alternately from two sites
    launches = [launch(10, 7, A, 11, name="a"), launch(20, 7, A, 12, name="a"), launch(30, 8, A, 11, name="a")]
    stalls = [stall(time, record(A, sbid=1)) for time in (10, 15, 20, 29, 30, 99)]
    found = joined(tmp_path, stall=stalls, launch=launches, rule=LATEST)
    # then processes do not matter, as for Intel's tool
    assert found == {(7, 11, "a", "", LOW_A): 2, (7, 12, "a", "", LOW_A): 2, (8, 11, "a", "", LOW_A): 2}


def test_none_attributes_all_to_the_kernel(tmp_path: Path) -> None:
    launches = [launch(10, 7, A, 11, name="a"), launch(20, 7, A, 12, name="a"), launch(20, 8, B, 12, name="b")]
    stalls = [stall(30, record(A, sbid=3), record(B, send=2), record(B + 4096, send=1))]
    found = joined(tmp_path, stall=stalls, launch=launches, rule=NONE)
    assert found == {
        (7, 0, "a", "[any launch]", LOW_A): 3,
        (8, 0, "b", "[any launch]", LOW_B): 2,
        (0, 0, "-", "", LOW_B + 4096): 1,
    }


def test_stalls_before_the_first_launch(tmp_path: Path) -> None:
    found = joined(tmp_path, stall=[stall(5, record(A, sbid=1))], launch=[launch(10, 7, A, 11, name="a")])
    assert found == {(7, 0, "a", "[launched before recording]", LOW_A): 1}


def test_processes_are_distinguished_by_launch_times(tmp_path: Path) -> None:
    # given a kernel of each of two processes at one address, launched at different times
    launches = [launch(10, 7, A, 11, name="a"), launch(200, 8, A, 21, name="b", size=128)]
    reads = ((15, record(A, sbid=1)), (205, record(A, sbid=2)), (206, record(A + 64, sbid=4)))
    stalls = [stall(time, one, begin_ns=time - 5) for time, one in reads]
    found = joined(tmp_path, stall=stalls, launch=launches, rule=within(50))
    assert found == {(7, 11, "a", "", LOW_A): 1, (8, 21, "b", "", LOW_A): 2, (8, 21, "b", "", LOW_A + 64): 4}


def test_stalls_of_several_candidate_processes_are_ambiguous(tmp_path: Path) -> None:
    # given the same kernel in two processes, and different ones in two
    launches = [launch(10, 7, A, 11, name="a"), launch(11, 8, A, 21, name="a"), launch(12, 8, A, 21, name="a")]
    launches += [launch(10, 7, B, 11, name="b"), launch(11, 8, B, 21, name="c")]
    stalls = [stall(20, record(A, sbid=9), record(B, send=6))]
    # then the kernel is known if it is the same in all processes
    assert joined(tmp_path, stall=stalls, launch=launches) == {
        (0, 0, "a", TWO, LOW_A): 9,
        (0, 0, "-", TWO, LOW_B): 6,
    }
    # and with split_ambiguous, all is divided
    assert joined(tmp_path, stall=stalls, launch=launches, rule=SPLIT) == {
        (7, 11, "a", "", LOW_A): 3,
        (8, 21, "a", "", LOW_A): 6,
        (7, 11, "b", "", LOW_B): 3,
        (8, 21, "c", "", LOW_B): 3,
    }


def test_processes_are_distinguished_by_instruction_starts(tmp_path: Path) -> None:
    # given kernels of two processes at one address, whose instructions start at different offsets
    launches = [launch(10, 7, A, 11, name="a"), launch(11, 8, A, 21, name="b")]
    records = [record(A, sbid=1), record(A + 8, sbid=2), record(A + 16, sbid=4), record(A + 24, sbid=8)]
    starts = {"a": [0, 16, 32], "b": [0, 8, 32]}
    found = joined(tmp_path, stall=[stall(20, *records)], launch=launches, starts=starts)
    # then addresses of instructions of both, or of neither, stay ambiguous
    assert found == {
        (0, 0, "-", TWO, LOW_A): 1,
        (8, 21, "b", "", LOW_A + 8): 2,
        (7, 11, "a", "", LOW_A + 16): 4,
        (0, 0, "-", TWO, LOW_A + 24): 8,
    }
    # and a kernel with unknown code can have an instruction anywhere
    found = joined(tmp_path, stall=[stall(20, *records)], launch=launches, starts={"a": [0, 16, 32]})
    assert found[8, 21, "b", "", LOW_A + 8] == 2
    assert found[0, 0, "-", TWO, LOW_A + 16] == 4


def test_kernels_of_an_ended_process_do_not_run(tmp_path: Path) -> None:
    # given two processes with a kernel at one address, one of which ends
    launches = [launch(10, 7, A, 11, name="a"), launch(11, 8, A, 21, name="a")]
    ends = [event(1, 7, "fork"), event(20, 7, "exit", 70), event(20, 7, "exit"), event(60, 7, "fork")]
    stalls = [stall(22, record(A, sbid=1), begin_ns=19), stall(30, record(A, sbid=2), begin_ns=21)]
    found = joined(tmp_path, stall=stalls, launch=launches, process=ends)
    assert found == {(0, 0, "a", TWO, LOW_A): 1, (8, 21, "a", "", LOW_A): 2}


def test_a_process_outlives_its_first_thread(tmp_path: Path) -> None:
    launches = [launch(10, 7, A, 11, name="a"), launch(30, 7, A, 11, name="a"), launch(11, 8, A, 21, name="a")]
    stalls = [stall(30, record(A, sbid=2), begin_ns=21)]
    found = joined(tmp_path, stall=stalls, launch=launches, process=[event(20, 7, "exit")])
    assert found == {(0, 0, "a", TWO, LOW_A): 2}


def test_stalls_after_all_processes_ended_go_to_the_last_one(tmp_path: Path) -> None:
    # given two processes that end, one after the other
    launches = [launch(10, 7, A, 11, name="a"), launch(5, 8, A, 21, name="a")]
    ends = [event(20, 7, "exit"), event(40, 8, "exit")]
    found = joined(tmp_path, stall=[stall(50, record(A, sbid=2), begin_ns=45)], launch=launches, process=ends)
    # then they belong to the process that ended last
    assert found == {(8, 21, "a", "", LOW_A): 2}


def test_a_kernel_replaced_by_another_at_its_address(tmp_path: Path) -> None:
    # given a process that compiles one module after another to the same address
    compilations = [Compilation(5, 7, module(("old", A, 64))), Compilation(20, 7, module(("new", A, 32)))]
    launches = [launch(10, 7, A, 11), launch(30, 7, A, 11)]
    # when
    stalls = [stall(time, record(A, sbid=n), begin_ns=time - 2) for time, n in ((12, 1), (25, 2), (35, 4))]
    found = joined(tmp_path, compilations, stall=stalls, launch=launches)
    # then the last launched kernel runs until another is launched, but not after a new one was compiled over it
    assert found == {(7, 11, "old", "", LOW_A): 3, (7, 11, "new", "", LOW_A): 4}


def test_a_kernel_replaced_by_an_overlapping_one(tmp_path: Path) -> None:
    # given a kernel whose memory a larger one takes over
    compilations = [Compilation(5, 7, module(("old", A + 64, 64))), Compilation(20, 7, module(("new", A, 256)))]
    launches = [launch(10, 7, A + 64, 11, size=64), launch(30, 7, A, 12, size=256)]
    stalls = [stall(time, record(A + 64, sbid=n), begin_ns=time - 2) for time, n in ((12, 1), (35, 4))]
    found = joined(tmp_path, compilations, stall=stalls, launch=launches)
    assert found == {(7, 11, "old", "", LOW_A + 64): 1, (7, 12, "new", "", LOW_A + 64): 4}


def test_a_kernel_that_was_compiled_before_the_recording(tmp_path: Path) -> None:
    # given a kernel known only from launches, and another compiled to its address while recording
    launches = [launch(10, 7, A, 11, name="early"), launch(30, 7, A, 12, name="ignored")]
    stalls = [stall(time, record(A, sbid=n), begin_ns=time - 2) for time, n in ((12, 1), (35, 4))]
    found = joined(tmp_path, [Compilation(20, 7, module(("late", A, 64)))], stall=stalls, launch=launches)
    assert found == {(7, 11, "early", "", LOW_A): 1, (7, 12, "late", "", LOW_A): 4}


def test_a_module_without_a_recorded_launch(tmp_path: Path) -> None:
    found = joined(tmp_path, [Compilation(5, 7, module(("a", A, 64)))], stall=[stall(9, record(A, sbid=1))], launch=[])
    assert found == {(7, 0, "a", "[launch not recorded]", LOW_A): 1}


def test_a_launch_without_a_stack(tmp_path: Path) -> None:
    found = joined(tmp_path, stall=[stall(9, record(A, sbid=1))], launch=[launch(1, 7, A, 0, name="a", flags=2)])
    assert found == {(7, 0, "a", "[no stack]", LOW_A): 1}


def test_thousands_of_reads_and_launches_add_up(tmp_path: Path) -> None:
    # given alternating launches of two sites, and reads between
    launches = [launch(10 * n, 7, A, 11 + n % 2, name="a") for n in range(1, 3000)]
    stalls = [stall(10 * n + 5, *[record(A + 8 * (n % 8), sbid=1 + n % 3)] * (n % 5)) for n in range(1, 3000)]
    # when
    found = joined(tmp_path, stall=stalls, launch=launches, rule=LATEST)
    # then
    expected: Counter[tuple[int, int, str, str, int]] = Counter()
    for n in range(1, 3000):
        expected[7, 11 + n % 2, "a", "", LOW_A + 8 * (n % 8)] += (n % 5) * (1 + n % 3)
    assert found == +expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"w0": [1, 2], "w1": [1]}, "do not belong together"),
        ({"w1": None}, "column 'w1' has nulls"),
        ({"stream": 3}, "does not name"),
    ],
)
def test_inconsistent_stall_columns_are_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        joined(tmp_path, stall=[stall(9, record(A, sbid=1)) | row])


@pytest.mark.parametrize(
    "streams", [[{}], [7], [{"layout": "xe9", "ip_version": [1, 2]}], [{"layout": "xe2", "ip_version": 1}]]
)
def test_invalid_streams_in_the_header_are_refused(tmp_path: Path, streams: Any) -> None:
    path = capture(tmp_path / "c", {**HEADER, "streams": streams}, stall=[stall(9, record(A, sbid=1))])
    placed = place_kernels(pa.Table.from_pylist([], pa.schema(list(KINDS["launch"]))), [])
    with pytest.raises(CaptureError, match="cannot be right"), samples_ahead(CaptureReader(path)) as samples:
        join(CaptureReader(path), Task(placed, 0), samples)
