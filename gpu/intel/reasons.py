"""The stall reasons of Intel's execution units, in the order of the text format of Intel's iaprof, and their rows."""

from __future__ import annotations

from iaprof.gpu.samples import SampleRows

ROWS = SampleRows("stall", ("w0", "w1", "w2"), required=2, since=1)

MEANINGS = {
    "active": "an instruction was issued: no stall",
    "control": "waits for the branch unit",
    "pipestall": "was chosen and could not be issued, as when registers of one bank collide",
    "send": "waits for a send unit",
    "dist_acc": "waits for a register that an instruction shortly before it writes",
    "sbid": "waits for a scoreboard token, mostly for data from memory",
    "sync": "waits for other threads",
    "inst_fetch": "waits for the instruction cache",
    "other": "anything else",
    "tdr": "waits for a thread dependency (since Xe2)",
}
"""What each reason means, in English."""
ABBREVIATIONS = {"active": "activ", "control": "ctrl", "pipestall": "pipe", "dist_acc": "dist", "inst_fetch": "fetch"}

REASONS = tuple(MEANINGS)
