"""From spool to capture: absurd content is counted, and everything else is there."""

import errno
import json
import os
import random
import re
import struct
import threading
import time
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import FORMAT, KINDS, SAMPLE_KINDS
from iaprof.formats.capture.writer import RowWriter
from iaprof.formats.wire.launches import CODE, LAUNCH, MOST_MORE, stack_dtype
from iaprof.formats.wire.sideband import comm_record
from iaprof.record.capture import finish as finishing, rows
from iaprof.record.capture.finish import finish
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from iaprof.record.symbolize.needed import SymbolInputs
from iaprof.symbols.python.layout import layout_of
from limits import Within
from waiting import LONGEST_WAIT_S, until

KERNEL = {"pid": 1, "path": "/x", "digest": "00", "size": 3, "content": True}
LOSS = {"source": "s", "what": "w", "count": 3, "detail": "d"}


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def captured(folder: Path, *frames: tuple[int, bytes, int], **more: int) -> CaptureReader:
    """The capture of a spool with these frames: kind, payload, part."""
    spool = Spool(folder / "s")
    for kind, payload, part in frames:
        spool.write(kind, payload, shape=part, **more)  # type: ignore[arg-type]
    spool.close()
    finish(SpoolReader(folder / "s"), folder / "c")
    return CaptureReader(folder / "c")


def damaged(reader: CaptureReader) -> list[str]:
    return [row["detail"] for row in reader.table("loss").to_pylist() if row["what"] == "damaged"]


JUNK: list[Any] = [None, 1, -1, 1 << 70, 1.5, float("nan"), "x", "\ud800", [], {}]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_in_every_member(tmp_path: Path, junk: Any) -> None:
    # given a good loss and a good kernel, among others of which one member is junk
    losses = [LOSS, *(LOSS | {name: junk} for name in LOSS)]
    kernels = [KERNEL, *(KERNEL | {name: junk} for name in KERNEL)]
    frames = [
        *((FrameKind.HEADER, as_json({"streams": [], "format": junk, "cost": junk, "end_ns": junk}), 0),),
        *((FrameKind.LOSS, as_json(row), 0) for row in losses),
        *((FrameKind.KERNEL, as_json(row) + b"ELF", len(as_json(row))) for row in kernels),
        *((FrameKind.END, as_json({"cost": junk, "totals": junk, "losses": junk}), 0),),
    ]
    # when
    reader = captured(tmp_path, *frames)
    # then
    assert reader.header["format"] == FORMAT
    assert isinstance(reader.header["cost"]["total_cpu_s"], float)
    assert {"pid": 1, "elf": b"ELF"}.items() <= reader.table("kernel").to_pylist()[0].items()
    kept = len(reader.table("loss")) - len(damaged(reader)) + len(reader.table("kernel"))
    assert kept + len(damaged(reader)) == len(losses) + len(kernels)
    assert sum(loss["events"] for loss in reader.header["losses"]) == len(reader.table("loss"))


def test_large_code_objects_have_row_groups_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given code objects, of which the last two share a row group
    monkeypatch.setattr("iaprof.record.capture.rows._BYTES_PER_GROUP", 1000)
    sizes = (600, 600, 100, 600, 2000, 200, 200)
    abouts = [as_json(KERNEL | {"digest": f"{number:02x}"}) for number in range(len(sizes))]
    frames = [(FrameKind.KERNEL, about + bytes(size), len(about)) for about, size in zip(abouts, sizes, strict=True)]
    # when
    reader = captured(tmp_path, (FrameKind.HEADER, as_json({"streams": []}), 0), *frames)
    # then finishing has no more of them in memory than the largest, or than a row group has
    rows = [[len(elf) for elf in group["elf"].to_pylist()] for group in reader.tables("kernel")]
    assert rows == [[600], [600], [100], [600], [2000], [200, 200]]


def test_a_row_group_of_samples_has_so_many_bytes_whatever_a_record_has(tmp_path: Path) -> None:
    # given reads of records of 2 and of 11 words
    records = {"xe2": 2, "pc-samples": 11}
    groups = {}
    for layout, words in records.items():
        (tmp_path / layout).mkdir()
        header = as_json({"streams": [{"layout": layout}]})
        reads = [(FrameKind.STALLS, bytes(8 * words << 16), words)] * 40
        reader = captured(tmp_path / layout, (FrameKind.HEADER, header, 0), *reads)
        (kind,) = (name for name in SAMPLE_KINDS if len(reader.table(name)))
        groups[layout] = [len(group) << 16 for group in reader.tables(kind, ("time_ns",))]
    # then
    assert groups == {"xe2": [1 << 20, 1 << 20, 1 << 19], "pc-samples": [3 << 16] * 13 + [1 << 16]}


def spool_with_launches(folder: Path, frames: int = 1) -> SpoolReader:
    """A spool with so many frames of a launch each."""
    spool = Spool(folder / "s")
    for number in range(frames):
        launch = np.zeros(1, LAUNCH)
        launch["time"], launch["name"] = number, b"k"
        spool.write(FrameKind.LAUNCHES, launch.tobytes())
    spool.close()
    return SpoolReader(folder / "s")


def test_names_are_found_while_other_rows_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naming, writing = threading.Event(), threading.Event()

    def launch_rows_meanwhile(*arguments: Any) -> Any:
        writing.set()
        assert naming.wait(LONGEST_WAIT_S)
        return rows.launch_rows(*arguments)

    def write_symbols(_known: SymbolInputs, writer: RowWriter) -> dict[str, Any]:
        assert writing.wait(LONGEST_WAIT_S)
        naming.set()
        writer.write("module", pa.array([{"id": 1, "what": "file", "path": "/x"}], KINDS["module"]))
        return {"modules": 1}

    monkeypatch.setattr(finishing, "launch_rows", launch_rows_meanwhile)
    finish(spool_with_launches(tmp_path), tmp_path / "c", write_symbols=write_symbols)
    # then modules come after all other rows, as if these had been written before
    assert pq.read_table(tmp_path / "c", columns=["kind"])["kind"].to_pylist()[-1] == "module"
    assert CaptureReader(tmp_path / "c").header["symbols"] == {"modules": 1}
    assert len(CaptureReader(tmp_path / "c").table("launch")) == 1


def test_naming_that_ends_the_process_ends_the_writing_of_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given row groups of a launch that take five seconds together
    written = []
    monkeypatch.setattr(finishing, "ROWS_PER_GROUP", 1)

    def launch_rows(launches: Any, _names: object) -> Any:
        written.append(len(launches))
        time.sleep(0.01)
        return iter(())

    def write_symbols(_known: SymbolInputs, _writer: RowWriter) -> dict[str, Any]:
        until(lambda: bool(written))
        raise SystemExit(143)

    monkeypatch.setattr(finishing, "launch_rows", launch_rows)
    with pytest.raises(SystemExit):
        finish(spool_with_launches(tmp_path, 500), tmp_path / "c", write_symbols=write_symbols)
    # then most of them are not written, and the spool is all that is left
    assert len(written) < 500
    assert [each.name for each in tmp_path.iterdir()] == ["s"]


def test_rows_that_cannot_be_written_while_names_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch_rows(*_: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(finishing, "launch_rows", launch_rows)
    with pytest.raises(IaprofError, match="No space left on device"):
        finish(spool_with_launches(tmp_path), tmp_path / "c", write_symbols=lambda *_: {})
    assert [each.name for each in tmp_path.iterdir()] == ["s"]


def test_a_capture_is_the_same_where_no_thread_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_symbols(_known: SymbolInputs, writer: RowWriter) -> dict[str, Any]:
        writer.write("module", pa.array([{"id": 1, "what": "file", "path": "/x"}], KINDS["module"]))
        return {}

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(finishing, "ROWS_PER_GROUP", 1)
    spool = spool_with_launches(tmp_path, 9)
    finish(spool, tmp_path / "c", write_symbols=write_symbols)
    expected = pq.read_table(tmp_path / "c", use_threads=False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    finish(spool, tmp_path / "d", write_symbols=write_symbols)
    assert pq.read_table(tmp_path / "d", use_threads=False).equals(expected)
    assert len(expected) > 9


@pytest.mark.parametrize("root", JUNK, ids=repr)
def test_a_root_that_is_no_path_is_not_looked_into(tmp_path: Path, root: Any) -> None:
    roots: list[Any] = []

    def write_symbols(known: SymbolInputs, _writer: object) -> dict[str, Any]:
        roots.extend(known.roots.values())
        return {}

    spool = Spool(tmp_path / "s")
    for each in (root, "/srv/r\udcff"):
        spool.write(FrameKind.PROCESS, as_json({"pid": 7, "root": each}))
    spool.close()
    finish(SpoolReader(tmp_path / "s"), tmp_path / "c", write_symbols=write_symbols)
    # then all that are can be given to the kernel
    assert [os.fsencode(each) for each in roots] == [b"/srv/r\xff"]
    assert len(damaged(CaptureReader(tmp_path / "c"))) == (root == "\ud800")


@pytest.mark.parametrize("payload", [b"", b"{", b"[" * 100_000, b"7", b"\xff\xfe", as_json({}), bytes(39)])
def test_frames_without_the_form_of_their_kind(tmp_path: Path, payload: bytes) -> None:
    frames = [(kind, payload, 5) for kind in FrameKind if kind not in (FrameKind.HEADER, FrameKind.END)]
    reader = captured(tmp_path, *frames, (FrameKind.HEADER, payload, 0), (99, payload, 0))
    assert "frames of unknown kinds" in damaged(reader)
    assert reader.header["recovered"]


def test_a_side_band_that_ends_in_a_cut_record_is_reported(tmp_path: Path) -> None:
    lost = struct.pack("<IHHQQ", 2, 0, 24, 1, (1 << 64) - 1) * 2
    cut = struct.pack("<IHH", 2, 0, 16) + bytes(8)  # a LOST record without its count
    reader = captured(tmp_path, (FrameKind.SIDEBAND, comm_record(5, 2, b"x") + cut + lost + b"rest", 0))
    assert reader.table("process")["comm"].to_pylist() == ["x"]
    assert damaged(reader) == ["a frame of SIDEBAND: 4 of its bytes are not records"]
    assert [row["count"] for row in reader.table("loss").to_pylist() if row["source"] == "side-band"] == [(1 << 64) - 1]


def test_random_launches_and_stacks_are_taken_as_they_are(tmp_path: Path) -> None:
    rng = random.Random(1)
    random_launches = np.frombuffer(rng.randbytes(50 * LAUNCH.itemsize), LAUNCH).copy()
    random_launches["more"] = 0
    launches = random_launches.tobytes()
    records = np.frombuffer(rng.randbytes(50 * stack_dtype(16).itemsize), stack_dtype(16)).copy()
    records["walked"] %= 7
    stacks = records.tobytes()
    frames = (FrameKind.LAUNCHES, launches, 0), (FrameKind.STACKS, stacks, 16), (FrameKind.STACKS, stacks, 16)
    reader = captured(tmp_path, *frames)
    assert reader.table("launch")["address"].to_pylist() == np.frombuffer(launches, LAUNCH)["address"].tolist()
    assert len(reader.table("stack")) == 50
    assert not damaged(reader)


def test_a_record_of_several_draws_has_a_row_for_each(tmp_path: Path) -> None:
    launches = np.zeros(3, LAUNCH)
    launches["address"], launches["more"] = (1, 2, 3), (0, MOST_MORE, 2)
    reader = captured(tmp_path, (FrameKind.LAUNCHES, launches.tobytes(), 0))
    assert reader.table("launch")["address"].to_pylist() == [1] + [2] * (1 + MOST_MORE) + [3] * 3
    assert reader.header["totals"]["launches"] == 5 + MOST_MORE
    assert not damaged(reader)


def test_a_record_of_very_many_draws_is_damaged(tmp_path: Path) -> None:
    launches = np.zeros(2, LAUNCH)
    launches["more"] = (0, MOST_MORE + 1)
    reader = captured(tmp_path, (FrameKind.LAUNCHES, launches.tobytes(), 0))
    assert len(reader.table("launch")) == 0
    assert damaged(reader)


@pytest.mark.parametrize("seed", range(10))
def test_stalls_in_are_stalls_out(tmp_path: Path, seed: int) -> None:
    # given frames of two and three words, many of them empty, some of an odd length
    rng = random.Random(seed)
    frames, words, odd = [], [], 0
    for _ in range(rng.randrange(80)):
        part, records = rng.choice((2, 3)), rng.choice((0, 0, 1, 7, 100))
        payload = rng.randbytes(8 * part * records)
        if rng.random() < 0.2:
            odd += 1
            payload += b"odd"
        else:
            words += [list(column) for column in np.frombuffer(payload, np.uint64).reshape(part, -1).tolist()]
        frames.append((FrameKind.STALLS, payload, part))
    # when
    reader = captured(tmp_path, *frames, time=(1 << 64) - 1, source=0xFFFF)
    # then
    found = reader.table("stall").to_pylist()
    assert [row[name] for row in found for name in ("w0", "w1", "w2") if row[name] is not None] == words
    assert len(damaged(reader)) == odd
    assert reader.header["totals"].get("stalls", 0) == sum(len(row["w0"]) for row in found)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    import os

    from iaprof.record.spool import SpoolError

    os.mkfifo(tmp_path / "s")
    with pytest.raises(SpoolError, match="is not a file"):
        SpoolReader(tmp_path / "s")


def test_interpreters_of_impossible_pids_are_ignored(tmp_path: Path) -> None:
    members = {"types": [1, 2], "layout": asdict(layout_of(11, 0x030B0000, lambda _: b""))}
    launches = np.zeros(2, LAUNCH)
    launches["pid"], launches["stack"] = 7, 5
    frames = [(FrameKind.INTERPRETER, as_json(members | {"pid": pid}), 0) for pid in (1 << 40, -1)]
    reader = captured(tmp_path, *frames, (FrameKind.LAUNCHES, launches.tobytes(), 0))
    assert reader.count("launch") == 2
    assert reader.header["python_stacks"]["launches"]["none"] == 0


def test_totals_of_an_empty_recording_are_zero(tmp_path: Path) -> None:
    # given a recording in which nothing happened
    totals = captured(tmp_path).header["totals"]
    # then each total that the format describes is there, and 0; some are of imports
    page = (Path(__file__).resolve().parents[4] / "docs" / "capture-format.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| `totals`"))
    described = set(re.findall(r"`(\w+)`", row.split("|")[2]))
    described -= {"samples", "slices", "counter_values", "flows", "instants"}
    assert totals == dict.fromkeys(described, 0) | {"losses": 1}  # that the recorder died


def test_code_objects_are_not_kept_as_they_came(tmp_path: Path) -> None:
    members = {"pid": 1, "types": [1, 2], "layout": vars(layout_of(11, 0x030B0000, lambda _: b""))}
    records = np.zeros(100, CODE)
    records["pid"] = 1
    spool = Spool(tmp_path / "s")
    for _ in range(50):
        spool.write(FrameKind.CODES, records.tobytes())
    spool.write(FrameKind.INTERPRETER, as_json(members))  # which may come later than its first code objects
    spool.close()
    tracemalloc.start()
    finish(SpoolReader(tmp_path / "s"), tmp_path / "c")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50 * records.nbytes / 2


def test_every_kind_of_frame_is_read() -> None:
    assert finishing._READERS.keys() | finishing._FIRST.keys() == set(FrameKind)


def test_a_capture_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a spool, and whoever notes what is on the disk
    spool = Spool(tmp_path / "s")
    spool.write(FrameKind.HEADER, b'{"streams": []}')
    spool.close()
    synced: list[tuple[int, bool]] = []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append((os.fstat(fd).st_size, (tmp_path / "c").exists())))
    # when
    finish(SpoolReader(tmp_path / "s"), tmp_path / "c")
    # then all of it was, before the spool may go
    assert synced == [((tmp_path / "c").stat().st_size, False)]


@pytest.mark.parametrize("processes", [1, 10_000])
def test_frames_of_one_stack_each_take_no_long_time(tmp_path: Path, within: Within, processes: int) -> None:
    sent = np.zeros(10_000, stack_dtype(1))
    sent["id"], sent["depth"], sent["pid"] = np.arange(1, 10_001), 1, np.arange(10_000) % processes + 7
    sent["ips"][:, 0] = np.arange(10_000)
    frames = [(FrameKind.STACKS, record.tobytes(), 1) for record in sent]
    began = time.process_time()
    reader = captured(tmp_path, *frames)
    within.took(time.process_time() - began, 3)
    assert reader.count("stack") == 10_000
