"""What the stages of a time line have to say, on stderr."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

from iaprof.basics.clean import clean

if TYPE_CHECKING:
    from iaprof.timelines.trace import Trace

_MOST_NOTES = 64  # that a stage prints


def say_messages(trace: Trace, of: str = "") -> None:
    """Prints what the stages found, and which events they dropped, merged and made, to stderr.

    Args:
        trace: after its stages.
        of: the name of what they are about, to begin each line with; "": none.
    """
    from iaprof.timelines.trace import Level

    of = f"{clean(of)}: " if of else ""
    notes: Counter[str] = Counter()
    for message in trace.messages.said:
        level = "warning: " if message.level is Level.WARNING else ""
        if not level:  # of each rank, and a stranger's trace can have a million
            notes[message.stage] += 1
            if notes[message.stage] > _MOST_NOTES:
                continue
        print(f"iaprof: {of}{level}{message.stage}: {message.text}", file=sys.stderr)
    for stage, count in notes.items():
        if count > _MOST_NOTES:
            print(f"iaprof: {of}{stage}: and {count - _MOST_NOTES:,} more; --json has all", file=sys.stderr)
    for what, counts in (("dropped", trace.dropped), ("merged", trace.merged), ("made", trace.made)):
        if some := +counts:
            texts = ", ".join(f"{count:,} {reason}" for reason, count in some.items())
            print(f"iaprof: {of}events {what}: {texts}", file=sys.stderr)
