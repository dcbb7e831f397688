"""Which processes the learner is told to prepare for, as they map large files, before they launch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from iaprof.record.sources.side_band import LARGE_BYTES, SideBand
from waiting import until

MAPS = """\
import mmap, sys
input()
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
"""


@pytest.mark.root
@pytest.mark.bpf
def test_the_files_of_a_process_that_maps_much_code_are_opened_once(tmp_path: Path) -> None:
    # given processes that map a large file, a small one, a large one out of scope, the first one again, and another one
    program = tmp_path / "maps.py"
    program.write_text(MAPS)
    others: set[int] = set()
    prepared: list[int] = []
    followed = cast(Any, SimpleNamespace(others=others, follow=lambda _: None))
    stacks = cast(Any, SimpleNamespace(prepare=prepared.append, look_for_python=Mock()))
    source = SideBand(Mock(), Mock(), stacks, followed)
    source._journal = cast(Any, SimpleNamespace(write=lambda *_, **__: None))
    pids = []
    sizes = {"large": LARGE_BYTES, "small": LARGE_BYTES // 2, "theirs": LARGE_BYTES, "other": LARGE_BYTES}
    for name in ("large", "small", "theirs", "large", "other"):
        with open(tmp_path / name, "ab") as file:
            file.truncate(sizes[name])
        process = subprocess.Popen([sys.executable, "-S", program, tmp_path / name], stdin=subprocess.PIPE)
        if name == "theirs":
            others.add(process.pid)
        process.communicate(b"\n")
        assert not process.returncode
        source.read()  # at once: each CPU has a buffer of its own, which are read one after the other
        pids.append(process.pid)

    def is_told() -> bool:
        source.read()
        return pids[-1] in prepared

    until(is_told)
    source.close()
    # Python itself may be as large; the first of these processes that is in scope is told of then, once more
    assert [pid for pid in dict.fromkeys(prepared) if pid in pids] == [pids[0], pids[-1]]
