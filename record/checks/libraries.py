"""The runtime's libraries: which there are, and whether they have the probes that tell of launches."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

from iaprof.bpf.libraries import COMPILE, LAUNCH, Libraries, Outcome
from iaprof.record.checks.processes import shortened
from iaprof.record.checks.result import Check, Level

GROUP = "Runtime"
MOST_LINES = 16


def checks() -> Iterator[Check]:
    """Checks the libraries that are installed and those that running processes have mapped."""
    names: list[str] = []  # of the probes of the library that comes next
    libraries = Libraries(lambda _, probes: names.extend(probe.name for probe in probes))
    every = itertools.chain(libraries.installed(), libraries.running())
    count = 0
    for outcome in every:
        count += 1
        if count <= MOST_LINES:
            yield _library(outcome, set(names))
        names.clear()
    if count > MOST_LINES:
        yield Check(GROUP, "driver", Level.WARNING, f"and {count - MOST_LINES} more files of that name")
    if not count:
        text = (
            "no libze_intel_gpu.so is installed here or used now: without Intel's compute runtime, with the probes of "
            "intel/iaprof's patches, there are no launches to record"
        )
        if os.geteuid() != 0:
            text = "none is installed here; only root can tell which ones are used"
        yield Check(GROUP, "driver", Level.WARNING, text)


def _library(outcome: Outcome, names: set[str]) -> Check:
    file = shortened(outcome.path)
    if missing := [name for name in (LAUNCH, COMPILE) if name not in names]:
        text = f"has no {' and no '.join(missing)} probe"
        if outcome.problem and (names or "probes" not in outcome.problem):
            text += f": {outcome.problem}"
        else:
            text += ": it was built without intel/iaprof's patches"
        return Check(GROUP, "driver", Level.WARNING, text, file=file)
    return Check(GROUP, "driver", Level.OK, "has the probes for launches and modules", file=file)
