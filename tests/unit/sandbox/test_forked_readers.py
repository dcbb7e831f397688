"""The forks that most tests have as reader processes: they differ in nothing from processes that start as always."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaprof.sandbox import parent
from iaprof.sandbox.parent import Limits, Sandbox, SandboxError
from iaprof.sandbox.worker import Worker
from unit.forked_readers import ForkedReader
from waiting import until

READERS = [
    "iaprof.report.gpu.reader", "iaprof.symbols.files.binary_reader", "iaprof.symbols.unwind.reader",
    "iaprof.timelines.reading.json_reader", "iaprof.timelines.reading.perfetto.packet_reader",
]  # fmt: skip
LIMITS = Limits(seconds=100, files=2, mapped_bytes=1 << 28)
SEEN = (
    "Uid", "Gid", "Groups", "PPid", "CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn", "SigCgt",
)  # fmt: skip


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(parent, "Worker", ForkedReader)
    yield
    ForkedReader.end()


def status(pid: int) -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def started(sandbox: Sandbox) -> int:
    """The pid of a sandbox's process, which has done what it does before the first request: filtering calls is last."""
    sandbox._start()
    pid = sandbox.pid
    assert pid is not None
    until(lambda: status(pid)["Seccomp"].strip() == "2")
    return pid


def facts(sandbox: Sandbox) -> dict[str, object]:
    """What the kernel knows of a sandbox's process."""
    pid = started(sandbox)
    found: dict[str, object] = {name: value.split() for name, value in status(pid).items() if name in SEEN}
    found["limits"] = Path(f"/proc/{pid}/limits").read_text().splitlines()
    found["nice"] = os.getpriority(os.PRIO_PROCESS, pid)
    found["leads"] = os.getsid(pid) == os.getpgid(pid) == pid
    if os.geteuid() == 0:
        found["files"] = sorted(os.listdir(f"/proc/{pid}/fd"), key=int)
        found["folder"] = os.readlink(f"/proc/{pid}/cwd")
    return found


@pytest.mark.parametrize("reader", READERS)
def test_a_fork_has_the_rights_of_a_process_of_its_own(
    reader: str, forking: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sandbox(reader, LIMITS) as first, Sandbox(reader, LIMITS) as second:
        forks = facts(first), facts(second)
        assert isinstance(first._child, ForkedReader)
        assert first.pid != second.pid
    monkeypatch.setattr(parent, "Worker", Worker)
    with Sandbox(reader, LIMITS) as alone:
        expected = facts(alone)
    assert forks == (expected, expected)


def test_a_fork_takes_the_soft_limits_of_this_process(forking: None) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with Sandbox(READERS[1]) as sandbox, Sandbox(READERS[1]) as limited:
        started(sandbox)  # and what forks
        resource.setrlimit(resource.RLIMIT_DATA, (1 << 29, before[1]))
        try:
            pid = started(limited)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
        (line,) = re.findall(r"Max data size *(\d+) *(\d+)", Path(f"/proc/{pid}/limits").read_text())
        assert line == (str(1 << 29), str(1 << 29))


def test_another_environment_has_a_process_of_its_own(forking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IAPROF_NVDISASM", "elsewhere")
    with Sandbox(READERS[0]) as sandbox:
        started(sandbox)
        assert ForkedReader._templates == {}


def test_what_forks_is_started_again_when_it_was_killed(forking: None) -> None:
    for _ in range(2):
        with Sandbox(READERS[1]) as sandbox:
            started(sandbox)
            ForkedReader._templates[READERS[1]].kill()
            ForkedReader._templates[READERS[1]].wait()


def test_a_reader_that_cannot_be_imported_is_an_error(forking: None) -> None:
    with Sandbox("iaprof.nowhere") as sandbox, pytest.raises(SandboxError):
        sandbox.call("facts")
