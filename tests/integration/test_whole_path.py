"""The whole path, and that nothing is lost on it: what the stand-in produced is what the report prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from iaprof.formats.capture.reader import CaptureReader
from integration.recording import (
    IN_TURN,
    by_instruction,
    by_stack,
    copy_of_build,
    ended,
    folded,
    has_met,
    iaprof,
    launched,
    ledger_by_instruction,
    ledger_by_stack,
    losses,
    record,
    recorded_launches,
    start,
)
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough, usually
from waiting import until

pytestmark = pytest.mark.bpf
FLAMEGRAPH = Path(sys.prefix) / "bin" / "flamegraph.pl"


def both_modules(device: str) -> list[Path]:
    return [runtime.debug_elf(device, "matmul"), runtime.debug_elf(device, "attention")]


@pytest.mark.parametrize("device", usually(["bmg"], ["bmg", "lnl", "pvc", "ptl"]))
def test_every_sample_is_at_its_instruction_and_its_stack(tmp_path: Path, device: str) -> None:
    # given a program that launches each kernel from one place
    command = runtime.command(both_modules(device), "--seconds", 1, "--one-place")
    with Hardware(tmp_path / "gpu", device) as hardware:
        # when
        record(hardware, tmp_path / "cap.parquet", "--", *command)
    # then
    ledger = hardware.ledger()
    text = folded(tmp_path / "cap.parquet")
    assert ledger.records_captured > 1000
    assert by_instruction(text, ledger) == ledger_by_instruction(ledger)
    assert by_stack(text, ledger) == ledger_by_stack(ledger)
    assert "[no decoder]" not in text
    assert "[unknown" not in text


def test_pandas_is_not_imported_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a pandas that tells of each process that imports it
    (tmp_path / "pandas.py").write_text(f"import sys; print(sys.argv, file=open({str(tmp_path / 'told')!r}, 'a'))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    subprocess.run([sys.executable, "-c", "import pandas"], check=True)
    told = (tmp_path / "told").read_text()
    assert told == "['-c']\n"
    # when
    with Hardware(tmp_path / "gpu", "bmg") as hardware:
        command = runtime.command(both_modules("bmg"), "--seconds", 0.2)
        record(hardware, tmp_path / "c", "--symbols", "all", "--", *command)
    assert folded(tmp_path / "c")
    # then
    assert (tmp_path / "told").read_text() == told


def test_records_that_hold_whole_addresses(tmp_path: Path) -> None:
    # given Xe3p's records; there is no compiler for it here, so its kernels are Xe2's, at sign-extended addresses
    with Hardware(tmp_path / "gpu", "xe3p") as hardware:
        record(hardware, tmp_path / "c", "--", *runtime.command(both_modules("bmg"), "--seconds", 1, "--one-place"))
    ledger = hardware.ledger()
    text = folded(tmp_path / "c")
    assert CaptureReader(tmp_path / "c").header["streams"][0]["layout"] == "xe3p"
    assert by_instruction(text, ledger) == ledger_by_instruction(ledger)
    assert by_stack(text, ledger) == ledger_by_stack(ledger)


@IN_TURN
def test_joining_four_threads_and_kernels_compiled_while_recording(tmp_path: Path) -> None:
    # given two processes of different kernels, each with four threads, one of which compiles again and again
    gpu = tmp_path / "gpu"
    one = runtime.command([runtime.debug_elf("bmg", "matmul")], "--seconds", 2, "--threads", 4, "--recompile-ms", 300)
    other = runtime.command(
        [runtime.debug_elf("bmg", "attention")], "--seconds", 2, "--threads", 4, "--recompile-ms", 400
    )
    script = f"{' '.join(one)} & {' '.join(other)} & wait"
    with Hardware(gpu) as hardware:
        # when
        record(hardware, tmp_path / "cap.parquet", "--", "sh", "-c", script)
    # then
    ledger = hardware.ledger()
    text = folded(tmp_path / "cap.parquet")
    assert by_instruction(text, ledger) == ledger_by_instruction(ledger)
    reader = CaptureReader(tmp_path / "cap.parquet")
    assert recorded_launches(tmp_path / "cap.parquet", ledger) == sum(launch.count for launch in ledger.launches)
    assert losses(tmp_path / "cap.parquet", ledger) == []
    # and a module that was compiled again is in the capture once
    ours = {launch.pid for launch in ledger.launches}
    kernels = [row for row in reader.table("kernel").to_pylist() if row["pid"] in ours]
    assert len(kernels) >= 8
    assert sum(row["elf"] is not None for row in kernels) == 2


def test_a_library_that_is_mapped_while_recording(tmp_path: Path) -> None:
    # given a library that no folder leads to: its file is new, and the program finds it beside itself
    build = copy_of_build(tmp_path / "build")
    programs = runtime.Programs(build / "libze_intel_gpu.so.1", build / "workload")
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, tmp_path / "c")
        # when
        program = launching(hardware, tmp_path, runtime.debug_elf("bmg", "matmul"), programs=programs)
        until(lambda: has_met(tmp_path / "c", programs.library), recorder)
        missed = launched(hardware)
        until(lambda: launched(hardware) > missed + 1000, recorder)
        program.terminate()
        assert program.wait() == 0
        ended(recorder)
    # then its launches are there, but for those before it was met
    ledger = hardware.ledger()
    header = CaptureReader(tmp_path / "c").header
    assert str(build / "libze_intel_gpu.so.1") in [library["path"] for library in header["libraries"]]
    launches = launched(hardware)
    assert launches - missed <= recorded_launches(tmp_path / "c", ledger) <= launches
    assert sum(by_instruction(folded(tmp_path / "c"), ledger).values()) == ledger.samples_captured


def launching(
    hardware: Hardware, folder: Path, elf: Path, *options: str | float, programs: runtime.Programs | None = None
) -> subprocess.Popen[bytes]:
    """A program that launches until it is told to end, if no option says otherwise."""
    command = runtime.command([elf], "--seconds", 600, *options, programs=programs)
    environment = os.environ | {"STANDIN_DIR": str(hardware.folder), "STANDIN_DUMP_DIR": str(folder)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def test_processes_that_started_before_and_after_the_recorder(tmp_path: Path) -> None:
    # given a process that has mapped the library when the recorder starts (its zeInit is over)
    with Hardware(tmp_path / "gpu") as hardware:
        options = ("--one-place", "--recompile-ms", 200)
        early = launching(hardware, tmp_path, runtime.debug_elf("bmg", "matmul"), *options)
        until(lambda: launched(hardware) > 100)
        recorder = start(hardware, tmp_path / "cap.parquet")
        # when another starts on its own
        missed = hardware.ledger().records_captured
        attention = runtime.debug_elf("bmg", "attention")
        late = launching(hardware, tmp_path, attention, "--seconds", 1, "--one-place")
        assert late.wait() == 0
        until(lambda: hardware.ledger().records_captured > 20_000 + 20 * missed, recorder)
        early.terminate()
        assert early.wait() == 0
        ended(recorder)
    # then the late one is complete, and of the early one everything but what was launched before the first look
    ledger = hardware.ledger()
    text = folded(tmp_path / "cap.parquet")
    found, expected = by_instruction(text, ledger), ledger_by_instruction(ledger)
    assert {key: n for key, n in found.items() if key[0] == "attention_scores"} == {
        key: n for key, n in expected.items() if key[0] == "attention_scores"
    }
    assert sum(found.values()) == sum(expected.values())
    matmul_samples = sum(n for (kernel, _, _), n in expected.items() if kernel != "attention_scores")
    named = sum(n for (kernel, _, _), n in found.items() if kernel.startswith("multiply"))
    assert named > 0.9 * matmul_samples


@thorough
def test_flamegraph_accepts_the_folded_text(tmp_path: Path) -> None:
    # given
    with Hardware(tmp_path / "gpu") as hardware:
        record(hardware, tmp_path / "c", "--", *runtime.command(both_modules("bmg"), "--seconds", 0.5))
    total = hardware.ledger().samples_captured
    # when
    text = folded(tmp_path / "c")
    done = subprocess.run(["perl", str(FLAMEGRAPH), "--hash"], input=text, capture_output=True, text=True, check=True)
    # then
    assert done.stderr == ""
    assert f"<title>all ({total:,} samples, 100%)</title>" in done.stdout


@thorough
def test_iaprof_text_has_the_same_sums(tmp_path: Path) -> None:
    # given
    with Hardware(tmp_path / "gpu") as hardware:
        record(hardware, tmp_path / "c", "--", *runtime.command(both_modules("bmg"), "--seconds", 2.5))
    # when
    done = iaprof("report", tmp_path / "c", "-o", tmp_path / "c.iaprof.txt", "--interval", "0.5")
    assert done.code == 0, done.err
    # then every id was defined before, every line has its fields, and the sums are the ledger's
    strings: dict[str, str] = {}
    total, kernel = 0, None
    intervals: list[float] = []
    for line in (tmp_path / "c.iaprof.txt").read_text().splitlines():
        match line.split("\t"):
            case ["string", id_, text]:
                assert id_ not in strings
                assert int(id_) > 0
                strings[id_] = text
            case ["interval", number, seconds]:
                assert int(number) == len(intervals)
                intervals.append(float(seconds))
            case ["kernel", address, comm, pid, stack, file, symbol]:
                kernel = int(address, 16)
                assert {strings[comm], strings[symbol]} <= {"workload", *(row.kernel for row in hardware.ledger().rows)}
                assert strings[stack].endswith(";zeCommandListAppendLaunchKernel")
                assert strings[file]
                assert int(pid)
            case ["eustall", offset, instruction, *counts]:
                assert kernel is not None
                assert int(offset, 16) >= 0
                assert strings[instruction]
                assert len(counts) == 10
                total += sum(map(int, counts))
            case ["metric", "frequency-MHz" | "busy-percent", _]:
                pass
            case _:
                raise AssertionError(line)
    assert total == hardware.ledger().samples_captured
    assert len(intervals) >= 5
    assert intervals[1] - intervals[0] == pytest.approx(0.5)
