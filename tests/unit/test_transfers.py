"""Copies and fills: from the records that BPF sends to what is said of them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.bpf.driver_layout import SHIPPED, Action, Layout, LayoutError
from iaprof.cli import info as verb
from iaprof.formats.capture import CaptureReader
from iaprof.formats.launches import LAUNCH, LaunchFlags
from iaprof.formats.transfers import FUNCTIONS, UNKNOWN_BYTES, number_of
from iaprof.record.finish import finish
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from unit.capturing import HEADER, capture


def transfer(time: int, function: int, size: int, **more: object) -> NDArray[np.void]:
    """A record as BPF sends it."""
    record = np.zeros(1, LAUNCH)
    told = {"time": time, "pid": 7, "tid": 8, "cpu": 1, "iba": function, "size": size, "comm": b"app"}
    for name, value in (told | {"flags": LaunchFlags.TRANSFER} | more).items():
        record[name] = value
    return record


def captured(folder: Path, *records: NDArray[np.void]) -> CaptureReader:
    """The capture of a spool with a frame for each."""
    spool = Spool(folder / "s")
    for record in records:
        spool.write(FrameKind.TRANSFERS, record.tobytes())
    spool.close()
    finish(SpoolReader(folder / "s"), folder / "c")
    return CaptureReader(folder / "c")


def test_records_become_rows(tmp_path: Path) -> None:
    # given a copy of 10 bytes, a fill of as many as can be, and an image
    names = ("zeCommandListAppendMemoryCopy", "zeCommandListAppendMemoryFill", "zeCommandListAppendImageCopy")
    copy, fill, image = map(number_of, names)
    presumed = LaunchFlags.TRANSFER | LaunchFlags.PRESUMED
    records = [
        transfer(1, copy, 10),
        transfer(2, fill, UNKNOWN_BYTES - 1, flags=presumed),
        transfer(3, image, UNKNOWN_BYTES),
    ]
    # when
    reader = captured(tmp_path, *records)
    # then
    rows = reader.table("transfer").to_pylist()
    assert [(row["time_ns"], row["function"], row["bytes"], row["flags"]) for row in rows] == [
        (1, "zeCommandListAppendMemoryCopy", 10, 0),
        (2, "zeCommandListAppendMemoryFill", UNKNOWN_BYTES - 1, int(LaunchFlags.PRESUMED)),
        (3, "zeCommandListAppendImageCopy", None, 0),
    ]
    assert {(row["pid"], row["tid"], row["cpu"], row["comm"]) for row in rows} == {(7, 8, 1, "app")}
    assert reader.header["totals"]["transfers"] == 3
    assert reader.header["totals"]["transferred_bytes"] == 10 + UNKNOWN_BYTES - 1
    assert reader.header["totals"]["launches"] == 0


@pytest.mark.parametrize("function", [0, len(FUNCTIONS) + 1, (1 << 64) - 1])
def test_a_record_of_no_known_function_is_damaged(tmp_path: Path, function: int) -> None:
    reader = captured(tmp_path, transfer(1, 1, 10), transfer(2, function, 10))
    assert reader.table("transfer")["time_ns"].to_pylist() == [1]
    assert "damaged" in {row["what"] for row in reader.table("loss").to_pylist()}


def test_info_tells_of_them_and_of_drivers_that_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"time_ns": 1, "pid": 7, "tid": 7, "cpu": 0, "comm": "app", "stack": 0, "function": FUNCTIONS[0],
           "bytes": 2_000_000, "flags": 0}  # fmt: skip
    libraries = [{"path": f"/{name}.so", "copies": known} for name, known in (("old", False), ("new", True))]
    header = HEADER | {"totals": {"transferred_bytes": 2_000_000}, "libraries": libraries}
    verb.info(capture(tmp_path / "cap.parquet", header, transfer=[row]))
    out = " ".join(capsys.readouterr().out.split())
    assert "transfers 1 copies and fills of 2.0 MB" in out
    assert "/old.so: copies and fills are not recorded" in out
    assert "/new.so: copies" not in out


@pytest.fixture
def layout() -> Layout:
    """One that leads to the kernels with which the driver copies."""
    layouts = (Layout.from_json(path.read_text()) for path in SHIPPED.glob("*.json"))
    return next(each for each in layouts if each.has_own_kernels)


def test_a_layout_with_copies_by_unknown_functions_is_refused(layout: Layout) -> None:
    entries = tuple(
        dataclasses.replace(entry, name="zeCopyAll") if entry.action is Action.TRANSFER else entry
        for entry in layout.entries
    )
    with pytest.raises(LayoutError, match="functions that this iaprof does not know"):
        Layout.from_json(dataclasses.replace(layout, entries=entries).to_json())


def test_a_layout_of_an_earlier_version_has_no_own_kernels(layout: Layout) -> None:
    told = json.loads(layout.to_json())
    told["entries"] = [
        entry for entry in told["entries"] if entry["action"] in ("launch", "kernel-gone", "module-gone")
    ]
    for entry in told["entries"]:
        del entry["offset"], entry["list_offset"]
    read = Layout.from_json(json.dumps(told))
    assert not read.has_own_kernels
    assert {entry.list_offset for entry in read.entries} == {0}
