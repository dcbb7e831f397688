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
def test_the_files_of_a_process_that_maps_much_code_are_opened(tmp_path: Path) -> None:
    # given processes, one of them out of scope, that map a large or a small file
    program = tmp_path / "maps.py"
    program.write_text(MAPS)
    others: set[int] = set()
    prepared: list[int] = []
    followed = cast(Any, SimpleNamespace(others=others, follow=lambda _: None))
    stacks = cast(Any, SimpleNamespace(prepare=prepared.append, look_for_python=Mock()))
    source = SideBand(Mock(), Mock(), stacks, followed)
    source._journal = cast(Any, SimpleNamespace(write=lambda *_, **__: None))
    pids = []
    for size, is_other in ((LARGE_BYTES, False), (LARGE_BYTES // 2, False), (LARGE_BYTES, True), (LARGE_BYTES, False)):
        with open(tmp_path / "file", "wb") as file:
            file.truncate(size)
        words = [sys.executable, "-S", str(program), str(tmp_path / "file")]
        process = subprocess.Popen(words, stdin=subprocess.PIPE)
        if is_other:
            others.add(process.pid)
        process.communicate(b"\\n")
        assert not process.returncode
        pids.append(process.pid)
    large, small, other, last = pids

    def is_told() -> bool:
        source.read()
        return last in prepared

    until(is_told)
    source.close()
    # Python itself may be as large
    assert large in prepared and other not in prepared
    assert prepared.count(large) > prepared.count(small)
