"""What goes wrong while recording: losses are counted, a killed recorder leaves what it read, errors are a sentence."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.gpu.intel.generations import LAYOUTS as KNOWN_LAYOUTS
from iaprof.gpu.intel.reasons import REASONS
from integration.recording import (
    BARE,
    IAPROF,
    IN_TURN,
    by_instruction,
    ended,
    folded,
    iaprof,
    ledger_by_instruction,
    losses,
    lost_launches,
    one_sentence,
    record,
    recorded_launches,
    stalls_in_spool,
    start,
)
from limits import Within
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough, usually
from waiting import until

pytestmark = pytest.mark.bpf


def matmul(*options: str | int | float) -> list[str]:
    return runtime.command([runtime.debug_elf("bmg", "matmul")], *options)


def launched(hardware: Hardware) -> int:
    return sum(launch.count for launch in hardware.ledger().launches)


def samples(capture: Path) -> Counter[str]:
    """Sums of the counters in a capture's stalls."""
    reader = CaptureReader(capture)
    layout = KNOWN_LAYOUTS[reader.header["streams"][0]["layout"]]
    total: Counter[str] = Counter()
    for table in reader.tables("stall"):
        words = [table[f"w{word}"].combine_chunks().flatten().to_numpy() for word in range(layout.words)]
        for reason in REASONS:
            total[reason] += int(layout.counts(words, reason).sum(dtype="u8"))
    return total


def xecores_of(detail: str) -> set[int]:
    """The XeCores that a loss names."""
    named = re.search(r" of XeCores? ([0-9, -]+) were full", detail)
    runs = [run.split("-") for run in named[1].split(", ")] if named else []
    return {xecore for run in runs for xecore in range(int(run[0]), int(run[-1]) + 1)}


@pytest.mark.parametrize("device", usually(["bmg"], ["bmg", "max"]))
@IN_TURN
def test_a_slow_reader_loses_and_says_so(tmp_path: Path, device: str) -> None:
    # given a driver whose reads take so long that the hardware's buffers fill
    with Hardware(tmp_path / "gpu", device, xecores=2, rate=200_000, faults=["slow-reader"]) as hardware:
        # when
        done = record(hardware, tmp_path / "c", "--", *matmul("--seconds", 1, "--duration-us", 5000))
    # then what was not dropped is there, exactly
    ledger = hardware.ledger()
    assert ledger.records_dropped > 0
    text = folded(tmp_path / "c")
    assert by_instruction(text, ledger) == ledger_by_instruction(ledger)
    # and the loss is told: at the end, in the header, and with its time, within which every drop lies
    assert "overflow" in done.err
    told = losses(tmp_path / "c", ledger)
    assert {loss["what"] for loss in told} == {"overflow"}
    assert told[0]["source"] in {loss["source"] for loss in CaptureReader(tmp_path / "c").header["losses"]}
    spans = [(row["begin_ns"], row["time_ns"], row["source"], xecores_of(row["detail"])) for row in told]
    for overflow in ledger.overflows:
        # (Intel's i915 says which XeCores dropped records)
        covered = [
            (b, e)
            for b, e, source, xecores in spans
            if b <= overflow.last_ns and e >= overflow.first_ns and source.endswith(f" GT {overflow.gt}")
            if device != "max" or overflow.xecore in xecores
        ]
        assert min(b for b, _ in covered) <= overflow.first_ns
        assert max(e for _, e in covered) >= overflow.last_ns


@pytest.mark.parametrize("device", usually(["bmg"], ["bmg", "max"]))
@IN_TURN
def test_a_reset_is_noted_and_recording_goes_on(tmp_path: Path, device: str) -> None:
    with Hardware(tmp_path / "gpu", device) as hardware:
        recorder = start(hardware, tmp_path / "c")
        environ = os.environ | {"STANDIN_DIR": str(hardware.folder), "STANDIN_DUMP_DIR": str(tmp_path)}
        program = subprocess.Popen(matmul("--seconds", 600), env=environ, stdout=subprocess.DEVNULL)
        until(lambda: hardware.ledger().records_captured > 0, recorder)
        was_reset = time.monotonic_ns()
        hardware.reset()
        after_reset = time.monotonic_ns()
        before = hardware.ledger().records_captured
        until(lambda: hardware.ledger().records_captured > before, recorder)
        program.terminate()
        assert program.wait() == 0
        ended(recorder)
    ledger = hardware.ledger()
    assert by_instruction(folded(tmp_path / "c"), ledger) == ledger_by_instruction(ledger)
    told = losses(tmp_path / "c", ledger)
    assert {loss["what"] for loss in told} == {"reset", "gap"}
    rows = CaptureReader(tmp_path / "c").table("stall")
    gap = next(row for row in told if row["what"] == "gap")
    reset = next(row for row in told if row["what"] == "reset")
    assert reset["begin_ns"] <= after_reset
    assert was_reset <= reset["time_ns"] <= gap["time_ns"]
    assert max(rows["time_ns"].to_pylist()) > gap["time_ns"]  # stalls came after it


@thorough
@pytest.mark.alone
def test_two_million_records_in_a_second_while_ten_thousand_launches_come(tmp_path: Path, within: Within) -> None:
    # given
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, tmp_path / "c")
        launching = matmul("--seconds", 600, "--rate", 10_000, "--duration-us", 1, "--one-place")
        environ = os.environ | {"STANDIN_DIR": str(hardware.folder), "STANDIN_DUMP_DIR": str(tmp_path)}
        program = subprocess.Popen(launching, env=environ, stdout=subprocess.DEVNULL)
        until(lambda: launched(hardware) > 5_000, recorder)
        # when
        hardware.flood(2_000_000, 1.0)
        until(lambda: hardware.ledger().records_produced >= 2_000_000 and launched(hardware) > 20_000, recorder)
        program.terminate()
        assert program.wait() == 0
        hardware.wait()
        ended(recorder)
    # then what the hardware had no room for is told, and all else is there
    ledger = hardware.ledger()
    header = CaptureReader(tmp_path / "c").header
    assert ledger.records_unread == 0
    assert header["totals"]["stalls"] == ledger.records_captured > 1_000_000
    rows = losses(tmp_path / "c", ledger)
    lost = lost_launches(rows)
    assert recorded_launches(tmp_path / "c", ledger) + lost == launched(hardware)
    expected = ({"overflow"} if ledger.overflows else set()) | ({"lost"} if lost else set())
    assert {loss["what"] for loss in rows} == expected
    if within.measures:
        assert ledger.records_dropped == lost == 0
    assert by_instruction(folded(tmp_path / "c"), ledger) == ledger_by_instruction(ledger)


@pytest.mark.parametrize("seed", [5, 6])
@thorough
def test_killed_at_ten_random_moments(tmp_path: Path, within: Within, seed: int) -> None:
    """What was read before the last read (on a free machine: half a second ago) is in what `recover` makes of it."""
    moments = random.Random(seed)
    with Hardware(tmp_path / "gpu", rate=20_000) as hardware:
        env = os.environ | {"STANDIN_DIR": str(hardware.folder), "STANDIN_DUMP_DIR": str(tmp_path)}
        program = subprocess.Popen(matmul("--seconds", 600, "--rate", 200), env=env, stdout=subprocess.DEVNULL)
        try:
            died = []
            for attempt in range(10):
                capture = tmp_path / f"c{attempt}"
                began = hardware.ledger()
                recorder = start(hardware, capture)

                def captures(most: int = began.samples_captured) -> bool:
                    return hardware.ledger().samples_captured > most

                until(captures, recorder)
                time.sleep(moments.uniform(0.05, 0.6))
                early = hardware.ledger()
                if within.measures:
                    time.sleep(0.5)
                else:  # until a recorder that hardly gets to run has written, too, what it had read
                    least = early.records_captured - began.records_captured

                    def has_written(capture: Path = capture, least: int = least) -> bool:
                        return stalls_in_spool(capture) >= least

                    until(has_written, recorder)
                recorder.send_signal(signal.SIGKILL)
                recorder.communicate()
                # when (the next one records meanwhile)
                words = [*IAPROF, "recover", "--symbols=none", f"{capture}.spool"]
                recovering = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
                died.append((capture, recovering, early.samples_captured - began.samples_captured))
            # then
            for capture, recovering, produced in died:
                _, errors = recovering.communicate(timeout=300)
                assert recovering.returncode == 0, errors
                assert "recorder died" in errors
                assert CaptureReader(capture).header["recovered"] is True
                assert sum(samples(capture).values()) >= produced > 0
            assert iaprof("report", capture).code == 0
        finally:
            program.kill()
            program.wait()


def pending(pid: int, number: signal.Signals) -> bool:
    """Whether a process has not yet taken a signal."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("ShdPnd:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


@thorough
def test_signals(tmp_path: Path, within: Within) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        for number, signals in enumerate(([signal.SIGINT], [signal.SIGTERM])):
            # given
            recorder = start(hardware, tmp_path / f"c{number}")
            # when
            for one in signals:
                recorder.send_signal(one)
            _, errors = recorder.communicate(timeout=300)
            # then the capture is whole and the spool is gone
            assert recorder.returncode == 0, errors
            assert "[ iaprof record: wrote" in errors
            assert CaptureReader(tmp_path / f"c{number}").header["recovered"] is False
            assert not (tmp_path / f"c{number}.spool").exists()
        # given a recorder that is kept from finishing by a command that does not end
        stubborn = f"trap '' TERM INT; echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 600"
        recorder = start(hardware, tmp_path / "c9", "--", "sh", "-c", stubborn)
        until((tmp_path / "pid").exists, recorder)
        recorder.send_signal(signal.SIGINT)
        until(lambda: not pending(recorder.pid, signal.SIGINT), recorder)
        # when a second signal comes, while it is patient
        with within(5):
            recorder.send_signal(signal.SIGINT)
            assert recorder.wait() == 130
        # then it has quit at once, and the spool can be recovered
        command = int((tmp_path / "pid").read_text())
        for child in Path(f"/proc/{command}/task/{command}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        os.kill(command, signal.SIGKILL)
        _, errors = recorder.communicate()
        assert "iaprof recover" in errors
        assert not (tmp_path / "c9").exists()
        assert iaprof("recover", tmp_path / "c9.spool").code == 0


def test_the_command_decides_the_exit_code_and_never_sees_the_preload(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        script = 'test -z "$LD_PRELOAD" && exit 7'
        done = iaprof("record", *BARE, "-o", tmp_path / "c", "--", "sh", "-c", script, env=hardware.env())
        assert done.code == 7
        assert CaptureReader(tmp_path / "c").header["command"] == ["sh", "-c", script]
        done = iaprof("record", *BARE, "-o", tmp_path / "d", "--", "sh", "-c", "kill -9 $$", env=hardware.env())
        assert done.code == 137


@pytest.mark.parametrize(
    ("device", "fault", "message"),
    [
        ("bmg", "no-device", "no GPU was found"),
        ("bmg", "not-xe", "is driven by i915"),
        ("bmg", "no-eu-stall", "has no EU stall sampling"),
        ("bmg", "busy", "held by another profiler"),
        ("bmg", "eacces", "with sudo, or as root: sysctl dev.xe.observation_paranoid=0"),
        ("max", "no-eu-stall", "has no EU stall sampling: under Intel's i915 driver, only a Data Center GPU Max can"),
        ("max", "busy", "held by another profiler: only one can sample EU stalls at a time; stop it first"),
        (
            "max",
            "eacces",
            "with sudo, or as root: sysctl dev.i915.perf_stream_paranoid=0",
        ),
    ],
)
def test_devices_that_cannot_be_recorded(tmp_path: Path, device: str, fault: str, message: str) -> None:
    with Hardware(tmp_path / "gpu", device, faults=[fault]) as hardware:
        done = iaprof("record", "-o", tmp_path / "c", "-d", "1", env=hardware.env())
    assert done.code == 1
    assert one_sentence(done.err), done.err
    assert message in done.err
    assert list(tmp_path.glob("c*")) == []


@IN_TURN
def test_wrong_usage_and_outputs_that_exist(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("precious")
    with Hardware(tmp_path / "gpu") as hardware:
        for words, code, message in [
            (("record", "-o", tmp_path / "c", "-d", "1"), 1, "exists: name another file with -o"),
            (("record", "-o", tmp_path, "-d", "1"), 1, "is a folder"),
            (("record", "-o", tmp_path / "no" / "c", "-d", "1"), 1, "does not exist"),
            (("record", "-o", tmp_path / "d", "-d", "0"), 2, "must be more than 0"),
            (("record", "-o", tmp_path / "d", "--", "/no/such/program"), 1, "cannot be started"),
        ]:
            done = iaprof(*words, env=hardware.env())
            assert (done.code, one_sentence(done.err)) == (code, True), done.err
            assert message in done.err
        assert (tmp_path / "c").read_text() == "precious"
        assert not (tmp_path / "d").exists()
        assert not (tmp_path / "d.spool").exists()
        assert iaprof("record", *BARE, "-f", "-o", tmp_path / "c", "-d", "0.2", env=hardware.env()).code == 0
        assert CaptureReader(tmp_path / "c").header["totals"]["process_events"] > 0
    assert iaprof("record", "--no-such-option").code == 2
