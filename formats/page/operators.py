"""The operators in the page's time line: lanes of slices for the threads that are busiest with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from iaprof.basics.clean import clean
from iaprof.formats.export import OperatorSlices

_MOST_THREADS = 4
_MOST_SLICES = 3_000  # of a thread: three for each unit of the drawing's width
_DEEPEST = 12  # lanes


def operators(found: OperatorSlices) -> dict[str, Any]:
    """Returns names, and for each thread its slices: begins, lengths, depths, numbers of names."""
    outermost = found.depth == 0
    busy = np.bincount(found.thread[outermost], (found.end - found.begin)[outermost], len(found.threads))
    busiest = [number for number in np.argsort(-busy, kind="stable").tolist() if busy[number]][:_MOST_THREADS]
    names: dict[str, int] = {}
    threads = []
    for number in busiest:
        own = np.flatnonzero((found.thread == number) & (found.depth < _DEEPEST))
        longest = own[np.argsort((found.begin - found.end)[own], kind="stable")[:_MOST_SLICES]]
        shown = longest[np.lexsort((found.depth[longest], found.begin[longest]))]
        thread = found.threads[number]
        threads.append(
            {
                "name": clean(f"{thread.host} {thread.comm} {thread.tid}").strip(),
                "all": int((found.thread == number).sum()),
                "begins": np.round(found.begin[shown], 9).tolist(),
                "lengths": np.round((found.end - found.begin)[shown], 9).tolist(),
                "depths": found.depth[shown].tolist(),
                "names": [
                    names.setdefault(clean(found.names[name]), len(names)) for name in found.name[shown].tolist()
                ],
            }
        )
    return {"threads": threads, "names": list(names)}
