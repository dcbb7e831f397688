"""Slices of a trace as a profile whose tree opens level by level: their self times in place of samples.

A slice is in place of a kernel, the slices around it in place of the stack that launched it, and the category of a
device's slice in place of a stall reason; that of a host's is `host`.
"""

from __future__ import annotations

import numpy as np

from iaprof.formats.profile import Code, CodeKind, Kernel, Launch, Profile
from iaprof.timelines.trace import Trace
from iaprof.timelines.views.stacks import stacks

HOST = "host"
OTHERS = "others"
_MOST_CATEGORIES = 100  # others than the first ones are one: a profile has a column of counts for each


def browsable(trace: Trace) -> Profile:
    """Makes a profile of a trace's slices; counts are ns."""
    found = stacks(trace)
    launches: dict[Launch | None, int] = {}
    kernels: dict[str, int] = {}
    categories: dict[str, int] = {}
    numbers = np.zeros((len(found.launches), 3), np.int64)
    for row, each in enumerate(found.launches):  # one for each distinct stack
        *around, name = each.stack or (each.comm,)
        is_on_device = bool(each.origins) and each.origins[-1].kind is CodeKind.SOURCE
        category = each.stack[0] if is_on_device else HOST if each.stack else OTHERS
        if category not in categories and len(categories) >= _MOST_CATEGORIES:
            category = OTHERS
        launch = Launch(each.comm, 0, tuple(around))
        numbers[row] = (
            launches.setdefault(launch, len(launches)),
            kernels.setdefault(name, len(kernels)),
            categories.setdefault(category, len(categories)),
        )
    launch, kernel, category = numbers[found.launch].T
    counts = np.zeros((len(launch), max(len(categories), 1)), np.uint64)
    counts[np.arange(len(launch)), category] = found.count
    none = np.zeros(len(launch), np.int64)
    return Profile(
        list(launches), [Kernel(0, name, "") for name in kernels], [Code("", (), ())], none, launch, kernel, none,
        none.astype(np.uint64), counts, none, list(categories) or [OTHERS], (0.0,),
    )  # fmt: skip
