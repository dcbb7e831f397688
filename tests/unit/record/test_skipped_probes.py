"""Kernels that skip probes in silence: a recording says so."""

from __future__ import annotations

from unittest.mock import Mock, call

import pytest

from iaprof.record.sources import launches as module
from iaprof.record.sources.launches import SKIPPED, Launches


@pytest.mark.parametrize("version", [(5, 15), (5, 19), (6, 0), (6, 18)])
def test_a_recording_says_that_an_old_kernel_may_skip_launches(
    version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "linux_version", lambda: version)
    journal = Mock()
    launches = Launches(Mock(), Mock(), Mock(), Mock(), Mock(), Mock(), Mock())
    launches.start(journal, Mock())
    assert (call(SKIPPED) in journal.warn.mock_calls) == (version[0] < 6)
