"""Whether stacks will be whole: how they are walked, and where those of current launches end."""

from __future__ import annotations

import re
from collections.abc import Iterator

from iaprof.basics.quantities import counted
from iaprof.bpf.sizes import kernel_offsets
from iaprof.record.checks.launching import SECONDS, SeenLaunches, watch_launches
from iaprof.record.checks.processes import mapped, shortened
from iaprof.record.checks.result import Check, Level

GROUP = "Stacks"
MOST_LINES = 8
_DRIVERS = re.compile(rb"libze_intel_gpu\.so[0-9.]*|libigdrcl\.so")


def checks() -> Iterator[Check]:
    """Checks how stacks are walked, and the stacks of current launches."""
    yield _walking()
    seen = watch_launches() if next(mapped(_DRIVERS), None) else None
    if seen is None:
        return
    if seen.ends.stacks:
        yield from _seen_launches(seen)
    else:
        text = f"none in {SECONDS:g} s by the processes that use a GPU, so nothing is known of their stacks"
        yield Check(GROUP, "launches", Level.WARNING, text)


def _walking() -> Check:
    if kernel_offsets() is not None:
        return Check(GROUP, "walking", Level.OK, "by call frame information: code needs no frame pointers")
    text = "by frame pointers: the kernel's BTF does not say where it has a process's mappings"
    return Check(GROUP, "walking", Level.WARNING, f"{text}. Stacks end in code without frame pointers")


def _seen_launches(seen: SeenLaunches) -> Iterator[Check]:
    """Yields a check for all launches that were seen, and one for each library in which stacks end or are guessed."""
    ends = seen.ends
    level = Level.OK if ends.whole == ends.stacks else Level.WARNING
    yield Check(GROUP, "launches", level, f"now, {ends.text('launches')}")
    for libraries, what in ((ends.ends, "end there"), (ends.guesses, "have a caller that is guessed there")):
        for end in libraries[:MOST_LINES]:
            text = f"the stacks of {counted(end.count, 'launch', 'launches')} {what}"
            yield Check(GROUP, end.library, Level.WARNING, text, file=shortened(seen.files.get(end.library, "")))
