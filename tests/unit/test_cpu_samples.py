"""CPU samples from the kernel's records to rows: each sample keeps its own, and each stack is there once."""

from __future__ import annotations

import contextlib
import random
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from iaprof.formats.capture import CaptureReader
from iaprof.formats.sideband import CONTEXT_KERNEL, CONTEXT_USER, SideBand, comm_record, decode, sample_columns
from iaprof.record.cpu_samples import SAMPLED, CpuSamples
from iaprof.record.finish import finish
from iaprof.record.spool import FrameKind, Spool, SpoolReader

SAMPLE = 9
Given = tuple[int, int, int, int, list[int], list[int]]  # time, pid, tid, cpu, user and kernel addresses


def sample_record(time_ns: int, pid: int, tid: int, cpu: int, user: list[int], kernel: list[int]) -> bytes:
    """A PERF_RECORD_SAMPLE with TID, TIME, CPU and CALLCHAIN, include/uapi/linux/perf_event.h."""
    chain = [*([CONTEXT_KERNEL, *kernel] if kernel else []), *([CONTEXT_USER, *user] if user else [])]
    body = struct.pack("<IIQIIQ", pid, tid, time_ns, cpu, 0, len(chain)) + struct.pack(f"<{len(chain)}Q", *chain)
    return struct.pack("<IHH", SAMPLE, 2, 8 + len(body)) + body


def finished(folder: Path, *payloads: bytes, depth: int = 127) -> CaptureReader:
    spool = Spool(folder / "s")
    spool.write(FrameKind.HEADER, b'{"stack_depth": %d}' % depth)
    for payload in payloads:
        spool.write(FrameKind.SIDEBAND, payload)
    spool.close()
    finish(SpoolReader(folder / "s"), folder / "c")
    return CaptureReader(folder / "c")


def read_back(reader: CaptureReader) -> list[Given]:
    stacks = {row["id"]: row for row in reader.table("stack").to_pylist()}
    assert len(stacks) == len(reader.table("stack"))
    for row in stacks.values():
        assert row["id"] & SAMPLED
        assert not row["id"] >> 63
    found = []
    for row in reader.table("cpu_sample").to_pylist():
        user, kernel = (stacks[row[name]]["ips"] if row[name] else [] for name in ("stack", "kernel_stack"))
        assert not row["stack"] or stacks[row["stack"]]["pid"] == row["pid"]
        assert not row["kernel_stack"] or stacks[row["kernel_stack"]]["pid"] == 0
        found.append((row["time_ns"], row["pid"], row["tid"], row["cpu"], user, kernel))
    return found


def some(number: int, seed: int) -> list[Given]:
    chance = random.Random(seed)
    stacks = [[chance.randrange(1 << 47) for _ in range(chance.randrange(40))] for _ in range(50)]
    deep = [[(1 << 63) + chance.randrange(1 << 40) for _ in range(chance.randrange(20))] for _ in range(20)]
    return [
        (
            time_ns,
            chance.randrange(5),
            chance.randrange(9),
            chance.randrange(2),
            chance.choice(stacks),
            chance.choice(deep),
        )
        for time_ns in range(number)
    ]


def test_what_went_in_comes_out(tmp_path: Path) -> None:
    # given samples of few stacks, among other records, in many frames
    samples = some(2000, 1)
    records = [sample_record(*sample) for sample in samples]
    payloads = [b"".join(records[n : n + 300]) + comm_record(5, 2, b"x") for n in range(0, len(records), 300)]
    # when
    reader = finished(tmp_path, *payloads)
    # then
    assert read_back(reader) == samples
    distinct = {(s[1], tuple(s[4])) for s in samples if s[4]} | {(-1, tuple(s[5])) for s in samples if s[5]}
    assert len(reader.table("stack")) == len(distinct)
    assert reader.header["totals"]["cpu_samples"] == 2000


def test_stacks_that_differ_only_in_order_or_process_are_two(tmp_path: Path) -> None:
    samples = [
        (1, 7, 7, 0, [1, 2, 3], []),
        (2, 7, 7, 0, [3, 2, 1], []),
        (3, 8, 8, 0, [1, 2, 3], []),
        (4, 7, 7, 0, [], [9]),
    ]
    assert read_back(finished(tmp_path, b"".join(sample_record(*sample) for sample in samples))) == samples


def test_a_stack_as_deep_as_the_limit_is_marked(tmp_path: Path) -> None:
    samples = [(1, 7, 7, 0, [1, 2], [9]), (2, 7, 7, 0, [1, 2, 3], [9])]
    reader = finished(tmp_path, b"".join(sample_record(*sample) for sample in samples), depth=4)
    marked = {tuple(row["ips"]): row["truncated"] for row in reader.table("stack").to_pylist()}
    assert marked == {(1, 2): False, (9,): False, (1, 2, 3): True}


def test_a_stack_is_written_once_in_many_batches() -> None:
    known = CpuSamples()
    for batch in range(3):
        band = SideBand()
        decode(b"".join(sample_record(n, 7, 7, 0, [1, 2], [9]) for n in range(5)), band)
        stacks, rows = known.rows(sample_columns(band.samples), 127)
        assert (len(stacks), len(rows)) == (0 if batch else 2, 5)


@given(st.binary(max_size=200), st.integers(0, 60))
@settings(deadline=None)
def test_damaged_bytes_are_an_error_or_samples(junk: bytes, place: int) -> None:
    good = sample_record(1, 7, 7, 0, [1, 2, 3], [1 << 63])
    data = good + good[:place] + junk
    band = SideBand()
    with contextlib.suppress(ValueError):
        decode(data, band)
    stacks, rows = CpuSamples().rows(sample_columns(band.samples), 127)
    assert len(rows) >= 1
    assert stacks.validate(full=True) is None


def test_an_absurd_number_of_addresses_is_an_error() -> None:
    record = bytearray(sample_record(1, 7, 7, 0, [1], []))
    struct.pack_into("<Q", record, 32, 1 << 60)
    with pytest.raises(ValueError, match="no records"):
        decode(bytes(record), SideBand())


def test_millions_are_a_matter_of_seconds() -> None:
    data = b"".join(sample_record(*sample) for sample in some(20_000, 2))
    began = time.process_time()
    band = SideBand()
    decode(data, band)
    CpuSamples().rows(sample_columns(band.samples), 127)
    assert time.process_time() - began < 1  # 50 microseconds a sample; it takes about 2


def test_no_samples_at_all() -> None:
    stacks, rows = CpuSamples().rows(sample_columns(SideBand().samples), 127)
    assert (len(stacks), len(rows)) == (0, 0)
    assert np.array(rows.to_pylist()).size == 0
