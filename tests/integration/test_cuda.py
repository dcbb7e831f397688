"""Recording programs of NVIDIA's GPUs, on the stand-in for their driver and CUPTI, compared with its ledger."""

from __future__ import annotations

import json
import os
import shlex
import signal
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from elftools.elf.elffile import ELFFile

from iaprof.bpf.loader import linux_version
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import MESSAGE_BYTES
from iaprof.gpu.nvidia.records import PC_SAMPLES
from integration.recording import BARE, CUDA_IN_TURN, IAPROF, Finished, counted, iaprof, until_recording
from standin.cuda.machine import Machine
from standin.cuda.runtime import REDUCE, SCALE, Ledger, cubin, read_ledgers
from thorough import thorough, usually
from waiting import LONGEST_WAIT_S

DEMANGLED = {REDUCE: "reduce", SCALE: "void math::scale<float>(float*, float const*, int)"}
LOAD = ("load", cubin())
WORK = (*LOAD, "launch", REDUCE, "A", 2000, 100, "launch", SCALE, "B", 300, 500, "sync")


pytestmark = CUDA_IN_TURN


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine with eight GPUs of NVIDIA."""
    tmp_path.chmod(0o755)
    yield Machine(tmp_path / "machine", 8)


class Recorded:
    """A recording of the stand-in's program."""

    def __init__(
        self,
        machine: Machine,
        *words: str | float | Path,
        options: tuple[str, ...] = (),
        faults: str = "",
        script: str = "",  # of a shell, in place of the program with these words
    ):
        self.path = machine.folder / "cap"
        command = ["sh", "-c", script] if script else machine.programs.command(*words)
        environment = machine.env(*filter(None, faults.split(",")))
        self.done: Finished = iaprof("record", "-o", self.path, *BARE, *options, "--", *command, env=environment)
        assert self.done.code == 0, self.done.err
        self.capture = CaptureReader(self.path)
        self.ledgers: list[Ledger] = read_ledgers(machine.ledger)

    def own(self, kind: str) -> pa.Table:
        """Rows of the program: other tests have programs at the same time."""
        table = self.capture.table(kind)
        return table.filter(pa.array([pid in {each.pid for each in self.ledgers} for pid in table["pid"].to_pylist()]))

    @property
    def samples(self) -> int:
        """Samples in the capture."""
        return int(sum(self._counts().values()))

    def _counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for table in self.capture.tables("pc_sample"):
            words = [table[name].combine_chunks().flatten().to_numpy() for name in PC_SAMPLES.rows.columns]
            for reason in PC_SAMPLES.reasons:
                found[reason] += int(PC_SAMPLES.counts(words, reason).sum())
        return found

    @property
    def losses(self) -> list[dict[str, Any]]:
        """What the header says was lost, but for other tests': hostile processes' code and stacks, and drivers."""
        found = self.capture.header["losses"]
        return [each for each in found if each["source"] not in ("kernels", "stacks") and each["what"] != "library"]

    def lost(self, what: str) -> int:
        """How much of it."""
        return sum(each["count"] or 0 for each in self.losses if each["what"] == what)

    def kernels(self) -> Counter[str]:
        """Samples by kernel, as a report counts them."""
        said = self._report("top", "--json", "-n0", "-q")
        return Counter({each["kernel"]: each["samples"] for each in said["entries"]})

    def places(self) -> Counter[str]:
        """Samples by the program's function that launched, as a report divides them."""
        found: Counter[str] = Counter()
        done = iaprof("report", self.path, "--format=folded", "--frames=cpu", "-q")
        assert done.code == 0, done.err
        for stack, count in counted(done.out):
            found[next((name for name in stack.split(";") if "place" in name), stack)] += count
        return found

    def _report(self, *words: str) -> Any:
        done = iaprof(words[0], self.path, *words[1:])
        assert done.code == 0, done.err
        return json.loads(done.out)


def program(machine: Machine, *words: str | float | Path) -> str:
    """The program with these words, for a shell."""
    return shlex.join(machine.programs.command(*words))


def on_gpus(machine: Machine, gpus: int, *words: str | float | Path) -> str:
    """A script that runs a program with these words on each of so many GPUs at the same time."""
    return f"{' & '.join(program(machine, 'device', gpu, *words) for gpu in range(gpus))} & wait"


def launched(recorded: Recorded) -> Counter[str]:
    """Launches in the capture, by name."""
    return Counter(recorded.own("launch")["name"].to_pylist())


def test_launches_executions_and_samples_are_those_of_the_ledger(machine: Machine) -> None:
    # when
    recorded = Recorded(machine, *WORK)
    # then
    (ledger,) = recorded.ledgers
    assert launched(recorded) == {REDUCE: 2000, SCALE: 300}
    executions = recorded.capture.table("execution")
    assert sorted(executions["correlation"].to_pylist()) == sorted(each.correlation for each in ledger.executions)
    assert recorded.samples == ledger.handed() > 1000
    assert recorded.losses == []
    assert recorded.kernels() == {DEMANGLED[kernel]: samples for kernel, samples in ledger.by_kernel().items()}
    # and every launch joins its execution, every stack is whole and ends with the driver's function
    launches = recorded.capture.table("launch", ("correlation",))
    assert sorted(filter(None, launches["correlation"].to_pylist())) == sorted(executions["correlation"].to_pylist())
    done = iaprof("report", recorded.path, "--format=folded", "--frames=cpu", "-q")
    stacks = {stack for stack, _ in counted(done.out)}
    assert all(stack.startswith("_start;") and stack.endswith(";cuLaunchKernel") for stack in stacks)
    assert {"place_a", "place_b"} <= {name for stack in stacks for name in stack.split(";")}


def test_times_on_the_gpu_are_those_of_the_ledger(machine: Machine) -> None:
    recorded = Recorded(machine, *LOAD, "launch", REDUCE, "A", 50, 1000, "sync")
    (ledger,) = recorded.ledgers
    table = recorded.capture.table("execution")
    times = {
        c: (b, e) for c, b, e in zip(*(table[n].to_pylist() for n in ("correlation", "time_ns", "end_ns")), strict=True)
    }
    assert times == {each.correlation: (each.begin, each.end) for each in ledger.executions}


def test_samples_are_divided_by_the_time_that_each_place_ran(machine: Machine) -> None:
    # given two places that launch one kernel by turns, one of them with three times the work
    turns = ("repeat", 150, "launch", REDUCE, "A", 1, 1000, "launch", REDUCE, "C", 1, 3000, "end")
    # when
    recorded = Recorded(machine, *LOAD, *turns, "sync")
    # then
    places = recorded.places()
    assert places["place_a"] / places.total() == pytest.approx(0.25, abs=0.01)
    assert places["place_c"] / places.total() == pytest.approx(0.75, abs=0.01)
    done = iaprof("top", recorded.path, "--by", "stack")
    assert "by measured times of execution" in " ".join(done.out.split())
    assert "(the others by times of execution)" in done.err


def test_a_graph_is_one_launch_of_many_kernels(machine: Machine) -> None:
    recorded = Recorded(machine, *LOAD, "graph", REDUCE, 5, 100, 500, "sync")
    (ledger,) = recorded.ledgers
    assert launched(recorded) == {"[graph]": 100}  # and not those that made the graph
    assert len(recorded.capture.table("execution")) == len(ledger.executions) == 500
    assert recorded.kernels() == {"reduce": ledger.handed()}
    assert recorded.places() == {"graph_place": ledger.handed()}


@thorough
def test_threads_contexts_and_gpus(machine: Machine) -> None:
    # given a program with four threads, and then another GPU
    words = (*LOAD, "threads", 4, REDUCE, "A", 200, 300, "sync", "device", 1, "context", *LOAD)
    # when
    recorded = Recorded(machine, *words, "launch", SCALE, "B", 300, 500, "sync")
    # then
    (ledger,) = recorded.ledgers
    assert launched(recorded) == {REDUCE: 800, SCALE: 300}
    assert recorded.samples == ledger.handed()
    cards = [stream["card"] for stream in recorded.capture.header["streams"]]
    assert cards == ["nvidia0", "nvidia1"]
    # and samples and executions are of the GPU that ran them
    by_device: Counter[int] = Counter()
    for context in ledger.contexts:
        by_device[context.device] += context.handed
    for device in (0, 1):
        done = iaprof("top", recorded.path, "--json", "-q", f"--device=nvidia{device}")
        assert json.loads(done.out)["total"]["samples"] == by_device[device] > 0
    streams = recorded.capture.table("execution", ("stream",))["stream"].to_pylist()
    assert Counter(streams) == Counter(each.device for each in ledger.executions)


def test_processes_have_their_own_kernels(machine: Machine) -> None:
    # given two processes that run one cubin at the same time
    words = (*LOAD, "launch", REDUCE, "A", 1500, 300, "sync")
    # when
    recorded = Recorded(machine, script=on_gpus(machine, 2, *words))
    # then each process's samples are its own
    assert len(recorded.ledgers) == 2
    done = iaprof("report", recorded.path, "--format=folded", "--frames=pid", "-q")
    assert dict(counted(done.out)) == {str(ledger.pid): ledger.handed() for ledger in recorded.ledgers}
    # and the cubin is in the capture once
    modules = recorded.own("kernel")
    assert len(modules) == 2
    assert sum(elf is not None for elf in modules["elf"].to_pylist()) == 1
    assert len(set(modules["base"].to_pylist())) == 2


def test_of_processes_on_one_gpu_one_is_sampled_and_all_are_recorded(machine: Machine) -> None:
    # when
    recorded = Recorded(machine, "fork", 2, *LOAD, "launch", REDUCE, "A", 1500, 300, "sync")
    # then each launch and its execution is there
    assert len(recorded.ledgers) == 3
    assert launched(recorded) == {REDUCE: 4500}
    assert len(recorded.capture.table("execution")) == 4500
    # and the samples of one, until it ended
    handed = [ledger.handed() for ledger in recorded.ledgers]
    assert recorded.samples == sum(handed) > 0
    assert max(handed) > 0.8 * sum(handed)
    # and the recorder says so
    said = "nvidia0 samples one process at a time: until that one ends, the others have launches and executions"
    assert said in recorded.done.err
    assert ("samples", "not recorded") in {(each["source"], each["what"]) for each in recorded.losses}


def test_when_a_process_ends_another_one_is_sampled(machine: Machine) -> None:
    # given a process that comes to a GPU while another one is sampled, which writes a line then, and one at its end
    first = program(machine, *LOAD, "say", "there", "launch", REDUCE, "A", 1000, 300, "sync")
    waiting = (*LOAD, "launch", REDUCE, "A", 100, 300, "wait")
    second = program(machine, *waiting, "launch", REDUCE, "B", 3000, 300, "sync")
    # when
    recorded = Recorded(machine, script=f"{first} | (read line; {second})")
    # then both were sampled
    by_launches = {sum(ledger.launches.values()): ledger.handed() for ledger in recorded.ledgers}
    assert by_launches.keys() == {1000, 3100}
    assert min(by_launches.values()) > 100
    assert recorded.samples == sum(by_launches.values())
    assert launched(recorded) == {REDUCE: 4100}
    assert recorded.places()["place_b"] == by_launches[3100]


def padded_cubin(path: Path, padding: bytes) -> Path:
    """A cubin with something more in it."""
    data = bytearray(cubin().read_bytes())
    (headers,) = struct.unpack_from("<Q", data, 40)
    data[40:48] = struct.pack("<Q", headers + len(padding))
    path.write_bytes(data[:headers] + padding + data[headers:])
    return path


@thorough
def test_processes_that_send_the_same_large_cubin(machine: Machine, tmp_path: Path) -> None:
    # given a cubin that is larger than the buffer of messages
    padding = os.urandom(24 << 20)
    large = padded_cubin(tmp_path / "large.cubin", padding)
    # when several processes use it at the same time
    words = ("load", large, "launch", REDUCE, "A", 200, 300, "sync")
    recorded = Recorded(machine, script=on_gpus(machine, 6, *words))
    # then all have its instructions, which the capture has once
    assert len(recorded.ledgers) == 6
    assert not recorded.lost("incomplete"), recorded.done.err
    modules = recorded.own("kernel")
    assert set(modules["pid"].to_pylist()) == {ledger.pid for ledger in recorded.ledgers}
    (elf,) = (each for each in modules["elf"].to_pylist() if each is not None)
    assert len(elf) > len(padding) and large.read_bytes().startswith(elf)
    assert recorded.capture.header["probes"]["messages"] * MESSAGE_BYTES < 2 * len(elf)
    assert recorded.kernels() == {"reduce": sum(ledger.handed() for ledger in recorded.ledgers)}


@pytest.mark.parametrize(
    ("processes", "mib", "stopped_s", "then"),
    usually(
        [(4, 16, 1, ())],
        [(4, 16, 1, ()), (8, 60, 1, ()), (8, 60, 1, ("sleep", 4000)), (4, 16, 3, ())],
    ),
    ids=lambda value: str(value),
)
def test_cubins_are_whole_though_the_recorder_stands_still(
    machine: Machine, tmp_path: Path, processes: int, mib: int, stopped_s: float, then: tuple[str | int, ...]
) -> None:
    # given processes that have large cubins of their own
    cubins = [
        padded_cubin(tmp_path / f"{number}.cubin", struct.pack("<Q", number) * (mib << 17))
        for number in range(processes)
    ]
    work = ("say", "there", "wait", "launch", REDUCE, "A", 200, 500, "sync", *then)
    commands = [program(machine, "device", gpu, "load", each, *work) for gpu, each in enumerate(cubins)]
    script = f"exec 3<&0; {''.join(f'{each} <&3 & ' for each in commands)} wait"
    path = machine.folder / "cap"
    command = [*IAPROF, "record", "-o", str(path), *BARE, "--", "sh", "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | machine.env(), **pipes) as recorder:  # type: ignore[call-overload]
        assert [recorder.stdout.readline() for _ in cubins] == ["there\n"] * processes
        # when all launch at the same moment, and the recorder gets no CPU meanwhile
        recorder.send_signal(signal.SIGSTOP)
        recorder.stdin.write("\n" * processes)
        recorder.stdin.flush()
        time.sleep(stopped_s)
        recorder.send_signal(signal.SIGCONT)
        _, told = recorder.communicate(timeout=LONGEST_WAIT_S)
    # then it gets them all, or says how many are missing if it took nothing for longer than programs wait at their end
    assert recorder.returncode == 0, told
    ledgers = read_ledgers(machine.ledger)
    losses = {(each["source"], each["what"]): each["count"] for each in CaptureReader(path).header["losses"]}
    elfs = [elf for elf in CaptureReader(path).table("kernel", ("elf",))["elf"].to_pylist() if elf is not None]
    found = sum(len(elf) > mib << 20 for elf in elfs)
    assert len(ledgers) == processes
    assert found == (processes if stopped_s < 1.5 else 0)
    assert ("messages", "lost") not in losses
    assert losses.get(("cubins", "incomplete"), 0) == processes - found


def test_modules_that_are_unloaded_keep_their_samples(machine: Machine) -> None:
    turns = ("repeat", 5, *LOAD, "launch", REDUCE, "A", 100, 300, "sync", "unload", "end")
    recorded = Recorded(machine, *turns)
    (ledger,) = recorded.ledgers
    assert launched(recorded) == {REDUCE: 500}
    assert recorded.samples == ledger.handed()
    assert recorded.kernels() == {"reduce": ledger.handed()}


@pytest.fixture(scope="module")
def other_cubin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cubin with kernels of the same names, but other code."""
    data = bytearray(cubin().read_bytes())
    with cubin().open("rb") as file:
        code = ELFFile(file).get_section_by_name(f".text.{REDUCE}")
        assert code is not None
        data[code["sh_offset"]] ^= 1
    path = tmp_path_factory.mktemp("cubin") / "other.cubin"
    path.write_bytes(data)
    path.parent.chmod(0o755)
    return path


def expected_places(ledger: Ledger) -> Counter[str]:
    """Samples by the function of the program that launched."""
    found: Counter[str] = Counter()
    for each in ledger.executions:
        found[f"place_{'?abcd'[each.site]}"] += each.samples
    return found


@pytest.mark.parametrize("load", usually(["library"], ["load", "library"]))
@pytest.mark.parametrize("how", usually(["ex"], ["plain", "ex"]))
def test_kernels_of_one_name_in_several_modules_are_told_apart(
    machine: Machine, other_cubin: Path, load: str, how: str
) -> None:
    # given two modules with a kernel of the same name, as compilers make them that run while the program does
    turns = ("module", 0, "launch", REDUCE, "A", 10, 300, "module", 1, "launch", REDUCE, "B", 10, 900)
    # when both are loaded before the first launch, and launched by turns
    recorded = Recorded(
        machine, load, cubin(), load, other_cubin, "how", how, "repeat", 20, *turns, "end", "sync", "unload"
    )
    # then
    (ledger,) = recorded.ledgers
    assert recorded.places() == expected_places(ledger)
    assert len(set(recorded.own("launch")["iba"].to_pylist())) == 1
    assert len(set(recorded.own("launch")["address"].to_pylist())) == 2
    assert "several modules" not in recorded.done.err


@thorough
def test_kernels_of_one_name_in_a_graph_are_told_apart(machine: Machine, other_cubin: Path) -> None:
    recorded = Recorded(machine, *LOAD, "load", other_cubin, "graph-of-all", REDUCE, 50, 500, "sync")
    (ledger,) = recorded.ledgers
    executions = recorded.own("execution")
    assert sorted(Counter(executions["address"].to_pylist()).values()) == [50, 50]
    assert recorded.places() == {"graph_place": ledger.handed()}
    assert "several modules" not in recorded.done.err


@thorough
def test_kernels_of_one_name_where_modules_come_and_go(machine: Machine, other_cubin: Path) -> None:
    # given modules that are loaded and unloaded by turns, so that their handles may be used again, and a second context
    words = ("context", "load", cubin(), "context", "load", other_cubin, "use", 0)
    turn = ("launch", REDUCE, "A", 20, 300, "sync", "unload")
    next_turn = ("load", other_cubin, "launch", REDUCE, "B", 20, 300, "sync", "unload")
    contexts = ("use", 1, "module", 1, "launch", REDUCE, "C", 20, 300, "sync", "use", 0)
    # when
    recorded = Recorded(machine, *words, "repeat", 10, *LOAD, *turn, *next_turn, *contexts, "end")
    # then
    (ledger,) = recorded.ledgers
    found, expected = recorded.places(), expected_places(ledger)
    assert found["place_a"] == expected["place_a"]
    assert found.total() == expected.total()  # places B and C launch the same code, and share by time
    assert found["place_b"] == pytest.approx(expected["place_b"], rel=0.2)
    assert "several modules" not in recorded.done.err


def test_a_driver_that_does_not_say_whose_kernel_it_is(machine: Machine, other_cubin: Path) -> None:
    turns = ("module", 0, "launch", REDUCE, "A", 10, 300, "module", 1, "launch", REDUCE, "B", 10, 300)
    words = (*LOAD, "load", other_cubin, "repeat", 3, *turns, "end", "sync")
    recorded = Recorded(machine, *words, faults="no-owners")
    assert recorded.done.err.count("several modules have a kernel reduce") == 1
    assert "presumes the one loaded last" in " ".join(recorded.done.err.split())
    assert launched(recorded) == {REDUCE: 60}
    assert recorded.samples == recorded.ledgers[0].handed()


def test_functions_and_lines_of_the_kernels_source(machine: Machine) -> None:
    recorded = Recorded(machine, "load", cubin("kernels-lineinfo"), "launch", REDUCE, "A", 2000, 200, "sync")
    done = iaprof("report", recorded.path, "--format=folded", "--frames=function,line", "-q")
    assert "reduce_[G];line 24_[G]" in done.out
    assert "reduce_[G];summed(float const*, int)_[G];scaled(float, float)_[G];line 2_[G]" in done.out  # inlined


def test_copies_and_waits(machine: Machine) -> None:
    words = (*LOAD, "copy", 4096, 25, "launch", REDUCE, "A", 20, 20_000, "sync")
    recorded = Recorded(machine, *words, options=("--waits",))
    (ledger,) = recorded.ledgers
    table = recorded.own("transfer")
    found = Counter(zip(table["function"].to_pylist(), table["bytes"].to_pylist(), strict=True))
    expected = Counter({name.partition("_")[0]: n for name, n in ledger.calls.items() if "Mem" in name})
    assert Counter({name: count for (name, _), count in found.items()}) == +expected
    assert {size for _, size in found} == {4096}
    waits = recorded.own("wait")
    waited: Counter[str] = Counter()
    for function, ns in zip(waits["function"].to_pylist(), waits["waited_ns"].to_pylist(), strict=True):
        waited[function] += ns
    assert waited["cuCtxSynchronize"] > 100_000_000  # of 400 ms of kernels; launching them took some, too


@pytest.mark.parametrize(
    ("fault", "what"),
    usually([("dropped", "dropped")], [("dropped", "dropped"), ("nonuser", "driver's own"), ("full", "overflow")]),
)
def test_what_the_gpu_loses_is_counted(machine: Machine, fault: str, what: str) -> None:
    recorded = Recorded(machine, *WORK, faults=fault)
    (ledger,) = recorded.ledgers
    assert recorded.samples == ledger.handed()
    assert launched(recorded) == {REDUCE: 2000, SCALE: 300}
    counts = {
        "dropped": sum(each.dropped for each in ledger.contexts),
        "driver's own": sum(each.nonuser for each in ledger.contexts),
    }
    assert [each["what"] for each in recorded.losses] == [what]
    if what in counts:
        assert recorded.lost(what) == counts[what] > 0
    # and what CUPTI counts is what is recorded and what is lost
    (stream,) = recorded.capture.header["streams"]
    assert stream["samples"] == recorded.samples + sum(map(recorded.lost, counts))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no-permission", "the driver lets only administrators sample"),
        ("cubin-damaged", "is not a cubin that iaprof can read"),
        pytest.param("second-subscriber", "another profiler uses CUPTI in this process", marks=thorough),
        pytest.param("getdata-fails-always", "CUPTI gives no samples", marks=thorough),
    ],
)
def test_why_nothing_is_sampled_is_said_once(machine: Machine, fault: str, said: str) -> None:
    recorded = Recorded(machine, *WORK, faults=fault)
    assert sum(said in line for line in recorded.done.err.splitlines()) == 1
    details = recorded.capture.table("loss", ("detail",))["detail"].to_pylist()
    assert sum(said in detail for detail in details) == 1
    assert f"{recorded.ledgers[0].pid} A launches 2000" in recorded.done.out  # the program did all of its work


def test_a_function_that_cupti_has_not_looked_up_does_no_harm(machine: Machine) -> None:
    """CUPTI copies the names of functions, and ends the program if there is none."""
    recorded = Recorded(machine, *WORK, faults="not-looked-up")
    (ledger,) = recorded.ledgers
    assert f"{ledger.pid} A launches 2000" in recorded.done.out  # the program did all of its work
    assert launched(recorded) == {REDUCE: 2000, SCALE: 300}
    # and these samples are counted
    assert recorded.samples + recorded.lost("unplaced") == ledger.handed()
    assert recorded.samples > 0 < recorded.lost("unplaced")


@thorough
def test_answers_that_make_no_sense_do_no_harm(machine: Machine) -> None:
    recorded = Recorded(machine, *WORK, faults="nonsense,activity-nonsense")
    assert launched(recorded) == {REDUCE: 2000, SCALE: 300}
    assert f"{recorded.ledgers[0].pid} A launches 2000" in recorded.done.out
    iaprof("top", recorded.path, "-q")
    assert {"unreadable", "unplaced"} & {each["what"] for each in recorded.capture.header["losses"]}


def test_a_process_that_is_killed_loses_its_last_moments_only(machine: Machine) -> None:
    recorded = Recorded(machine, *LOAD, "launch", REDUCE, "A", 2000, 400, "sync", "stop", "vanish")
    (ledger,) = recorded.ledgers
    assert launched(recorded) == {REDUCE: 2000}
    assert ledger.handed() * 0.5 < recorded.samples <= ledger.handed()


def test_a_system_wide_recording_says_that_it_cannot_sample(machine: Machine) -> None:
    path = machine.folder / "cap"
    done = iaprof("record", "-o", path, *BARE, "-d", "0.5", env=machine.env())
    assert done.code == 0, done.err
    assert "only in a command that iaprof starts" in done.err


def test_launches_of_a_running_process_are_recorded_without_names(machine: Machine) -> None:
    # given a program that has begun to use the GPU
    work = ("launch", REDUCE, "A", 500, 10, "launch", SCALE, "B", 300, 10, "stream", "launch", REDUCE, "C", 200, 10)
    then = ("graph", REDUCE, 5, 9, 20, "sync", "ledger", "say", "done", "wait")
    words = machine.programs.command(*LOAD, "launch", REDUCE, "A", 1, 1, "say", "there", "wait", *work, *then)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=os.environ | machine.env(), **pipes) as program:  # type: ignore[call-overload]
        assert program.stdout.readline() == "there\n"
        # when it is recorded from then on
        path = machine.folder / "cap"
        command = [*IAPROF, "record", "-o", str(path), *BARE, "-p", str(program.pid)]
        recorder = subprocess.Popen(command, env=os.environ | machine.env(), stderr=subprocess.PIPE, text=True)
        until_recording(recorder)
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline() == "done\n"
        recorder.send_signal(signal.SIGINT)
        _, told = recorder.communicate(timeout=LONGEST_WAIT_S)
        assert recorder.returncode == 0
        program.communicate("\n")
    # then each call is a launch with its whole stack
    (ledger,) = read_ledgers(machine.ledger)
    calls = sum(calls for name, calls in ledger.calls.items() if name.startswith(("cuLaunch", "cuGraphLaunch")))
    table = CaptureReader(path).table("launch")
    launches = table.filter(pa.array([pid == ledger.pid for pid in table["pid"].to_pylist()]))
    assert len(launches) == calls - 1 > 1000
    assert set(launches["name"].to_pylist()) == {""}
    assert "(100.0 %) have a whole stack" in told


def test_a_program_that_profiles_itself(machine: Machine) -> None:
    """CUPTI serves one profiler in a process: iaprof, unless the user leaves it to the program."""
    recorded = Recorded(machine, *WORK, "profile")
    (ledger,) = recorded.ledgers
    assert recorded.samples == ledger.handed() > 0
    assert f"{ledger.pid} subscribe 39\n" in recorded.done.out  # CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED


def test_a_program_that_is_left_to_profile_itself(machine: Machine) -> None:
    recorded = Recorded(machine, *WORK, "profile", options=("--launches=attach",))
    (ledger,) = recorded.ledgers
    assert f"{ledger.pid} subscribe 0\n" in recorded.done.out
    assert "the command is free to use CUPTI, and NVIDIA's GPUs are not sampled" in recorded.done.err
    assert len(recorded.own("launch")) == ledger.calls["cuLaunchKernel"] == 2300
    assert recorded.samples == 0


@thorough
def test_the_library_sends_to_its_own_recorder_only(machine: Machine) -> None:
    # given a recorder of the whole machine
    path = machine.folder / "all"
    command = [*IAPROF, "record", "-o", str(path), *BARE]
    other = subprocess.Popen(command, env=os.environ | machine.env(), stderr=subprocess.PIPE, text=True)
    until_recording(other)
    # when another one records a program
    recorded = Recorded(machine, *WORK)
    other.send_signal(signal.SIGINT)
    assert other.wait(LONGEST_WAIT_S) == 0
    # then that one has all of it, and the first nothing
    assert recorded.samples == recorded.ledgers[0].handed()
    capture = CaptureReader(path)
    assert capture.count("pc_sample") == capture.count("execution") == 0
    assert "messages" not in [each["source"] for each in capture.header["losses"]]


@pytest.mark.skipif(linux_version() < (6, 18), reason="since Linux 6.18 a probe at a long nop is a call")
def test_a_launch_takes_no_trap(machine: Machine) -> None:
    # given a program that has launched
    words = machine.programs.command(*LOAD, "launch", REDUCE, "A", 2000, 100, "ledger", "say", "launched", "wait")
    command = [*IAPROF, "record", "-o", str(machine.folder / "cap"), *BARE, "--", *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | machine.env(), **pipes) as recorder:  # type: ignore[call-overload]
        assert recorder.stdout.readline() == "launched\n"
        # then Linux has made the probe a call to its trampoline
        (ledger,) = read_ledgers(machine.ledger)
        assert "[uprobes-trampoline]" in Path(f"/proc/{ledger.pid}/maps").read_text()
        recorder.communicate("\n")
    assert recorder.returncode == 0


def test_the_rate_is_a_power_of_two(machine: Machine) -> None:
    recorded = Recorded(machine, *WORK, options=("--rate", str(1 << 16)))
    assert recorded.capture.header["streams"][0]["rate_cycles"] == 1 << 16
    assert recorded.ledgers[0].contexts[0].period == 16
    done = iaprof("record", "-o", machine.folder / "no", *BARE, "--rate=1000", "--", "true", env=machine.env())
    assert done.code == 2
    assert "2^5 to 2^31" in done.err


def test_everything_of_reports_works(machine: Machine, tmp_path: Path) -> None:
    recorded = Recorded(machine, *WORK)
    total = recorded.samples
    table = iaprof("query", recorded.path, "SELECT count(*) AS n FROM executions", "--format=csv")
    assert table.out.split() == ["n", "2300"]
    assert iaprof("annotate", recorded.path, "-q").code == 0
    for name, words in {
        "page.html": ("--format=html",),
        "perfetto": ("--format=perfetto",),
        "pprof": ("--format=pprof",),
        "folded": ("--format=folded", "--per-interval"),
    }.items():
        done = iaprof("report", recorded.path, *words, "-o", tmp_path / name, "-q")
        assert done.code == 0, done.err
        assert os.path.getsize(tmp_path / name) > 100
    assert json.loads(iaprof("top", recorded.path, "--json", "-q").out)["total"]["samples"] == total
