"""Messages of the library in processes that use NVIDIA's GPUs: what becomes rows, and that no process does harm."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import subprocess
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.basics.errors import UsageError
from iaprof.formats.wire.launches import EXECUTION, LAUNCH, MESSAGE, MESSAGE_BYTES, MessageOf
from iaprof.gpu.nvidia.reasons import MEANINGS, SELECTED, WORDS
from iaprof.gpu.nvidia.records import PC_SAMPLES
from iaprof.gpu.samples import ACTIVE
from iaprof.record.options import Options
from iaprof.record.sources import cuda
from iaprof.record.sources.cuda import CudaSamples
from iaprof.record.sources.nvidia import Gpu
from iaprof.record.spool import FrameKind

PID, OTHER, THIRD = 5_000_003, 5_900_001, 5_900_002  # above the most that Linux gives: as if both had ended
BUS, BUS1 = "0000:1b:00.0", "0000:1c:00.0"
GPUS = [Gpu(BUS, "Stand-in GPU", "0"), Gpu(BUS1, "Stand-in GPU", "1")]
MS = 1_000_000
HUGE = (1 << 64) - 1
CONTEXT, SAMPLES, SUMS, MODULE, KERNEL, EXECUTIONS, PROBLEM, LAUNCHES = MessageOf


class Journal:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.frames: list[tuple[FrameKind, bytes, dict[str, int]]] = []
        self.losses: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.streams: list[Any] = []
        self.totals = type("Totals", (), {"records": 0, "modules": 0})()

    def write(self, kind: FrameKind, *payload: bytes | memoryview, **meta: int) -> None:
        self.frames.append((kind, b"".join(bytes(each) for each in payload), meta))

    def json(self, kind: FrameKind, value: object, time_ns: int = 0, begin_ns: int = 0) -> None:
        self.write(kind, json.dumps(value).encode(), time=time_ns, begin=begin_ns)

    def append(self, name: str, item: object) -> None:
        assert name == "streams"
        self.streams.append(item)

    def loss(self, source: str, what: str, count: int | None, detail: str, begin: int, end: int) -> None:
        assert begin <= end
        self.losses.append({"source": source, "what": what, "count": count, "detail": detail})

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def of(self, kind: FrameKind) -> list[tuple[bytes, dict[str, int]]]:
        return [(payload, meta) for each, payload, meta in self.frames if each is kind]


class Loop:
    def __init__(self) -> None:
        self.actions: dict[object, Any] = {}

    def keep_calling(self, key: object, action: Any) -> None:
        self.actions[key] = action

    def stop_calling(self, key: object) -> None:
        self.actions.pop(key, None)


class Taken:
    """The source, and what it has written."""

    def __init__(self, *devices: str) -> None:
        self.source = CudaSamples(Options(Path("out"), ("command",), devices=devices))
        self.journal, self.loop = Journal(), Loop()
        self.source.start(self.journal, self.loop)  # type: ignore[arg-type]
        self.source.resume()
        self.began = self.source._began_ns
        self.now = self.began + 1000 * MS

    def __call__(self, *messages: NDArray[np.void]) -> None:
        self.source.take(np.concatenate([np.empty(0, MESSAGE), *messages]), self.now)

    def lost(self) -> Counter[tuple[str, str]]:
        """What was lost, by source and kind."""
        self.journal.losses.clear()
        self.source.losses()
        return Counter({(each["source"], each["what"]): each["count"] or 1 for each in self.journal.losses})

    def reads(self) -> list[tuple[int, int, int, NDArray[np.uint64]]]:
        """The reads of samples: begin and end in ms since the recording's begin, stream, uint64[records, words]."""
        return [
            (
                (meta["begin"] - self.began) // MS,
                (meta["time"] - self.began) // MS,
                meta["source"],
                np.frombuffer(payload, np.uint64).reshape(meta["shape"], -1).T,
            )
            for payload, meta in self.journal.of(FrameKind.STALLS)
        ]

    def executions(self) -> NDArray[np.void]:
        frames = [np.frombuffer(payload, EXECUTION) for payload, _ in self.journal.of(FrameKind.EXECUTIONS)]
        return np.concatenate([np.empty(0, EXECUTION), *frames])

    def modules(self) -> list[tuple[dict[str, Any], bytes]]:
        return [
            (json.loads(payload[: meta["shape"]]), payload[meta["shape"] :])
            for payload, meta in self.journal.of(FrameKind.KERNEL)
        ]

    def names(self) -> list[dict[str, Any]]:
        return [json.loads(payload) for payload, _ in self.journal.of(FrameKind.KERNEL_NAME)]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "find_gpus", lambda: list(GPUS))


@pytest.fixture
def taken() -> Taken:
    return Taken()


def message(what: int, data: bytes = b"", pid: int = PID, size: int | None = None, **members: int) -> NDArray[np.void]:
    made = np.zeros(1, MESSAGE)
    made["pid"] = pid
    made["what"], made["bytes"] = what, len(data) if size is None else size
    made["data"] = np.frombuffer(data[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"), f"V{MESSAGE_BYTES}")
    for name, value in members.items():
        made[name] = value
    return made


def context(number: int = 0, pid: int = PID, bus: bytes = BUS.encode(), **members: int) -> NDArray[np.void]:
    device = np.zeros(1, cuda._DEVICE)
    device["bus"], device["name"] = bus, b"a name\x1b[31m"
    for name, value in ({"major": 9, "period": 18, "sampled": 1} | members).items():
        device[name] = value
    return message(CONTEXT, device.tobytes(), pid, id=number)


BASE = 4096
"""What the library says."""


def base(pid: int = PID) -> int:
    """What BASE is in a capture."""
    return (pid % cuda.RANGES << cuda.RANGE_BITS) + BASE


def samples(taken: Taken, *rows: int, number: int = 0, pid: int = PID, begin: int = 100, end: int = 200,
            size: int | None = None) -> NDArray[np.void]:  # fmt: skip
    """A message with a row for each address: its first word of counts is 7, and its last one 9."""
    table = np.zeros((len(rows), PC_SAMPLES_WORDS), np.uint64)
    table[:, 0], table[:, 1], table[:, -1] = rows, 7, 9
    times = {"begin": max(taken.began + begin * MS, 0), "end": taken.began + end * MS}
    return message(SAMPLES, table.tobytes(), pid, size, id=number, **times)


PC_SAMPLES_WORDS = len(PC_SAMPLES.rows.columns)


def execution(taken: Taken, correlation: int, begin: int, end: int, pid: int = PID, **members: int) -> bytes:
    row = np.zeros(1, cuda._EXECUTION)
    row["correlation"], row["begin"], row["end"] = correlation, taken.began + begin * MS, taken.began + end * MS
    for name, value in members.items():
        row[name] = value
    return row.tobytes()


def execution_at(begin: int, end: int) -> bytes:
    row = np.zeros(1, cuda._EXECUTION)
    row["begin"], row["end"] = begin, end
    return row.tobytes()


def pieces(
    content: bytes, pid: int = PID, crc: int = 77, at: int | None = None, step: int = 16000, **members: int
) -> list[NDArray[np.void]]:
    """The messages with a cubin."""
    where = {"end": BASE if at is None else at, "total": len(content)} | members
    return [
        message(MODULE, content[offset : offset + step], pid, id=crc, offset=offset, **where)
        for offset in range(0, len(content), step)
    ]


# What comes is written


def test_samples_of_several_processes_contexts_and_gpus(taken: Taken) -> None:
    # when descriptions come after samples that are read with them
    taken(
        samples(taken, BASE, BASE + 16),
        samples(taken, BASE, pid=OTHER, begin=110),
        samples(taken, BASE + 32),  # of the first drain, too
        samples(taken, BASE + 48, number=1),
        context(),
        context(1, bus=BUS1.upper().encode(), ordinal=1),
        context(pid=OTHER),
    )
    # then a drain is a read
    reads = {(begin, end, stream): words for begin, end, stream, words in taken.reads()}
    assert {key: words[:, 0].tolist() for key, words in reads.items()} == {
        (100, 200, 0): [base(), base() + 16, base() + 32],
        (100, 200, 1): [base() + 48],
        (110, 200, 0): [base(OTHER)],
    }
    assert all((words[:, 1] == 7).all() and (words[:, -1] == 9).all() for words in reads.values())
    assert taken.journal.totals.records == 5
    assert [stream["card"] for stream in taken.source.header()["streams"]] == ["nvidia0", "nvidia1"]
    assert [stream["pci_address"] for stream in taken.journal.streams] == [BUS, BUS1]
    assert [stream["rate_cycles"] for stream in taken.journal.streams] == [1 << 18] * 2
    assert not taken.lost()


def test_full_messages(taken: Taken) -> None:
    most = MESSAGE_BYTES // (8 * PC_SAMPLES_WORDS)
    taken(context(), samples(taken, *range(BASE, BASE + most)))
    most_executions = MESSAGE_BYTES // cuda._EXECUTION.itemsize
    rows = [execution(taken, number, 1, 2) for number in range(most_executions)]
    taken(message(EXECUTIONS, b"".join(rows)))
    assert [len(words) for *_, words in taken.reads()] == [most]
    assert taken.executions()["correlation"].tolist() == list(range(most_executions))
    assert not taken.lost()


def test_nothing_while_sampling_pauses(taken: Taken) -> None:
    taken.source.pause()
    sums = np.ones(1, cuda._SUMS).tobytes()
    taken(context(), samples(taken, BASE), message(SUMS, sums))
    assert taken.reads() == []
    taken.source.resume()
    taken(samples(taken, BASE))
    assert len(taken.reads()) == 1
    assert not taken.lost()


def test_sums_are_losses_of_the_gpu(taken: Taken) -> None:
    sums = np.zeros(1, cuda._SUMS)
    sums["samples"], sums["dropped"], sums["of_driver"], sums["full"] = 100, 3, 4, 2
    taken(context(), context(1, bus=BUS1.encode(), ordinal=1))
    taken(message(SUMS, sums.tobytes()), message(SUMS, sums.tobytes(), id=1), message(SUMS, sums.tobytes(), id=1))
    gpu, gpu1 = "samples of /dev/nvidia0", "samples of /dev/nvidia1"
    assert taken.lost() == {
        (gpu, "dropped"): 3, (gpu, "driver's own"): 4, (gpu, "overflow"): 1,
        (gpu1, "dropped"): 6, (gpu1, "driver's own"): 8, (gpu1, "overflow"): 1,
    }  # fmt: skip
    assert not taken.lost()


def test_modules_and_names(taken: Taken) -> None:
    content = os.urandom(40_000)
    since = taken.began + 5 * MS
    taken(*pieces(content, begin=since), message(KERNEL, b"_Z4stepPf", id=BASE + 64, begin=since, end=128))
    taken(*pieces(content, OTHER))
    (first, elf), (second, nothing) = taken.modules()
    digest = hashlib.sha256(content).hexdigest()
    assert elf == content and nothing == b""  # once
    assert first == {
        "pid": PID,
        "path": "[in memory]",
        "digest": digest,
        "size": 40_000,
        "base": base(),
        "content": True,
    }
    assert second == {**first, "pid": OTHER, "base": base(OTHER), "content": False}
    assert taken.journal.of(FrameKind.KERNEL)[0][1]["time"] == since
    assert taken.names() == [{"pid": PID, "address": base() + 64, "name": "_Z4stepPf"}]
    # and another output file has names again, and contents from the process or by rotation
    taken.journal.frames.clear()
    taken.source.begin_part(taken.now)
    while taken.loop.actions:
        [action() for action in list(taken.loop.actions.values())]
    assert taken.names() == [{"pid": PID, "address": base() + 64, "name": "_Z4stepPf"}]
    assert not taken.lost()


def test_one_process_of_a_user_sends_a_cubin_for_all(taken: Taken) -> None:
    content = os.urandom(40_000)
    mine, other = pieces(content), pieces(content, OTHER)
    # when BPF takes the first piece of the other one only, and that process has ended meanwhile
    taken(mine[0], other[0], *mine[1:])
    assert [(about["pid"], about["base"], data) for about, data in taken.modules()] == [
        (PID, base(), content),
        (OTHER, base(OTHER), b""),
    ]
    # and likewise once it is known, but not for another user's process, or one with other contents
    third, longer = pieces(content, PID + 2), pieces(content + b"x", PID + 4)
    taken(third[0], pieces(content, PID + 3, uid=1000)[0], longer[0])
    assert [about["pid"] for about, _ in taken.modules()] == [PID, OTHER, PID + 2]
    # and what nobody has sent is counted
    taken.source.finish()
    assert taken.lost() == {("cubins", "incomplete"): 2}


def test_a_piece_that_comes_again(taken: Taken) -> None:
    content = os.urandom(60_000)
    made = pieces(content)
    taken(made[0], made[1], made[1], *made[2:], made[-1])
    assert [each for _, each in taken.modules()] == [content]
    taken.source.finish()
    assert not taken.lost()
    assert taken.source._unfinished_bytes == 0


def test_a_cubin_that_a_process_could_not_send(taken: Taken) -> None:
    content = os.urandom(40_000)
    places = {"end": BASE, "total": len(content)}
    # given processes that only say where they have it: one before another one sends it, one after
    taken(message(MODULE, b"", OTHER, id=77, **places), *pieces(content), message(MODULE, b"", THIRD, id=77, **places))
    assert [(about["pid"], about["base"], data) for about, data in taken.modules()] == [
        (OTHER, base(OTHER), content),
        (PID, base(), b""),
        (THIRD, base(THIRD), b""),
    ]
    # and one that nobody sends
    taken(message(MODULE, b"", OTHER, id=78, **places))
    taken.source.finish()
    assert taken.lost() == {("cubins", "incomplete"): 1}


def test_executions(taken: Taken) -> None:
    taken(
        context(),
        context(bus=BUS1.encode(), pid=OTHER, ordinal=3),
        message(EXECUTIONS, execution(taken, 5, 10, 20, queue=13) + execution(taken, 6, 20, 30, address=BASE + 8)),
        message(EXECUTIONS, execution(taken, 5, 15, 25, ordinal=3), OTHER, id=4),
    )
    found = taken.executions()
    assert found["pid"].tolist() == [PID, PID, OTHER]
    assert found["correlation"].tolist() == [5, 6, 5]
    assert found["stream"].tolist() == [0, 0, 1]
    assert found["queue"].tolist() == [13, 0, 0]
    assert found["address"].tolist() == [0, base() + 8, 0]
    assert (found["end"] - found["begin"]).tolist() == [10 * MS] * 3
    assert taken.lost() == {("executions", "dropped"): 4}


def test_launches_are_where_their_kernels_are(taken: Taken) -> None:
    # given launches of two processes, one of a graph, and one that is not of the library
    launches = np.zeros(5, LAUNCH)
    launches["pid"] = PID, OTHER, PID, PID, PID
    launches["address"] = BASE, BASE + 16, 0, 0x8000_0001_0000, HUGE
    launches["correlation"] = 1, 1, 2, 0, 3
    launches.flags.writeable = False  # they are read from a ring buffer
    # when
    placed = taken.source.placed(launches)
    # then
    last = base() - BASE + (1 << 30) - 1
    assert placed["address"].tolist() == [base(), base(OTHER) + 16, 0, 0x8000_0001_0000, last]
    assert taken.source.placed(launches[3:4])["address"].tolist() == [0x8000_0001_0000]
    assert not len(taken.source.placed(launches[:0]))


def test_only_the_chosen_gpu() -> None:
    taken = Taken("nvidia1")
    taken(
        context(), samples(taken, BASE), message(EXECUTIONS, execution(taken, 1, 2, 3)),
        context(1, bus=BUS1.encode(), ordinal=1), samples(taken, BASE, number=1),
    )  # fmt: skip
    assert [stream for _, _, stream, _ in taken.reads()] == [0]
    assert [stream["card"] for stream in taken.journal.streams] == ["nvidia1"]
    assert not len(taken.executions())
    assert not taken.lost()
    with pytest.raises(UsageError, match="there is no device nvidia2"):
        Taken("nvidia2")


def test_a_context_that_is_not_sampled_leaves_its_gpu_s_executions_where_they_are(taken: Taken) -> None:
    taken(context(), context(1, sampled=0), samples(taken, BASE, number=1))
    taken(message(EXECUTIONS, execution(taken, 1, 2, 3)))
    assert taken.reads() == []
    assert len(taken.executions()) == 1


def test_another_program_in_the_process(taken: Taken) -> None:
    taken(context(), samples(taken, BASE), *pieces(b"a" * 50_000)[:2])
    # when it begins again with the same numbers, on another GPU
    taken(context(bus=BUS1.encode()), samples(taken, BASE, begin=300, end=400), *pieces(b"b" * 50_000))
    assert [stream for _, _, stream, _ in taken.reads()] == [0, 1]
    assert [content for _, content in taken.modules()] == [b"b" * 50_000]
    assert taken.lost() == {("cubins", "incomplete"): 1}


# What no honest process sends


def test_lengths(taken: Taken) -> None:
    rows, row = PC_SAMPLES_WORDS * 8, execution(taken, 1, 2, 3)
    taken(
        context(),
        *(message(kind, b"x", size=size) for kind in MessageOf for size in (MESSAGE_BYTES + 1, (1 << 32) - 1)),
        *(message(kind, b"", size=0) for kind in MessageOf if kind not in (KERNEL, PROBLEM, LAUNCHES)),
        message(CONTEXT, b"short"),
        message(SUMS, b"short"),
        message(99, b"of no kind"),
        message(0),
        samples(taken, BASE, BASE, size=rows + 9),
        message(EXECUTIONS, row + b"rest"),
    )
    assert [len(words) for *_, words in taken.reads() if len(words)] == [1]
    assert len(taken.executions()) == 1
    assert taken.lost()["messages", "unreadable"] == 16 + 3 + 4 + 2


def test_an_address_of_another_process(taken: Taken) -> None:
    wrong = [1 << 30, (1 << 30) + BASE, HUGE, base(), base(OTHER)]
    taken(context(), samples(taken, BASE, *wrong))
    assert [words[:, 0].tolist() for *_, words in taken.reads()] == [[base()]]
    taken(*(message(KERNEL, b"name", id=address) for address in wrong))
    taken(*(each for address in wrong for each in pieces(b"content", at=address)))
    taken(*pieces(b"x" * 9000, at=(1 << 30) - 8000))  # its end is in the next range
    taken(*(message(EXECUTIONS, execution(taken, 1, 2, 3, address=address)) for address in wrong))
    assert (taken.names(), taken.modules()) == ([], [])
    assert not len(taken.executions())
    assert taken.lost() == {
        ("samples of /dev/nvidia0", "unplaced"): 5,
        ("messages", "unreadable"): 11,
        ("executions", "unreadable"): 5,
    }


def test_times_are_within_the_recording(taken: Taken) -> None:
    latest = taken.now + 10 * MS  # of executions, as the GPU has another clock
    moments = (0, 1, taken.began, taken.now, latest, latest + 1, 1 << 63, HUGE)
    taken(context())
    for begin in moments:
        for end in moments:
            drain = samples(taken, BASE)
            drain["begin"], drain["end"] = begin, end
            taken(drain, message(EXECUTIONS, execution_at(begin, end)))
            taken(*pieces(b"x", begin=begin), message(KERNEL, f"{begin} {end}".encode(), id=BASE, begin=begin))
    for kind, _, meta in taken.journal.frames:
        assert taken.began <= meta["time"] <= taken.now
        assert kind is not FrameKind.STALLS or taken.began <= meta["begin"] <= meta["time"]
    found = taken.executions()
    assert ((taken.began <= found["begin"]) & (found["begin"] <= found["end"]) & (found["end"] <= latest)).all()
    assert set(found["begin"].tolist()) == {taken.began, taken.now, latest}


def test_contexts_and_gpus_by_the_thousand(taken: Taken) -> None:
    for number in range(4000):
        taken(context(number, ordinal=number % 700))
    taken(context(HUGE), context(0, ordinal=(1 << 32) - 1))
    (process,) = taken.source._processes.values()
    assert len(process.contexts) == len(process.ordinals) == cuda.MAX_CONTEXTS
    assert len(taken.journal.streams) == 1


def test_executions_on_gpus_by_the_thousand(taken: Taken) -> None:
    rows = [execution(taken, 1, 2, 3, ordinal=ordinal) for ordinal in (0, 1, 5, 255, 256, (1 << 32) - 1)]
    taken(context(), message(EXECUTIONS, b"".join(rows)), message(EXECUTIONS, rows[0], OTHER))
    assert len(taken.executions()) == 1
    assert taken.lost() == {("executions", "unreadable"): 2, ("executions", "unplaced"): 4}


def test_samples_of_a_context_that_nobody_described(taken: Taken) -> None:
    taken(context(), samples(taken, BASE, BASE, number=1), samples(taken, BASE, pid=OTHER))
    assert taken.reads() == []
    assert taken.lost() == {("samples", "unplaced"): 3}


@pytest.mark.parametrize("bus", [b"", b"no bus", b"0000:1b:00.0\n", b"9999:1b:00.0", b"../../../etc", b"\xff" * 32])
def test_a_gpu_that_does_not_exist(taken: Taken, bus: bytes) -> None:
    taken(context(bus=bus), context(1, bus=bus), samples(taken, BASE))
    assert taken.reads() == taken.journal.streams == []
    assert taken.journal.warnings == [f"process {PID}: it names a GPU that the driver does not have"]


@pytest.mark.parametrize("period", [0, 4, 17, 32, 255, (1 << 32) - 1])
def test_a_period_that_was_not_asked_for(taken: Taken, period: int) -> None:
    taken(context(period=period))
    assert taken.journal.streams == []
    assert taken.lost() == {("messages", "unreadable"): 1}


def test_names_of_all_kinds(taken: Taken) -> None:
    texts = [b"", b"\xff\xfe\0", b"\x1b[2J\r\n", "\u202egnp".encode(), b"n" * MESSAGE_BYTES, b"\xf0" * MESSAGE_BYTES]
    taken(*(message(KERNEL, text, id=BASE + number) for number, text in enumerate(texts)))
    names = {name["address"] - base(): name["name"] for name in taken.names()}
    assert names[1] == "\\xff\\xfe\0"
    assert names[4] == "n" * cuda.MAX_NAME_BYTES
    assert names[5] == "\\xf0" * cuda.MAX_NAME_BYTES


def test_a_name_is_written_when_it_changes(taken: Taken) -> None:
    for name in (b"a", b"a", b"b", b"b", b"a"):
        taken(message(KERNEL, name, id=BASE))
    assert [name["name"] for name in taken.names()] == ["a", "b", "a"]


def test_names_do_not_fill_the_memory(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MAX_NAMES", 20)
    monkeypatch.setattr(cuda, "MAX_NAMES_BYTES", 100_000)
    for pid in range(50):
        taken(*(message(KERNEL, b"n" * 4000, PID + pid, id=BASE + number) for number in range(30)))
    kept = [name for process in taken.source._processes.values() for name in process.names.values()]
    assert sum(len(name) for _, name in kept) == taken.source._names_bytes <= 100_000
    assert taken.lost() == {("names", "lost"): 1500 - 25}
    # and those of processes that have ended, which these have, go
    taken.lost()
    assert taken.source._names_bytes == 0
    taken(message(KERNEL, b"name", id=BASE))
    assert taken.names()[-1]["pid"] == PID


@pytest.mark.parametrize("order", ["backwards", "gap", "overlap", "empty", "beyond", "other total", "moves"])
def test_pieces_that_do_not_fit(taken: Taken, order: str) -> None:
    content = os.urandom(60_000)
    made = pieces(content)
    match order:
        case "backwards":
            made.reverse()
        case "gap":
            del made[1]
        case "overlap":
            made[1]["offset"] = 15_999
        case "empty":
            made[1]["bytes"] = 0
        case "beyond":
            made[-1]["offset"] = HUGE - 10
        case "other total":
            made[1]["total"] = HUGE
        case "moves":
            made[1]["end"] = BASE + 4096
    taken(*made)
    assert taken.modules() == []
    taken.source.finish()
    lost = taken.lost()
    assert lost["cubins", "incomplete"] + lost["messages", "unreadable"] + lost["cubins", "too large"] >= 1
    assert taken.source._unfinished_bytes == sum(
        len(module.data) for process in taken.source._processes.values() for module in process.modules.values()
    )
    # and the process can send it as it is
    taken(*pieces(content))
    assert [each for _, each in taken.modules()] == [content]
    assert taken.source._unfinished_bytes == 0


def test_a_module_of_no_bytes_or_of_absurdly_many(taken: Taken) -> None:
    taken(message(MODULE, b"", id=1, end=BASE, total=0), message(MODULE, b"x", id=1, end=BASE, total=0))
    taken(message(MODULE, b"x", id=1, end=BASE, total=cuda.MAX_MODULE_BYTES + 1))
    assert taken.modules() == []
    assert taken.lost() == {("messages", "unreadable"): 2, ("cubins", "too large"): 1}


def test_modules_that_never_end(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MAX_UNFINISHED_BYTES", 1 << 20)
    tracemalloc.start()
    for number in range(2000):
        taken(*pieces(b"x" * 16_000, PID + number % 40, number, total=cuda.MAX_MODULE_BYTES))
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 4 << 20
    assert taken.source._unfinished_bytes <= 1 << 20
    # and when the processes have ended, others have the room
    taken.source.finish()
    assert taken.lost()["cubins", "incomplete"] > 1000
    taken.lost()
    assert taken.source._unfinished_bytes == 0
    assert not taken.source._processes


def test_pieces_of_one_byte(taken: Taken) -> None:
    tracemalloc.start()
    for offset in range(3000):
        taken(message(MODULE, b"x", id=1, end=BASE, offset=offset, total=1 << 20))
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 1 << 20


def test_a_module_counts_once_however_often_it_comes(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MAX_MODULES_BYTES", 100_000)
    for pid in range(20):
        taken(*pieces(b"a" * 60_000, PID + pid))
    assert [about["content"] for about, _ in taken.modules()] == [True] + [False] * 19
    # and what is new beyond the limit is left out, and said
    taken(*pieces(b"b" * 60_000, crc=78), *pieces(b"c" * 60_000, crc=79))
    assert len(taken.modules()) == 20
    assert len(taken.journal.warnings) == 1


def test_tiny_modules_are_not_free(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MAX_MODULES_BYTES", 1 << 20)
    for number in range(1000):
        taken(*pieces(number.to_bytes(8, "little"), crc=number))
    assert len(taken.modules()) == len(taken.source._taken) == 256


def test_processes_without_end(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "MAX_PROCESSES", 100)
    taken(*(context(pid=pid) for pid in range(10_000_000, 10_000_300)))
    assert len(taken.source._processes) == 100
    assert taken.journal.warnings == ["more than 100 processes use GPUs: those beyond are not recorded"]
    taken.lost()
    taken.lost()
    taken(context(), samples(taken, BASE))
    assert len(taken.reads()) == 1


def test_processes_that_run_are_kept(taken: Taken) -> None:
    pid = os.getpid()
    taken(context(pid=pid))
    for _ in range(5):
        taken.lost()
    taken(samples(taken, BASE, pid=pid))
    assert len(taken.reads()) == 1


def test_problems_go_to_the_terminal_of_root(taken: Taken) -> None:
    hostile = b"\x1b]0;title\x07 \x9b2J \r\n\t\0 \xe2\x80\xae \xff end"
    taken(message(PROBLEM, hostile), message(PROBLEM, hostile, OTHER), message(PROBLEM, b"x" * MESSAGE_BYTES))
    said, long = taken.journal.warnings
    assert said == f"process {PID}: ?]0;title? \ufffd2J ???? ? \ufffd end"
    assert all(text.isprintable() and len(text) < 500 for text in (said, long))
    # and one that says much leaves room for others
    taken(*(message(PROBLEM, f"number {number}".encode()) for number in range(5000)))
    assert len(taken.journal.warnings) == cuda.MAX_PROBLEMS_OF_PROCESS
    taken(message(PROBLEM, b"of another one", OTHER))
    assert taken.journal.warnings[-1] == f"process {OTHER}: of another one"
    taken(*(message(PROBLEM, f"of {pid}".encode(), PID + 1 + pid) for pid in range(1000)))
    assert len(taken.journal.warnings) == cuda.MAX_PROBLEMS


def test_anything(taken: Taken) -> None:
    # when messages have whatever members, and whatever is in them
    rng = np.random.default_rng(1)
    for _ in range(60):
        some = rng.integers(0, 256, (40, MESSAGE.itemsize), np.uint8).view(MESSAGE).reshape(-1)
        some["what"] = rng.integers(0, 9, 40)
        some["bytes"] = np.where(rng.random(40) < 0.8, rng.integers(0, MESSAGE_BYTES + 2, 40), some["bytes"])
        some["pid"] = PID + rng.integers(0, 3, 40)
        for name in ("id", "end", "offset", "total", "begin"):
            some[name] = np.where(rng.random(40) < 0.5, rng.integers(0, 5, 40), some[name])
            some[name] = np.where(rng.random(40) < 0.5, BASE + some[name], some[name])
        taken(context(), context(pid=PID + 1), some)
    # then nothing is raised, and frames are what the finisher takes
    taken.source.finish()
    taken.lost()
    for kind, payload, meta in taken.journal.frames:
        assert kind is not FrameKind.STALLS or len(payload) % (8 * meta["shape"]) == 0
        assert 0 <= meta["time"] < 1 << 64


def test_many_samples_take_no_time_each(taken: Taken) -> None:
    addresses = range(BASE, BASE + 170)
    batch = np.concatenate([samples(taken, *addresses, begin=number // 40) for number in range(400)])
    taken(context())
    began = os.times().user
    taken(batch)
    assert os.times().user - began < 1
    assert sum(len(words) for *_, words in taken.reads()) == 400 * 170
    assert len(taken.reads()) == 10


# What Python and C both have

SOURCE = Path(cuda.__file__).resolve().parents[1] / "kernels" / "inject_cuda.c"
PATHS = SOURCE.with_name("inject_cuda_paths.c")


def values_of_c(tmp_path: Path, source: Path, *others: Path, **expressions: str) -> dict[str, int]:
    """What expressions in a C file are; `others` have functions that it calls."""
    printing = "".join(f'printf("{name} %lu\\n", (unsigned long)({text}));' for name, text in expressions.items())
    program = tmp_path / "values.c"
    program.write_text(f'#include "{source}"\n#include <stdio.h>\nint main(void) {{ {printing} return 0; }}\n')
    subprocess.run(["cc", "-w", "-pthread", "-o", tmp_path / "values", program, *others, "-ldl"], check=True)
    done = subprocess.run([tmp_path / "values"], check=True, capture_output=True, text=True)
    return {name: int(value) for name, value in (line.split() for line in done.stdout.splitlines())}


def places(dtype: np.dtype[Any]) -> dict[str, int]:
    """Where members are, bytes."""
    return {name: int(member[1]) for name, member in dtype.fields.items()} if dtype.fields else {}


def test_sizes_and_numbers_of_c_are_those_of_python(tmp_path: Path) -> None:
    members = ("id", "begin", "end", "offset", "total", "what", "bytes", "data")
    devices, rows, sums, fields = map(places, (cuda._DEVICE, cuda._EXECUTION, cuda._SUMS, MESSAGE))
    theirs = {"begin": "begin", "end": "end", "correlation": "correlation", "address": "address",
              "ordinal": "device", "queue": "stream"}  # fmt: skip
    found = values_of_c(
        tmp_path,
        SOURCE,
        PATHS,
        most_bytes="MESSAGE_BYTES",
        range_bits="RANGE_BITS",
        contexts="MOST_CONTEXTS",
        row_words="ROW_WORDS",
        reason_words="REASON_WORDS",
        device="sizeof(struct device)",
        sums="sizeof(struct sums)",
        execution="sizeof(struct execution)",
        **{kind.name: f"OF_{kind.name}" for kind in MessageOf},
        **{f"message_{name}": f"__builtin_offsetof(struct message, {name})" for name in members},
        **{f"device_{name}": f"__builtin_offsetof(struct device, {name})" for name in devices},
        **{f"sums_{name}": f"__builtin_offsetof(struct sums, {name})" for name in sums},
        **{f"execution_{name}": f"__builtin_offsetof(struct execution, {theirs[name]})" for name in rows},
    )
    assert found == {
        "most_bytes": MESSAGE_BYTES,
        "range_bits": cuda.RANGE_BITS,
        "contexts": cuda.MAX_CONTEXTS,
        "row_words": PC_SAMPLES_WORDS,
        "reason_words": WORDS,
        "device": cuda._DEVICE.itemsize,
        "sums": cuda._SUMS.itemsize,
        "execution": cuda._EXECUTION.itemsize,
        **{kind.name: kind.value for kind in MessageOf},
        **{f"message_{name}": fields[name] - fields["id"] for name in members},
        **{f"device_{name}": devices[name] for name in devices},
        **{f"sums_{name}": sums[name] for name in sums},
        **{f"execution_{name}": rows[name] for name in rows},
    }


def test_the_reasons_of_c_are_those_of_python() -> None:
    table = re.search(r"REASONS\[\] = \{(.*?)\}", SOURCE.read_text(), re.DOTALL)
    assert table
    names = [SELECTED if reason == ACTIVE else reason for reason in MEANINGS]
    assert re.findall(r'"(\w+)"', table[1]) == names


def test_a_message_of_c_is_what_bpf_copies() -> None:
    fields = places(MESSAGE)
    assert fields["id"] == struct.calcsize("<QII")  # behind what BPF itself says
    assert fields["data"] + MESSAGE_BYTES == MESSAGE.itemsize
