"""Which processes, from when to when, into which files: `record`'s options, against what the stand-in produced."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.report.about import about
from integration.recording import (
    IN_TURN,
    by_instruction,
    by_stack,
    ended,
    folded,
    iaprof,
    ledger_by_instruction,
    ledger_by_stack,
    losses,
    lost_launches,
    record,
    start,
)
from limits import Within
from standin import runtime
from standin.hardware import Hardware, Ledger
from thorough import thorough
from waiting import until

pytestmark = pytest.mark.bpf


def workload(module: str, *options: str | float) -> list[str]:
    return runtime.command([runtime.debug_elf("bmg", module)], *options)


def launch_in(hardware: Hardware, folder: Path, command: list[str]) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"STANDIN_DIR": str(hardware.folder), "STANDIN_DUMP_DIR": str(folder)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def test_one_process_and_the_children_it_has_later(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        # given a shell, which starts a program only when it is recorded already, and another program
        gate = tmp_path / "gate"
        wanted = workload("matmul", "--seconds", 1.5, "--threads", 2, "--one-place")
        shell = launch_in(
            hardware, tmp_path / "a", ["sh", "-c", f"until [ -e {gate} ]; do sleep 0.02; done; {' '.join(wanted)}"]
        )
        recorder = start(hardware, tmp_path / "c", "-p", str(shell.pid))
        # when
        gate.touch()
        other = launch_in(hardware, tmp_path / "b", workload("attention", "--seconds", 3, "--one-place"))
        assert shell.wait() == other.wait() == 0
        ended(recorder)
    # then the child's samples are at its stacks, and the other's are told apart
    ledger = hardware.ledger()
    text = folded(tmp_path / "c")
    lines = text.splitlines()
    ours = "\n".join(line for line in lines if not line.startswith("[other process]"))
    others = [line for line in lines if line.startswith("[other process]")]
    expected = ledger_by_stack(ledger)
    assert by_stack(ours, ledger) == Counter({key: n for key, n in expected.items() if key[0] != other.pid})
    assert others
    assert all(f";{other.pid};[not recorded];-;" in line for line in others)
    assert sum(int(line.rsplit(" ", 1)[1]) for line in others) == sum(
        n for key, n in expected.items() if key[0] == other.pid
    )
    # and nothing else of the other is in the capture
    reader = CaptureReader(tmp_path / "c")
    assert other.pid not in reader.header["scope"]
    assert other.pid not in reader.table("kernel")["pid"].to_pylist()
    launches = reader.table("launch", ("pid", "stack", "name", "comm")).to_pylist()
    theirs = [(row["stack"], row["name"], row["comm"]) for row in launches if row["pid"] == other.pid]
    # (but for its first launches, where a busy machine has it launch before the recorder has read of its fork)
    known = theirs.index((0, "", ""))
    assert known < len(theirs) / 2
    assert set(theirs[known:]) == {(0, "", "")}


def test_a_process_that_is_not_there(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        done = iaprof("record", "-o", tmp_path / "c", "-p", "4194303", env=hardware.env())
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "there is no process 4194303" in done.err


def paused_spans(reader: CaptureReader) -> list[tuple[int, int]]:
    return [(begin, end) for begin, end in reader.header["paused"]]


def test_a_delay_leaves_out_the_beginning_and_nothing_of_the_rest(tmp_path: Path, within: Within) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        command = ["sh", "-c", f'echo $$ > {tmp_path}/pid && exec "$@"', "sh", *workload("matmul", "--seconds", 600)]
        recorder = start(hardware, tmp_path / "c", "-D", "800", "--", *command)
        until(lambda: hardware.ledger().records_captured > 1000, recorder)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
        ended(recorder, interrupt=False)
    ledger, reader = hardware.ledger(), CaptureReader(tmp_path / "c")
    # then it did not sample for so long
    [(begin, end)] = paused_spans(reader)
    assert end - begin > 0.79e9
    within.took((end - begin) / 1e9, 2)
    assert min(reader.table("stall")["begin_ns"].to_pylist()) >= end
    # and what was compiled and launched in that time is known
    text = folded(tmp_path / "c")
    assert by_instruction(text, ledger) == ledger_by_instruction(ledger)
    assert "[unknown" not in text
    assert ledger.records_captured > 0


def until_launched(hardware: Hardware, more: int) -> None:
    """Waits for so many launches more."""
    before = launched(hardware)
    until(lambda: launched(hardware) >= before + more)


def launched(hardware: Hardware) -> int:
    return sum(launch.count for launch in hardware.ledger().launches)


def learner_of(recorder: subprocess.Popen[str]) -> int:
    """The process that finishes its stacks."""
    children = Path(f"/proc/{recorder.pid}/task/{recorder.pid}/children").read_text().split()
    [learner] = [int(pid) for pid in children if b"learner" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return learner


@pytest.mark.parametrize("device", ["bmg", "max"])
@thorough
def test_another_program_says_when(tmp_path: Path, device: str) -> None:
    for name in ("ctl", "ack"):
        os.mkfifo(tmp_path / name)
    with Hardware(tmp_path / "gpu", device) as hardware:
        # given a recording that waits, of a program that runs
        recorder = start(hardware, tmp_path / "c", "-D", "-1", f"--control=fifo:{tmp_path}/ctl,{tmp_path}/ack")
        program = launch_in(hardware, tmp_path, workload("matmul", "--seconds", 600, "--recompile-ms", 200))
        commands, answers = open(tmp_path / "ctl", "w"), open(tmp_path / "ack")

        def say(command: str) -> None:
            commands.write(command + "\n")
            commands.flush()
            if command != "nonsense":
                assert answers.readline() == "ack\n"

        # when
        say("ping")
        until_launched(hardware, 100)
        assert hardware.ledger().records_captured == 0
        captured = 0
        for _ in range(2):
            say("enable")
            until(lambda most=captured: hardware.ledger().records_captured > most, recorder)  # type: ignore[misc]
            say("disable")
            captured = hardware.ledger().records_captured
            until_launched(hardware, 100)
            assert hardware.ledger().records_captured == captured
        say("nonsense")
        say("enable")
        until(lambda: hardware.ledger().records_captured > captured, recorder)
        program.send_signal(signal.SIGTERM)
        program.wait()
        say("stop")
        errors = ended(recorder, interrupt=False)
        commands.close()
        answers.close()
    # then
    assert "'nonsense' is not one of enable, disable" in errors
    reader, ledger = CaptureReader(tmp_path / "c"), hardware.ledger()
    spans = paused_spans(reader)
    assert len(spans) == 3
    for stall in reader.table("stall", ("begin_ns", "time_ns")).to_pylist():
        assert not any(begin <= stall["begin_ns"] and stall["time_ns"] <= end for begin, end in spans)
    assert by_instruction(folded(tmp_path / "c"), ledger) == ledger_by_instruction(ledger)


def parts(capture: Path) -> list[Path]:
    return sorted(path for path in capture.parent.glob(f"{capture.stem}*.parquet"))


def whole(captures: list[Path], ledger: Ledger) -> None:
    """Together the parts have what one capture would have: each sample at its instruction and its stack."""
    texts = [folded(part) for part in captures]
    instructions, stacks = Counter[tuple[str, int, str]](), Counter[tuple[int, str, str]]()
    for text in texts:
        instructions.update(by_instruction(text, ledger))
        stacks.update(by_stack(text, ledger))
    assert instructions == ledger_by_instruction(ledger)
    headers = [CaptureReader(part).header for part in captures]
    assert sum(header["totals"].get("stalls", 0) for header in headers) == ledger.records_captured
    pids = {launch.pid for launch in ledger.launches}
    recorded = 0
    for part in captures:
        table = CaptureReader(part).table("launch", ("pid", "flags")).to_pylist()
        recorded += sum(row["pid"] in pids and not row["flags"] & 16 for row in table)
    # Where others keep the recorder from reading in time, the hardware drops records; and launches are lost where the
    # kernel cannot end a grace period for half a minute, for which a rotation waits.
    rows = [loss for part in captures for loss in losses(part, ledger)]
    lost = lost_launches(rows)
    assert recorded + lost == sum(launch.count for launch in ledger.launches)
    assert lost or stacks == ledger_by_stack(ledger)
    others = {loss["what"] for loss in rows if (loss["source"], loss["what"]) != ("launches", "lost")}
    assert others == ({"overflow"} if ledger.records_dropped else set())


@IN_TURN
def test_rotation_by_a_signal_loses_nothing_and_each_part_stands_alone(tmp_path: Path) -> None:
    capture = tmp_path / "cap.parquet"
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, capture)
        # given a program that compiles once, and then launches what executes 30 ms later
        program = launch_in(
            hardware,
            tmp_path,
            workload("matmul", "--seconds", 600, "--threads", 2, "--one-place", "--delay-us", 30_000),
        )
        # when
        for number in range(1, 4):
            until_launched(hardware, 500)
            recorder.send_signal(signal.SIGUSR2)
            until(lambda n=number: len(parts(capture)) >= n, recorder)  # type: ignore[misc]
        until_launched(hardware, 500)
        program.terminate()
        assert program.wait() == 0
        errors = ended(recorder)
    # then
    captures = parts(capture)
    assert len(captures) == 4
    assert errors.count("[ iaprof record: wrote") == 4
    assert sorted(CaptureReader(part).header["part"] for part in captures) == [0, 1, 2, 3]
    assert [path.name for path in tmp_path.glob("*.spool")] == []
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in captures)
    whole(captures, hardware.ledger())


@IN_TURN
@thorough
def test_rotation_by_size_and_by_time(tmp_path: Path) -> None:
    capture = tmp_path / "cap.parquet"
    with Hardware(tmp_path / "gpu", rate=20_000) as hardware:
        recorder = start(hardware, capture, "--switch-output", "2M")
        program = launch_in(hardware, tmp_path, workload("matmul", "--seconds", 600, "--one-place"))
        until(lambda: len(parts(capture)) == 2, recorder)
        program.terminate()
        assert program.wait() == 0
        ended(recorder)
        by_size = parts(capture)
        whole(by_size, hardware.ledger())
    for part in by_size:
        part.unlink()
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, capture, "--switch-output", "0.6s", "--max-files", "2")
        program = launch_in(hardware, tmp_path, workload("matmul", "--seconds", 600))
        seen: set[Path] = set()

        def three_seen() -> bool:
            seen.update(parts(capture))
            return len(seen) >= 3

        until(three_seen, recorder)
        program.terminate()
        assert program.wait() == 0
        ended(recorder)
    kept = parts(capture)
    assert len(kept) == 2
    assert kept[-1] == capture
    assert CaptureReader(capture).header["part"] >= 3
    assert "[unknown" not in folded(capture)


@IN_TURN
def test_another_file_does_not_wait_for_stacks_and_the_one_before_gets_them(tmp_path: Path) -> None:
    capture = tmp_path / "cap.parquet"
    with Hardware(tmp_path / "gpu") as hardware:
        # Of other tests' programs there would be more copies than there is room for.
        recorder = start(hardware, capture, "-p", str(os.getpid()))
        # given stacks that nobody finishes for now
        learner = learner_of(recorder)
        os.kill(learner, signal.SIGSTOP)
        program = launch_in(hardware, tmp_path, workload("matmul", "--seconds", 600, "--one-place"))
        until_launched(hardware, 200)
        # when
        recorder.send_signal(signal.SIGUSR2)
        until(lambda: len(list(tmp_path.glob("*.spool"))) == 2, recorder)
        changed_ns = time.monotonic_ns()
        os.kill(learner, signal.SIGCONT)
        until(lambda: len(parts(capture)) == 1, recorder)
        program.terminate()
        assert program.wait() == 0
        ended(recorder)
    # then
    captures = parts(capture)
    assert len(captures) == 2
    for number, part in enumerate(captures):
        reader = CaptureReader(part)
        assert reader.header["part"] == number
        assert reader.header["end_ns"] < changed_ns or number == 1
        launches = reader.table("launch", ("pid", "stack")).to_pylist()
        used = {row["stack"] for row in launches if row["pid"] == program.pid}
        assert used
        assert set(reader.stacks(np.array(list(used), np.uint64))["ended"].to_pylist()) == {"whole"}


def test_an_end_by_size(tmp_path: Path, within: Within) -> None:
    with Hardware(tmp_path / "gpu", rate=20_000) as hardware:
        recorder = start(hardware, tmp_path / "c", "--max-size", "2M")
        program = launch_in(hardware, tmp_path, workload("matmul", "--seconds", 600))
        errors = ended(recorder, interrupt=False)
        program.send_signal(signal.SIGTERM)
        program.wait()
    assert "--max-size" in errors
    written = CaptureReader(tmp_path / "c").header["cost"]["spool_bytes"]
    assert written >= 2 << 20
    assert written < 4 << 20 or not within.measures


@thorough
def test_one_record_of_ten_stands_for_ten(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu", rate=20_000) as hardware:
        record(hardware, tmp_path / "c", "--subsample", "10", "--", *workload("matmul", "--seconds", 2))
    ledger, reader = hardware.ledger(), CaptureReader(tmp_path / "c")
    [stream] = reader.header["streams"]
    assert stream["subsample"] == 10
    assert reader.header["totals"]["stalls"] == pytest.approx(ledger.records_captured / 10, abs=1)
    done = iaprof("report", tmp_path / "c")
    samples = sum(by_instruction(done.out, ledger).values())
    assert samples == pytest.approx(ledger.samples_captured, rel=0.05)
    assert "one of every 10 records was kept" in done.err


@thorough
def test_rates_by_name_and_cycles(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        found = set()
        for rate in ("fastest", "slowest", "502"):
            record(hardware, tmp_path / "c", "-f", "--rate", rate, "-d", "0.2")
            found.add(CaptureReader(tmp_path / "c").header["streams"][0]["rate_cycles"])
        assert found == {251, 502, 1757}
        done = iaprof("record", "-f", "-o", tmp_path / "c", "--rate", "500", env=hardware.env())
    assert done.code == 2
    assert "1757" in done.err


def test_signals_are_the_commands_too(tmp_path: Path) -> None:
    script = (
        f"trap 'echo usr1 >> {tmp_path}/log' USR1; trap 'echo term >> {tmp_path}/log; exit 7' TERM; "
        f"echo ready >> {tmp_path}/log; while :; do sleep 0.05; done"
    )
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, tmp_path / "c", "--", "sh", "-c", script)
        log = tmp_path / "log"
        until(log.exists, recorder)
        recorder.send_signal(signal.SIGUSR1)
        until(lambda: "usr1" in log.read_text(), recorder)
        recorder.send_signal(signal.SIGTERM)
        _, errors = recorder.communicate(timeout=300)
    # then the command ended as it wanted to, and that is how we end
    assert log.read_text().split() == ["ready", "usr1", "term"]
    assert recorder.returncode == 7, errors
    assert CaptureReader(tmp_path / "c").header["recovered"] is False


def test_stalls_without_a_launch_are_told_with_what_to_try(tmp_path: Path) -> None:
    # given a program that calls its driver past the loader, where the library that is put into it sees nothing
    with Hardware(tmp_path / "gpu") as hardware:
        words = ("--launches", "inject", "--", *workload("matmul", "--seconds", 1))
        done = record(hardware, tmp_path / "c", *words)
    # then
    reader = CaptureReader(tmp_path / "c")
    assert (len(reader.table("launch")), len(reader.table("stall")) > 0) == (0, True)
    records = reader.header["totals"]["stalls"]
    [said] = [line for line in done.err.splitlines() if "no launch was seen" in line]
    assert f"mapped libze_intel_gpu.so and {records:,} stall records came: the program may not have loaded" in said
    assert said == done.err.splitlines()[-1]
    assert said.removeprefix("iaprof: ") in " ".join(iaprof("info", tmp_path / "c").out.split())
    assert said.removeprefix("iaprof: ") in about(reader).warnings


def test_with_launches_nothing_of_the_kind_is_told(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        done = record(hardware, tmp_path / "c", "--", *workload("matmul", "--seconds", 1))
    assert "no launch was seen" not in done.err
    assert "no_launches" not in CaptureReader(tmp_path / "c").header
