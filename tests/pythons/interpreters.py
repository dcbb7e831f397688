# SPDX-License-Identifier: Apache-2.0
"""The CPython interpreters that tests can start.

    @pytest.mark.parametrize("name", NAMES)
    def test_something(name: str) -> None:
        python = started_as(name)        # skips the test where there is none

That of the tests, those of three releases of Debian as `make test` unpacks them, and by hand any others:

    PYTHONS=/opt/python3.12/bin/python:/opt/python3.13/bin/python .venv/bin/python -m pytest tests/unit/symbols/python
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from iaprof.symbols.python.layout import Interpreter, read_interpreter
from iaprof.symbols.unwind.cfi import CallFrames, CfiError

RELEASES = {"bookworm": (2, 36), "trixie": (2, 41), "unstable": (2, 42)}
"""Of Debian, with the versions of glibc that they have at least."""
NAMES = ("own", *RELEASES, *filter(None, os.environ.get("PYTHONS", "").split(":")))
OWN_GLIBC = tuple(map(int, (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0").split()[1].split(".")))
OWN_IS_OF_DEBIAN = os.path.realpath(sys.executable).startswith("/usr/bin/")
LOADING = tuple(
    name
    for name in NAMES
    if (glibc := RELEASES.get(name)) is None or glibc > OWN_GLIBC or (glibc == OWN_GLIBC and not OWN_IS_OF_DEBIAN)
)
"""Those that can load a library that was compiled here: an older release's has an older C library.

Each once: on Debian, this release's is the one that runs the tests."""
HERE = Path(__file__).parent
_MAPPED = "print(open('/proc/self/maps').read())"


def started_as(name: str) -> list[str]:
    """The words that start an interpreter, without site packages."""
    if name == "own":
        return [sys.executable, "-S", "-B"]
    if name not in RELEASES:
        return [name, "-S", "-B"]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iaprof-tests"
    folders = sorted(caches.glob(f"bcc-{name}-*[0-9a-f]/python"))
    if not folders:
        pytest.skip(f"Debian {name}'s Python is not unpacked: scripts/debian-bcc {name} does that")
    return [str(folders[-1])]


def output_of(python: list[str], *words: str | Path) -> str:
    """What it prints."""
    command = [*python, *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=300).stdout


def files_of(python: list[str]) -> dict[Path, Interpreter]:
    """The interpreters in the files that it maps: one, in the program or in libpython."""
    mapped = {line.split()[5] for line in output_of(python, "-c", _MAPPED).splitlines() if "/" in line}
    found = {}
    for path in sorted(mapped):
        with open(path, "rb") as file:
            try:
                interpreter = read_interpreter(CallFrames(file.read()))
            except CfiError:
                continue
        if interpreter is not None:
            found[Path(path)] = interpreter
    return found
