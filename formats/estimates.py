"""Texts about samples that are divided among the stacks that launched a kernel at about the same time: an estimate."""

from __future__ import annotations

from iaprof.basics.quantities import percent

MARK = "~"
"""Stands before names and figures of which a part is an estimate."""
LEAST_SHARE = 0.01
"""The part that has to be an estimate for the mark."""
_WHY = "A sample says at which instruction a thread was, but not which launch of the kernel it belonged to. "
_EXACT = "The kernel's own figures, and those of functions that all these stacks share, are exact."
EXPLANATION = (
    f"{_WHY}Where several stacks launched the kernel at about the same time, its samples are divided among them in "
    f"proportion to their launches. {_EXACT}"
)
EXPLANATION_OF_TIMED = (
    f"{_WHY}Where several stacks launched the kernel at about the same time, its samples are divided among them in "
    "proportion to how long the GPU executed each one's launches, which was measured; where that is not known, in "
    f"proportion to their launches. {_EXACT}"
)


def explanation(timed: bool) -> str:
    """How samples are divided; see `Profile.timed`."""
    return EXPLANATION_OF_TIMED if timed else EXPLANATION


def divided_text(divided: int, samples: int, timed: bool = False) -> str:
    """A sentence that says which part of the samples is divided; "" if none is."""
    if not divided:
        return ""
    how = ", by measured times of execution" if timed else ""
    return (
        f"{percent(divided / samples)} of the samples are divided among stacks that launched the same kernel at about "
        f"the same time{how}: what is marked {MARK} is an estimate."
    )


def short_divided_text(divided: int, samples: int) -> str:
    """The same in fewer words, where `divided_text` and EXPLANATION show when a pointer rests on it."""
    if not divided:
        return ""
    return (
        f"{percent(divided / samples)} of the samples are divided among stacks: what is marked {MARK} is an estimate. "
        "Hover to read why."
    )


def is_marked(divided: float, samples: float) -> bool:
    """Whether a figure gets the mark."""
    return divided > 0 and divided >= LEAST_SHARE * samples
