"""Waits for the GPU by a driver's layout, against what the programs that wait have measured themselves."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter as Counts, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.bpf.driver_layout import CACHE
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.sizes import Sizes
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.waits import FUNCTIONS, SHORT_NS, WAIT, WaitFlags, WaitTotals
from iaprof.formats.wire.launches import Counter, stack_dtype
from iaprof.formats.wire.unwind_rules import Walked
from iaprof.record.sources.launches import Launches
from iaprof.record.spool import FrameKind
from integration.handles.driver import Built, build, copied
from integration.recording import BARE, iaprof
from integration.test_handles import Attached
from integration.walking import Walking
from standin.hardware import Hardware
from thorough import thorough
from waiting import until

pytestmark = pytest.mark.bpf
MS = 1_000_000
SLACK_NS = 300 * MS  # that a busy machine may take between a program's clock and the driver's first instruction


@dataclass(frozen=True)
class Told:
    """A wait as the program measured it."""

    tid: int
    begin: int
    end: int
    result: int


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("played") / "build")


@pytest.fixture(scope="module")
def loaded() -> Iterator[LaunchProbes]:
    probes = LaunchProbes(Sizes(waiting_threads=64), waits=True, cpu_samples=False)
    yield probes
    probes.close()


@pytest.fixture
def attached(loaded: LaunchProbes, built: Built, tmp_path: Path) -> Iterator[Attached]:
    loaded.waits.read()
    loaded.take_short_waits()
    loaded.forget_waits(lambda _pid, _tid: False, 0, least=0)
    yield Attached(loaded, copied(built, tmp_path / "copy"), built.with_waits)
    loaded.detach()


def start(attached: Attached, *words: str | int) -> subprocess.Popen[str]:
    """The program, which waits for a line before it does anything, and for another one, or for no more, at its end."""
    process = subprocess.Popen(
        [attached.built.waiting, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def run(attached: Attached, *words: str | int) -> tuple[int, list[Told], NDArray[np.void]]:
    """Its pid, what it told, and the waits that were sent, those short ones included that were not sent yet."""
    process = start(attached, *words)
    out, _ = process.communicate("\n", timeout=300)
    assert process.returncode == 0
    told = [Told(*map(int, line.split())) for line in out.splitlines()]
    return process.pid, told, sent(attached)


def sent(attached: Attached) -> NDArray[np.void]:
    """The waits so far, in the order of their begins."""
    waits = np.concatenate([attached.probes.waits.read(), attached.probes.take_short_waits()])
    return waits[np.argsort(waits["begin"], kind="stable")]


def assert_measured(waits: NDArray[np.void], told: list[Told]) -> None:
    """Each wait of the program is there once, within what the program measured around it, and nearly as long."""
    assert told
    left = sorted(told, key=lambda each: (each.tid, each.begin))
    rows = waits[np.lexsort((waits["begin"], waits["tid"]))]
    assert rows["tid"].tolist() == [each.tid for each in left]
    assert rows["count"].tolist() == [1] * len(left)
    assert (rows["waited"] == rows["end"] - rows["begin"]).all()
    begin, end = (np.array([getattr(each, name) for each in left], np.uint64) for name in ("begin", "end"))
    assert (rows["begin"] >= begin).all()
    assert (rows["end"] <= end).all()
    assert ((end - begin) - rows["waited"] < SLACK_NS).all()


def function_of(waits: NDArray[np.void]) -> list[str]:
    return [FUNCTIONS[number] for number in waits["function"].tolist()]


def test_each_long_wait_of_each_thread_is_a_row(attached: Attached) -> None:
    pid, told, waits = run(attached, "both", 20, 2 * MS, 4)
    assert len(told) == 2 * 20 * 4
    assert_measured(waits, told)
    assert set(waits["pid"].tolist()) == {pid}
    assert set(waits["comm"].tolist()) == {b"waiting"}
    assert (waits["waited"] >= 2 * MS).all()
    assert sorted(set(function_of(waits))) == ["zeCommandQueueSynchronize", "zeEventHostSynchronize"]
    assert function_of(waits).count("zeEventHostSynchronize") == len(told) // 2
    assert len(set(waits["handle"].tolist())) == 4  # each thread has its own
    assert not (waits["flags"] & ~np.uint32(WaitFlags.PRESUMED)).any()
    assert attached.counted()[Counter.WAITS] == len(told)


@pytest.mark.parametrize(("mode", "flag"), [("times-out", WaitFlags.TIMED_OUT), ("fails", WaitFlags.FAILED)])
def test_how_a_wait_ended_is_told(attached: Attached, mode: str, flag: WaitFlags) -> None:
    _, told, waits = run(attached, mode, 3, 4 * MS, 1)
    assert_measured(waits, told)
    assert [each.result != 0 for each in told] == [True] * 3
    assert set(waits["flags"].tolist()) <= {int(flag), int(flag | WaitFlags.PRESUMED)}


def test_short_waits_are_added_up_by_thread_and_call(attached: Attached) -> None:
    many, threads = 30_000, 3
    _, told, waits = run(attached, "short", many, 0, threads)
    short = waits[waits["flags"] & WaitFlags.ADDED_UP > 0]
    others = waits[waits["flags"] & WaitFlags.ADDED_UP == 0]  # in which the thread was not given a CPU
    assert (others["waited"] >= SHORT_NS).all()
    assert len(told) == threads
    for each in told:
        own = short[short["tid"] == each.tid]
        assert int(own["count"].sum()) + int((others["tid"] == each.tid).sum()) == many
        assert int(own["waited"].sum()) < each.end - each.begin
        assert (own["waited"] < own["count"] * np.uint64(SHORT_NS)).all()
        assert (own["begin"] >= each.begin).all()
        assert (own["end"] <= each.end).all()
        assert len(own) < 10 + (each.end - each.begin) // 100_000_000
    assert len(set(short["stack"].tolist()) - {0}) >= 1
    assert attached.counted()[Counter.WAITS] == many * threads


@thorough
def test_each_short_wait_is_counted_once_while_sums_are_taken(attached: Attached) -> None:
    many, threads = 100_000, 2
    process = start(attached, "short", many, 0, threads)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.close()
    # when sums are taken again and again while threads add to them
    taken = []
    while process.poll() is None:
        taken += [attached.probes.take_short_waits(), attached.probes.waits.read()]
    taken += [attached.probes.waits.read(), attached.probes.take_short_waits()]
    # then none is missing, and none is there twice
    assert sum(int(waits["count"].sum()) for waits in taken) == many * threads
    assert len([waits for waits in taken if len(waits)]) > 10
    assert attached.counted()[Counter.WAITS] == many * threads


def test_polls_are_counted_only(attached: Attached) -> None:
    _, _, waits = run(attached, "poll", 10_000, 1000 * MS, 2)
    assert len(waits) == 0
    counted = attached.counted()
    assert counted[Counter.WAIT_POLLS] == 20_000
    assert counted[Counter.WAITS] == 0


def test_a_wait_within_another_is_part_of_it(attached: Attached) -> None:
    _, told, waits = run(attached, "inside", 5, 3 * MS, 1)
    assert_measured(waits, told)
    assert (waits["waited"] >= 5 * MS).all()
    assert attached.counted()[Counter.WAITS_INSIDE] == 5


def test_a_wait_that_a_program_jumps_out_of_has_not_ended(attached: Attached) -> None:
    _, told, waits = run(attached, "jumps", 4, 2 * MS, 1)
    assert [bool(flags & WaitFlags.NOT_ENDED) for flags in waits["flags"].tolist()] == [True] * 4 + [False] * 4
    assert_measured(waits[4:], told)


def test_threads_that_end_in_a_wait_have_not_ended_it(attached: Attached) -> None:
    _, told, waits = run(attached, "cancelled", 2, 2 * MS, 3)
    assert_measured(waits, told)
    left = attached.probes.unended_waits(time.monotonic_ns())
    assert (left["flags"] & WaitFlags.NOT_ENDED > 0).sum() == 3
    assert not set(left["tid"].tolist()) & {each.tid for each in told}


def test_a_wait_that_goes_on_is_known_with_its_stack(attached: Attached) -> None:
    with Walking(attached.probes) as walking:
        process = start(attached, "both", 1, 3_600_000 * MS, 1)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        until(lambda: attached.probes.unended_waits(time.monotonic_ns())["stack"].any(), process)
        now = time.monotonic_ns()
        left = attached.probes.unended_waits(now)
        stacks = walking.stacks()
        process.kill()
        process.wait()
        assert left["tid"].tolist() == [process.pid]
        assert left["end"].tolist() == [now]
        assert left["waited"].tolist() == [now - int(left["begin"][0])]
        ips, walked = stacks[int(left["stack"][0])]
    assert walked is Walked.WHOLE
    assert len(ips) > 8  # wait_event, waits_for_event, wait_and_tell, work, deeper six times, main and what calls it
    # and once the thread is gone, there is room for others
    assert len(attached.probes.forget_waits(lambda _pid, _tid: False, now)) == 0  # as there is much left
    assert attached.probes.forget_waits(lambda _pid, _tid: True, now, least=0).tolist() == []
    assert attached.probes.forget_waits(lambda _pid, _tid: False, now, least=0)["tid"].tolist() == [process.pid]
    assert not len(attached.probes.unended_waits(now))


def test_stacks_are_those_of_launches(attached: Attached) -> None:
    with Walking(attached.probes) as walking:
        process = start(attached, "both", 40, 1 * MS, 1)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        told = [Told(*map(int, process.stdout.readline().split())) for _ in range(2 * 40)]
        waits = sent(attached)
        assert_measured(waits, told)
        stacks = walking.stacks()  # while the program is there, as its code is read
        process.communicate("\n")
        known = [stacks.get(number, ([], Walked.MISSED)) for number in waits["stack"].tolist()]
    assert [walked for _, walked in known] == [Walked.WHOLE] * len(waits)
    entry = {name: [ips for (ips, _), of in zip(known, function_of(waits), strict=True) if of == name] for name in
             ("zeEventHostSynchronize", "zeCommandQueueSynchronize")}  # fmt: skip
    # then waits of one call have one stack, and the two calls differ in the innermost addresses only
    event, queue = (set(map(tuple, each)) for each in entry.values())
    assert len(event) == len(queue) == 1
    (one,), (other,) = event, queue
    assert len(one) == len(other) > 10
    assert one[4:] == other[4:]
    assert one[:2] != other[:2]


def test_of_processes_that_are_not_recorded_nothing_is_told(attached: Attached) -> None:
    process = start(attached, "both", 3, 1 * MS, 1)
    attached.probes.exclude([process.pid])
    process.communicate("\n", timeout=300)
    attached.probes.include([process.pid])
    assert len(attached.probes.waits.read()) == 0
    assert attached.counted()[Counter.WAITS] == 0


def test_what_has_no_room_is_counted(built: Built, tmp_path: Path) -> None:
    probes = LaunchProbes(Sizes(waiting_threads=2, wait_pages=1), waits=True, cpu_samples=False)
    try:
        attached = Attached(probes, copied(built, tmp_path / "copy"), built.with_waits)
        _, told, waits = run(attached, "both", 30, 1 * MS, 4)
        counted = attached.counted()
        assert len(waits) + counted[Counter.WAITS_LOST] == len(told)
        assert len(set(waits["tid"].tolist())) == 2
        assert 0 < len(waits) < len(told)
    finally:
        probes.close()


def test_a_place_that_is_no_functions_beginning_changes_nothing(
    attached: Attached, built: Built, tmp_path: Path
) -> None:
    """A layout that leads astray must not have the kernel replace what is not a return address."""
    # given a layout that takes the middle of a function for its beginning, where a number is on top of the stack
    wrong = built.with_waits.entries[-1]
    program = copied(built, tmp_path / "another")
    assert wrong.name == "zeCommandQueueSynchronize"
    layout = replace(
        built.layout, entries=(*built.layout.entries, replace(wrong, address=built.symbols["launch_start"] + 5))
    )
    probes = attached.probes
    other = Attached(probes, program, layout)
    other.driver.launch_with_frame(1, 0x1234, "launch_start")
    assert attached.counted()[Counter.WAITS_ASTRAY] == 1
    assert len(probes.waits.read()) == 0


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Built]:
    """A driver that recorders find, and whose layout was calibrated on this machine."""
    built = build(tmp_path / "driver", "libze_intel_gpu.so.1")
    layout = CACHE / f"{built.layout.build_id}.json"
    layout.parent.mkdir(parents=True, exist_ok=True)
    layout.write_text(built.with_waits.to_json())
    yield built
    layout.unlink()


def recorded(known: Built, folder: Path, *options: str, script: str, waits: bool = True) -> CaptureReader:
    """A recording of a shell script in which $P is the program."""
    with Hardware(folder / "gpu") as hardware:
        environment = {"LD_LIBRARY_PATH": str(known.library.parent), "P": str(known.waiting)}
        asked = ["--waits"] if waits else []
        command = [*asked, *options, "--", "sh", "-c", script]
        done = iaprof("record", "-f", "-o", folder / "c.parquet", *command, env=hardware.env() | environment)
    assert done.code == 0, done.err
    return CaptureReader(folder / "c.parquet")


def own(capture: CaptureReader) -> list[dict[str, Any]]:
    """Its waits, without those of others."""
    return [row for row in capture.table("wait").to_pylist() if row["comm"] in ("waiting", "")]


@pytest.mark.alone  # recorders of that time see the driver
def test_a_capture_has_all_waits_with_their_stacks(known: Built, tmp_path: Path) -> None:
    # given threads that wait, for long and for a moment, and one that is killed while it waits
    script = f"""
        cd {tmp_path}
        echo | "$P" both 50 2000000 2 > long
        echo | "$P" short 5000 0 1 > short
        echo | "$P" both 1 3600000000000 1 > never & sleep 3; kill -9 $!; sleep 1
    """
    capture = recorded(known, tmp_path, "--cpu-freq=499", script=script)
    told = [Told(*map(int, line.split())) for line in (tmp_path / "long").read_text().splitlines()[1:]]
    pid = min(each.tid for each in told)
    waits = own(capture)
    # then each is there, as the program measured it
    long = [row for row in waits if row["pid"] == pid]
    assert sorted(row["tid"] for row in long) == sorted(each.tid for each in told)
    for row, each in zip(
        sorted(long, key=lambda row: (row["tid"], row["time_ns"])),
        sorted(told, key=lambda each: (each.tid, each.begin)),
        strict=True,
    ):
        assert each.begin <= row["time_ns"] <= row["end_ns"] <= each.end
        assert row["waited_ns"] == row["end_ns"] - row["time_ns"]
    assert {row["function"] for row in long} == {"zeEventHostSynchronize", "zeCommandQueueSynchronize"}
    # and the short ones are counted, and the one that was killed waited until then
    (unended,) = (row for row in waits if row["flags"] & WaitFlags.NOT_ENDED)
    assert 500 * MS < unended["waited_ns"] < (capture.header["end_ns"] - unended["time_ns"]) - 500 * MS
    others = [row for row in waits if row["pid"] not in (pid, unended["pid"])]
    assert sum(row["count"] for row in others) == 5000
    # and their stacks lead to the program's start, in the program's functions
    stacks = {row["id"]: row for row in capture.table("stack").to_pylist()}
    ends = Counts(stacks[row["stack"]]["ended"] for row in long)
    assert ends["whole"] == len(long)
    totals = WaitTotals.from_header(capture.header)
    assert totals is not None
    assert totals.waits == sum(row["count"] for row in capture.table("wait").to_pylist())
    assert totals.not_ended == 1
    assert [each["waits"] for each in capture.header["libraries"] if each["path"] == str(known.library)] == [2]
    assert not [loss for loss in capture.header["losses"] if loss["source"] == "waits"]


@pytest.mark.alone
@thorough
def test_cpu_samples_below_a_wait_have_whole_stacks(known: Built, tmp_path: Path) -> None:
    """The kernel has another return address on the stack of a thread that waits."""
    # given a program that computes while it waits
    script = f'cd {tmp_path}; echo | "$P" computes 20 100000000 1 > told'
    capture = recorded(known, tmp_path, "--cpu-freq=499", script=script)
    stacks = {row["id"]: row for row in capture.table("stack").to_pylist()}
    (pid,) = {row["pid"] for row in own(capture)}
    samples = [row for row in capture.table("cpu_sample").to_pylist() if row["pid"] == pid and row["stack"]]
    waits = own(capture)
    assert len(waits) == 20
    callers = [(wait, stacks[wait["stack"]]["ips"][1:]) for wait in waits if stacks[wait["stack"]]["ended"] == "whole"]
    mappings = [row for row in capture.table("mapping").to_pylist() if row["path"] != "[uprobes]"]
    mapped = [(row["start"], row["start"] + row["length"]) for row in mappings]
    inside = [
        (stacks[row["stack"]], above)
        for row in samples
        for wait, above in callers
        if wait["time_ns"] < row["time_ns"] < wait["end_ns"]
        # (as a wait ends, the thread is in the kernel's own page, and its caller is no longer on the stack: a guess)
        and any(start <= stacks[row["stack"]]["ips"][0] < end for start, end in mapped)
    ]
    # then what called the driver is in all of them, and nothing is guessed
    alike = [stack["ips"][-len(above) :] == above for stack, above in inside if stack["ended"] == "whole"]
    # (where others keep the processor and the learner busy, few come and are finished)
    assert len(alike) > 20, Counts(stack["ended"] for stack, _ in inside)
    assert all(alike), Counts(alike)
    assert not any(stack["marks"] for stack, _ in inside if stack["ended"] == "whole")


@pytest.mark.alone
def test_waits_are_recorded_only_if_asked_for(known: Built, tmp_path: Path) -> None:
    capture = recorded(known, tmp_path, *BARE, script='echo | "$P" both 3 1000000 1', waits=False)
    assert own(capture) == []
    assert capture.header["probes"]["waits"] == 0
    assert not any("waits" in each for each in capture.header["libraries"])
    assert [each["way"] for each in capture.header["libraries"] if each["path"] == str(known.library)] == ["attach"]


@pytest.mark.alone
def test_reports_of_waits(known: Built, tmp_path: Path) -> None:
    # given waits of two functions by two threads
    capture = recorded(known, tmp_path, script=f'cd {tmp_path}; echo | "$P" both 50 2000000 2 > told')
    told = [Told(*map(int, line.split())) for line in (tmp_path / "told").read_text().splitlines()[1:]]
    measured = sum(each.end - each.begin for each in told)
    # when
    folded, top, as_json = (
        iaprof(*words, capture.path)
        for words in (["report", "--waits"], ["top", "--by", "wait"], ["top", "--by=wait", "--json"])
    )
    # then the stacks say where, and add up to what the program measured
    assert [folded.code, top.code, as_json.code] == [0, 0, 0], folded.err + top.err + as_json.err
    us: Counts[str] = Counts()
    for line in folded.out.splitlines():
        stack, count = line.rsplit(" ", 1)
        if stack.startswith("waiting;"):
            us[stack.split(";")[-1]] += int(count)
            assert ";work;" in stack, line
    assert us.keys() == {"wait_event", "wait_queue"}  # as the driver's symbols have it
    assert 0.8 * measured < 1000 * sum(us.values()) <= measured
    rows = [row for row in json.loads(as_json.out)["entries"] if row["process"] == "waiting"]
    assert Counts({row["function"]: row["waits"] for row in rows}) == dict.fromkeys(
        ("zeEventHostSynchronize", "zeCommandQueueSynchronize"), 100
    )
    assert {row["launcher"] for row in rows} == {"waits_for_event", "waits_for_queue"}
    assert [row["objects"] for row in rows] == [2, 2]
    assert abs(sum(row["waited_ns"] for row in rows) - 1000 * sum(us.values())) < 1000 * len(told)
    assert "zeEventHostSynchronize < waits_for_event < waiting" in top.out
    assert "waits for the GPU" in top.err
    # and nothing of a time in which nothing waited
    later = iaprof("report", "--waits", "--time", "100%-", capture.path)
    assert (later.code, later.out) == (1, "")
    assert later.err.startswith("iaprof: no wait matches --time 100%-")


@thorough
def test_what_waits_cannot_be_shown_as(tmp_path: Path) -> None:
    for words in (["--format=pprof"], ["--cpu-samples"], ["-o", tmp_path / "x.html"]):
        done = iaprof("report", "--waits", *words, tmp_path / "none.parquet")
        assert (done.code, done.err) == (
            2,
            "iaprof: --waits is for folded, svg, speedscope, without --cpu-samples\n",
        )


def test_sums_of_short_waits_are_in_a_file_with_their_stacks(attached: Attached) -> None:
    files: list[dict[FrameKind, bytes]] = [defaultdict(bytes)]

    def write(kind: FrameKind, payload: bytes, **_: object) -> None:
        files[-1][kind] += bytes(payload)

    sampler = Mock(placed=lambda launches: launches)
    source = Launches(Mock(), attached.probes, Mock(), Mock(warning=""), Mock(), Mock(), sampler)
    source.start(Mock(write=write), Mock())
    process = start(attached, "short", 1000, 0, 1)
    source.losses()
    # when a program begins to wait after what belongs to a file was read from the ring buffers
    source.end_part(time.monotonic_ns())
    process.communicate("\n", timeout=300)
    source.losses()
    files.append(defaultdict(bytes))
    source.begin_part(time.monotonic_ns())
    source.read()
    # then
    stacks = stack_dtype(attached.probes.depth)
    waits = [np.frombuffer(file[FrameKind.WAITS], WAIT) for file in files]
    assert sum(int(of_file["count"].sum()) for of_file in waits) == 1000
    for file, of_file in zip(files, waits, strict=True):
        sent_ids = np.frombuffer(file[FrameKind.STACKS], stacks)["id"].tolist()
        assert set(of_file["stack"].tolist()) <= set(sent_ids)


@pytest.mark.alone
@thorough
def test_waits_are_in_the_file_in_which_they_ended(known: Built, tmp_path: Path) -> None:
    # given long and short waits for three seconds, and a new file twice a second
    script = f'cd {tmp_path}; echo | "$P" both 750 2000000 1 > long; echo | "$P" short 300000 0 1 > short'
    recorded(known, tmp_path, "--cpu-freq=0", "--switch-output=0.5s", *BARE, script=script)
    parts = [CaptureReader(path) for path in sorted(tmp_path.glob("c.*parquet"))]
    told = [Told(*map(int, line.split())) for line in (tmp_path / "long").read_text().splitlines()[1:]]
    assert len(parts) > 2
    # then each is in one of them, with its stack
    rows = [[row for row in own(part) if row["comm"] == "waiting"] for part in parts]
    long = sum(len([row for row in some if row["pid"] == told[0].tid]) for some in rows)
    short = sum(row["count"] for some in rows for row in some if row["pid"] != told[0].tid)
    # (on a busy machine a probe may find all memory for stacks in use by others that were preempted, which is counted)
    losses = [loss for part in parts for loss in part.header["losses"] if loss["source"] == "waits"]
    lost = sum(loss["count"] for loss in losses)
    assert long + short + lost == len(told) + 300_000
    assert lost < 10, losses
    for part, some in zip(parts, rows, strict=True):
        stacks = set(part.table("stack")["id"].to_pylist())
        assert {row["stack"] for row in some} <= stacks
