"""Losses are kept in few arrays until they are written."""

from __future__ import annotations

import pyarrow as pa

from iaprof.record.capture.rows import LossRows


def test_very_many_losses_are_few_arrays() -> None:
    losses = LossRows()
    for number in range(2500):
        losses.add(number, number + 1, "spool", "damaged", 1, f"frame {number}")
    assert len(losses) == 2500
    arrays = losses.take()
    assert len(arrays) < 500
    assert pa.concat_arrays(arrays).field("begin_ns").to_pylist() == list(range(2500))
    assert (len(losses), losses.take()) == (0, [])
    assert losses.sums[("spool", "damaged")]["count"] == 2500
