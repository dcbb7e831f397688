"""Side-band records: all that the kernel writes is read, and anything else does no harm."""

from __future__ import annotations

import select
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from iaprof.bpf.sideband import SideBandBuffers
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.sideband import (
    SideBand,
    comm_record,
    decode,
    mapped_paths,
    mapping_record,
    possible_mappings,
    process_events,
    process_records,
    running_record,
)
from iaprof.record.capture.finish import finish
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from limits import Within


def record(kind: int, body: bytes, misc: int = 0) -> bytes:
    return struct.pack("<IHH", kind, misc, 8 + len(body)) + body


def lost(count: int) -> bytes:
    return record(2, struct.pack("<QQ", 1, count))


@pytest.mark.parametrize(
    "bad", [comm_record(1, 2, b"x")[:-8], record(3, bytes(33)), bytes(8), struct.pack("<IHH", 3, 0, 0) + bytes(8)]
)
def test_what_follows_the_last_record_is_reported(bad: bytes) -> None:
    band = SideBand()
    with pytest.raises(ValueError, match=f"^{len(bad)} of its bytes are not records"):
        decode(comm_record(3, 7, b"x") + bad, band)
    assert band.processes.time == [3]


@given(st.binary(max_size=400), st.integers(0, 400), st.binary(max_size=9))
def test_any_bytes_are_read_or_refused(data: bytes, where: int, change: bytes) -> None:
    # given noise, and records in which a few bytes are changed
    good = lost(3) + comm_record(1, 2, b"x") + running_record(5, 6, 7) + comm_record(3, 4, b"y")
    for damaged in (data, good[:where] + change + good[where + len(change) :], good + data):
        band = SideBand()
        try:
            decode(damaged, band)
        except ValueError as error:
            assert "of its bytes are not records" in str(error)
        # then what was accepted can be read
        list(process_events(damaged)), list(mapped_paths(damaged)), process_records(damaged, {2})
        possible_mappings(damaged, 1)
        assert len(band.processes.time) == len(band.processes.event)


def test_large_mappings_are_found() -> None:
    sizes = {7: 4096, 8: 1 << 22, 9: (1 << 22) - 4096, 10: 1 << 33}
    data = b"".join(
        comm_record(1, pid, b"x") + mapping_record(2, pid, 1 << 46, size, 0, b"/lib/x.so", b"", (1, 2, pid))
        for pid, size in sizes.items()
    )
    pids, files = possible_mappings(data, 1 << 22)
    assert pids.tolist() == [8, 10]
    assert files.tolist() == [[1 | 2 << 32, 8, 0], [1 | 2 << 32, 10, 0]]
    assert possible_mappings(data[: -len(data) // 4 - 80], 1 << 22)[0].tolist() == [8]


def captured(folder: Path, *frames: tuple[int, int, bytes], depth: int = 127) -> CaptureReader:
    """The capture of side-band frames: time, CPU, records."""
    spool = Spool(folder / "s")
    spool.write(FrameKind.HEADER, b'{"streams": [], "stack_depth": %d}' % depth, time=1)
    for time_ns, cpu, data in frames:
        spool.write(FrameKind.SIDEBAND, data, time=time_ns, source=cpu)
    spool.close()
    finish(SpoolReader(folder / "s"), folder / "c")
    return CaptureReader(folder / "c")


def test_a_loss_lies_in_its_span(tmp_path: Path) -> None:
    # given CPU 3, which lost something before it was read at 30, as the records after that read say
    some = comm_record(1, 1, b"x")
    frames = [(10, 0, some), (20, 3, some), (30, 3, some), (35, 0, lost(2))]
    reader = captured(tmp_path, *frames, (40, 3, lost(7) + some))
    losses = [(row["begin_ns"], row["time_ns"], row["count"]) for row in reader.table("loss").to_pylist()]
    assert losses[:2] == [(1, 35, 2), (20, 40, 7)]


@pytest.mark.root
def test_what_is_mapped_wakes_at_once(within: Within) -> None:
    # given a reader that reads only when woken
    buffers = SideBandBuffers()
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
def test_a_storm_of_forks_loses_nothing() -> None:
    # given thousands of forks, which map nothing
    storm = "import os\nfor _ in range(5000):\n    if not (pid := os.fork()): os._exit(0)\n    os.waitpid(pid, 0)"
    command = [sys.executable, "-c", f"print(flush=True)\ninput()\n{storm}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        buffers = SideBandBuffers()
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
