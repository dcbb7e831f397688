"""The runtime's libraries: which there are, and whether they have the probes that tell of launches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from iaprof.bpf.libraries import COMPILE, LAUNCH, Libraries, Outcome
from iaprof.record.checks.processes import shortened
from iaprof.record.checks.result import Check, Level

GROUP = "Runtime"
MOST_LINES = 16


def checks() -> Iterator[Check]:
    """Checks the libraries that are installed and those that running processes have mapped."""
    names: list[str] = []  # of the probes of the library that comes next
    libraries = Libraries(lambda _, probe: names.append(probe.name))
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
        yield Check(GROUP, "driver", Level.WARNING, text)


def _library(outcome: Outcome, names: set[str]) -> Check:
    path = shortened(outcome.path)
    if missing := [name for name in (LAUNCH, COMPILE) if name not in names]:
        why = outcome.problem if names or "probes" not in outcome.problem else "build it with intel/iaprof's patches"
        text = f"{path} has no {' and no '.join(missing)} probe: {why}"
        return Check(GROUP, "driver", Level.WARNING, text.removesuffix(": "))
    return Check(GROUP, "driver", Level.OK, f"{path} has the probes")
