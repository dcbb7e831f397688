"""When kernels' samples were seen: runs of reads, with as many samples as the profile has."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.export import Executions, Track
from iaprof.formats.profile import Profile, kernel_name
from iaprof.report.cpu_names import SymbolOptions
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.join import seen
from iaprof.report.join.selection import Selection
from iaprof.report.merging import merge
from iaprof.report.parts import build_parts
from iaprof.report.profile import ReportOptions
from unit.capturing import HEADER, capture, launch, record, stall
from unit.report.join import test_joining

MS, S = 1_000_000, 1_000_000_000
FIRST, SECOND = 0x8000_0001_0000, 0x8000_0002_0000


def found(path: Path, selection: Selection = Selection()) -> tuple[Executions, Profile]:  # noqa: B008 (it is frozen)
    report = build_parts(CaptureReader(path), GpuModuleLoader(), ReportOptions(selection, seen=True), SymbolOptions())
    assert report.executions is not None
    return report.executions, report.profile


def runs(executions: Executions) -> list[tuple[str, float, float, int]]:
    """Kernel, begin and end in ms, and samples of each run."""
    columns = (executions.track, executions.begin * 1e3, executions.end * 1e3, executions.count)
    return sorted(
        (executions.tracks[track].kernel, round(begin, 3), round(end, 3), count)
        for track, begin, end, count in zip(*(column.tolist() for column in columns), strict=True)
    )


def recorded(folder: Path) -> Path:
    """Two kernels: one in reads at 10, 20 and 500 ms, of which the last came after a pause; the other at 20 ms."""
    launches = [launch(S, 7, FIRST, name="first"), launch(S, 7, SECOND, name="second")]
    reads = [
        stall(S + 10 * MS, record(FIRST, sbid=3), record(FIRST + 8, active=1), begin_ns=S),
        stall(S + 20 * MS, record(FIRST, sbid=2), record(SECOND, send=5), begin_ns=S + 6 * MS),
        stall(S + 500 * MS, record(FIRST, sbid=4), begin_ns=S + 16 * MS),
    ]
    return capture(folder / "c.parquet", launch=launches, stall=reads)


def test_successive_reads_with_samples_are_one_run(tmp_path: Path) -> None:
    executions, _ = found(recorded(tmp_path))
    assert runs(executions) == [("first", 0, 20, 6), ("first", 480, 500, 4), ("second", 6, 20, 5)]


def test_kernels_have_the_queue_of_their_launches(tmp_path: Path) -> None:
    # given a kernel that was launched to one queue, and one that was to two
    launches = [
        launch(S, 7, FIRST, name="first", list=0x5000),
        launch(S, 7, SECOND, name="second", list=0x5000),
        launch(S, 7, SECOND, name="second", list=0x6000),
    ]
    read = stall(S + 10 * MS, record(FIRST, sbid=3), record(SECOND, send=5), begin_ns=S)
    # when
    executions, _ = found(capture(tmp_path / "c", launch=launches, stall=[read]))
    # then
    assert sorted((track.kernel, track.queue) for track in executions.tracks) == [("first", 0x5000), ("second", 0)]


def test_filters_choose_runs_too(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    assert runs(found(path, Selection(reasons=frozenset(["active"])))[0]) == [("first", 0, 10, 1)]
    assert runs(found(path, Selection(pids=frozenset([8])))[0]) == []


def test_a_capture_without_samples_has_no_runs(tmp_path: Path) -> None:
    assert runs(found(capture(tmp_path / "c", launch=[launch(S, 7, FIRST)], stall=[]))[0]) == []


def by_track(executions: Executions, profile: Profile) -> tuple[Counter[object], Counter[object]]:
    """The samples of each device, kernel and launch: of the runs, and of the profile."""
    of_runs: Counter[object] = Counter()
    for track, count in zip(executions.track.tolist(), executions.count.tolist(), strict=True):
        of_runs[executions.tracks[track]] += count
    of_profile: Counter[object] = Counter()
    samples = profile.counts.sum(axis=1).tolist()
    columns = (profile.device, profile.kernel, profile.code, profile.launch)
    for device, kernel, code, launched, count in zip(*(column.tolist() for column in columns), samples, strict=True):
        name = kernel_name(profile.kernels[kernel], profile.codes[code])
        of_profile[Track(profile.devices[device], name, profile.launches[launched])] += count
    return of_runs, of_profile


@pytest.mark.parametrize("seed", range(4))
def test_runs_have_the_samples_of_the_profile(seed: int, tmp_path: Path) -> None:
    # given kernels that several stacks launch at once, on two GPUs, so that each gets a fraction of a read's samples
    path = test_joining.made(tmp_path / "c.parquet", seed)
    # when
    of_runs, of_profile = by_track(*found(path))
    # then
    assert of_runs == of_profile


def test_runs_do_not_depend_on_row_groups(tmp_path: Path) -> None:
    several, one = (found(test_joining.made(tmp_path / f"{groups}.parquet", groups=groups))[0] for groups in (9, 1))
    assert runs(several) == runs(one)


def test_of_many_sites_those_with_few_samples_share_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen, "_MAX_PAIRS", 1)
    executions, profile = found(recorded(tmp_path))
    assert [each.kernel for each in executions.tracks] == ["first", "[others]"]
    assert executions.count.sum() == profile.counts.sum()


def test_parts_of_a_merged_capture_keep_their_hosts(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    other = capture(
        tmp_path / "other.parquet", HEADER | {"host": {"name": "two"}, "clock": {"monotonic_ns": S, "realtime_ns": S}},
        launch=[launch(S, 7, FIRST, name="k")], stall=[stall(S + MS, record(FIRST, sbid=1), begin_ns=S)],
    )  # fmt: skip
    merge([path, other], tmp_path / "both.parquet")
    executions, profile = found(tmp_path / "both.parquet")
    assert executions.count.sum() == profile.counts.sum() == 16
    assert {each.device for each in executions.tracks} >= {"two"}
    assert np.all(executions.end >= executions.begin)
