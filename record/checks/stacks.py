"""Where stacks end: in code on the way from a program to a launch that keeps no frame pointers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import chain

from iaprof.bpf.libraries import SYSTEM_FOLDERS
from iaprof.formats.quantities import counted
from iaprof.record.checks.launching import SECONDS, Launching, look
from iaprof.record.checks.processes import MOST_FILES, MappedFile, installed, mapped, opened, shortened
from iaprof.record.checks.result import Check, Level
from iaprof.symbols.frame_pointers import Openings, read_openings

GROUP = "Stacks"
MOST_LINES = 8
REBUILD = "export CFLAGS='-O2 -fno-omit-frame-pointer' CXXFLAGS=$CFLAGS"
_VERSION = rb"\.so(?:\.[0-9.-]+)?"
LIBRARIES = {
    "libze_intel_gpu": "stacks of launches end at once",
    "libze_loader": "stacks of launches end there",
    "libsycl": "stacks end there",
    "libc": "stacks lose who called into it",
}
"""Their names, and what it means when they keep none."""
_DRIVERS = re.compile(rb"libze_intel_gpu\.so[0-9.]*|libigdrcl\.so")
_NAMES = re.compile(rb"(" + b"|".join(name.encode() for name in LIBRARIES) + rb")" + _VERSION)


def checks() -> Iterator[Check]:
    """Checks the stacks of launches that happen now; if there are none, the libraries through which most stacks go."""
    launching = look() if next(mapped(_DRIVERS), None) else None
    if launching is not None and launching.ends.stacks:
        yield from _launching(launching)
        return
    if launching is not None:
        text = f"none in {SECONDS:g} s by the processes that use a GPU: the next lines are about libraries instead"
        yield Check(GROUP, "launches", Level.WARNING, text)
    yield from _libraries()


def _launching(launching: Launching) -> Iterator[Check]:
    """One line for all launches that were seen, and one for each library in which stacks end."""
    ends = launching.ends
    yield Check(GROUP, "launches", Level.WARNING if ends.others else Level.OK, f"now, {ends.text('launches')}")
    for end in ends.ends[:MOST_LINES]:
        text = f"the stacks of {counted(end.count, 'launch', 'launches')} end there: it keeps no frame pointers"
        yield Check(GROUP, end.library, Level.WARNING, text, REBUILD, shortened(launching.files.get(end.library, "")))


def _libraries() -> Iterator[Check]:
    found: dict[str, dict[bool, list[tuple[str, Openings]]]] = {name: {} for name in LIBRARIES}
    for file, openings in _distinct(chain(installed(SYSTEM_FOLDERS, _NAMES), mapped(_NAMES))):
        name = os.path.basename(file.path).split(".so")[0]
        found[name].setdefault(openings.kept, []).append((file.path, openings))
    for name, verdicts in found.items():
        for files in verdicts.values():
            yield _check(name, files)


def _distinct(files: Iterator[MappedFile]) -> Iterator[tuple[MappedFile, Openings]]:
    seen = set()
    for file in files:
        with opened(file.location) as fd:
            if fd is None:
                continue
            status = os.fstat(fd)
            inode = status.st_dev, status.st_ino
            if inode not in seen:
                seen.add(inode)
                openings = read_openings(fd)
                if openings is not None:  # the linker's scripts are called like libraries
                    yield file, openings
        if len(seen) == MOST_FILES:
            return


def _check(name: str, files: list[tuple[str, Openings]]) -> Check:
    """One line for files of one name that are alike."""
    path, openings = files[0]
    file = shortened(path)
    others = f", and {len(files) - 1} more files of that name" if len(files) > 1 else ""
    if not openings.functions:
        return Check(GROUP, name, Level.WARNING, f"cannot be told: it names no functions{others}", file=file)
    share = f"{openings.share:.0%} of {openings.functions} functions do{others}"
    if openings.kept:
        return Check(GROUP, name, Level.OK, f"keeps frame pointers: {share}", file=file)
    text = f"keeps no frame pointers ({share}): {LIBRARIES[name]}"
    mend = "" if name == "libc" else REBUILD
    return Check(GROUP, name, Level.WARNING, text, mend, file)
