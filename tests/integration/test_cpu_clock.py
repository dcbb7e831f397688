"""CPU samples: who is busy has as many as it should, who is not has none, and both of its stacks are there."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from iaprof.bpf.perf_event import CpuClock
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.sizes import Sizes
from iaprof.formats.wire.launches import Counter as Counted
from integration.recording import cpu_seconds
from waiting import until

pytestmark = [pytest.mark.bpf, pytest.mark.beside]

HZ = 499
BUSY = """
import time
print("ready", flush=True)
while True:
    time.clock_gettime_ns(0), open("/proc/self/stat").read()
"""


def test_a_busy_process_is_sampled_and_an_idle_one_is_not() -> None:
    # given one that is busy, and one that sleeps
    probes = LaunchProbes()
    clock = CpuClock(probes.maps["on_sample"], HZ)
    busy = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    idle = subprocess.Popen(["sleep", "600"])
    assert busy.stdout is not None
    busy.stdout.readline()
    parts, sent = [probes.samples.read()], []
    # when, until it has used two seconds
    used, began = cpu_seconds(busy.pid), time.monotonic_ns()
    clock.enable(True)
    while cpu_seconds(busy.pid) < used + 2:
        time.sleep(0.1)
        parts.append(probes.samples.read())
        sent.append(probes.stacks.read())
    clock.enable(False)
    used, ended = cpu_seconds(busy.pid) - used, time.monotonic_ns()
    for process in (busy, idle):
        process.kill()
        process.wait()
    before, found = parts[0], np.concatenate([*parts[1:], probes.samples.read()])
    time.sleep(0.2)
    after = probes.samples.read()
    stacks = {int(each["id"]): each for some in (*sent, probes.stacks.read()) for each in some}
    counters = probes.counters()
    clock.close()
    probes.close()
    # then samples come while they are wanted
    assert not len(before) and not len(after)
    assert (began < found["time"]).all() and (found["time"] < ended).all()
    # and the busy one has its share of them
    by_pid = Counter(found["pid"].tolist())
    assert by_pid[busy.pid] == pytest.approx(HZ * used, rel=0.15, abs=50)
    assert by_pid[idle.pid] == 0, "it sleeps"
    assert by_pid[0] == 0, "a CPU that idles"
    assert counters[Counted.SAMPLES] == len(found) + counters[Counted.SAMPLES_LOST]
    # and its stacks are in user space, and in the kernel
    mine = found[found["pid"] == busy.pid]
    users, kernels = (mine[name][mine[name] > 0].tolist() for name in ("stack", "kernel_stack"))
    assert len(users) > 0.9 * len(mine)
    known = [stacks[id_] for id_ in users if id_ in stacks]
    assert known and all(each["pid"] == busy.pid and int(each["ips"][0]) < 1 << 47 for each in known)
    deep = [stacks[id_] for id_ in kernels if id_ in stacks]
    assert deep and all(each["pid"] == 0 and int(each["ips"][0]) >> 63 for each in deep)


def test_samples_without_a_stack_are_counted() -> None:
    """A reader that is stopped for long loses stacks first: the samples are shorter."""
    # given room for few stacks, and nobody who reads
    probes = LaunchProbes(Sizes(stack_pages=1))
    clock = CpuClock(probes.maps["on_sample"], HZ)
    busy = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    assert busy.stdout is not None
    busy.stdout.readline()
    # when
    clock.enable(True)
    used = cpu_seconds(busy.pid)
    until(lambda: cpu_seconds(busy.pid) > used + 1, busy)
    clock.enable(False)
    busy.kill()
    busy.wait()
    found, counters = probes.samples.read(), probes.counters()
    clock.close()
    probes.close()
    # then those that lack a stack of user space or of the kernel have been counted
    assert len(found) == counters[Counted.SAMPLES] - counters[Counted.SAMPLES_LOST]
    lacks_one = found[(found["stack"] == 0) | (found["kernel_stack"] == 0)]
    without = int(((found["stack"] == 0) & (found["pid"] == busy.pid)).sum())
    assert 0 < without <= counters[Counted.SAMPLE_STACKS_LOST] <= len(lacks_one)
