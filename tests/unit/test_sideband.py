"""Side-band records and CPU samples: what the kernel writes is read whole, and what it never wrote does no harm."""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from iaprof.bpf.sideband import SideBandBuffers
from iaprof.formats.capture import CaptureReader
from iaprof.formats.sideband import (
    CONTEXT_KERNEL,
    CONTEXT_MAX,
    CONTEXT_USER,
    SAMPLE,
    SampleRecords,
    Samples,
    SideBand,
    Stacks,
    comm_record,
    decode,
    sample_columns,
    tasks,
)
from iaprof.record.finish import finish
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from limits import Within

GUEST = -2048 % 2**64
Stack = tuple[int, ...]


def record(kind: int, body: bytes, misc: int = 0) -> bytes:
    return struct.pack("<IHH", kind, misc, 8 + len(body)) + body


def sample(time: int, pid: int, tid: int, cpu: int, *chain: int) -> bytes:
    return record(SAMPLE, struct.pack(f"<IIQIIQ{len(chain)}Q", pid, tid, time, cpu, 0, len(chain), *chain))


def both(kernel: Stack, user: Stack) -> Stack:
    """A call chain as the kernel writes it."""
    return (*((CONTEXT_KERNEL, *kernel) if kernel else ()), *((CONTEXT_USER, *user) if user else ()))


def lost(count: int) -> bytes:
    return record(2, struct.pack("<QQ", 1, count))


def of_each(stacks: Stacks) -> list[Stack]:
    ends = np.cumsum(stacks.depths).tolist()
    assert (ends or [0])[-1] == len(stacks.ips)
    return [tuple(stacks.ips[start:end].tolist()) for start, end in zip([0, *ends], ends, strict=False)]


def read(*frames: bytes) -> tuple[SideBand, Samples]:
    band = SideBand()
    for frame in frames:
        decode(frame, band)
    return band, sample_columns(band.samples)


address = st.integers(0, CONTEXT_MAX - 1)
stack = st.lists(address, max_size=5).map(tuple)
u32 = st.integers(0, (1 << 32) - 1)
one = st.tuples(st.integers(0, (1 << 64) - 1), u32, u32, u32, stack, stack)


@given(st.lists(st.lists(st.one_of(one, st.just(None)), max_size=8), max_size=4))
def test_every_sample_comes_out_as_it_went_in(
    frames: list[list[tuple[int, int, int, int, Stack, Stack] | None]],
) -> None:
    # given frames of samples, among them other records
    written = [
        b"".join(sample(*s[:4], *both(s[5], s[4])) if s else comm_record(1, 2, b"x") for s in frame) for frame in frames
    ]
    # when
    band, found = read(*written)
    # then
    samples = [s for frame in frames for s in frame if s]
    columns = [found.time, found.pid, found.tid, found.cpu]
    assert [column.tolist() for column in columns] == [[s[i] for s in samples] for i in range(4)]
    assert of_each(found.user) == [s[4] for s in samples]
    assert of_each(found.kernel) == [s[5] for s in samples]
    assert len(band.processes.time) == sum(s is None for frame in frames for s in frame)


@pytest.mark.parametrize(
    ("chain", "user", "kernel"),
    [
        ((), (), ()),
        ((CONTEXT_USER,), (), ()),
        ((1, 2), (), ()),
        ((1, CONTEXT_KERNEL, 2), (), (2,)),
        ((CONTEXT_USER, 1, CONTEXT_KERNEL, 2, CONTEXT_USER, 3), (1, 3), (2,)),
        ((CONTEXT_USER, 1, GUEST, 2, CONTEXT_USER, CONTEXT_MAX, 3), (1,), ()),
    ],
)
def test_parts_of_a_chain_go_by_the_marker_before_them(chain: Stack, user: Stack, kernel: Stack) -> None:
    # between two others, whose parts must not reach into it, nor its into theirs
    around = sample(1, 1, 1, 1, CONTEXT_USER, 7)
    _, found = read(around + sample(1, 1, 1, 1, *chain) + around)
    assert of_each(found.user) == [(7,), user, (7,)]
    assert of_each(found.kernel) == [(), kernel, ()]


def test_pids_of_tasks_that_end_are_no_markers() -> None:
    ending = (1 << 32) - 1
    _, found = read(sample((1 << 64) - 1, ending, ending, 0, CONTEXT_USER, 5))
    assert (found.pid.tolist(), found.tid.tolist(), of_each(found.user)) == ([ending], [ending], [(5,)])


@pytest.mark.parametrize(
    "bad",
    [
        record(SAMPLE, bytes(24)),  # too short to say how many addresses it has
        record(SAMPLE, struct.pack("<IIQIIQQ", 1, 1, 1, 1, 0, 2, 5)),  # more than there are
        record(SAMPLE, struct.pack("<IIQIIQQ", 1, 1, 1, 1, 0, (1 << 64) - 1, 5)),
        record(SAMPLE, struct.pack("<IIQIIQQ", 1, 1, 1, 1, 0, 0, 5)),  # fewer
        sample(1, 1, 1, 1, 5)[:-8],
        record(SAMPLE, bytes(33)),
        bytes(8),
    ],
)
def test_what_follows_a_sample_that_is_none_is_told(bad: bytes) -> None:
    band, good = SideBand(), sample(3, 1, 1, 1, CONTEXT_USER, 5)
    with pytest.raises(ValueError, match=f"^{len(bad)} of its bytes are no records"):
        decode(good + bad, band)
    assert sample_columns(band.samples).time.tolist() == [3]


@given(st.binary(max_size=400), st.integers(0, 400), st.binary(max_size=9))
def test_any_bytes_are_read_or_refused(data: bytes, where: int, change: bytes) -> None:
    # given noise, and records in which a few bytes are changed
    good = lost(3) + sample(1, 2, 3, 4, *both((9, 8), (7,))) + comm_record(1, 2, b"x") + sample(1, 2, 3, 4)
    for damaged in (data, good[:where] + change + good[where + len(change) :], good + data):
        band = SideBand()
        try:
            decode(damaged, band)
        except ValueError as error:
            assert "of its bytes are no records" in str(error)
        # then what was taken can be read
        found = sample_columns(band.samples)
        of_each(found.user), of_each(found.kernel), list(tasks(damaged))
        assert len(found.time) == len(band.samples.starts)


def test_no_samples_have_no_columns() -> None:
    found = sample_columns(SampleRecords())
    assert (len(found.time), of_each(found.user), of_each(found.kernel)) == (0, [], [])


def captured(folder: Path, *frames: tuple[int, int, bytes], depth: int = 127) -> CaptureReader:
    """The capture of side-band frames: time, CPU, records."""
    spool = Spool(folder / "s")
    spool.write(FrameKind.HEADER, b'{"streams": [], "stack_depth": %d}' % depth, time=1)
    for time_ns, cpu, data in frames:
        spool.write(FrameKind.SIDEBAND, data, time=time_ns, source=cpu)
    spool.close()
    finish(SpoolReader(folder / "s"), folder / "c")
    return CaptureReader(folder / "c")


def test_distinct_stacks_are_kept_once(tmp_path: Path) -> None:
    # given samples whose user stacks are alike in all but the process, the order, the end; kernel stacks of anybody
    users: list[tuple[int, Stack]] = [(1, (5, 6)), (2, (5, 6)), (1, (6, 5)), (1, (5,)), (1, (5, 6, 0)), (3, ())]
    kernels: list[Stack] = [(), (1 << 63,), (1 << 63, 1)]
    samples = [(*user, kernel) for user in users for kernel in kernels] * 3
    data = b"".join(sample(i, pid, pid, 0, *both(kernel, user)) for i, (pid, user, kernel) in enumerate(samples))
    # when they come in two frames
    reader = captured(tmp_path, (5, 0, data), (6, 1, data))
    # then
    rows = reader.table("stack").to_pylist()
    stacks = {row["id"]: (row["pid"], tuple(row["ips"])) for row in rows}
    found = [
        (row["pid"], stacks.get(row["stack"], (row["pid"], ())), stacks.get(row["kernel_stack"], (0, ())))
        for row in reader.table("cpu_sample").to_pylist()
    ]
    assert found == [(pid, (pid, user), (0, kernel)) for pid, user, kernel in samples] * 2
    assert sorted(stacks.values()) == sorted([*(u for u in users if u[1]), *((0, k) for k in kernels if k)])
    assert len(rows) == len(stacks)
    assert all(id_ >> 62 == 1 for id_ in stacks), "an id that a launch's stack may have"
    assert reader.header["totals"]["cpu_samples"] == 2 * len(samples)


def test_stacks_at_the_limit_are_truncated(tmp_path: Path) -> None:
    # given a limit of four, for both stacks together
    chains = [both((), (1, 2, 3)), both((), (1, 2, 3, 4)), both((9, 8), (5, 6)), both((9, 8, 7, 6), ())]
    data = b"".join(sample(1, 1, 1, 0, *chain) for chain in chains)
    # when
    reader = captured(tmp_path, (5, 0, data), depth=4)
    # then the stack at the chain's end may go on
    truncated = {tuple(row["ips"]): row["truncated"] for row in reader.table("stack").to_pylist()}
    assert truncated == {(1, 2, 3): False, (1, 2, 3, 4): True, (5, 6): True, (9, 8): False, (9, 8, 7, 6): True}


def test_a_loss_lies_in_its_span(tmp_path: Path) -> None:
    # given CPU 3, of which something was lost before it was read at 30, as the records after that read say
    frames = [(10, 0, sample(1, 1, 1, 0)), (20, 3, sample(1, 1, 1, 3)), (30, 3, sample(1, 1, 1, 3)), (35, 0, lost(2))]
    reader = captured(tmp_path, *frames, (40, 3, lost(7) + sample(1, 1, 1, 3)))
    losses = [(row["begin_ns"], row["time_ns"], row["count"]) for row in reader.table("loss").to_pylist()]
    assert losses[:2] == [(1, 35, 2), (20, 40, 7)]


BUSY = """
import ctypes, sys, time
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    time.clock_gettime_ns(0), open("/proc/self/stat").read()
"""


@pytest.mark.root
@pytest.mark.slow
def test_a_busy_process_is_sampled_and_an_idle_one_is_not() -> None:
    # given one that is busy for two seconds, in which others have their turns, and one that sleeps
    buffers = SideBandBuffers(499)
    busy = subprocess.Popen([sys.executable, "-c", BUSY, "60"], stdout=subprocess.PIPE)
    idle = subprocess.Popen(["sleep", "60"])
    assert busy.stdout is not None
    busy.stdout.readline()
    try:
        mapped = [line.split(None, 2) for line in Path(f"/proc/{busy.pid}/maps").read_text().splitlines()]
        code = [[int(end, 16) for end in line[0].split("-")] for line in mapped if "x" in line[1]]
        before = SideBand()
        for _, data in buffers.read():
            decode(data, before)
        buffers.sampling(True)
        used, began = cpu_seconds(busy.pid), time.monotonic_ns()
        time.sleep(2)
        buffers.sampling(False)
        used, ended = cpu_seconds(busy.pid) - used, time.monotonic_ns()
    finally:
        busy.send_signal(signal.SIGKILL)
        idle.kill()
        busy.wait(), idle.wait()
    # when
    band = SideBand()
    cpus = set()
    for cpu, data in buffers.read():
        decode(data, band)
        cpus.add(cpu)
    time.sleep(0.2)
    after = SideBand()
    for _, data in buffers.read():
        decode(data, after)
    buffers.stop()
    buffers.close()
    # then samples come while they are wanted, the side-band always does
    assert not before.samples.starts and not after.samples.starts
    assert {busy.pid, idle.pid} <= set(before.processes.pid) & set(band.processes.pid)
    found = sample_columns(band.samples)
    assert all(began < int(t) < ended for t in found.time)
    # and the busy one has its share of 499 Hz
    assert band.lost == 0
    by_pid = Counter(found.pid.tolist())
    print(f"{by_pid[busy.pid]} samples in {used:.2f} s of CPU, {len(found.time)} of all processes")
    assert by_pid[busy.pid] == pytest.approx(499 * used, rel=0.15, abs=50)
    assert by_pid[idle.pid] == 0, "it sleeps"
    assert by_pid[0] == 0, "a CPU that idles"
    # and its stacks are in its code, and in the kernel
    mine = found.pid == busy.pid
    users = [s for s, m in zip(of_each(found.user), mine, strict=True) if m and s]
    kernels = [s for s, m in zip(of_each(found.kernel), mine, strict=True) if m and s]
    assert len(users) > 0.8 * by_pid[busy.pid]
    inside = sum(any(start <= s[0] < end for start, end in code) for s in users)
    assert inside > 0.95 * len(users)
    assert kernels and all(ip >> 63 for s in kernels for ip in s)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.root
def test_what_is_mapped_wakes_at_once(within: Within) -> None:
    # given somebody who reads only when woken
    buffers = SideBandBuffers(49)
    buffers.sampling(True)
    band = SideBand()
    started = time.monotonic()
    # when a program is started, which maps itself
    with subprocess.Popen(["sleep", "600"]) as process:
        while process.pid not in band.mappings.pid and select.select([buffers], [], [], 120)[0]:
            for _, data in buffers.read():
                decode(data, band)
        passed = time.monotonic() - started
        runs = process.poll() is None
        process.kill()
    buffers.close()
    # then its mappings are there while it still runs
    assert process.pid in band.mappings.pid
    assert runs
    within.took(passed, 0.4)


@pytest.mark.root
@pytest.mark.alone
@pytest.mark.slow
def test_a_storm_of_forks_loses_nothing() -> None:
    # given thousands of forks, which map nothing
    storm = "import os\nfor _ in range(5000):\n    if not (pid := os.fork()): os._exit(0)\n    os.waitpid(pid, 0)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", f"print(flush=True)\ninput()\n{storm}"], **pipes) as process:
        process.stdout.readline()
        buffers = SideBandBuffers(49)
        buffers.sampling(True)
        band = SideBand()
        process.communicate(b"\n")
    # when they are read only afterwards
    for _, data in buffers.read():
        decode(data, band)
    buffers.stop()
    for _, data in buffers.read():
        decode(data, band)
    buffers.close()
    # then
    forks = [
        (pid, ppid)
        for event, pid, ppid in zip(band.processes.event, band.processes.pid, band.processes.ppid, strict=True)
        if event == "fork"
    ]
    assert sum(ppid == process.pid and pid != process.pid for pid, ppid in forks) == 5000
    assert band.lost == 0
