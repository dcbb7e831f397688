"""Whose stalls they are: one small capture per rule."""

from collections import Counter
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
from iaprof.report.join.attribution import JoinedShares, to_whole_counts
from iaprof.report.join.candidates import AMBIGUOUS, Method, Rule
from iaprof.report.join.joining import Task, join
from iaprof.report.join.placements import Compilation, place_kernels
from unit.capturing import HEADER, capture, launch, record, stall


def module(*kernels: tuple[str, int, int]) -> GpuModule:
    """A module of kernels (name, address, size) of which nothing else is known."""
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
    known = {
        i: np.array(starts[p.name], np.uint64) for i, p in enumerate(placed.placements) if p.name in (starts or {})
    }
    result, _ = join(reader, Task(placed, 0, rule=rule or Rule(), starts=known))
    found: Counter[tuple[int, int, str, str, int]] = Counter()
    for index, ip, counts in zip(result.site.tolist(), result.ip.tolist(), result.counts.tolist(), strict=True):
        site = placed.sites[index]
        name = placed.placements[site.placement].name if site.placement is not None else "-"
        found[site.pid, site.stack, name, site.comm if site.note == AMBIGUOUS else site.note, ip] += sum(counts)
    return found


LATEST, NONE, SPLIT = Rule(Method.LATEST), Rule(Method.NONE), Rule(split_ambiguous=True)
TWO = "[ambiguous: 2 processes]"


def within(ns: int) -> Rule:
    """A rule with this horizon."""
    return Rule(window_ns=ns)


def event(time_ns: int, pid: int, event: str, tid: int = 0) -> dict[str, Any]:
    """A `process` row."""
    return {"time_ns": time_ns, "pid": pid, "tid": tid or pid, "event": event}


A, B = 0xFFFF8000_00010000, 0xFFFF8000_00020000  # sign-extended, as some devices give them
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


def test_outside_of_all_kernels_nothing_is_lost(tmp_path: Path) -> None:
    # given stalls one instruction before, and right behind, a kernel of 64 bytes
    stalls = [stall(9, record(A - 8, sbid=3), record(A + 64, send=1), record(A + 63 & ~7, sync=2))]
    found = joined(tmp_path, stall=stalls, launch=[launch(1, 7, A, 11, name="a")])
    assert found == {
        (0, 0, "-", "", LOW_A - 8): 3,
        (0, 0, "-", "", LOW_A + 64): 1,
        (7, 11, "a", "", LOW_A + 56): 2,
    }


def test_without_any_launch_or_kernel(tmp_path: Path) -> None:
    assert joined(tmp_path, stall=[stall(9, record(A, sbid=3))]) == {(0, 0, "-", "", LOW_A): 3}


def test_one_place_gets_all(tmp_path: Path) -> None:
    launches = [launch(10, 7, A, 11, name="a"), launch(20, 7, A, 11, name="a")]
    found = joined(tmp_path, stall=[stall(30, record(A, sbid=5))], launch=launches)
    assert found == {(7, 11, "a", "", LOW_A): 5}


def test_several_places_share_by_their_launches(tmp_path: Path) -> None:
    # given three launches from one place and one from another, before the read's end, and one after it
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
def test_shares_are_whole_and_add_up_whatever_they_are(tmp_path: Path, count: int) -> None:
    # given seven places with 1 to 7 launches, and reads of a few samples each
    launches = [launch(n, 7, A, 10 + n, name="a") for n in range(1, 8) for _ in range(n)]
    stalls = [stall(20 + n, record(A, sbid=1)) for n in range(count)]
    found = joined(tmp_path, stall=stalls, launch=launches)
    # then no count is further than one from its share
    assert sum(found.values()) == count
    for n in range(1, 8):
        assert abs(found[7, 10 + n, "a", "", LOW_A] - count * n / 28) < 1


@pytest.mark.parametrize(("intervals", "addresses"), [(1, 3000), (3000, 1), (60, 50)])
def test_single_samples_are_shared_as_many_are(intervals: int, addresses: int) -> None:
    # given samples one by one, each of which is a third of one site's and two thirds of the other's
    interval, address = (each.ravel() for each in np.mgrid[0:intervals, 0:addresses])
    count = len(interval)
    shares = np.zeros((len(REASONS) + 1, 2 * count))
    shares[REASONS.index("sbid")] = np.tile([1 / 3, 2 / 3], count)
    ips = np.repeat(0x10000 + 8 * address, 2).astype(np.uint64)
    site = np.tile([0, 1], count)
    result = JoinedShares(np.repeat(interval, 2), np.zeros(2 * count, np.int64), site, ips, shares)
    # when
    found = to_whole_counts(result)
    # then each sample is somebody's, and of all of them each has its part, to within a hundredth
    assert (found.counts.sum(axis=1) == 1).all()
    assert len({*zip(found.interval.tolist(), found.ip.tolist(), strict=True)}) == count == len(found.site)
    assert np.bincount(found.site) == pytest.approx([count / 3, 2 * count / 3], abs=count / 100)


def test_what_is_launched_before_the_horizon_has_ended(tmp_path: Path) -> None:
    # given a kernel at one address in two processes, of which one launches it long before the other
    launches = [launch(10, 7, A, 11, name="a"), launch(100, 8, A, 12, name="a")]
    stalls = [stall(120, record(A, sbid=8), begin_ns=110)]
    assert joined(tmp_path, stall=stalls, launch=launches, rule=within(99)) == {(8, 12, "a", "", LOW_A): 8}
    assert joined(tmp_path, stall=stalls, launch=launches, rule=within(100)) == {(0, 0, "a", TWO, LOW_A): 8}


def test_of_one_process_what_was_launched_together_runs_together(tmp_path: Path) -> None:
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


def test_what_was_launched_while_a_read_was_sampled_can_be_running(tmp_path: Path) -> None:
    launches = [launch(time, 7, A, stack, name="a") for time, stack in ((101, 11), (110, 12), (119, 12))]
    found = joined(tmp_path, stall=[stall(120, record(A, sbid=9), begin_ns=100)], launch=launches)
    assert found == {(7, 11, "a", "", LOW_A): 3, (7, 12, "a", "", LOW_A): 6}


def test_what_ran_longer_than_the_horizon_is_the_last_one_s(tmp_path: Path) -> None:
    launches = [launch(10, 7, A, 11, name="a"), launch(20, 7, A, 12, name="a")]
    found = joined(tmp_path, stall=[stall(900, record(A, sbid=8), begin_ns=895)], launch=launches, rule=within(50))
    assert found == {(7, 12, "a", "", LOW_A): 8}


def test_launches_in_many_buckets_of_time_add_up(tmp_path: Path) -> None:
    # given launches of two places in turn every 10 ns, and reads of 5 ns at changing phases
    launches = [launch(10 * n, 7, A, 11 + n % 2, name="a") for n in range(1, 400)]
    for horizon in (1, 7, 64, 1000):
        expected: Counter[int] = Counter()
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


def test_latest_gives_all_to_the_last_launch(tmp_path: Path) -> None:
    # given a kernel launched from two places in turn
    launches = [launch(10, 7, A, 11, name="a"), launch(20, 7, A, 12, name="a"), launch(30, 8, A, 11, name="a")]
    stalls = [stall(time, record(A, sbid=1)) for time in (10, 15, 20, 29, 30, 99)]
    found = joined(tmp_path, stall=stalls, launch=launches, rule=LATEST)
    # then not even processes are looked at, as Intel's tool does not
    assert found == {(7, 11, "a", "", LOW_A): 2, (7, 12, "a", "", LOW_A): 2, (8, 11, "a", "", LOW_A): 2}


def test_none_gives_all_to_the_kernel(tmp_path: Path) -> None:
    launches = [launch(10, 7, A, 11, name="a"), launch(20, 7, A, 12, name="a"), launch(20, 8, B, 12, name="b")]
    stalls = [stall(30, record(A, sbid=3), record(B, send=2), record(B + 4096, send=1))]
    found = joined(tmp_path, stall=stalls, launch=launches, rule=NONE)
    assert found == {
        (7, 0, "a", "[any launch]", LOW_A): 3,
        (8, 0, "b", "[any launch]", LOW_B): 2,
        (0, 0, "-", "", LOW_B + 4096): 1,
    }


def test_before_the_first_launch(tmp_path: Path) -> None:
    found = joined(tmp_path, stall=[stall(5, record(A, sbid=1))], launch=[launch(10, 7, A, 11, name="a")])
    assert found == {(7, 0, "a", "[launched before recording]", LOW_A): 1}


def test_processes_are_told_apart_by_time(tmp_path: Path) -> None:
    # given a kernel of each of two processes at one address, launched at different times
    launches = [launch(10, 7, A, 11, name="a"), launch(200, 8, A, 21, name="b", size=128)]
    reads = ((15, record(A, sbid=1)), (205, record(A, sbid=2)), (206, record(A + 64, sbid=4)))
    stalls = [stall(time, one, begin_ns=time - 5) for time, one in reads]
    found = joined(tmp_path, stall=stalls, launch=launches, rule=within(50))
    assert found == {(7, 11, "a", "", LOW_A): 1, (8, 21, "b", "", LOW_A): 2, (8, 21, "b", "", LOW_A + 64): 4}


def test_what_several_processes_can_have_launched_is_labelled(tmp_path: Path) -> None:
    # given the same kernel in two processes, and different ones in two
    launches = [launch(10, 7, A, 11, name="a"), launch(11, 8, A, 21, name="a"), launch(12, 8, A, 21, name="a")]
    launches += [launch(10, 7, B, 11, name="b"), launch(11, 8, B, 21, name="c")]
    stalls = [stall(20, record(A, sbid=9), record(B, send=6))]
    # then the kernel is known where it is the same
    assert joined(tmp_path, stall=stalls, launch=launches) == {
        (0, 0, "a", TWO, LOW_A): 9,
        (0, 0, "-", TWO, LOW_B): 6,
    }
    # and on request all is split
    assert joined(tmp_path, stall=stalls, launch=launches, rule=SPLIT) == {
        (7, 11, "a", "", LOW_A): 3,
        (8, 21, "a", "", LOW_A): 6,
        (7, 11, "b", "", LOW_B): 3,
        (8, 21, "c", "", LOW_B): 3,
    }


def test_processes_are_told_apart_by_where_instructions_start(tmp_path: Path) -> None:
    # given kernels of two processes at one address, whose instructions start at different offsets
    launches = [launch(10, 7, A, 11, name="a"), launch(11, 8, A, 21, name="b")]
    records = [record(A, sbid=1), record(A + 8, sbid=2), record(A + 16, sbid=4), record(A + 24, sbid=8)]
    starts = {"a": [0, 16, 32], "b": [0, 8, 32]}
    found = joined(tmp_path, stall=[stall(20, *records)], launch=launches, starts=starts)
    # then what is an instruction of both, or of neither, stays undecided
    assert found == {
        (0, 0, "-", TWO, LOW_A): 1,
        (8, 21, "b", "", LOW_A + 8): 2,
        (7, 11, "a", "", LOW_A + 16): 4,
        (0, 0, "-", TWO, LOW_A + 24): 8,
    }
    # and a kernel whose code is not known can have one anywhere
    found = joined(tmp_path, stall=[stall(20, *records)], launch=launches, starts={"a": [0, 16, 32]})
    assert found[8, 21, "b", "", LOW_A + 8] == 2
    assert found[0, 0, "-", TWO, LOW_A + 16] == 4


def test_a_process_that_has_gone_runs_nothing_more(tmp_path: Path) -> None:
    # given two processes with a kernel at one address, one of which ends
    launches = [launch(10, 7, A, 11, name="a"), launch(11, 8, A, 21, name="a")]
    ends = [event(1, 7, "fork"), event(20, 7, "exit", 70), event(20, 7, "exit"), event(60, 7, "fork")]
    stalls = [stall(22, record(A, sbid=1), begin_ns=19), stall(30, record(A, sbid=2), begin_ns=21)]
    found = joined(tmp_path, stall=stalls, launch=launches, process=ends)
    assert found == {(0, 0, "a", TWO, LOW_A): 1, (8, 21, "a", "", LOW_A): 2}


def test_a_process_whose_first_thread_has_gone_goes_on(tmp_path: Path) -> None:
    launches = [launch(10, 7, A, 11, name="a"), launch(30, 7, A, 11, name="a"), launch(11, 8, A, 21, name="a")]
    stalls = [stall(30, record(A, sbid=2), begin_ns=21)]
    found = joined(tmp_path, stall=stalls, launch=launches, process=[event(20, 7, "exit")])
    assert found == {(0, 0, "a", TWO, LOW_A): 2}


def test_stalls_that_arrive_after_everybody_has_gone(tmp_path: Path) -> None:
    # given two processes that end, one after the other
    launches = [launch(10, 7, A, 11, name="a"), launch(5, 8, A, 21, name="a")]
    ends = [event(20, 7, "exit"), event(40, 8, "exit")]
    found = joined(tmp_path, stall=[stall(50, record(A, sbid=2), begin_ns=45)], launch=launches, process=ends)
    # then it was whoever was there longest
    assert found == {(8, 21, "a", "", LOW_A): 2}


def test_an_address_that_another_kernel_takes_later(tmp_path: Path) -> None:
    # given a process that compiles one module after the other to one place
    compilations = [Compilation(5, 7, module(("old", A, 64))), Compilation(20, 7, module(("new", A, 32)))]
    launches = [launch(10, 7, A, 11), launch(30, 7, A, 11)]
    # when
    stalls = [stall(time, record(A, sbid=n), begin_ns=time - 2) for time, n in ((12, 1), (25, 2), (35, 4))]
    found = joined(tmp_path, compilations, stall=stalls, launch=launches)
    # then what was launched last runs until another is launched; and the old one not after the new one was compiled
    assert found == {(7, 11, "old", "", LOW_A): 3, (7, 11, "new", "", LOW_A): 4}


def test_memory_that_a_kernel_at_another_address_takes(tmp_path: Path) -> None:
    # given a kernel whose memory becomes part of a larger one's
    compilations = [Compilation(5, 7, module(("old", A + 64, 64))), Compilation(20, 7, module(("new", A, 256)))]
    launches = [launch(10, 7, A + 64, 11, size=64), launch(30, 7, A, 12, size=256)]
    stalls = [stall(time, record(A + 64, sbid=n), begin_ns=time - 2) for time, n in ((12, 1), (35, 4))]
    found = joined(tmp_path, compilations, stall=stalls, launch=launches)
    assert found == {(7, 11, "old", "", LOW_A + 64): 1, (7, 12, "new", "", LOW_A + 64): 4}


def test_a_kernel_that_was_compiled_before_the_recording(tmp_path: Path) -> None:
    # given one that only launches tell of, and another that is compiled to its place while recording
    launches = [launch(10, 7, A, 11, name="early"), launch(30, 7, A, 12, name="ignored")]
    stalls = [stall(time, record(A, sbid=n), begin_ns=time - 2) for time, n in ((12, 1), (35, 4))]
    found = joined(tmp_path, [Compilation(20, 7, module(("late", A, 64)))], stall=stalls, launch=launches)
    assert found == {(7, 11, "early", "", LOW_A): 1, (7, 12, "late", "", LOW_A): 4}


def test_a_module_of_which_no_launch_was_recorded(tmp_path: Path) -> None:
    found = joined(tmp_path, [Compilation(5, 7, module(("a", A, 64)))], stall=[stall(9, record(A, sbid=1))], launch=[])
    assert found == {(7, 0, "a", "[launch not recorded]", LOW_A): 1}


def test_a_launch_without_a_stack(tmp_path: Path) -> None:
    found = joined(tmp_path, stall=[stall(9, record(A, sbid=1))], launch=[launch(1, 7, A, 0, name="a", flags=2)])
    assert found == {(7, 0, "a", "[no stack]", LOW_A): 1}


def test_thousands_of_reads_and_launches_add_up(tmp_path: Path) -> None:
    # given launches of two places in turn, and reads between
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
def test_stalls_that_do_not_fit_together(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        joined(tmp_path, stall=[stall(9, record(A, sbid=1)) | row])


@pytest.mark.parametrize(
    "streams", [[{}], [7], [{"layout": "xe9", "ip_version": [1, 2]}], [{"layout": "xe2", "ip_version": 1}]]
)
def test_headers_that_make_no_sense(tmp_path: Path, streams: Any) -> None:
    path = capture(tmp_path / "c", {**HEADER, "streams": streams}, stall=[stall(9, record(A, sbid=1))])
    with pytest.raises(CaptureError, match="makes no sense"):
        join(
            CaptureReader(path), Task(place_kernels(pa.Table.from_pylist([], pa.schema(list(KINDS["launch"]))), []), 0)
        )
