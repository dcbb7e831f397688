"""Very many candidates for each sample: sums stay right, and time and memory stay small."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.report.join.attribution import MOST_CANDIDATES, drawn
from iaprof.report.join.joining import Task, join, samples_ahead
from iaprof.report.join.placements import LAUNCH_COLUMNS, Placed, place_kernels
from iaprof.report.join.shares import Joined
from thorough import thorough
from unit.capturing import capture, launch, record, stall
from unit.in_process import iaprof
from unit.slow_captures import kernels_over_each_other, processes_at_one_address, stacks_of_one_kernel

A = 0x1000_0000


def joined(path: Path) -> tuple[Joined, Placed, int]:
    reader = CaptureReader(path)
    placed = place_kernels(reader.table("launch", LAUNCH_COLUMNS), [])
    with samples_ahead(reader) as samples:
        result, _, cut, *_ = join(reader, Task(placed, 0), samples)
    return result, placed, cut


@pytest.mark.parametrize("stacks", [MOST_CANDIDATES - 4, MOST_CANDIDATES + 3, 400])
def test_each_of_many_stacks_gets_its_part(tmp_path: Path, stacks: int) -> None:
    # given a kernel that each stack launches once, and one of them as often as all others, and 300 reads of 40 samples
    times = [(1000 + number, 1 + number % stacks) for number in range(stacks)]
    times += [(1000 + number, 7) for number in range(stacks)]
    launches = [launch(at, 5, A, stack) for at, stack in sorted(times)]
    reads = [stall(10_000 + 10 * n, *(record(A + 8 * (n % 5), sbid=8) for _ in range(5)), begin_ns=5000)
             for n in range(300)]  # fmt: skip
    # when they are joined
    result, placed, _ = joined(capture(tmp_path / "c", launch=launches, stall=reads))
    # then no sample is lost at any address, and each stack has what its launches say
    at = Counter[int]()
    by = Counter[int]()
    for site, ip, counts in zip(result.site.tolist(), result.ip.tolist(), result.counts.tolist(), strict=True):
        at[ip] += sum(counts)
        by[placed.sites[site].stack] += sum(counts)
    assert at == {A + 8 * n: 60 * 40 for n in range(5)}
    one = 12_000 / (2 * stacks)
    assert by[7] == pytest.approx(one * (stacks + 1), rel=0.05)
    assert all(abs(by[stack] - one) < 5 + one / 2 for stack in range(1, stacks + 1) if stack != 7)
    assert not result.alone.any()


def test_a_candidate_is_drawn_as_often_as_its_share_says() -> None:
    # given two pairs' candidates, of very different shares, and 20,000 rows of one sample each
    share = np.array([0.5, 0.25, 0.2, 0.05, 0.9, 0.1])
    rows = np.arange(20_000)
    first, stop = np.where(rows % 2, 4, 0), np.where(rows % 2, 6, 4)
    # when candidates are drawn
    ips, times = (rows % 100 * 8).astype(np.uint64), (rows // 100 * 5_000_000).astype(np.uint64)
    row, candidate, part = drawn(share, first, stop, np.ones(len(rows)), ips, times)
    # then each row has one of its own pair, as often as its share
    assert row.tolist() == rows.tolist()
    assert (part == 1).all()
    assert ((candidate >= 4) == (rows % 2 == 1)).all()
    assert np.bincount(candidate) / 10_000 == pytest.approx(share, abs=0.01)


def test_a_row_of_many_samples_is_divided_evenly() -> None:
    share = np.full(100, 0.01)
    row, candidate, part = drawn(
        share, np.zeros(2, np.int64), np.full(2, 100), np.array([5.0, 5000.0]), np.zeros(2, np.uint64),
        np.array([1, 2], np.uint64),
    )  # fmt: skip
    assert np.bincount(row).tolist() == [5, 16]
    assert np.bincount(row, part) == pytest.approx([1, 1])
    assert set(np.diff(candidate[row == 0])) == {20}


def test_kernels_over_each_other_keep_all_samples(tmp_path: Path) -> None:
    # given 3,000 kernels over each other, and a sample at 3,000 addresses in them
    result, placed, cut = joined(kernels_over_each_other(tmp_path / "c", 3000))
    # then some were looked at for each, and each sample is at a kernel that contains its address
    assert cut > 1000
    assert result.counts.sum() == 3000
    for site, ip in zip(result.site.tolist(), result.ip.tolist(), strict=True):
        number = placed.sites[site].placement
        assert number is not None
        assert (
            placed.placements[number].address <= ip < placed.placements[number].address + placed.placements[number].size
        )
    # and hundreds of kernels have some
    assert len(set(result.site.tolist())) > 200


def test_that_kernels_were_left_out_is_told(tmp_path: Path) -> None:
    ran = iaprof("top", kernels_over_each_other(tmp_path / "c", 3000))
    assert "addresses: in so many kernels that only some of these were looked at" in ran.err


def test_few_kernels_over_each_other_are_all_looked_at(tmp_path: Path) -> None:
    _, _, cut = joined(kernels_over_each_other(tmp_path / "c", 500))
    assert cut == 0


def test_stacks_and_addresses_without_end_make_few_shares(tmp_path: Path) -> None:
    # given a kernel with 4,000 stacks and a sample at 2,000 addresses: 8 million shares
    result, _, _ = joined(stacks_of_one_kernel(tmp_path / "c", 4000))
    assert result.counts.sum() == 2000


@thorough
def test_candidates_without_end_are_refused(tmp_path: Path) -> None:
    # given 4,500 processes with a kernel at the same place, and 2,000 reads of it
    with pytest.raises(CaptureError, match=r"launches and processes that can have caused its stalls, more than"):
        joined(processes_at_one_address(tmp_path / "c", 4500))
