"""Dumped kernels put together from chunks: whole or not at all, and never of two kernels."""

from __future__ import annotations

import hashlib
import os
import random
import tracemalloc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import CHUNK, ChunkOf
from iaprof.gpu.code import canonical
from iaprof.gpu.intel.zebin import read_zebin
from iaprof.record.capture.finish import finish
from iaprof.record.capture.rotation_state import RotationState
from iaprof.record.capture.rows import IN_MEMORY
from iaprof.record.journal import Journal
from iaprof.record.kernels.dumped import HEAD, SAME_TIME_NS, DumpedModules
from iaprof.record.sources import code_objects
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from unit.zebins import debug_elf, plain_zebin

PLACE = 0x8001_0000_0000
MODULE = 0x7F00_1000
END = b'{"end_ns": 6000}'


@dataclass(frozen=True)
class Chunk:
    """A chunk that BPF sends at a launch; by default the name of a kernel `k`."""

    data: bytes = b"k"
    what: int = ChunkOf.NAME
    address: int = PLACE
    pid: int = 7
    module: int = MODULE
    module_time: int = 100
    time: int = 100
    offset: int = 0
    total: int | None = None  # the data's length
    simd: int = 0

    def frame(self) -> bytes:
        record = np.zeros(1, CHUNK)
        for name in ("time", "pid", "module", "module_time", "address", "offset", "what", "simd"):
            record[name] = getattr(self, name)
        # A module is valid from SAME_TIME_NS before, as another thread's first launch may be a little older.
        record["time"] += SAME_TIME_NS
        record["module_time"] += SAME_TIME_NS
        record["total"] = len(self.data) if self.total is None else self.total
        record["bytes"] = len(self.data)
        return record.tobytes()[: HEAD.itemsize] + self.data


def chunks(data: bytes, what: ChunkOf, length: int = 1000, **more: Any) -> list[Chunk]:
    """Divides data into chunks."""
    starts = range(0, len(data), length)
    return [Chunk(data[at : at + length], what, offset=at, total=len(data), **more) for at in starts]


def dumped_kernel(name: str, code: bytes, **more: Any) -> list[Chunk]:
    """The chunks of a kernel: its code and its name."""
    return [*chunks(code, ChunkOf.CODE, **more), Chunk(name.encode(), **more)]


def spooled(path: Path, sent: Iterable[Chunk | bytes]) -> Path:
    spool = Spool(path)
    for chunk in sent:
        spool.write(FrameKind.PIECE, chunk if isinstance(chunk, bytes) else chunk.frame(), time=5000)
    spool.write(FrameKind.END, END, time=6000)
    spool.close()
    return path


def captured(spool: Path) -> CaptureReader:
    capture = spool.with_name("capture")
    finish(SpoolReader(spool), capture)
    return CaptureReader(capture)


Modules = list[tuple[int, int, list[tuple[str, int, bytes]]]]
"""By module: process, time, and its kernels' names, addresses and code."""


def modules_of(reader: CaptureReader) -> Modules:
    rows = reader.table("kernel").to_pylist()
    contents = {row["digest"]: row["elf"] for row in rows if row["elf"] is not None}
    assert {row["path"] for row in rows} <= {IN_MEMORY}
    return [
        (row["pid"], row["time_ns"], [(k.name, k.address, k.code) for k in read_zebin(contents[row["digest"]]).kernels])
        for row in rows
    ]


def unfinished(reader: CaptureReader) -> int:
    """How many kernels and modules were reported as incomplete."""
    return sum(row["count"] for row in reader.table("loss").to_pylist() if row["what"] == "unfinished")


def damaged(reader: CaptureReader) -> int:
    return sum(row["what"] == "damaged" for row in reader.table("loss").to_pylist())


def real(seed: int = 0) -> tuple[list[Chunk], bytes]:
    """All chunks of a real module whose kernels were launched, in random order; and the driver's own debug ELF."""
    driver = debug_elf("bmg", "matmul")
    sent = chunks(plain_zebin("bmg", "matmul"), ChunkOf.MODULE, address=read_zebin(driver).kernels[0].address)
    for kernel in read_zebin(driver).kernels:
        sent += dumped_kernel(kernel.name, kernel.code, address=kernel.address)
    random.Random(seed).shuffle(sent)
    return sent, driver


@pytest.mark.parametrize("seed", range(3))
def test_a_module_is_as_the_driver_says_in_whatever_order_it_comes(tmp_path: Path, seed: int) -> None:
    sent, driver = real(seed)
    # some chunks come twice: two threads launched at the same time
    reader = captured(spooled(tmp_path / "s", [*sent, *sent[::3]]))
    [(pid, time, kernels)] = modules_of(reader)
    assert (pid, time) == (7, 100)
    assert kernels == [(kernel.name, kernel.address, kernel.code) for kernel in read_zebin(driver).kernels]
    assert read_zebin(reader.table("kernel")["elf"][0].as_py()) == read_zebin(driver)
    assert reader.header["losses"] == []


def test_modules_of_many_processes_come_interleaved(tmp_path: Path) -> None:
    sent = [
        dumped_kernel(f"k{pid}-{module}", bytes([pid]) * 3000, pid=pid, module=module, address=PLACE + module)
        for pid in (1, 2)
        for module in (0x1000, 0x2000)
    ]
    reader = captured(spooled(tmp_path / "s", (chunk for turn in zip(*sent, strict=True) for chunk in turn)))
    assert modules_of(reader) == [
        (pid, 100, [(f"k{pid}-{module}", PLACE + module, bytes([pid]) * 3000)])
        for pid in (1, 2)
        for module in (0x1000, 0x2000)
    ]


def test_a_shader_needs_no_name(tmp_path: Path) -> None:
    """Each shader is a module of its own, and one without a name gets that of its code."""
    sent = [
        *chunks(b"A" * 64, ChunkOf.SHADER, 40, module=0x10, address=0x200000000),
        Chunk(b"softmax", module=0x10, address=0x200000000),
        *chunks(b"B" * 64, ChunkOf.SHADER, 40, module=0x20, address=0x200000040),
        *chunks(b"C" * 64, ChunkOf.SHADER, 40, module=0x30, address=0x200000080)[:1],
    ]
    reader = captured(spooled(tmp_path / "s", sent))
    assert modules_of(reader) == [
        (7, 100, [("softmax", 0x200000000, b"A" * 64)]),
        (7, 100, [("compute " + hashlib.sha256(b"B" * 64).hexdigest()[:8], 0x200000040, b"B" * 64)]),
    ]
    assert unfinished(reader) == 1


@pytest.mark.parametrize(
    "name", [b"softmax", b'a"b\\', b"- name: x\n      simd_size: 8\n", b"\xff\x85\xe2\x80\xa8", b"'q'", b" "]
)
def test_lanes_of_a_shader_are_those_that_a_driver_can_mean(tmp_path: Path, name: bytes) -> None:
    sent = []
    for number, lanes in enumerate((8, 16, 32, 0, 255, 17, 65535)):
        place = {"module": 16 * number, "address": 0x200000000 + 64 * number}
        sent += [*chunks(b"A" * 64, ChunkOf.SHADER, 40, simd=lanes, **place), Chunk(name, **place)]
    rows = captured(spooled(tmp_path / "s", sent)).table("kernel").to_pylist()
    kernels = [kernel for row in rows for kernel in read_zebin(row["elf"]).kernels]
    assert [kernel.simd for kernel in kernels] == [8, 16, 32, 0, 0, 0, 0]
    assert {kernel.name for kernel in kernels} == {name.decode("utf-8", "backslashreplace")}


def test_a_kernel_that_lacks_a_chunk_is_not_there_and_is_counted(tmp_path: Path) -> None:
    whole = dumped_kernel("whole", b"w" * 2500)
    sent = dumped_kernel("k", b"c" * 2500, address=PLACE + 4096)
    for number in range(len(sent)):
        without = [*whole, *sent[:number], *sent[number + 1 :]]
        reader = captured(spooled(tmp_path / f"s{number}", without))
        assert modules_of(reader) == [(7, 100, [("whole", PLACE, b"w" * 2500)])]
        assert [(row["source"], row["count"]) for row in reader.table("loss").to_pylist()] == [("kernels", 1)]


def test_a_kernel_of_an_incomplete_module_is_there_by_itself(tmp_path: Path) -> None:
    sent, driver = real()
    missing = next(chunk for chunk in sent if chunk.what == ChunkOf.MODULE)
    sent.remove(missing)
    reader = captured(spooled(tmp_path / "s", sent))
    [(_, _, kernels)] = modules_of(reader)
    assert sorted(kernels) == sorted((k.name, k.address, k.code) for k in read_zebin(driver).kernels)
    assert not read_zebin(reader.table("kernel")["elf"][0].as_py()).has_debug
    assert [(row["source"], row["count"]) for row in reader.table("loss").to_pylist()] == [("modules", 1)]


def test_a_chunk_that_could_not_be_read_is_replaced_by_a_later_one(tmp_path: Path) -> None:
    empty = Chunk(b"", ChunkOf.CODE, total=2500)
    sent = [empty, replace(empty, offset=1000), *dumped_kernel("k", b"c" * 2500)]
    reader = captured(spooled(tmp_path / "s", sent))
    assert modules_of(reader) == [(7, 100, [("k", PLACE, b"c" * 2500)])]
    assert reader.header["losses"] == []
    # and if it never came, the kernel is counted
    reader = captured(spooled(tmp_path / "t", [empty]))
    assert (modules_of(reader), unfinished(reader)) == ([], 1)


def test_two_generations_of_a_modules_handle(tmp_path: Path) -> None:
    """A module is destroyed; another gets its handle, and a kernel at the same address."""
    first, second = b"1" * 1500, b"2" * 1500
    sent = [*dumped_kernel("first", first), *dumped_kernel("second", second, module_time=200, time=200)]
    for name, order in (("s", sent), ("t", sent[::-1])):
        reader = captured(spooled(tmp_path / name, order))
        assert sorted(modules_of(reader), key=lambda row: row[1]) == [
            (7, 100, [("first", PLACE, first)]),
            (7, 200, [("second", PLACE, second)]),
        ]


@pytest.mark.parametrize("size", [1500, 700, 2500])
def test_another_kernel_at_the_same_address_without_a_destruction(tmp_path: Path, size: int) -> None:
    """Nothing reports the module's destruction: one kernel's code never gets the other's name."""
    first, second = b"1" * 1500, b"2" * size
    reader = captured(
        spooled(tmp_path / "s", [*dumped_kernel("first", first), *dumped_kernel("second", second, time=200)])
    )
    assert modules_of(reader) == [(7, 100, [("first", PLACE, first)]), (7, 200, [("second", PLACE, second)])]


@pytest.mark.parametrize("cut", [1, 500, 1500])
def test_a_spool_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = spooled(
        tmp_path / "s", [*dumped_kernel("whole", b"w" * 900), *dumped_kernel("k", b"c" * 2500, address=PLACE + 4096)]
    )
    end = path.stat().st_size - 48 - len(END)  # frames have 48 bytes before what is in them
    os.truncate(path, end - cut)
    reader = captured(path)
    assert modules_of(reader) == [(7, 100, [("whole", PLACE, b"w" * 900)])]
    assert unfinished(reader) == 1
    assert reader.header["recovered"]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        Chunk().frame()[: HEAD.itemsize - 1],
        Chunk(what=max(ChunkOf) + 1).frame(),
        Chunk(total=1 << 60).frame(),
        Chunk(total=(1 << 28) + 1).frame(),
    ],
    ids=["empty", "short", "of nothing", "huge", "too large"],
)
def test_invalid_chunks_are_counted_as_damaged(tmp_path: Path, frame: bytes) -> None:
    reader = captured(spooled(tmp_path / "s", [frame, *dumped_kernel("k", b"code")]))
    assert modules_of(reader) == [(7, 100, [("k", PLACE, b"code")])]
    assert damaged(reader) == 1


def test_chunks_that_overlap_or_lie_outside(tmp_path: Path) -> None:
    sent = [
        Chunk(b"overlong", ChunkOf.CODE, total=4),
        Chunk(b"x", ChunkOf.CODE, offset=2, total=4),
        Chunk(b"x", ChunkOf.CODE, offset=(1 << 64) - 1, total=4),
        Chunk(),
    ]
    assert modules_of(captured(spooled(tmp_path / "s", sent))) == [(7, 100, [("k", PLACE, b"over")])]


def test_random_chunks_do_no_harm(tmp_path: Path) -> None:
    rng = random.Random(1)
    # given a kernel of a process of its own among them
    sent: list[Chunk | bytes] = [*dumped_kernel("k", b"c" * 2500, pid=9)]
    sent += [rng.randbytes(rng.randrange(200)) for _ in range(300)]
    for _ in range(3000):
        numbers = {name: rng.randrange(4) for name in ("what", "address", "pid", "module", "offset", "total")}
        sent.append(Chunk(rng.randbytes(rng.randrange(4)), **numbers))
    rng.shuffle(sent)
    reader = captured(spooled(tmp_path / "s", sent))
    assert damaged(reader) > 0
    assert unfinished(reader) > 0
    modules = modules_of(reader)
    assert (9, 100, [("k", PLACE, b"c" * 2500)]) in modules
    assert len(modules) > 1
    assert all(kernels for _, _, kernels in modules)


@pytest.mark.parametrize("name", [b"\xff\xfe\xc3", b"a;b\n\x1b[31m", b"n" * 5000], ids=["no text", "odd", "long"])
def test_names_are_text(tmp_path: Path, name: bytes) -> None:
    reader = captured(spooled(tmp_path / "s", [Chunk(b"code", ChunkOf.CODE), Chunk(name)]))
    [(_, _, [kernel])] = modules_of(reader)
    assert kernel == (name.decode("utf-8", "backslashreplace"), canonical(PLACE), b"code")


def test_contents_are_not_held(tmp_path: Path) -> None:
    # given 64 modules of 1 MB
    sent = (
        chunk
        for number in range(64)
        for chunk in [*chunks(bytes([number]) * (1 << 20), ChunkOf.CODE, 1 << 16, module=number), Chunk(module=number)]
    )
    spool, kept = SpoolReader(spooled(tmp_path / "s", sent)), DumpedModules()
    # when
    tracemalloc.start()
    for frame in spool.frames({FrameKind.PIECE}):
        kept.add(frame)
    _, adding = tracemalloc.get_traced_memory()
    count = sum(1 for _ in kept.modules(spool))
    _, putting = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # then
    assert count == 64
    assert adding < 2 << 20
    assert putting < 16 << 20


def test_a_million_tiny_chunks_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs memory when they are put together; they are refused past what would be 4 GiB of larger ones."""
    monkeypatch.setattr(code_objects, "MAX_TOTAL_BYTES", 1 << 20)
    journal = Journal(Spool(tmp_path / "s"), print, print)
    taking = code_objects.CodeObjects(None, None)  # type: ignore[arg-type]
    taking._journal = journal
    tiny = np.zeros(100, CHUNK)
    tiny["bytes"] = 1
    for _ in range(3):
        taking.keep_chunks(tiny, 1)
    kept = [frame.kind for frame in SpoolReader(tmp_path / "s").frames()]
    assert kept == [FrameKind.PIECE] * 200 + [FrameKind.LOSS]


def test_the_next_file_has_the_kernels_of_running_processes(tmp_path: Path) -> None:
    # given a running process, half of whose second kernel has come, and one that has ended
    half = dumped_kernel("half", b"h" * 1500, address=PLACE + 4096)
    ended = dumped_kernel("gone", b"g", pid=8)
    path = spooled(tmp_path / "s", [*dumped_kernel("k", b"c" * 1500), half[0], *ended])
    spool, carry = SpoolReader(path), RotationState()
    for frame in spool.frames():
        carry.add(frame)
    carry._ended[8], carry._now = 1, 100_000_000_000
    with (tmp_path / "carried").open("w+b") as file:
        carry.write(spool, file.fileno())
        # when the other half comes into the next file before the rotation state
        following = Spool(tmp_path / "t")
        for chunk in half[1:]:
            following.write(FrameKind.PIECE, replace(chunk, time=900).frame(), time=7000)
        following.take_over(file.fileno())
        following.close()
    # then
    reader = captured(tmp_path / "t")
    [(pid, time, kernels)] = modules_of(reader)
    assert (pid, time) == (7, 100)
    assert sorted(kernels) == [("half", PLACE + 4096, b"h" * 1500), ("k", PLACE, b"c" * 1500)]
    assert unfinished(reader) == 0
    assert unfinished(captured(path)) == 1
