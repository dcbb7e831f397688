"""How well stalls find their launches on the mixed workload: three processes, overlapping kernels, several stacks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from integration.recording import iaprof, record
from standin import mixed, quality
from thorough import thorough

pytestmark = pytest.mark.bpf


def report(capture: Path, *options: str) -> str:
    done = iaprof("report", capture, *options)
    assert done.code == 0, done.err
    return done.out


@thorough
@pytest.mark.alone  # how its processes overlap depends on what else runs
def test_the_mixed_workload(tmp_path: Path) -> None:
    # given
    capture = tmp_path / "capture"
    with mixed.hardware(tmp_path / "gpu") as hardware:
        # when
        record(hardware, capture, "--", *mixed.command(seconds=6))
    # then the records' own numbers are the ledger's sums, and the workload is what it is said to be
    ledger = hardware.ledger()
    stalls = quality.read_stalls(capture)
    assert quality.true_cells(stalls, ledger) == quality.ledger_cells(ledger)
    assert all(before.end_ns <= after.begin_ns for before, after in pairwise(ledger.executions))
    for pid in {site.pid for site in ledger.sites}:
        numbers = [piece.launch for piece in ledger.executions if ledger.sites[piece.site].pid == pid]
        assert numbers == sorted(numbers)
    workload = quality.describe(stalls, ledger)
    assert workload.pairs > 300
    assert 0.3 < workload.with_choice / workload.pairs < 0.9
    # and what is not labelled is at the right process and kernel
    measured = quality.measure(capture, ledger, report)
    assert measured.places.right_share >= 0.999
    assert measured.places.labelled < 0.5 * measured.places.stalls
    # and the more so if it is known which process had work on the GPU at a time
    with_jobs = tmp_path / "with-jobs"
    quality.write_part(capture, None, with_jobs, quality.jobs_of(ledger))
    judged, _ = quality.judge(with_jobs, stalls, ledger, report)
    assert judged.right_share >= 0.999
    assert judged.labelled < 0.9 * measured.places.labelled
    # and in proportion is more than twice as near to who knows as the latest is, in a run that is easy for both, too
    errors = measured.errors
    assert errors["oracle"] < errors["proportional"]
    assert errors["proportional"] - errors["oracle"] <= (errors["latest"] - errors["oracle"]) / 2
    assert errors["proportional"] <= 0.1 * measured.compared
