"""Sizes, times and pids in the notation of options."""

from __future__ import annotations

import pytest

from iaprof.basics.errors import UsageError
from iaprof.cli.options.values import pids, size, size_or_time


def test_sizes_and_times() -> None:
    assert size("500M", "-x") == 500 << 20
    assert size("1.5k", "-x") == 1536
    assert size("2G", "-x") == 2 << 30
    assert size_or_time("100M", "-x") == (100 << 20, None)
    assert size_or_time("10m", "-x") == (None, 600.0)
    assert size_or_time("1.5h", "-x") == (None, 5400.0)
    assert size_or_time("30s", "-x") == (None, 30.0)


@pytest.mark.parametrize("text", ["", "5", "M", "0M", "-1M", "1e9M", "5x", "nanM", "1 M", "0.1B"])
def test_invalid_sizes_and_times(text: str) -> None:
    with pytest.raises(UsageError, match="-x takes a size"):
        size_or_time(text, "-x")
    with pytest.raises(UsageError, match="-x takes a size"):
        size(text, "-x")


def test_pids() -> None:
    assert pids(None) == ()
    assert pids(["12,34", "56"]) == (12, 34, 56)
    for text in ("x", "-1", "0", "99999999999", "1.5"):
        with pytest.raises(UsageError, match="-p takes pids"):
            pids([text])
