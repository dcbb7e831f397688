"""A page reads the text of instructions only of the kernels that it lists."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.report import profile as profiles
from iaprof.report.facts import Report
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.profile import ReportOptions, build

CAPTURE = Path(__file__).parents[3] / "data" / "captures" / "format-6.parquet"


def built(options: ReportOptions) -> Report:
    with GpuModuleLoader() as loader:
        return build(CaptureReader(CAPTURE), loader, options)


def test_kernels_with_most_samples_have_texts_and_others_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a capture of three kernels, of which a page lists one
    every = built(ReportOptions(texts=True))
    monkeypatch.setattr(profiles, "MAX_LISTED", 1)
    # when the text of its instructions is read
    some = built(ReportOptions(texts=True, texts_of_hottest=True))
    # then that is all that differs
    samples = np.bincount(every.profile.kernel, every.profile.counts.sum(axis=1))
    hottest = int(samples.argmax())
    assert len(some.binaries) == len(every.binaries) == 3
    for index, (one, other) in enumerate(zip(some.binaries, every.binaries, strict=True)):
        assert one is not None
        assert other is not None
        texts = [each.text for each in other.instructions]
        assert any(texts)
        assert [each.text for each in one.instructions] == (texts if index == hottest else [""] * len(texts))
        assert [each.mnemonic for each in one.instructions] == [each.mnemonic for each in other.instructions]
        assert [astuple(each)[-1] for each in one.instructions] == [astuple(each)[-1] for each in other.instructions]
    assert some.profile.codes == every.profile.codes
    assert some.profile.kernels == every.profile.kernels
    assert some.facts.problems == every.facts.problems
    assert some.facts.matched == every.facts.matched
