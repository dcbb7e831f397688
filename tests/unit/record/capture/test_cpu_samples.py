"""CPU samples, from BPF's records to rows: each is there once, with the ids of its stacks in the capture."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import CPU_SAMPLE, stack_dtype
from iaprof.formats.wire.unwind_rules import Walked
from iaprof.record.capture.finish import finish
from iaprof.record.spool import FrameKind, Spool, SpoolReader

DEPTH = 8


def stack(id_: int, pid: int, *ips: int, walked: int = Walked.WHOLE) -> bytes:
    record = np.zeros(1, stack_dtype(DEPTH))
    record["id"], record["pid"], record["depth"], record["time"], record["walked"] = id_, pid, len(ips), 5, walked
    record["ips"][0, : len(ips)] = ips
    return record.tobytes()


def finished(folder: Path, *frames: tuple[FrameKind, bytes]) -> CaptureReader:
    spool = Spool(folder / "s")
    spool.write(FrameKind.HEADER, b'{"stack_depth": %d}' % DEPTH)
    for kind, payload in frames:
        spool.write(kind, payload, shape=DEPTH)
    spool.close()
    finish(SpoolReader(folder / "s"), folder / "c")
    return CaptureReader(folder / "c")


def test_what_went_in_comes_out(tmp_path: Path) -> None:
    # given samples in many frames, and two equal stacks
    chance = random.Random(1)
    samples = np.zeros(2000, CPU_SAMPLE)
    for name, most in (("pid", 5), ("tid", 9), ("cpu", 2), ("stack", 3), ("kernel_stack", 2)):
        samples[name] = [chance.randrange(most) for _ in samples]
    samples["time"] = np.arange(len(samples))
    samples["kernel_stack"] *= 7
    stacks = stack(1, 3, 10, 11) + stack(2, 3, 10, 11) + stack(7, 0, 1 << 63)
    frames = [(FrameKind.CPU_SAMPLES, samples[at : at + 300].tobytes()) for at in range(0, 2000, 300)]
    # when
    reader = finished(tmp_path, *frames, (FrameKind.STACKS, stacks))
    # then
    table = reader.table("cpu_sample")
    for column, name in (("time_ns", "time"), ("pid", "pid"), ("tid", "tid"), ("cpu", "cpu")):
        assert table[column].to_pylist() == samples[name].tolist()
    assert table["stack"].to_pylist() == np.minimum(samples["stack"], 1).tolist()
    assert table["kernel_stack"].to_pylist() == samples["kernel_stack"].tolist()
    assert reader.header["totals"]["cpu_samples"] == 2000
    ends = reader.header["stack_ends"]["cpu_samples"]
    assert (ends["stacks"], ends["whole"]) == ((samples["stack"] > 0).sum(),) * 2


def test_a_damaged_frame_is_reported(tmp_path: Path) -> None:
    good = np.zeros(1, CPU_SAMPLE).tobytes()
    reader = finished(tmp_path, (FrameKind.CPU_SAMPLES, good + b"rest"), (FrameKind.CPU_SAMPLES, good))
    assert len(reader.table("cpu_sample")) == 1
    assert [row["what"] for row in reader.table("loss").to_pylist() if row["source"] == "spool"] == ["damaged"]


def test_no_samples_at_all(tmp_path: Path) -> None:
    assert finished(tmp_path).header["totals"]["cpu_samples"] == 0
