"""The states of warps that NVIDIA's GPUs sample, and the rows that count them."""

from __future__ import annotations

from iaprof.gpu.samples import ACTIVE, SampleRows

MEANINGS = {
    ACTIVE: "an instruction was issued: no stall",
    "long_scoreboard": "waits for data from global, local, texture or surface memory",
    "short_scoreboard": "waits for shared memory, a special function or another unit of the multiprocessor",
    "wait": "waits the fixed number of cycles that the instruction before it takes",
    "barrier": "waits for other warps of its block at a barrier",
    "membar": "waits for a memory barrier",
    "warpgroup_arrive": "waits for other warps of its warp group, or for its matrix instructions (Hopper)",
    "math_pipe_throttle": "waits for an arithmetic unit that is busy",
    "lg_throttle": "waits for room in the queue for global and local memory",
    "mio_throttle": "waits for room in the queue for shared memory and special functions",
    "tex_throttle": "waits for room in the queue for textures",
    "branch_resolving": "waits for the target of a branch",
    "no_instructions": "waits for the instruction cache, or for the next instruction after a jump",
    "imc_miss": "waits for the cache of constants",
    "drain": "has ended and waits for its writes to memory",
    "dispatch_stall": "waits because the scheduler holds back what it has chosen",
    "sleeping": "sleeps, as it asked for",
    "not_selected": "could have issued, but the scheduler chose another warp",
    "misc": "anything else that the hardware counts",
    "other": "a state that this version of iaprof does not know",
}
"""What each reason means, in English. NVIDIA's `selected` is ACTIVE; the other names are those of its counters,
smsp__pcsamp_warps_issue_stalled_X. `other` is none of them."""

ABBREVIATIONS = {
    ACTIVE: "activ", "long_scoreboard": "long", "short_scoreboard": "short", "warpgroup_arrive": "group",
    "math_pipe_throttle": "math", "lg_throttle": "lg", "mio_throttle": "mio", "tex_throttle": "tex",
    "branch_resolving": "branch", "no_instructions": "no_inst", "imc_miss": "imc", "dispatch_stall": "disp",
    "sleeping": "sleep", "not_selected": "not_sel",
}  # fmt: skip
SELECTED = "selected"
"""NVIDIA's name for ACTIVE."""
PER_WORD = 4  # counts of 16 bits in a word
WORDS = -(-len(MEANINGS) // PER_WORD)
ROWS = SampleRows(
    "pc_sample",
    ("address", *(f"samples{number}" for number in range(WORDS)), *(f"latency{number}" for number in range(WORDS))),
    required=1 + WORDS,
    since=11,
)
"""A record is an instruction with its counts since the last read, four to a word: of all samples, and of the latency
samples among them, which the hardware took when the scheduler issued nothing."""
