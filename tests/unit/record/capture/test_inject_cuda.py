"""The library in programs that use CUDA, in a program of the stand-in: its probes are written to a file instead.

Nothing is recorded here, so this needs no root; tests/integration/test_cuda.py records.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from iaprof.formats.wire.launches import MESSAGE, MESSAGE_BYTES, MessageOf
from iaprof.gpu.nvidia.records import PC_SAMPLES
from iaprof.record.sources import cuda
from standin.cuda import runtime
from standin.cuda.runtime import FIRST_REASON, REDUCE, SCALE, Ledger, cubin, read_ledgers

INJECTED = runtime.SOURCES / "injected"
HEAD = np.dtype([(name, MESSAGE[name]) for name in (MESSAGE.names or ())[3:-1]])
LAUNCH = 100  # `what` of a launch in the file
LOAD = ("load", cubin())
Row = tuple[int, int, int, int, int, int, int, int]  # as HEAD


@dataclass
class Said:
    """What the library said in one process."""

    messages: list[tuple[dict[str, int], bytes]] = field(default_factory=list)

    def of(self, what: int) -> list[tuple[dict[str, int], bytes]]:
        return [(head, data) for head, data in self.messages if head["what"] == what]

    @property
    def rows(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
        """All rows of samples."""
        words = len(PC_SAMPLES.rows.columns)
        rows = [np.frombuffer(data, np.uint64).reshape(-1, words) for _, data in self.of(MessageOf.SAMPLES)]
        return np.concatenate([np.empty((0, words), np.uint64), *rows])

    @property
    def samples(self) -> int:
        columns = list(self.rows.T)
        return sum(int(PC_SAMPLES.counts(columns, reason).sum()) for reason in PC_SAMPLES.reasons)

    def sums(self, name: str) -> int:
        return sum(int(np.frombuffer(data, cuda._SUMS)[name][0]) for _, data in self.of(MessageOf.SUMS))

    @property
    def problems(self) -> list[str]:
        return [data.decode() for _, data in self.of(MessageOf.PROBLEM)]

    @property
    def modules(self) -> list[bytes]:
        """Cubins that were sent as a whole, in order."""
        found, begun = [], b""
        for head, data in self.of(MessageOf.MODULE):
            assert head["offset"] == len(begun)
            begun += data
            if len(begun) == head["total"]:
                found.append(begun)
                begun = b""
        return found

    def launches(self) -> Counter[tuple[str, int]]:
        """Launches by name and address."""
        return Counter((data.decode(), head["id"]) for head, data in self.of(LAUNCH))

    def names(self) -> dict[int, str]:
        return {head["id"]: data.decode() for head, data in self.of(MessageOf.KERNEL)}


@dataclass
class Ran:
    code: int
    seconds: float
    errors: str
    said: dict[int, Said]
    ledgers: list[Ledger]

    @property
    def only(self) -> tuple[Said, Ledger]:
        (said,), (ledger,) = self.said.values(), self.ledgers
        return said, ledger


def library() -> Path:
    """Compiles the library with other probes."""
    made = runtime.build().folder / "libinjected.so"
    sources = [
        INJECTED / "injected.c",
        INJECTED / "sys" / "sdt.h",
        Path(cuda.__file__).parents[1] / "kernels/inject_cuda_paths.c",
        Path(cuda.__file__).parents[1] / "kernels/inject_cuda_paths.h",
        Path(cuda.__file__).parents[1] / "kernels/inject_cuda.c",
    ]
    if not made.exists() or made.stat().st_mtime_ns < max(source.resolve().stat().st_mtime_ns for source in sources):
        fresh = made.with_suffix(f".{os.getpid()}")
        flags = ["-g", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Werror"]
        subprocess.run(["cc", *flags, f"-I{INJECTED}", "-o", fresh, sources[0], sources[2], "-ldl"], check=True)
        fresh.rename(made)
    return made


class Runner:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, *words: str | float | Path, faults: Collection[str] = (), settings: Mapping[str, str] | None = None
    ) -> Ran:
        programs, output = runtime.build(), self.folder / "said"
        environment = os.environ | programs.env(self.folder / "ledger", faults, library())
        environment |= {"INJECTED_OUTPUT": str(output), "IAPROF_CUDA_PERIOD": "16"} | dict(settings or {})
        began = time.monotonic()
        done = subprocess.run(
            programs.command(*words), env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        seconds = time.monotonic() - began
        said = {int(path.suffix[1:]): read(path) for path in sorted(self.folder.glob("said.*"))}
        return Ran(done.returncode, seconds, done.stderr, said, read_ledgers(self.folder / "ledger"))


def read(path: Path) -> Said:
    content, said, at = path.read_bytes(), Said(), 0
    while at < len(content):
        head = np.frombuffer(content, HEAD, 1, at)[0]
        begin = at + HEAD.itemsize
        at = begin + int(head["bytes"])
        said.messages.append(({name: int(head[name]) for name in HEAD.names or ()}, content[begin:at]))
    assert at == len(content)
    return said


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_everything_is_that_of_the_ledger(run: Runner) -> None:
    ran = run(*LOAD, "launch", REDUCE, "A", 500, 400, "launch", SCALE, "B", 100, 500, "sync")
    said, ledger = ran.only
    assert (ran.code, ran.errors, said.problems) == (0, "", [])
    assert said.samples == said.sums("samples") == ledger.handed() > 10_000
    assert [said.sums(name) for name in ("dropped", "of_driver", "unknown", "full", "invalid")] == [0] * 5
    names = said.names()
    assert Counter({(names[address], address): n for (_, address), n in said.launches().items()}) == said.launches()
    assert {name: count for (name, _), count in said.launches().items()} == {REDUCE: 500, SCALE: 100}
    assert said.modules == [cubin().read_bytes()]
    # and every address is in the cubin
    (base,) = {head["end"] for head, _ in said.of(MessageOf.MODULE)}
    addresses = said.rows[:, 0] - np.uint64(base)
    assert (addresses < len(said.modules[0])).all()
    ran_as = sorted(each.correlation for each in ledger.executions)
    assert sorted(head["offset"] for head, _ in said.of(LAUNCH)) == ran_as


KINDS = (  # of stall reasons, as the stand-in numbers its metrics from 2 on: each, and each with _not_issued
    "barrier", "branch_resolving", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instructions", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait", "warpgroup_arrive",
)  # fmt: skip


@pytest.mark.parametrize("faults", [[], ["unknown-reason"]], ids=["known", "one of a later GPU"])
def test_samples_are_counted_by_what_their_metrics_are_named(run: Runner, faults: list[str]) -> None:
    said, ledger = run(*LOAD, "launch", REDUCE, "A", 500, 400, "sync", faults=faults).only
    made: Counter[tuple[str, bool]] = Counter()
    for row in ledger.samples:
        kind, is_latency = divmod(row.reason - FIRST_REASON, 2)
        reason = "active" if KINDS[kind] == "selected" else KINDS[kind]
        made["other" if faults and reason == "misc" else reason, bool(is_latency)] += row.samples
    columns, required = list(said.rows.T), PC_SAMPLES.rows.required
    counted = {
        (reason, is_latency): int(PC_SAMPLES.counts([columns[0], *of_kind], reason).sum())
        for reason in PC_SAMPLES.reasons
        for is_latency, of_kind in ((False, columns[1:required]), (True, columns[required:]))
    }
    assert {key: number for key, number in counted.items() if number} == +made
    assert len(made) > 30


def test_a_program_does_not_wait_at_its_end(run: Runner) -> None:
    # a drain is made in 100 ms: it ends without waiting for the next one
    seconds = sorted(run(*LOAD, "launch", REDUCE, "A", 1, 10, "sync").seconds for _ in range(5))
    assert seconds[0] < 0.09


@pytest.mark.parametrize("words", [(), ("destroy",)], ids=["at the end", "in a callback"])
def test_cupti_that_does_not_return_does_not_hang_the_program(run: Runner, words: tuple[str, ...]) -> None:
    # given a thread of ours that is in CUPTI and does not return, with our lock
    ran = run(*LOAD, "launch", REDUCE, "A", 500, 500, "sync", *words, faults=["getdata-hangs"])
    assert ran.code == 0
    assert ran.seconds < 10
    assert ran.only[0].launches().total() == 500


@pytest.mark.parametrize("fault", ["nonsense", "nonsense-count", "nonsense-pc", "nonsense-function", "nonsense-crc"])
def test_answers_of_nonsense(run: Runner, fault: str) -> None:
    ran = run(*LOAD, "launch", REDUCE, "A", 1000, 500, "sync", faults=[fault])
    said, ledger = ran.only
    assert (ran.code, said.problems) == (0, [])
    if fault == "nonsense-count":
        assert said.sums("invalid") > 0
    else:
        assert said.sums("unknown") > 0
    assert said.samples == pytest.approx(ledger.handed(), rel=0.01)


def test_threads_contexts_modules_and_graphs(run: Runner) -> None:
    ran = run(
        *LOAD, "threads", 6, REDUCE, "A", 100, 300, "sync", "graph", REDUCE, 5, 50, 100, "sync", "unload",
        "context", *LOAD, "threads", 3, SCALE, "B", 100, 300, "sync", "destroy",
    )  # fmt: skip
    said, ledger = ran.only
    assert (ran.code, ran.errors, said.problems) == (0, "", [])
    assert said.samples == ledger.handed()
    rows = [np.frombuffer(data, cuda._EXECUTION) for _, data in said.of(MessageOf.EXECUTIONS)]
    executions = np.concatenate(rows)
    assert sorted(executions["correlation"].tolist()) == sorted(each.correlation for each in ledger.executions)
    assert Counter(executions["address"].tolist())[next(a for a, n in said.names().items() if n == REDUCE)] == 250


def test_contexts_come_and_go(run: Runner) -> None:
    # given contexts of which only one is there at a time
    ran = run("repeat", 60, "context", *LOAD, "launch", REDUCE, "A", 2, 200, "sync", "destroy", "end")
    said, ledger = ran.only
    assert (ran.code, said.problems) == (0, [])
    assert len(said.of(MessageOf.CONTEXT)) == 60
    assert {head["id"] for head, _ in said.of(MessageOf.CONTEXT)} == {0}  # there is room for 256 at a time
    assert said.samples == ledger.handed()


def test_a_kernel_is_that_of_the_module_that_was_loaded_last(run: Runner) -> None:
    first, second = cubin("kernels"), cubin("kernels-lineinfo")
    launch = ("launch", REDUCE, "A", 10, 100, "sync")
    ran = run("load", first, *launch, "unload", "load", second, *launch, "unload", "load", first, *launch)
    said, _ = ran.only
    addresses = [head["id"] for head, _ in said.of(LAUNCH)]
    assert addresses[:10] == addresses[20:] != addresses[10:20]
    assert len(set(addresses)) == 2


def test_children(run: Runner) -> None:
    # given a program that forks before it uses CUDA, and one that does so after
    before = run("fork", 2, *LOAD, "launch", REDUCE, "A", 200, 500, "sync")
    assert {pid: said.samples for pid, said in before.said.items()} == {
        ledger.pid: ledger.handed() for ledger in before.ledgers
    }


def test_a_child_of_a_process_that_uses_cuda_says_nothing(run: Runner) -> None:
    ran = run(*LOAD, "launch", REDUCE, "A", 200, 500, "fork", 3, "sleep", 150, "destroy")
    said, ledger = ran.only
    assert ran.seconds < 3
    assert said.samples == ledger.handed()


def test_the_recorder_is_gone(run: Runner) -> None:
    ran = run(*LOAD, "launch", REDUCE, "A", 3000, 500, "sync", settings={"INJECTED_SECONDS": "0.3"})
    said, ledger = ran.only
    assert ran.code == 0
    assert 0 < said.launches().total() < 3000
    assert 0 < said.samples < ledger.handed()
    assert not any(context.enabled for context in ledger.contexts)


def large_cubin(path: Path, size: int) -> Path:
    """A cubin that goes in many pieces."""
    data = bytearray(cubin().read_bytes())
    (headers,) = struct.unpack_from("<Q", data, 40)
    struct.pack_into("<Q", data, 40, headers + size)
    path.write_bytes(data[:headers] + os.urandom(size) + data[headers:])
    return path


def test_pieces_of_cubins_that_are_not_taken_are_sent_again(run: Runner, tmp_path: Path) -> None:
    large = large_cubin(tmp_path / "large.cubin", 300_000)
    words = (*LOAD, "launch", REDUCE, "A", 100, 500, "load", large, "launch", SCALE, "B", 100, 500, "sync")
    said, _ = run(*words, settings={"INJECTED_ROOM": "3"}).only
    small, found = sorted(said.modules, key=len)
    assert small == cubin().read_bytes()
    assert large.read_bytes().startswith(found)  # the driver loads what is in segments and sections
    assert len(found) > 300_000


def test_a_recorder_that_takes_no_pieces_does_not_hang_the_program(run: Runner, tmp_path: Path) -> None:
    large = large_cubin(tmp_path / "large.cubin", 1 << 20)
    words = (*LOAD, "launch", REDUCE, "A", 100, 500, "load", large, "launch", SCALE, "B", 100, 500, "sync")
    ran = run(*words, settings={"INJECTED_ROOM": "0"})
    assert ran.code == 0
    assert ran.seconds < 5
    # and it is told where the cubins are, for another process to send them
    said, ledger = ran.only
    assert [(head["bytes"], head["offset"]) for head, _ in said.of(MessageOf.MODULE)] == [(0, 0)] * 2
    assert {head["total"] for head, _ in said.of(MessageOf.MODULE)} == {each.size for each in ledger.cubins}
    assert all(head["end"] for head, _ in said.of(MessageOf.MODULE))


def test_a_signal_of_the_program_s_own_is_no_answer(run: Runner) -> None:
    ran = run(*LOAD, "launch", REDUCE, "A", 100, 500, "sync", settings={"INJECTED_URGENT": "1"})
    assert (ran.code, ran.errors) == (0, "")  # the program has it still
    assert ran.only[0].modules == [cubin().read_bytes()]


def test_nobody_records(run: Runner) -> None:
    ran = run(*LOAD, "launch", REDUCE, "A", 100, 100, "sync", settings={"INJECTED_OUTPUT": ""})
    assert ran.code == 0
    assert [context.calls for context in ran.ledgers[0].contexts if context.calls] == []  # CUPTI was not asked


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("no-permission", "the driver lets only administrators sample"),
        ("second-subscriber", "another profiler uses CUPTI"),
        ("no-activity", "nothing is sampled: CUPTI says CUPTI_ERROR_NOT_SUPPORTED"),
        ("no-reasons", "a context is not sampled: CUPTI says nothing of its reasons"),
        ("no-configuration", "a context is not sampled: CUPTI says CUPTI_ERROR_INVALID_OPERATION"),
        ("cubin-damaged", "is not a cubin that iaprof can read"),
        ("cubin-truncated", "is not a cubin that iaprof can read"),
        ("getdata-fails-always", "CUPTI gives no samples: CUPTI_ERROR_UNKNOWN"),
    ],
)
def test_problems_are_said_once_and_the_program_goes_on(run: Runner, fault: str, problem: str) -> None:
    ran = run(*LOAD, "launch", REDUCE, "A", 600, 500, "sync", faults=[fault])
    said, ledger = ran.only
    assert (ran.code, ran.errors) == (0, "")
    assert len(said.problems) == 1
    assert problem in said.problems[0]
    assert ledger.launches == {(REDUCE, 1): 600}


def test_a_process_that_takes_the_name_of_a_gpu(run: Runner) -> None:
    # given who has the name that says that a GPU samples another process
    words = (*LOAD, "launch", REDUCE, "A", 600, 500, "sync")
    said, _ = run(*words).only
    ((_, data),) = said.of(MessageOf.CONTEXT)
    uuid = bytes(np.frombuffer(data, cuda._DEVICE)[0]["uuid"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taken:
        taken.bind(f"\0iaprof-gpu-{uuid.hex()}")
        # when
        ran = run(*words)
    # then the process has its launches and executions, and says why it has no samples
    (ledger,) = (each for each in ran.ledgers if not each.handed())
    said = ran.said[ledger.pid]
    assert (ran.code, ran.errors, said.problems, len(said.rows)) == (0, "", [], 0)
    assert said.launches().total() == len(ledger.executions) == 600
    assert sum(len(data) for _, data in said.of(MessageOf.EXECUTIONS)) == 600 * cuda._EXECUTION.itemsize
    ((_, data),) = said.of(MessageOf.CONTEXT)
    assert np.frombuffer(data, cuda._DEVICE)[0]["sampled"] == cuda.OTHER_SAMPLED


def test_sizes(run: Runner) -> None:
    said, _ = run(*LOAD, "launch", REDUCE, "A", 10, 500, "sync").only
    assert all(head["bytes"] <= MESSAGE_BYTES for head, _ in said.messages)
    (context,) = said.of(MessageOf.CONTEXT)
    device = np.frombuffer(context[1], cuda._DEVICE)[0]
    assert (device["bus"], device["major"], device["period"], device["sampled"]) == (b"0000:1B:00.0", 9, 16, 1)
