"""Copies and fills: from BPF's records to tables."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.basics.errors import UsageError
from iaprof.bpf.driver_layout import SHIPPED, Action, Layout, LayoutError
from iaprof.cli.verbs import info as verb
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.launch_warnings import OWN_KERNELS_UNRECORDED
from iaprof.formats.wire.launches import (
    LAUNCH,
    TRANSFER_FUNCTIONS as FUNCTIONS,
    UNKNOWN_BYTES,
    LaunchFlags,
    transfer_function_number,
)
from iaprof.record.capture.finish import finish
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from iaprof.report.join.selection import Selection, TimeRange
from iaprof.report.views.transfers import Transfers, transfers
from unit.capturing import HEADER, capture, launch
from unit.in_process import iaprof


def transfer(time: int, function: int, size: int, **more: object) -> NDArray[np.void]:
    """A record, as BPF sends it."""
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
    copy, fill, image = map(transfer_function_number, names)
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
def test_a_record_of_an_unknown_function_is_damaged(tmp_path: Path, function: int) -> None:
    reader = captured(tmp_path, transfer(1, 1, 10), transfer(2, function, 10))
    assert reader.table("transfer")["time_ns"].to_pylist() == [1]
    assert "damaged" in {row["what"] for row in reader.table("loss").to_pylist()}


def test_info_reports_transfers_and_drivers_without_probes_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"time_ns": 1, "pid": 7, "tid": 7, "cpu": 0, "comm": "app", "stack": 0, "function": FUNCTIONS[0],
           "bytes": 2_000_000, "flags": 0}  # fmt: skip
    libraries = [{"path": f"/{name}.so", "copies": known} for name, known in (("old", False), ("new", True))]
    libraries += [{"path": f"/{own}.so", "copies": True, "own_kernels": own} for own in (False, True)]
    header = HEADER | {"totals": {"transferred_bytes": 2_000_000}, "libraries": libraries}
    verb.info(capture(tmp_path / "cap.parquet", header, transfer=[row]))
    out = " ".join(capsys.readouterr().out.split())
    assert "transfers 1 copies and fills of 2.0 MB" in out
    assert "/old.so: copies and fills are not recorded" in out
    assert "/new.so: copies" not in out
    assert "/False.so: copies and fills are recorded, but not the driver's own kernels" in out
    assert "/True.so: copies" not in out


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Two processes that copy with kernels and a copy engine, and fill; and launches that do not belong to copies."""

    def row(time: int, function: int, size: int | None, stack: int, pid: int = 7, **more: Any) -> dict[str, Any]:
        told = {"time_ns": time, "pid": pid, "tid": pid, "cpu": 0, "comm": f"app{pid}", "stack": stack,
                "function": FUNCTIONS[function], "bytes": size, "flags": 0}  # fmt: skip
        return told | more

    own = {"flags": int(LaunchFlags.OWN)}
    return capture(
        tmp_path / "cap.parquet",
        HEADER | {"clock": {"monotonic_ns": 0, "realtime_ns": 0}},
        transfer=[
            row(1, 0, 10, 1), row(2, 0, 20, 2), row(3, 5, 7, 3), row(4, 8, None, 4), row(5, 8, None, 4, pid=8),
            row(6, 5, 1 << 63, 3, pid=8), row(7, 0, 99, 1, flags=int(LaunchFlags.CARRIED)),
        ],
        launch=[
            *(launch(time, 7, 64, stack=1, **own) for time in (1, 1, 2)), launch(3, 7, 64, stack=3, **own),
            launch(3, 7, 64, stack=3), launch(9, 7, 64, stack=9, **own), launch(9, 8, 64, stack=3, **own),
            launch(9, 7, 64, stack=1, flags=int(LaunchFlags.OWN | LaunchFlags.CARRIED)),
        ],
    )  # fmt: skip


def test_functions_are_ranked_by_bytes(copied: Path) -> None:
    assert transfers(CaptureReader(copied), Selection()) == [
        Transfers(FUNCTIONS[5], calls=2, bytes=7 + (1 << 63), kernels=2),
        Transfers(FUNCTIONS[0], calls=2, bytes=30, kernels=3),
        Transfers(FUNCTIONS[8], calls=2, unknown=2),
    ]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(pids=frozenset({8})), {FUNCTIONS[5]: (1, 1), FUNCTIONS[8]: (1, 0)}),
        (Selection(tids=frozenset({7})), {FUNCTIONS[0]: (2, 3), FUNCTIONS[5]: (1, 1), FUNCTIONS[8]: (1, 0)}),
        (Selection(comms=frozenset({"app8"})), {FUNCTIONS[5]: (1, 0), FUNCTIONS[8]: (1, 0)}),
        (Selection(kernel=re.compile("Fill")), {FUNCTIONS[5]: (2, 2)}),
        (
            Selection(time_range=TimeRange.parse("0.000000002s-0.000000004s")),
            {FUNCTIONS[0]: (1, 0), FUNCTIONS[5]: (1, 1)},
        ),
    ],
    ids=["pid", "tid", "comm", "kernel", "time"],
)
def test_selections_apply(copied: Path, selection: Selection, expected: dict[str, tuple[int, int]]) -> None:
    found = transfers(CaptureReader(copied), selection)
    assert {each.function: (each.calls, each.kernels) for each in found} == expected


def test_filters_that_transfers_lack_are_refused(copied: Path) -> None:
    with pytest.raises(UsageError, match="--by transfer"):
        transfers(CaptureReader(copied), Selection(devices=("card0",)))


def test_top_by_transfer(copied: Path) -> None:
    done = iaprof("top", copied, "--by", "transfer", "-n", "1")
    assert [line.split() for line in done.out.splitlines()] == [
        ["BYTES", "CALLS", "KERNELS", "FUNCTION"],
        ["9223372036.9", "GB", "2", "2", FUNCTIONS[5]],
        ["30", "bytes", "4", "3", "(2", "more)"],
        ["9223372036.9", "GB", "6", "5", "(total)"],
    ]
    told = json.loads(iaprof("top", copied, "--by", "transfer", "--json").out)
    assert told["by"] == "transfer"
    assert told["entries"][1] == {"function": FUNCTIONS[0], "calls": 2, "bytes": 30, "unknown": 0, "kernels": 3}
    assert told["more"]["calls"] == 0 and told["total"]["calls"] == 6
    assert iaprof("top", copied, "--by", "transfer", "--per-interval").code == 2


def test_top_reports_where_kernels_are_not_counted(tmp_path: Path) -> None:
    row = {"time_ns": 1, "pid": 7, "tid": 7, "cpu": 0, "comm": "app", "stack": 0, "function": FUNCTIONS[0],
           "bytes": 10, "flags": 0}  # fmt: skip
    injected = {"path": "/injected.so", "copies": True, "own_kernels": False}
    header = HEADER | {"libraries": [injected, injected, {"path": "/whole.so", "copies": True, "own_kernels": True}]}
    path = capture(tmp_path / "cap.parquet", header, transfer=[row])
    done = iaprof("top", path, "--by", "transfer")
    assert done.err == f"iaprof: /injected.so: {OWN_KERNELS_UNRECORDED}\n"
    assert iaprof("top", path, "--by", "transfer", "--quiet").err == ""
    # and an invalid header is not an error
    damaged = capture(tmp_path / "damaged.parquet", HEADER | {"libraries": {"path": 7}}, transfer=[row])
    assert iaprof("top", damaged, "--by", "transfer").err == ""


@pytest.fixture
def layout() -> Layout:
    """A driver layout with the driver's own copy kernels."""
    layouts = (Layout.from_json(path.read_text()) for path in SHIPPED.glob("*.json"))
    return next(each for each in layouts if each.has_own_kernels)


def test_a_layout_with_unknown_copy_functions_is_refused(layout: Layout) -> None:
    entries = tuple(
        dataclasses.replace(entry, name="zeCopyAll") if entry.action is Action.TRANSFER else entry
        for entry in layout.entries
    )
    with pytest.raises(LayoutError, match="functions that this iaprof does not know"):
        Layout.from_json(dataclasses.replace(layout, entries=entries).to_json())


def test_a_layout_of_an_earlier_version_lacks_the_driver_s_kernels(layout: Layout) -> None:
    told = json.loads(layout.to_json())
    told["entries"] = [
        entry for entry in told["entries"] if entry["action"] in ("launch", "kernel-gone", "module-gone")
    ]
    for entry in told["entries"]:
        del entry["offset"], entry["list_offset"]
    read = Layout.from_json(json.dumps(told))
    assert not read.has_own_kernels
    assert {entry.list_offset for entry in read.entries} == {0}
