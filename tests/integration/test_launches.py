"""The launch probes by themselves: what arrives, and what happens when there is no room."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from errno import EINVAL
from pathlib import Path

import numpy as np
import pytest

from iaprof.bpf.maps import RingBuffer
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.usdt import Probe, read_probes
from iaprof.bpf.sizes import PAGE_BYTES, Sizes
from iaprof.bpf.syscall import BPF_LINK_CREATE, BPF_PROG_LOAD, bpf
from iaprof.bpf.uprobe import ProgramFor
from iaprof.formats.wire.launches import LAUNCH, MAX_DEPTH, Counter, LaunchFlags
from integration.recording import IN_TURN, copy_of_build, voluntary_switches
from limits import Within
from standin import runtime
from waiting import until

pytestmark = pytest.mark.bpf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the build: nobody else's probes are in these files."""
    return copy_of_build(tmp_path / "build")


def probes_on(folder: Path, sizes: Sizes | None = None) -> LaunchProbes:
    """Walks by frame pointers, which the programs have: nothing has to be learnt, and so nobody learns."""
    runtime.build(folder)
    probes = LaunchProbes(sizes or Sizes(), frame_pointers_only=True, cpu_samples=False)
    outcomes = list(probes.libraries.installed((str(folder),)))
    assert [outcome.problem for outcome in outcomes] == [""]
    assert outcomes[0].probes >= 2
    return probes


def start(folder: Path, *options: str | int | float) -> subprocess.Popen[bytes]:
    """Starts the workload without a GPU."""
    return subprocess.Popen(words_of(folder, *options), env=environment(), stdout=subprocess.DEVNULL)


def words_of(folder: Path, *options: str | int | float) -> list[str]:
    return runtime.command([runtime.debug_elf("bmg", "matmul")], *options, programs=runtime.build(folder))


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "STANDIN_DIR"}


def start_stopped(folder: Path, *options: str | int | float) -> subprocess.Popen[bytes]:
    """The same; it begins when it gets SIGCONT."""
    words = ["sh", "-c", 'kill -STOP $$ && exec "$@"', "sh", *words_of(folder, *options)]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    return process


def run(folder: Path, *options: str | int | float) -> int:
    """Runs the workload without a GPU; gives its process id."""
    process = start(folder, *options)
    assert process.wait() == 0
    return process.pid


@pytest.fixture
def closing() -> Iterator[list[LaunchProbes]]:
    opened: list[LaunchProbes] = []
    yield opened
    for probes in opened:
        probes.close()


@pytest.fixture(params=["links", "no links"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """This kernel, and one before Linux 6.6, which has no links for uprobes but loads programs for them."""

    def before_6_6(command: int, attributes: bytes) -> int:
        place = 68 if command == BPF_PROG_LOAD else 8
        (kind,) = struct.unpack_from("<I", attributes, place)
        if kind == ProgramFor.UPROBES.value:
            if command == BPF_LINK_CREATE:
                raise OSError(EINVAL, os.strerror(EINVAL))
            attributes = attributes[:place] + bytes(4) + attributes[place + 4 :]
        return bpf(command, attributes)

    if request.param == "no links":
        monkeypatch.setattr("iaprof.bpf.uprobe.bpf", before_6_6)


EITHER_KERNEL = pytest.mark.usefixtures("kernel")


@EITHER_KERNEL
def test_every_launch_arrives_whole(folder: Path, closing: list[LaunchProbes]) -> None:
    # given
    probes = probes_on(folder)
    closing.append(probes)
    begin = time.monotonic_ns()
    # when
    pid = run(folder, "--launches", 3000, "--rate", 0)
    # then
    launches = probes.launches.read()
    assert len(launches) == 3000
    assert set(launches["pid"].tolist()) == {pid}
    assert set(launches["comm"].tolist()) == {b"workload"}
    assert set(launches["name"].tolist()) == {
        b"multiply_basic",
        b"multiply_local_access",
        b"multiply_local_access_and_tiling",
    }
    assert set(launches["flags"].tolist()) == {0}
    assert set(launches["iba"].tolist()) == {0x800000000000}
    assert (np.diff(launches["time"].astype(np.int64)) > 0).all()
    assert begin < launches["time"][0] < time.monotonic_ns()
    assert (launches["address"] >> np.uint64(32) == 0xFFFF8000).all()
    # and every stack that they name has come before them, once
    stacks = probes.stacks.read()
    assert set(launches["stack"].tolist()) == set(stacks["id"].tolist())
    assert len(set(stacks["id"].tolist())) == len(stacks)
    assert (stacks["depth"] > 5).all()
    # and the module's path came
    compiled = probes.compiled.read()
    assert len(compiled) == 1
    assert b"dumped_zebin_module" in compiled["path"][0]
    assert (compiled["uid"][0], compiled["gid"][0]) == (os.getuid(), os.getgid())
    assert probes.counters()[Counter.LAUNCHES] == 3000
    # and without the probes nothing is sent
    probes.detach()
    run(folder, "--launches", 100, "--rate", 0)
    assert len(probes.launches.read()) == 0


def test_each_quarter_of_a_ring_buffer_wakes_the_reader_once(folder: Path, closing: list[LaunchProbes]) -> None:
    # given
    sizes = Sizes(launch_pages=16)
    probes = probes_on(folder, sizes)
    closing.append(probes)
    launches_of_quarter = sizes.launch_pages * PAGE_BYTES // 4 // (LAUNCH.itemsize + 8)
    # when launches come that fill half a quarter each time
    with select.epoll() as epoll:
        epoll.register(probes.launches.fileno(), select.EPOLLIN | select.EPOLLET)
        woken = 0
        for _ in range(8):
            run(folder, "--launches", launches_of_quarter // 2, "--rate", 0)
            woken += len(epoll.poll(0.1))
            probes.launches.read()
    # then, however many CPUs there are
    assert 3 <= woken <= 4


def test_a_full_ring_buffer_is_counted(folder: Path, closing: list[LaunchProbes]) -> None:
    # given room for 28 launches, and nobody who reads
    probes = probes_on(folder, Sizes(launch_pages=1))
    closing.append(probes)
    # when
    run(folder, "--launches", 1000, "--rate", 0)
    # then
    kept = len(probes.launches.read())
    counters = probes.counters()
    assert 0 < kept < 40
    assert kept + counters[Counter.LAUNCHES_LOST] == counters[Counter.LAUNCHES] == 1000
    # and the time of those that were lost is counted, too
    assert counters[Counter.PROBE_NS] > 1000 * 100


def test_what_a_lost_launch_lacks_is_not_counted_again(folder: Path, closing: list[LaunchProbes]) -> None:
    # given room for few launches and fewer stacks, ids that always collide, and nobody who reads
    probes = probes_on(folder, Sizes(launch_pages=1, stack_pages=1, stack_id_bits=1))
    closing.append(probes)
    # when
    run(folder, "--launches", 1000, "--rate", 0)
    # then
    launches, counters = probes.launches.read(), probes.counters()
    without = int(((launches["flags"] & LaunchFlags.NO_STACK) != 0).sum())
    assert len(launches) + counters[Counter.LAUNCHES_LOST] == counters[Counter.LAUNCHES] == 1000
    assert without == counters[Counter.STACKS_LOST] + counters[Counter.STACKS_FAILED] > 0
    assert counters[Counter.STACKS] == len(probes.stacks.read())


def test_stacks_whose_ids_collide_all_arrive(folder: Path, closing: list[LaunchProbes]) -> None:
    # given ids of one bit, so that any two stacks have one id
    probes = probes_on(folder, Sizes(stack_id_bits=1))
    closing.append(probes)
    # when
    run(folder, "--launches", 300, "--rate", 0)
    # then every launch has a stack, and all different stacks are there
    launches, stacks = probes.launches.read(), probes.stacks.read()
    assert len(launches) == 300
    assert not (launches["flags"] & LaunchFlags.NO_STACK).any()
    assert set(launches["stack"].tolist()) <= set(stacks["id"].tolist())
    assert probes.counters()[Counter.STACKS_COLLIDED] > 0
    # (behind a stack's end is what a longer one left there)
    distinct = {stack["ips"][: stack["depth"]].tobytes() for stack in stacks}
    collided = probes_on_without_collisions(folder, closing)
    assert len(distinct) == collided


def probes_on_without_collisions(folder: Path, closing: list[LaunchProbes]) -> int:
    """How many different stacks the same run has."""
    probes = LaunchProbes(frame_pointers_only=True, cpu_samples=False)
    closing.append(probes)
    list(probes.libraries.installed((str(folder),)))
    run(folder, "--launches", 300, "--rate", 0)
    return len(probes.stacks.read())


def test_a_stack_that_was_forgotten_travels_again(folder: Path, closing: list[LaunchProbes]) -> None:
    # given a memory for few stacks, threads that have many, and room for one of each launch
    probes = probes_on(folder, Sizes(stacks_remembered=1))
    closing.append(probes)
    # when
    run(folder, "--launches", 250, "--rate", 0, "--threads", 4)
    # then
    launches, stacks = probes.launches.read(), probes.stacks.read()
    assert len(launches) == 1000
    assert not (launches["flags"] & LaunchFlags.NO_STACK).any()
    assert set(launches["stack"].tolist()) <= set(stacks["id"].tolist())
    assert len(stacks) > len(set(stacks["id"].tolist()))


def test_no_room_for_stacks_is_counted_and_marked(folder: Path, closing: list[LaunchProbes]) -> None:
    # given room for three stacks, ids that always collide, and nobody who reads
    probes = probes_on(folder, Sizes(stack_pages=1, stack_id_bits=1))
    closing.append(probes)
    # when
    run(folder, "--launches", 400, "--rate", 0)
    # then launches without a stack say so, and are as many as were counted
    launches = probes.launches.read()
    without = int(((launches["flags"] & LaunchFlags.NO_STACK) != 0).sum())
    assert len(launches) == 400
    assert without == int((launches["stack"] == 0).sum())
    assert without == probes.counters()[Counter.STACKS_LOST] > 0


@IN_TURN
def test_a_stack_deeper_than_the_limit_is_as_deep_as_the_limit(folder: Path, closing: list[LaunchProbes]) -> None:
    # given
    probes = probes_on(folder)
    closing.append(probes)
    # when
    run(folder, "--launches", 30, "--rate", 0)
    run(folder, "--launches", 40, "--rate", 0, "--depth", MAX_DEPTH + 10)
    # then launches are counted whose stack may be deeper, not their different stacks
    launches, stacks = probes.launches.read(), probes.stacks.read()
    assert stacks["depth"].max() == MAX_DEPTH
    deep = stacks["id"][stacks["depth"] == MAX_DEPTH]
    truncated = int(np.isin(launches["stack"], deep).sum())
    assert 0 < len(deep) < truncated == probes.counters()[Counter.STACKS_TRUNCATED] < 40


def until_launched(probes: LaunchProbes, process: subprocess.Popen[bytes], more: int) -> None:
    """Waits until the process has launched so often again."""
    before = probes.counters()[Counter.LAUNCHES]
    until(lambda: probes.counters()[Counter.LAUNCHES] >= before + more, process)


def test_in_a_new_epoch_every_stack_travels_again(folder: Path, closing: list[LaunchProbes]) -> None:
    # given a process that launches all the time
    probes = probes_on(folder, Sizes(launch_pages=4096))
    closing.append(probes)
    process = start(folder, "--seconds", 600, "--rate", 5000, "--threads", 3)
    launches, stacks = [], []
    # when epochs begin meanwhile, in each of which it launches
    for _ in range(14):
        until_launched(probes, process, 100)
        launches.append(probes.launches.read())
        first = probes.stacks.read()
        probes.new_epoch()
        launches[-1] = np.concatenate([launches[-1], probes.launches.read()])
        stacks.append(np.concatenate([first, probes.stacks.read()]))
    process.terminate()
    assert process.wait() == 0
    # then the launches of each have all their stacks in it, or in what was read last before it
    assert len(launches) > 10
    assert probes.counters()[Counter.STACKS_LOST] == 0  # launches may be: on a busy machine nobody reads in time
    epochs = 0
    for index, batch in enumerate(launches):
        known = np.concatenate(stacks[max(0, index - 1) : index + 1])
        assert not (batch["flags"] & LaunchFlags.NO_STACK).any()
        assert set(batch["stack"].tolist()) <= set(known["id"].tolist())
        if index and len(batch) and len(launches[index - 1]):
            epochs += 1
    assert epochs > 10
    # and stacks of three epochs are the same addresses under different ids
    some = stacks[3], stacks[5], stacks[7]
    assert not set(some[0]["id"].tolist()) & set(some[2]["id"].tolist())
    assert set(map(bytes, some[0]["ips"])) & set(map(bytes, some[1]["ips"])) & set(map(bytes, some[2]["ips"]))


def test_launches_of_others_are_kept_short(folder: Path, closing: list[LaunchProbes]) -> None:
    # given a process that is excluded, one that is not, and one that was and is no longer
    probes = probes_on(folder)
    closing.append(probes)
    processes = [start_stopped(folder, "--launches", 200, "--rate", 400) for _ in range(3)]
    other, meant, again = (process.pid for process in processes)
    # when
    probes.exclude([other, again, *range(5_000_000, 5_010_000)])
    probes.include([again, 6_000_000])
    began = time.monotonic_ns()
    for process in processes:
        process.send_signal(signal.SIGCONT)
    assert [process.wait() for process in processes] == [0, 0, 0]
    # then
    launches = probes.launches.read()
    launches = launches[launches["time"] > began]
    of_other = launches[launches["pid"] == other]
    assert len(of_other) > 50
    assert set(of_other["flags"].tolist()) == {LaunchFlags.OTHER}
    assert set(of_other["comm"].tolist()) == set(of_other["name"].tolist()) == {b""}
    assert set(of_other["stack"].tolist()) == {0}
    assert (of_other["address"] != 0).all()
    assert (of_other["size"] != 0).all()
    for pid in (meant, again):
        whole = launches[launches["pid"] == pid]
        assert len(whole) > 50
        assert set(whole["flags"].tolist()) == {0}
        assert b"" not in whole["name"].tolist()
    # and those of others are counted, and come without stacks
    counters = probes.counters()
    assert len(of_other) <= counters[Counter.OTHERS] <= 200
    assert counters[Counter.LAUNCHES] == 600
    stacks = probes.stacks.read()
    assert other not in stacks["pid"][stacks["time"] > began].tolist()


def test_others_beyond_the_maps_room_come_in_full(folder: Path, closing: list[LaunchProbes]) -> None:
    # given more processes than can be remembered, the one that launches first
    probes = probes_on(folder, Sizes(others_remembered=64))
    closing.append(probes)
    process = start_stopped(folder, "--launches", 100, "--rate", 400)
    probes.exclude([process.pid])
    probes.exclude(range(5_000_000, 5_010_000))
    began = time.monotonic_ns()
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 0
    launches = probes.launches.read()
    launches = launches[launches["time"] > began]
    assert len(launches) > 10
    assert set(launches["flags"].tolist()) == {0}


def semaphores(pid: int, library: Path, offsets: set[int]) -> set[int]:
    """The values of a library's semaphores in a process."""
    values = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split()
        if words[-1] == str(library):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            first = int(words[2], 16)
            with open(f"/proc/{pid}/mem", "rb") as memory:
                for offset in (
                    offset for offset in offsets if first <= offset < first + end - begin and "w" in words[1]
                ):
                    memory.seek(begin + offset - first)
                    values.add(int.from_bytes(memory.read(2), "little"))
    return values


@EITHER_KERNEL
@pytest.mark.alone
def test_detaching_many_libraries_takes_as_long_as_one(
    tmp_path: Path, closing: list[LaunchProbes], within: Within
) -> None:
    # given probes in 15 libraries, and a process that has mapped one
    builds = [copy_of_build(tmp_path / f"build-{number}") for number in range(15)]
    programs = runtime.build(builds[7])
    with programs.library.open("rb") as file:
        offsets = {probe.semaphore_offset for probe in read_probes(file, "level_zero", ("launch_kernel",))}
    probes = LaunchProbes(cpu_samples=False)
    closing.append(probes)
    outcomes = list(probes.libraries.installed(tuple(map(str, builds))))
    assert [outcome.problem for outcome in outcomes] == [""] * 15
    process = start(builds[7], "--seconds", 60, "--rate", 100)
    try:
        until_launched(probes, process, 1)
        assert 0 not in semaphores(process.pid, programs.library, offsets)
        # when
        began = time.monotonic()
        probes.detach()
        took = time.monotonic() - began
        # then: one after the other they would take 15 times two of the kernel's grace periods, of 50 ms and more
        within.took(took, 0.75)
        # (a recorder that somebody else runs on this machine meanwhile holds it up, too)
        until(lambda: semaphores(process.pid, programs.library, offsets) == {0}, process)
        fired, waited = probes.counters()[Counter.LAUNCHES], voluntary_switches(process.pid)
        until(lambda: voluntary_switches(process.pid) > waited + 10, process)  # it waits between any two launches
        assert probes.counters()[Counter.LAUNCHES] == fired
    finally:
        process.kill()
        process.wait()


@EITHER_KERNEL
def test_a_program_goes_to_all_locations_or_to_none(folder: Path, closing: list[LaunchProbes]) -> None:
    # given a location that the kernel refuses, after one that it takes
    probes = LaunchProbes(cpu_samples=False)
    closing.append(probes)
    programs = runtime.build(folder)
    with programs.library.open("rb") as file:
        launch, *_ = read_probes(file, "level_zero", ("launch_kernel",))
        beyond = replace(launch, offset=1 << 40)
        # when
        with pytest.raises(OSError, match="Invalid argument"):
            probes._attach(file.fileno(), [launch, beyond])
        # and a second program's
        with pytest.raises(OSError, match="Invalid argument"):
            probes._attach(file.fileno(), [launch, replace(beyond, name="compile_kernel")])
    # then
    run(folder, "--launches", 10, "--rate", 0)
    assert probes.counters()[Counter.LAUNCHES] == 0
    # and the library can still be taken
    assert [outcome.problem for outcome in probes.libraries.installed((str(folder),))] == [""]
    run(folder, "--launches", 10, "--rate", 0)
    assert probes.counters()[Counter.LAUNCHES] == 10


def test_one_library_under_two_names_is_probed_once(folder: Path, closing: list[LaunchProbes]) -> None:
    # given
    programs = runtime.build(folder)
    (folder / "libze_intel_gpu.so").symlink_to(programs.library.name)
    os.link(programs.library, folder / "libze_intel_gpu.so.1.99")
    # when
    probes = LaunchProbes(cpu_samples=False)
    closing.append(probes)
    outcomes = list(probes.libraries.installed((str(folder),)))
    # then
    assert len(outcomes) == 1
    run(folder, "--launches", 10, "--rate", 0)
    assert len(probes.launches.read()) == 10


def test_a_library_without_probes_is_told(tmp_path: Path, closing: list[LaunchProbes]) -> None:
    (tmp_path / "libze_intel_gpu.so.1").write_bytes(Path("/lib/x86_64-linux-gnu/libm.so.6").read_bytes())
    (tmp_path / "libze_intel_gpu.so.2").write_bytes(b"no library at all")
    (tmp_path / "libze_intel_gpu.so.3").mkdir()
    os.mkfifo(tmp_path / "libze_intel_gpu.so.4")
    probes = LaunchProbes(cpu_samples=False)
    closing.append(probes)
    outcomes = list(probes.libraries.installed((str(tmp_path),)))
    assert [outcome.probes for outcome in outcomes] == [0, 0]
    assert outcomes[0].problem.startswith("it has no probes, and its build (")
    assert "broken ELF file" in outcomes[1].problem


def test_records_of_another_length_are_counted_and_not_read(folder: Path, closing: list[LaunchProbes]) -> None:
    # given a reader that expects longer launches than the programs send
    probes = probes_on(folder)
    closing.append(probes)
    longer = np.dtype([("launch", LAUNCH), ("more", "<u8")])
    loaded = probes._wait_loaded()
    ring = RingBuffer(loaded.fds["launches"], Sizes().launch_pages * os.sysconf("SC_PAGE_SIZE"), longer)
    # when
    run(folder, "--launches", 100, "--rate", 0)
    # then it takes none for one
    assert len(ring.read()) == 0
    assert ring.misfits == 100
    ring.close()
    # and the room is given back: who expects what is sent reads on
    run(folder, "--launches", 10, "--rate", 0)
    assert len(probes.launches.read()) == 10


def uprobe(path: Path, offset: int, counter: int) -> int:
    """A uprobe as perf has it, with the reference counter at that offset in the file, or 0 for none: a descriptor."""
    kind = int(Path("/sys/bus/event_source/devices/uprobe/type").read_text())
    name = ctypes.create_string_buffer(os.fsencode(path))
    attributes = struct.pack("<IIQ40xQQ", kind, 128, counter << 32, ctypes.addressof(name), offset).ljust(128, b"\0")
    fd = ctypes.CDLL(None, use_errno=True).syscall(298, attributes, -1, 0, -1, 8)  # perf_event_open
    assert fd >= 0, os.strerror(ctypes.get_errno())
    return int(fd)


@pytest.fixture
def others() -> Iterator[list[int]]:
    """Uprobes of another tool."""
    opened: list[int] = []
    yield opened
    for fd in opened:
        os.close(fd)


def launch_probe(folder: Path) -> Probe:
    with runtime.build(folder).library.open("rb") as file:
        [probe] = read_probes(file, "level_zero", ("launch_kernel",))
    assert probe.semaphore_offset
    return probe


@EITHER_KERNEL
@IN_TURN
def test_a_uprobe_of_another_tool_without_a_counter_costs_no_launch(
    folder: Path, others: list[int], closing: list[LaunchProbes]
) -> None:
    # given one at the very place, which does not raise the probe's semaphore
    probe, library = launch_probe(folder), runtime.build(folder).library
    others.append(uprobe(library, probe.offset, 0))
    # when
    probes = probes_on(folder)
    closing.append(probes)
    pid = run(folder, "--launches", 100, "--rate", 0)
    # then
    launches = probes.launches.read()
    assert launches["pid"].tolist() == [pid] * 100
    assert set(launches["flags"].tolist()) == {0}
    assert len(probes.compiled.read()) == 1
    # and without our probes the semaphore is not raised by anything
    probes.detach()
    run(folder, "--launches", 100, "--rate", 0)
    assert len(probes.launches.read()) == 0


@EITHER_KERNEL
@IN_TURN
def test_a_uprobe_of_another_tool_with_the_same_counter_is_no_hindrance(
    folder: Path, others: list[int], closing: list[LaunchProbes]
) -> None:
    probe, library = launch_probe(folder), runtime.build(folder).library
    others.append(uprobe(library, probe.offset, probe.semaphore_offset))
    probes = probes_on(folder)
    closing.append(probes)
    run(folder, "--launches", 100, "--rate", 0)
    assert len(probes.launches.read()) == 100


@EITHER_KERNEL
@IN_TURN
def test_a_semaphore_that_cannot_be_raised_is_told(
    folder: Path, others: list[int], closing: list[LaunchProbes]
) -> None:
    # given uprobes without a counter at the place and behind it
    probe, library = launch_probe(folder), runtime.build(folder).library
    others += [uprobe(library, probe.offset, 0), uprobe(library, probe.offset + 1, 0)]
    # when
    probes = LaunchProbes(cpu_samples=False)
    closing.append(probes)
    [outcome] = probes.libraries.installed((str(folder),))
    # then
    assert (outcome.problem, outcome.probes) == ("", 2)
    assert outcome.doubt.startswith("another tool has a uprobe without a reference counter where one of its probes is")
    # and it fires only while somebody else raises it
    run(folder, "--launches", 10, "--rate", 0)
    assert len(probes.launches.read()) == 0
    with library.open("rb") as file:
        [other] = read_probes(file, "level_zero", ("compile_kernel",))
    others.append(uprobe(library, other.offset + 1, probe.semaphore_offset))
    run(folder, "--launches", 10, "--rate", 0)
    assert len(probes.launches.read()) == 10


@EITHER_KERNEL
@IN_TURN
def test_a_uprobe_of_another_tool_with_another_counter_is_named(
    folder: Path, others: list[int], closing: list[LaunchProbes]
) -> None:
    # given
    probe, library = launch_probe(folder), runtime.build(folder).library
    others.append(uprobe(library, probe.offset, probe.semaphore_offset + 4))
    # when
    probes = LaunchProbes(cpu_samples=False)
    closing.append(probes)
    [outcome] = probes.libraries.installed((str(folder),))
    # then nothing is attached, and who is to blame is told
    assert outcome.probes == 0
    assert outcome.problem == (
        "the kernel refuses probes in it (another tool has a uprobe with another reference counter at the same place, "
        "which the kernel's log calls a ref_ctr_offset mismatch: end that tool, then record again)"
    )
    run(folder, "--launches", 10, "--rate", 0)
    assert probes.counters()[Counter.LAUNCHES] == 0
    assert len(probes.compiled.read()) == 0
    # and once that tool has ended, its place is free
    os.close(others.pop())
    closing.append(probes_on(folder))
    run(folder, "--launches", 10, "--rate", 0)
    assert len(closing[-1].launches.read()) == 10
