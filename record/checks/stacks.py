"""Where stacks would end: libraries on the way from a program to a launch that keep no frame pointers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import chain

from iaprof.bpf.libraries import SYSTEM_FOLDERS
from iaprof.record.checks.frame_pointers import Openings, read_openings
from iaprof.record.checks.processes import MOST_FILES, MappedFile, installed, mapped, opened, shortened
from iaprof.record.checks.result import Check, Level

GROUP = "Stacks"
_VERSION = rb"\.so(?:\.[0-9.-]+)?"
LIBRARIES = {
    "libze_intel_gpu": "stacks of launches end at once",
    "libze_loader": "stacks of launches end there",
    "libsycl": "stacks end there",
    "libc": "stacks lose who called into it",
}
"""Their names, and what it means when they keep none."""
_NAMES = re.compile(rb"(" + b"|".join(name.encode() for name in LIBRARIES) + rb")" + _VERSION)


def checks() -> Iterator[Check]:
    """Checks the libraries that are installed and those that running processes have mapped."""
    found: dict[str, dict[bool | None, list[tuple[str, Openings | None]]]] = {name: {} for name in LIBRARIES}
    for file, openings in _distinct(chain(installed(SYSTEM_FOLDERS, _NAMES), mapped(_NAMES))):
        kept = None if openings is None else openings.kept
        found[os.path.basename(file.path).split(".so")[0]].setdefault(kept, []).append((file.path, openings))
    for name, verdicts in found.items():
        for kept, files in verdicts.items():
            yield _check(name, kept, files)


def _distinct(files: Iterator[MappedFile]) -> Iterator[tuple[MappedFile, Openings | None]]:
    seen = set()
    for file in files:
        with opened(file.location) as fd:
            if fd is None:
                continue
            status = os.fstat(fd)
            inode = status.st_dev, status.st_ino
            if inode not in seen:
                seen.add(inode)
                yield file, read_openings(fd)
        if len(seen) == MOST_FILES:
            return


def _check(name: str, kept: bool | None, files: list[tuple[str, Openings | None]]) -> Check:
    path, openings = files[0]
    others = f" and {len(files) - 1} more" if len(files) > 1 else ""
    where = f"({shortened(path)}{others})"
    if openings is None:
        return Check(GROUP, name, Level.WARNING, f"cannot be told: no functions are named {where}")
    share = f"{openings.share:.0%} of {openings.functions} functions {where}"
    if kept:
        return Check(GROUP, name, Level.OK, f"keeps frame pointers: {share}")
    text = f"keeps no frame pointers, {LIBRARIES[name]}: {share}"
    return Check(
        GROUP, name, Level.WARNING, text, "export CFLAGS='-O2 -fno-omit-frame-pointer'" if name != "libc" else ""
    )
