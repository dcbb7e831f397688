"""Several GPUs and tiles, some of which are held, vanish, come back or appear: each sample is accounted for."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.record.spool import FrameKind
from iaprof.report.about import about
from integration.recording import (
    IN_TURN,
    by_instruction,
    ended,
    folded,
    has_met,
    iaprof,
    launched,
    ledger_by_instruction,
    losses as all_losses,
    record,
    spooled,
    start,
)
from standin import runtime
from standin.hardware import Hardware, Ledger
from thorough import thorough, usually
from waiting import until

pytestmark = pytest.mark.bpf


def workload(*options: str | float) -> list[str]:
    return runtime.command([runtime.debug_elf("bmg", "matmul")], *options)


def losses(capture: Path, ledger: Ledger) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in all_losses(capture, ledger):
        found.setdefault((row["source"], row["what"]), []).append(row)
    return found


@thorough
@pytest.mark.parametrize("device", ["pvc", "max"])
def test_two_cards_of_which_one_has_two_tiles(tmp_path: Path, device: str) -> None:
    with Hardware(tmp_path / "gpu", cards=("bmg", device)) as hardware:
        record(hardware, tmp_path / "c", "--", *workload("--seconds", 2, "--threads", 2))
    ledger, reader = hardware.ledger(), CaptureReader(tmp_path / "c")
    streams = reader.header["streams"]
    assert [(s["card"], s["tile"], s["layout"]) for s in streams] == [
        ("card0", 0, "xe2"), ("card1", 0, "pvc"), ("card1", 1, "pvc"),
    ]  # fmt: skip
    assert [s["xecores"] for s in streams] == [20, 20, 20]
    assert [s["driver"] for s in streams] == ["xe", *(["i915" if device == "max" else "xe"] * 2)]
    # each stream has what its GT produced
    by_stream = dict.fromkeys(range(3), 0)
    for stall in reader.table("stall", ("stream", "w0")).to_pylist():
        by_stream[stall["stream"]] += len(stall["w0"])
    assert list(by_stream.values()) == [gt.captured for gt in ledger.gts]
    assert min(by_stream.values()) > 0
    assert by_instruction(folded(tmp_path / "c"), ledger) == ledger_by_instruction(ledger)
    # and its own metrics
    most: dict[tuple[str, int], float] = {}
    for row in reader.table("metric", ("name", "stream", "value")).to_pylist():
        if row["stream"] is not None:
            most[row["name"], row["stream"]] = max(row["value"], most.get((row["name"], row["stream"]), 0))
    busy = "busy-any-percent" if device == "max" else "busy-compute-percent"
    for stream in (1, 2):
        assert most[busy, stream] > 1
        assert most["frequency-actual-MHz", stream] > 0
    assert most["energy-card-J", 1] > 0 and ("energy-card-J", 2) not in most


@pytest.mark.parametrize(
    "name", usually(["card1", "address"], ["card1", "1", "renderD129", "/dev/dri/renderD129", "address"])
)
def test_one_device_of_two(tmp_path: Path, name: str) -> None:
    with Hardware(tmp_path / "gpu", cards=("bmg", "lnl")) as hardware:
        address = hardware.cards[1].address
        record(hardware, tmp_path / "c", "--device", address if name == "address" else name, "-d", "0.2")
    assert [s["pci_address"] for s in CaptureReader(tmp_path / "c").header["streams"]] == [address]


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu", cards=("bmg", "lnl")) as hardware:
        done = iaprof("record", "-o", tmp_path / "e", "--device", "card7", env=hardware.env())
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "card1" in done.err


@pytest.mark.parametrize("device", usually(["max"], ["pvc", "max"]))
def test_a_tile_that_another_profiler_holds_and_a_card_that_cannot(tmp_path: Path, device: str) -> None:
    faults = ["busy@0.1", "no-eu-stall@1"]
    with Hardware(tmp_path / "gpu", cards=(device, "bmg"), faults=faults) as hardware:
        done = record(hardware, tmp_path / "c", "--", *workload("--seconds", 1))
    ledger, reader = hardware.ledger(), CaptureReader(tmp_path / "c")
    assert [(s["card"], s["tile"]) for s in reader.header["streams"]] == [("card0", 0)]
    told = [row["detail"] for row in losses(tmp_path / "c", ledger)["devices", "not recorded"]]
    assert any("held by another profiler" in text for text in told)
    assert any("has no EU stall sampling" in text for text in told)
    for text in told:
        assert text in done.err
    assert reader.header["totals"]["stalls"] == ledger.records_captured > 0


def launching(hardware: Hardware, folder: Path) -> subprocess.Popen[bytes]:
    """A program that launches until it is told to end."""
    environment = os.environ | {"STANDIN_DIR": str(hardware.folder), "STANDIN_DUMP_DIR": str(folder)}
    return subprocess.Popen(workload("--seconds", 600), env=environment, stdout=subprocess.DEVNULL)


def until_more(hardware: Hardware, card: int, recorder: subprocess.Popen[str]) -> None:
    """Waits until the recorder has read more of what a card made, twice: what was read before is written then."""
    for _ in range(2):
        before = captured(hardware, card)
        until(lambda most=before: captured(hardware, card) > most, recorder)  # type: ignore[misc]


def captured(hardware: Hardware, card: int) -> int:
    return sum(gt.captured for gt in hardware.ledger().gts if gt.card == card)


def test_a_card_that_appears_and_one_that_vanishes_and_comes_back(tmp_path: Path) -> None:
    with (
        Hardware(tmp_path / "gpu", cards=("bmg", "lnl"), unplugged=(1,)) as hardware,
        (tmp_path / "said").open("w") as said,
    ):
        recorder = start(hardware, tmp_path / "c", stderr=said)
        program = launching(hardware, tmp_path)
        until_more(hardware, 0, recorder)
        # when one appears
        hardware.plug(1)
        until_more(hardware, 1, recorder)
        # and the other vanishes, and comes back
        hardware.unplug(0)
        gone = time.monotonic_ns()
        until(lambda: "renderD128 vanished" in (tmp_path / "said").read_text(), recorder)
        back = time.monotonic_ns()
        hardware.plug(0)
        until_more(hardware, 0, recorder)
        again = time.monotonic_ns()
        program.terminate()
        assert program.wait() == 0
        ended(recorder)
    # then all that could be read was, and what is missing lies in a reported span
    ledger, reader = hardware.ledger(), CaptureReader(tmp_path / "c")
    assert [s["card"] for s in reader.header["streams"]] == ["card0", "card1"]
    assert reader.header["totals"]["stalls"] == ledger.records_captured
    assert {row["stream"] for row in reader.table("stall", ("stream",)).to_pylist()} == {0, 1}
    assert by_instruction(folded(tmp_path / "c"), ledger) == ledger_by_instruction(ledger)
    assert "renderD129 appeared" in (tmp_path / "said").read_text()
    found = losses(tmp_path / "c", ledger)
    [gap] = [row for (source, what), rows in found.items() if what == "gap" for row in rows]
    assert gap["begin_ns"] <= gone
    assert back <= gap["time_ns"] <= again


def test_a_card_that_vanishes_for_good(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu", cards=("bmg", "lnl")) as hardware:
        recorder = start(hardware, tmp_path / "c")
        program = launching(hardware, tmp_path)
        until_more(hardware, 1, recorder)
        hardware.unplug(1)
        until_more(hardware, 0, recorder)
        program.terminate()
        assert program.wait() == 0
        ended(recorder)
    ledger, reader = hardware.ledger(), CaptureReader(tmp_path / "c")
    assert reader.header["totals"]["stalls"] == ledger.records_captured
    [gap] = [row for (_, what), rows in losses(tmp_path / "c", ledger).items() if what == "gap" for row in rows]
    assert "the device vanished" in str(gap["detail"])


@IN_TURN
def test_a_gpu_that_stops_answering(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, tmp_path / "c")
        program = launching(hardware, tmp_path)
        until(lambda: has_met(tmp_path / "c", runtime.build().library), recorder)
        missed = launched(hardware)  # before the library had probes
        until_more(hardware, 0, recorder)
        # when it neither samples nor lets its stream be opened, which a reset asks for
        hardware.freeze()
        hardware.reset()
        until(lambda: spooled(tmp_path / "c", FrameKind.LOSS), recorder)
        time.sleep(0.3)  # in which it tries three times to open it
        hardware.thaw()
        until_more(hardware, 0, recorder)
        program.terminate()
        assert program.wait() == 0
        ended(recorder)
    ledger, reader = hardware.ledger(), CaptureReader(tmp_path / "c")
    assert reader.header["totals"]["stalls"] == ledger.records_captured
    assert by_instruction(folded(tmp_path / "c"), ledger) == ledger_by_instruction(ledger)
    assert {what for _, what in losses(tmp_path / "c", ledger)} == {"reset", "gap"}
    # and launches were recorded all the while
    assert reader.header["totals"]["launches"] >= launched(hardware) - missed


def test_a_gpu_that_nobody_knows_yet_is_recorded_as_the_newest_one(tmp_path: Path) -> None:
    # given a GPU of an IP version that is in no table, whose records are those of the newest that is
    with Hardware(tmp_path / "gpu", cards=("future", "bmg")) as hardware:
        done = record(hardware, tmp_path / "c", "--", *workload("--seconds", 1))
    # then that is told, once
    said = (
        "has graphics IP 41.02, which this version of iaprof does not know: its stall records are read as xe3p "
        "records, which is a guess, so kernels and counts may be wrong; use a newer iaprof"
    )
    assert done.err.count(said) == done.err.count("41.02") == 1
    # and in the capture, and by who looks at it
    reader = CaptureReader(tmp_path / "c")
    assert [(s["layout"], s["layout_guessed"]) for s in reader.header["streams"]] == [("xe3p", True), ("xe2", False)]
    assert "is a guess" in " ".join(iaprof("info", tmp_path / "c").out.split())
    [warning] = [text for text in about(reader).warnings if "41.02" in text]  # as the page has it
    assert "is a guess" in warning
    # and every sample is there
    ledger = hardware.ledger()
    assert sum(len(row["w0"]) for row in reader.table("stall", ("w0",)).to_pylist()) == sum(
        gt.captured for gt in ledger.gts
    )
    assert min(gt.captured for gt in ledger.gts) > 0
