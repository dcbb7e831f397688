"""A workload in namespaces and a cgroup of its own, as in a container, and a recorder outside."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaprof.bpf.accounts import describe
from iaprof.formats.capture.reader import CaptureReader
from integration.attacking import PYTHON
from integration.recording import IAPROF, by_instruction, folded, has_met, ledger_by_instruction, until_recording
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough
from waiting import until

pytestmark = pytest.mark.bpf
ID = "5f2504e04f8911d39a0c0305e82c3301" * 2

IN_NAMESPACES = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--mount-proc", "--kill-child"]

# A /tmp that nobody else sees, with the runtime's library, the program, a debug ELF to make modules from, and the GPU.
# The bound files come with it, as the folder itself is in the /tmp that it covers.
BUILD_TMP = """
mount -t tmpfs none "$1"
cp "$2"/libze_intel_gpu.so.1 "$2"/workload "$3" "$1"
mkdir "$1"/gpu "$1"/only-inside
mount --bind "$4" "$1"/gpu
mount --rbind "$1" /tmp
cd /tmp
shift 4
exec "$@"
"""

# Maps the library, so that it has probes when the recorder begins, and starts the program at a command.
START_LATER = """
import ctypes, subprocess, sys
ctypes.CDLL("/tmp/libze_intel_gpu.so.1")
print("mapped", flush=True)
sys.stdin.readline()
sys.exit(subprocess.call(sys.argv[1:]))
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup named like a container's by systemd and Docker."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    top = Path(next(words[1] for words in mounts if words[2] == "cgroup2"))
    path = top / f"iaprof-test-{os.getpid()}.slice" / f"docker-{ID}.scope"
    path.mkdir(parents=True)
    yield path
    until(lambda: not (path / "cgroup.procs").read_text())
    path.rmdir()
    path.parent.rmdir()


def join(cgroup: Path, pid: int) -> None:
    (cgroup / "cgroup.procs").write_text(str(pid))


def inner_pid(pid: int) -> int:
    """The pid in the innermost namespace; proc_pid_status(5)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def test_a_process_is_described(cgroup: Path) -> None:
    # given a process in a pid namespace and a cgroup
    command = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo; read x"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        inside = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        join(cgroup, inside)
        # when
        told = describe(inside)
        outside = describe(process.pid)
        process.communicate()
    # then
    place = f"/{cgroup.parent.name}/{cgroup.name}"
    assert told == {
        "pid": inside,
        "ns_pid": 1,
        "cgroup": place,
        "container": ID,
        "uid": 0,
        "gid": 0,
        "account": f"container {place}",
    }
    assert (outside["ns_pid"], outside["container"]) == (None, None)


@thorough
def test_a_workload_in_a_container(tmp_path: Path, cgroup: Path) -> None:
    # given a process in its own container, which has the runtime's library
    (tmp_path / "root").mkdir()
    elf = runtime.debug_elf("bmg", "matmul")
    build = runtime.build().library.parent
    capture = tmp_path / "c"
    with Hardware(tmp_path / "gpu") as hardware:
        words = ["/tmp/workload", "--elf", f"/tmp/{elf.name}", "--launches", "400", "--rate", "400", "--threads", "2"]
        start = [PYTHON, "-I", "-c", START_LATER, *words]
        container = subprocess.Popen(
            [*IN_NAMESPACES, "sh", "-ec", BUILD_TMP, "sh", tmp_path / "root", build, elf, hardware.folder, *start],
            env=os.environ | {"STANDIN_DIR": "/tmp/gpu", "STANDIN_DUMP_DIR": "/tmp/only-inside"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert container.stdout is not None
        assert container.stdout.readline() == "mapped\n"
        init = int(Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text())
        join(cgroup, init)
        # when it launches while a recorder outside records
        recorder = subprocess.Popen(
            [*IAPROF, "record", "-o", str(capture)],
            env=os.environ | hardware.env(),
            stderr=subprocess.PIPE,
            text=True,
        )
        until_recording(recorder)
        until(lambda: has_met(capture, Path("/tmp/libze_intel_gpu.so.1")), recorder)
        assert container.stdin is not None
        container.stdin.write("\n")
        container.stdin.flush()
        pids: dict[int, int] = {}  # pids in the container, by pids outside
        while not pids:
            assert container.poll() is None
            for pid in Path(f"/proc/{init}/task/{init}/children").read_text().split():
                pids[int(pid)] = inner_pid(int(pid))
        output, _ = container.communicate(timeout=300)
        recorder.send_signal(signal.SIGINT)
        _, errors = recorder.communicate(timeout=300)
    assert recorder.returncode == 0, errors
    ledger = hardware.ledger()
    summaries = runtime.read_summaries(output)
    # then its launches have the host's pids, and all its stalls are there
    reader = CaptureReader(capture)
    ((host, inside),) = pids.items()
    assert host != inside
    assert [summary.pid for summary in summaries] == [inside]
    assert {launch.pid for launch in ledger.launches} == {inside}
    rows = [row for row in reader.table("launch", ("pid", "name")).to_pylist() if row["pid"] == host]
    launched: Counter[str] = Counter()
    for launch in ledger.launches:
        launched[launch.kernel] += launch.count
    assert Counter(row["name"] for row in rows) == launched
    assert sum(launched.values()) == 800
    # and its kernels, from files that only exist in its mount namespace
    (kernel,) = (row for row in reader.table("kernel").to_pylist() if row["pid"] == host)
    assert kernel["path"].startswith("/tmp/only-inside/")
    assert kernel["elf"]
    assert not Path(kernel["path"]).exists()
    assert by_instruction(folded(capture), ledger) == ledger_by_instruction(ledger)
    # and its pid and container there
    described = [row for row in reader.table("process").to_pylist() if row["event"] == "described"]
    place = f"/{cgroup.parent.name}/{cgroup.name}"
    told = {(row["ns_pid"], row["cgroup"], row["container"]) for row in described if row["pid"] == host}
    assert told == {(inside, place, ID)}
