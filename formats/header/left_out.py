"""CPU samples that reports leave out: those of the recorder's own processes, and of processes out of scope."""

from __future__ import annotations

from collections.abc import Mapping

RECORDER, OTHER = "recorder", "other"
"""The values of `cpu_sample.left_out`."""
TOTALS = {RECORDER: "recorder_cpu_samples", OTHER: "other_cpu_samples"}
"""By value: the member of the header's `totals` that counts them."""
_WHOSE = {RECORDER: "the recorder's processes", OTHER: "other processes"}


def left_out_text(counts: Mapping[str, int | None]) -> str:
    """Returns the numbers of samples by value as text, such as `790 of the recorder's processes`; "" for none."""
    return ", ".join(f"{count:,} of {_WHOSE[why]}" for why in TOTALS if (count := counts.get(why)))
