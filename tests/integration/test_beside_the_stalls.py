"""What is recorded beside stalls and launches: metrics of GPUs, samples of CPUs, and how the recording goes."""

from __future__ import annotations

import bisect
import contextlib
import os
import pty
import re
import select
import signal
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.members import MEMBERS
from iaprof.formats.header.stack_counts import recorded
from integration.recording import IAPROF, counted, environment, iaprof, record
from limits import Within
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough
from waiting import LONGEST_WAIT_S

pytestmark = pytest.mark.bpf

# Says who it is, and takes so many seconds of a CPU, in which others may have had their turns.
BUSY = """
import os, time
print(os.getpid())
while time.process_time() < {}:
    sum(range(1000)), open("/proc/self/stat").read()
"""


def stolen_s() -> float:
    """The time that other virtual machines took from this one's CPUs, which CPU time does not have, and samples do."""
    return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def workload(*options: str | float) -> list[str]:
    return runtime.command([runtime.debug_elf("bmg", "matmul")], *options)


def metrics(capture: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in CaptureReader(capture).table("metric").to_pylist():
        found.setdefault(row["name"], []).append(row["value"])
    return found


@thorough
def test_how_busy_the_gpu_was(tmp_path: Path, within: Within) -> None:
    # given launches that execute for 4 ms, 100 times a second
    with Hardware(tmp_path / "gpu") as hardware:
        record(hardware, tmp_path / "c", "--", *workload("--seconds", 3, "--rate", 100, "--duration-us", 4000))
    # then
    found = metrics(tmp_path / "c")
    every = CaptureReader(tmp_path / "c").table("metric").to_pylist()
    rows = [row for row in every if row["name"] == "cpu-percent"]
    times = [row["time_ns"] for row in every if row["name"] == "busy-compute-percent"]
    executed = sum(launch.count for launch in hardware.ledger().launches) * 4_000_000
    assert statistics.mean(found["busy-compute-percent"]) == pytest.approx(
        100 * executed / (times[-1] - times[0]), abs=8
    )
    assert max(found["frequency-actual-MHz"]) == 2400
    assert len(found["frequency-actual-MHz"]) > (150 if within.measures else 20)
    assert statistics.mean(found["power-card-W"]) == pytest.approx(20 + 0.4 * 150, rel=0.3)
    assert 40 < statistics.mean(found["temperature-pkg-C"]) < 100
    assert {row["stream"] for row in rows} == {None}
    assert all(row["pid"] for row in rows)
    # and iaprof text has both of its lines
    done = iaprof("report", tmp_path / "c", "--format", "iaprof", "--interval", "0.5")
    busy = [int(n) for n in re.findall(r"^metric\tbusy-percent\t(\d+)$", done.out, re.MULTILINE)]
    frequency = [int(n) for n in re.findall(r"^metric\tfrequency-MHz\t(\d+)$", done.out, re.MULTILINE)]
    assert 25 < statistics.median(busy) < 55
    assert 400 < statistics.median(frequency) <= 2400


def test_what_the_cpus_did_meanwhile(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        command = [sys.executable, "-c", BUSY.format(2)]
        before_s = stolen_s()
        done = record(hardware, tmp_path / "c", "--cpu-freq", "99", "--", *command)
        lost_s = stolen_s() - before_s
        record(hardware, tmp_path / "d", "--cpu-freq", "0", "--metric-interval", "0", "-d", "0.3")
    reader = CaptureReader(tmp_path / "c")
    samples = reader.table("cpu_sample").to_pylist()
    by_pid = Counter(sample["pid"] for sample in samples)
    pid = int(done.out)
    # then the busy process has its samples, two seconds of a CPU, and what a hypervisor took of it
    assert 0.75 * 2 * 99 < by_pid[pid] < (1.25 * 2 + lost_s) * 99
    stacks = {row["id"]: row for row in reader.table("stack").to_pylist()}
    mine = [sample for sample in samples if sample["pid"] == pid]
    assert all(sample["stack"] == 0 or stacks[sample["stack"]]["pid"] == pid for sample in mine)
    assert sum(sample["stack"] != 0 for sample in mine) > 0.8 * len(mine)
    # with stacks that lie in what it had mapped, and kernel stacks that lie in the kernel
    mapped = [
        (row["start"], row["start"] + row["length"]) for row in reader.table("mapping").to_pylist() if row["pid"] == pid
    ]
    leaves = [stacks[sample["stack"]]["ips"][0] for sample in mine if sample["stack"]]
    assert sum(any(start <= ip < end for start, end in mapped) for ip in leaves) > 0.9 * len(leaves)
    kernel = [stacks[sample["kernel_stack"]]["ips"] for sample in samples if sample["kernel_stack"]]
    assert kernel
    assert all(ip >= 1 << 63 for ips in kernel for ip in ips)
    # on the recording's clock
    assert reader.header["clock"]["monotonic_ns"] < samples[0]["time_ns"] < reader.header["end_ns"]
    assert reader.header["totals"]["cpu_samples"] == len(samples)
    # and who does not want them has none
    assert len(CaptureReader(tmp_path / "d").table("cpu_sample")) == 0
    assert len(CaptureReader(tmp_path / "d").table("metric")) == 0


# Ends after a few samples, in functions without frame pointers.
BRIEF = """
#include <time.h>
static __attribute__((noipa)) int inner(void) { while (clock() < CLOCKS_PER_SEC / 40); return 1; }
static __attribute__((noipa)) int middle(void) { return inner() + 1; }
static __attribute__((noipa)) int outer(void) { return middle() + 1; }
int main(void) { return outer() == 3 ? 0 : 1; }
"""


def test_stacks_of_programs_that_end_at_once(tmp_path: Path) -> None:
    """Of a build, most are: the learner comes too late to see what they had mapped."""
    (tmp_path / "brief.c").write_text(BRIEF)
    subprocess.run(["gcc", "-O2", tmp_path / "brief.c", "-o", tmp_path / "brief"], check=True)
    loop = f"for i in $(seq 40); do {tmp_path}/brief || exit 1; done"
    with Hardware(tmp_path / "gpu") as hardware:
        record(hardware, tmp_path / "c", "--cpu-freq", "499", "--symbols", "needed", "--", "sh", "-c", loop)
    done = iaprof("report", tmp_path / "c", "--cpu-samples", "--format", "folded", "--frames", "process,cpu")
    stacks: Counter[str] = Counter()
    for stack, count in counted(done.out):
        if stack.startswith("brief;") and "inner" in stack:
            stacks[stack.partition(";")[2]] += count
    # then nearly all stacks are whole; the others execute a program, and have none
    counts = recorded(CaptureReader(tmp_path / "c").header)["cpu_samples"]
    assert counts.whole > 0.9 * counts.stacks > 0.9 * 40 * 5
    # and what is in their functions has all callers
    others = {
        stack: count for stack, count in stacks.items() if not re.match("_start;.*;main;outer;middle;inner", stack)
    }
    assert stacks.total() > 40 * 5
    assert sum(others.values()) < 0.03 * stacks.total(), others


EXECUTES_ITSELF = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    char left[16], *words[] = {argv[0], left, 0};
    int many = atoi(argv[1]);
    snprintf(left, sizeof(left), "%d", many - 1);
    return many ? execv(argv[0], words) : 0;
}
"""


def test_a_thread_between_two_programs_has_no_stack(tmp_path: Path) -> None:
    (tmp_path / "execs.c").write_text(EXECUTES_ITSELF)
    subprocess.run(["gcc", "-O2", tmp_path / "execs.c", "-o", tmp_path / "execs"], check=True)
    with Hardware(tmp_path / "gpu") as hardware:
        record(hardware, tmp_path / "c", "--cpu-freq", "999", "--", str(tmp_path / "execs"), "2000")
    reader = CaptureReader(tmp_path / "c")
    pid, stacks = reader.header["command_pid"][0], {row["id"]: row for row in reader.table("stack").to_pylist()}
    rows = [row for row in reader.table("cpu_sample").to_pylist() if row["pid"] == pid and not row["stack"]]
    # then samples without a stack are in the system call, but for those of a process that has ended
    lines = [line.split() for line in Path("/proc/kallsyms").read_text().splitlines()]
    symbols = sorted((int(address, 16), name) for address, _, name, *_ in lines)
    starts = [address for address, _ in symbols]
    calls: Counter[str] = Counter()
    for row in rows:
        ips = stacks[row["kernel_stack"]]["ips"]
        # return addresses: a call may be a function's last instruction
        names = {symbols[bisect.bisect_right(starts, ip - 1) - 1][1] for ip in ips}
        if len(ips) == 1 and all(name.startswith("__x86_indirect_thunk_") for name in names):
            continue  # from there, Linux finds no caller
        calls[next(iter(names & {"__x64_sys_execve", "__x64_sys_exit_group"}), "")] += 1
    assert calls["__x64_sys_execve"] > 20
    assert calls.keys() <= {"__x64_sys_execve", "__x64_sys_exit_group"}, calls


# Executes another program after a few samples. Programs that differ in MORE have the same functions at the same
# addresses, but one with a larger frame: by the other program's call frame information, its caller is left out.
EXECUTES = """
#include <time.h>
#include <unistd.h>
static __attribute__((noipa)) int inner(void) { while (clock() < CLOCKS_PER_SEC / 40); return 1; }
static __attribute__((noipa)) int middle(void)
{
    char more[MORE];
    __asm__ volatile("" : : "r"(more));
    return inner() + 1;
}
static __attribute__((noipa)) int outer(void) { return middle() + 1; }
int main(int argc, char **argv) { return argc < 2 ? sleep(1) : outer() == 3 ? execv(argv[1], argv + 1) : 1; }
"""


def test_a_program_that_is_executed_meanwhile_finishes_no_stack_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "executes.c").write_text(EXECUTES)
    one, other = (str(tmp_path / name) for name in ("one", "other"))
    for program, more in ((one, 8), (other, 24)):
        flags = ["-O2", "-static", "-no-pie", f"-DMORE={more}"]
        subprocess.run(["gcc", *flags, tmp_path / "executes.c", "-o", program], check=True)
    # when a sample's stack waits for its turn longer than the program runs
    loop = f"for i in $(seq 40); do {one} {other} & sleep 0.05; done; wait"
    with Hardware(tmp_path / "gpu") as hardware:
        record(hardware, tmp_path / "c", "--cpu-freq", "499", "--symbols", "needed", "--", "sh", "-c", loop)
    done = iaprof("report", tmp_path / "c", "--cpu-samples", "--format", "folded", "--frames", "cpu")
    stacks: Counter[str] = Counter()
    for stack, count in counted(done.out):
        if ";inner" in stack:
            stacks[stack.partition(";inner")[0]] += count
    whole = {stack: count for stack, count in stacks.items() if stack.startswith("_start;")}
    assert sum(whole.values()) > 0.9 * stacks.total() > 40 * 5
    assert all(stack.endswith(";main;outer;middle") for stack in whole), whole


# Starts itself a second time, in a session of its own, and both are busy; then it says who they are.
WITH_A_CHILD = """
import os, subprocess, sys, time
other = None if len(sys.argv) > 1 else subprocess.Popen([sys.executable, __file__, "x"], start_new_session=True)
while time.process_time() < 1:
    sum(range(1000)), open("/proc/self/stat").read()
if other:
    print(os.getpid(), other.pid)
    other.wait()
"""


def test_the_command_s_samples_are_the_command_s(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(WITH_A_CHILD)
    forever = [sys.executable, "-c", BUSY.format(1e9)]
    with Hardware(tmp_path / "gpu") as hardware:
        # given a process that is busy, too
        before = subprocess.Popen(forever, stdout=subprocess.DEVNULL)
        try:
            done = record(hardware, tmp_path / "c", "--cpu-freq", "499", "--", sys.executable, str(script))
            with_all = record(
                hardware, tmp_path / "a", "-a", "--cpu-freq", "99", "--", sys.executable, "-c", BUSY.format(0.5)
            )
        finally:
            before.kill()
            before.wait()
    command = set(map(int, done.out.split()))
    # then its samples, and its child's, are shown, and nobody else's
    rows = CaptureReader(tmp_path / "c").table("cpu_sample").to_pylist()
    shown = Counter(row["pid"] for row in rows if row["left_out"] is None)
    assert shown.keys() == command
    assert all(count > 0.5 * 499 for count in shown.values())
    # the recorder's are those of itself and its children
    header = CaptureReader(tmp_path / "c").header
    assert header.keys() <= MEMBERS.keys()
    own = {header["recorder_pid"]}
    table = CaptureReader(tmp_path / "c").table("process", ("pid", "tid", "ppid", "event")).to_pylist()
    for _ in range(4):
        own |= {row["pid"] for row in table if row["ppid"] in own and row["event"] in ("fork", "running")} - command
    recorder = Counter(row["pid"] for row in rows if row["left_out"] == "recorder")
    assert header["recorder_pid"] in recorder
    assert recorder.keys() <= own
    assert any(row["stack"] for row in rows if row["left_out"] == "recorder")  # its cost can be looked at
    # and others have no stack
    others = [row for row in rows if row["left_out"] == "other"]
    assert {(row["stack"], row["kernel_stack"]) for row in others if row["pid"] == before.pid} == {(0, 0)}
    totals = header["totals"]
    assert (totals["recorder_cpu_samples"], totals["other_cpu_samples"]) == (sum(recorder.values()), len(others))
    # reports say so
    report = iaprof("report", tmp_path / "c", "--cpu-samples", "--frames", "process,pid")
    assert {int(line.split(";")[1].split()[0]) for line in report.out.splitlines()} == command
    assert f"{sum(shown.values()):,} CPU samples, without {sum(recorder.values()):,} of the recorder's" in report.err
    everything = iaprof("report", tmp_path / "c", "--cpu-samples", "--all-processes", "--frames", "process,pid")
    assert {int(line.split(";")[1].split()[0]) for line in everything.out.splitlines()} == {row["pid"] for row in rows}
    # with -a, others are shown, with their stacks
    rows = CaptureReader(tmp_path / "a").table("cpu_sample").to_pylist()
    assert {row["left_out"] for row in rows} <= {None, "recorder"}
    assert {row["left_out"] for row in rows if row["pid"] in (before.pid, int(with_all.out))} == {None}
    assert any(row["stack"] for row in rows if row["pid"] == before.pid)


# Starts a program whose parent ends at once, and is busy until that has been so for some seconds, too.
WITH_A_DAEMON = """
import os, time
if not os.fork():
    if os.fork():
        os.write(1, b"%d\\n" % os.getpid())
        os._exit(0)
    os.setsid()
else:
    os.wait()
os.write(1, b"%d\\n" % os.getpid())
ends = time.monotonic() + 5
while time.monotonic() < ends:
    sum(range(1000))
"""


@thorough
def test_later_files_know_the_command_s_processes_and_the_recorder_s(tmp_path: Path) -> None:
    script = tmp_path / "daemon.py"
    script.write_text(WITH_A_DAEMON)
    words = ("--cpu-freq", "199", "--switch-output", "2s", "--", sys.executable, str(script))
    with Hardware(tmp_path / "gpu") as hardware:
        done = record(hardware, tmp_path / "c.parquet", *words)
    command = set(map(int, done.out.split()))
    files = list(tmp_path.glob("c*.parquet"))
    assert len(files) >= 2
    for path in files:
        reader = CaptureReader(path)
        rows = reader.table("cpu_sample").to_pylist()
        assert {row["pid"] for row in rows if row["left_out"] is None} <= command
        assert {row["left_out"] for row in rows if row["pid"] in command} <= {None}
        assert {row["left_out"] for row in rows if row["pid"] == reader.header["recorder_pid"]} == {"recorder"}
    second = next(reader for path in files if (reader := CaptureReader(path)).header["part"] == 1)
    assert len(command & set(second.table("cpu_sample")["pid"].to_pylist())) == 2
    # and what finished the first file in the meantime is the recorder's, too
    rows = second.table("cpu_sample").to_pylist()
    assert len({row["pid"] for row in rows if row["left_out"] == "recorder"}) > 1


def on_a_terminal(hardware: Hardware, *words: str | Path) -> str:
    """What a recorder of two seconds writes to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    command = [*IAPROF, "record", *map(str, words)]
    recorder = subprocess.Popen(
        command, env=os.environ | environment(hardware) | {"COLUMNS": "80"}, stderr=follower, stdout=follower
    )
    os.close(follower)
    written = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while select.select([leader], [], [], LONGEST_WAIT_S)[0] and (piece := os.read(leader, 4096)):
            written += piece
    os.close(leader)
    assert recorder.wait(120) == 0
    return written.decode()


@pytest.mark.alone
@thorough
def test_the_status_line_is_for_terminals(tmp_path: Path) -> None:
    quiet_program = ["sh", "-c", '"$@" > /dev/null', "sh", *workload("--seconds", 2)]
    with Hardware(tmp_path / "gpu") as hardware:
        shown = on_a_terminal(hardware, "-o", tmp_path / "c", "--", *quiet_program)
        nothing = on_a_terminal(hardware, "-q", "-o", tmp_path / "d", "-d", "1.2")
        told = record(hardware, tmp_path / "e", "-v", "--", *workload("--seconds", 1))
    lines = [part for part in shown.split("\r\x1b[K") if "records/s" in part]
    assert len(lines) >= 2
    last = lines[-1]
    assert all(len(line) < 80 for line in lines)
    assert re.match(r"0:0\d  lost 0  \d+(\.\d)?k? records/s  \d+(\.\d)?k? launches/s  3/3 kernels  ", last), last
    # it gives way to the last line, and the cursor stands at the beginning of a line
    assert shown.split("\r\x1b[K")[-1].startswith("[ iaprof record: wrote")
    assert re.search(r"\]\r\n", shown.split("\r\x1b[K")[-1])  # sentences about others' drivers may follow
    assert nothing == ""
    assert "\x1b" not in told.err
    assert "records/s" not in told.err
    assert f"{runtime.build().library}: 2 probes" in told.err
    assert "iaprof: took " in told.err


def test_a_signal_clears_the_line(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        leader, follower = pty.openpty()
        recorder = subprocess.Popen(
            [*IAPROF, "record", "-o", str(tmp_path / "c")], env=os.environ | hardware.env(), stderr=follower
        )
        os.close(follower)
        written = b""
        while b"records/s" not in written:
            written += os.read(leader, 4096)
        recorder.send_signal(signal.SIGINT)
        while b"wrote" not in written:
            written += os.read(leader, 4096)
        os.close(leader)
        assert recorder.wait(120) == 0
    assert b"\r\x1b[K[ iaprof record: wrote" in written
