"""What the jobs of the kernel's GPU scheduler tell of who can have caused stalls."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.report.join.candidates import AMBIGUOUS, Rule
from iaprof.report.join.jobs import Intervals, Jobs, jobs_of
from iaprof.report.join.joining import JoinResult, Task, join, samples_ahead
from iaprof.report.join.placements import LAUNCH_COLUMNS, Placed, place_kernels
from unit.capturing import HEADER, capture, launch, record, stall

A = 0x8000_0001_0000
MS = 1_000_000
ONE, OTHER, COMPOSITOR = 7, 8, 9


def job(pid: int, begin: int, end: int | None, at_once: bool = False, device: str | None = None) -> dict[str, Any]:
    """A `gpu_job` row, with its times in ms."""
    return {
        "time_ns": begin * MS, "end_ns": None if end is None else end * MS, "queued_ns": begin * MS if pid else None,
        "pid": pid, "queue": "ccs0", "device": device, "at_once": at_once,
    }  # fmt: skip


def joined(path: Path, pids: list[int], jobs: list[dict[str, Any]], **header: Any) -> tuple[Counter[Any], JoinResult]:
    """Joins a stall that was sampled from 100 to 105 ms to launches of these processes at 90 ms, all at one address."""
    launches = [launch(90 * MS, pid, A, pid, name=f"of {pid}") for pid in pids]
    stalls = [stall(105 * MS, record(A, sbid=8), begin_ns=100 * MS)]
    file = capture(path / "c", HEADER | header, stall=stalls, launch=launches, **({"gpu_job": jobs} if jobs else {}))
    reader = CaptureReader(file)
    placed: Placed = place_kernels(reader.table("launch", LAUNCH_COLUMNS), [])
    placed.jobs = jobs_of(reader, (each.pid for each in placed.placements))
    with samples_ahead(reader) as samples:
        result = join(reader, Task(placed, 0, rule=Rule()), samples)
    found: Counter[Any] = Counter()
    for index, counts in zip(result.joined.site.tolist(), result.joined.counts.tolist(), strict=True):
        site = placed.sites[index]
        known = site.comm if site.note == AMBIGUOUS else site.pid if site.placement is not None else "unknown"
        found[known] += sum(counts)
    return found, result


TWO = "[ambiguous: 2 processes]"


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([], TWO),
        ([job(ONE, 95, 103), job(OTHER, 80, 99)], ONE),
        ([job(ONE, 80, 99), job(ONE, 106, 107), job(OTHER, 104, None)], OTHER),
        ([job(ONE, 80, 100), job(OTHER, 1, 2), job(OTHER, 105, 106)], TWO),  # at the very edges
        ([job(ONE, 95, 103), job(OTHER, 101, 102)], TWO),
        ([job(ONE, 95, 103), job(OTHER, 106, 107)], TWO),  # before its first job nothing is known of a process
        # nobody had a job, so records may be of a time that is not known so exactly
        ([job(ONE, 80, 99), job(OTHER, 80, 99)], TWO),
        # a process without jobs may use another driver, and one whose jobs end at once may run on
        ([job(ONE, 95, 103)], TWO),
        ([job(ONE, 95, 103), job(OTHER, 80, 80, at_once=True), job(OTHER, 81, 82)], TWO),
        # who queued a job before the recording is not known
        ([job(ONE, 95, 103), job(OTHER, 80, 99), job(0, 0, 100)], TWO),
        ([job(ONE, 95, 103), job(OTHER, 80, 99), job(0, 0, 99)], ONE),
    ],
)
def test_processes_without_a_job_are_excluded(tmp_path: Path, jobs: list[dict[str, Any]], expected: object) -> None:
    found, _ = joined(tmp_path, [ONE, OTHER], jobs)
    assert found == {expected: 8}


def test_jobs_of_other_gpus_tell_nothing(tmp_path: Path) -> None:
    streams = [HEADER["streams"][0] | {"pci_address": "0000:03:00.0"}]
    ran, idle = job(ONE, 95, 103, device="0000:03:00.0"), job(OTHER, 80, 99, device="0000:03:00.0")
    elsewhere = job(OTHER, 95, 103, device="0000:00:02.0"), job(COMPOSITOR, 95, 103, device="0000:00:02.0")
    found, result = joined(tmp_path, [ONE, OTHER], [ran, idle, *elsewhere], streams=streams)
    assert found == {ONE: 8}
    assert result.beside_others == 0


def test_jobs_of_which_some_are_missing_exclude_nobody(tmp_path: Path) -> None:
    lost = {"source": "gpu jobs", "what": "lost", "count": 1, "events": 1}
    found, _ = joined(tmp_path, [ONE, OTHER], [job(ONE, 95, 103), job(OTHER, 80, 99)], losses=[lost])
    assert found == {TWO: 8}


@pytest.mark.parametrize(
    ("jobs", "expected", "beside"),
    [
        ([job(COMPOSITOR, 101, 102), job(ONE, 80, 99)], "unknown", 1),
        ([job(COMPOSITOR, 101, 102), job(ONE, 99, 101)], ONE, 1),
        ([job(COMPOSITOR, 80, 99), job(ONE, 99, 101)], ONE, 0),
        ([job(COMPOSITOR, 101, 102)], ONE, 1),  # this one's jobs are not known
    ],
)
def test_programs_without_launches_keep_their_stalls(
    tmp_path: Path, jobs: list[dict[str, Any]], expected: object, beside: int
) -> None:
    found, result = joined(tmp_path, [ONE], jobs)
    assert found == {expected: 8}
    assert result.beside_others == beside


def test_intervals_of_several_lanes() -> None:
    # given random ones, many of which overlap
    random = np.random.default_rng(1)
    begins, lanes = random.integers(0, 3000, 300, np.uint64), random.integers(0, 7, 300)
    ends = begins + random.integers(0, 90, 300, np.uint64)
    since, lane = random.integers(0, 3000, 2000, np.uint64), random.integers(0, 9, 2000)
    until = since + random.integers(0, 9, 2000, np.uint64)
    # then
    overlap = (begins <= until[:, None]) & (ends >= since[:, None]) & (lanes == lane[:, None])
    assert 500 < overlap.any(axis=1).sum() < 1500
    assert (Intervals(begins, ends, lanes).overlap(since, until, lane) == overlap.any(axis=1)).all()
    # and without any, nothing is so
    assert not Intervals(begins[:0], ends[:0]).overlap(since, until).any()


def test_as_many_processes_as_jobs_take_no_longer() -> None:
    count = 200_000
    times = np.arange(count, dtype=np.uint64) * np.uint64(10) + np.uint64(5)
    columns = {"time_ns": times, "end_ns": times + np.uint64(3), "pid": np.arange(1, count + 1, dtype=np.uint32)}
    pids = np.arange(1, count + 1)
    jobs = Jobs(pa.table({**columns, "at_once": np.zeros(count, bool)}), pids)
    assert jobs.can_have_run(pids, times, times).all()
    assert not jobs.can_have_run(pids, times + np.uint64(4), times + np.uint64(5)).any()
