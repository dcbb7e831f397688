"""How a recording ends that does not go to its planned end: signals at odd moments, full disks, GPUs that vanish."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaprof.formats.capture import CaptureReader
from integration.recording import IAPROF, NO_SYMBOLS, iaprof
from integration.refused import where_it_is_refused
from standin import runtime
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf


def matmul(*options: str | float) -> list[str]:
    return runtime.command([runtime.debug_elf("bmg", "matmul")], *options)


def start(hardware: Hardware, capture: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A recorder that was just started."""
    command = [*IAPROF, "record", "-o", str(capture), *NO_SYMBOLS, *words]
    environment = os.environ | hardware.env() | (env or {})
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def wait_until_recording(process: subprocess.Popen[str], capture: Path) -> None:
    spool = capture.with_name(capture.name + ".spool")
    while not spool.exists() or spool.stat().st_size < 1000:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.005)
    time.sleep(0.2)


def stall(hardware: Hardware, seconds: float) -> None:
    """Makes megabytes of stalls."""
    environment = os.environ | {"STANDIN_DIR": str(hardware.folder)}
    command = matmul("--seconds", seconds, "--rate", 100, "--duration-us", 9000)
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)


def cpu_seconds(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _maps(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return b""  # it ended


def one_sentence(text: str) -> bool:
    return text.startswith("iaprof: ") and text.count("\n") == 1 and "Traceback" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_starts(tmp_path: Path, number: signal.Signals) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        # given a recorder whose child has begun to load BPF's compiler
        words = [*IAPROF, "record", "-o", str(tmp_path / "c"), *NO_SYMBOLS]
        command = where_it_is_refused(tmp_path, *words, env=hardware.env())
        recorder = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        children = Path(f"/proc/{recorder.pid}/task/{recorder.pid}/children")
        while not any(b"libbcc" in _maps(int(pid)) for pid in children.read_text().split()):
            assert recorder.poll() is None
        # when
        recorder.send_signal(number)
        _, errors = recorder.communicate(timeout=20)
    # then
    assert recorder.returncode == 128 + number
    assert one_sentence(errors), errors
    assert "nothing was recorded" in errors
    assert list(tmp_path.glob("c*")) == []


def test_a_terminal_that_closes_ends_it_in_good_order_and_nohup_keeps_it(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, tmp_path / "c")
        wait_until_recording(recorder, tmp_path / "c")
        recorder.stderr.close()  # type: ignore[union-attr]
        recorder.send_signal(signal.SIGHUP)
        assert recorder.wait(timeout=20) == 0
        assert CaptureReader(tmp_path / "c").header["recovered"] is False
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        recorder = start(hardware, tmp_path / "d", "-d", "1")
        signal.signal(signal.SIGHUP, before)
        wait_until_recording(recorder, tmp_path / "d")
        recorder.send_signal(signal.SIGHUP)
        _, errors = recorder.communicate(timeout=20)
        assert "wrote" in errors
        header = CaptureReader(tmp_path / "d").header
        assert header["end_ns"] - header["clock"]["monotonic_ns"] >= 1e9


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of half a megabyte."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.alone  # others would fill what little room there is
def test_a_disk_that_fills(tmp_path: Path, small: Path) -> None:
    with Hardware(tmp_path / "gpu", rate=100_000) as hardware:
        # given
        recorder = start(hardware, small / "c")
        wait_until_recording(recorder, small / "c")
        # when
        stall(hardware, seconds=2)
        _, errors = recorder.communicate(timeout=20)
    # then
    assert recorder.returncode == 1
    assert one_sentence(errors), errors
    assert "No space left on device" in errors
    assert f"iaprof recover {small}/c.spool" in errors
    # and what was recorded is there, for which another disk is needed
    assert iaprof("recover", small / "c.spool", "-o", tmp_path / "c").code == 0
    header, ledger = CaptureReader(tmp_path / "c").header, hardware.ledger()
    assert 0 < header["totals"]["stalls"] < ledger.records_produced
    unwritten = sum(loss["count"] for loss in header["losses"] if loss["what"] == "unwritten")
    missing = ledger.records_dropped + ledger.records_unread + unwritten
    assert header["totals"]["stalls"] + missing == ledger.records_produced


@pytest.mark.alone  # others would fill what little room there is
def test_a_disk_that_fills_ends_the_recording_and_not_the_command(tmp_path: Path, small: Path) -> None:
    with Hardware(tmp_path / "gpu", rate=100_000) as hardware:
        # given
        script = f"sleep 4; echo done > {tmp_path}/result"
        recorder = start(hardware, small / "c", "--", "sh", "-c", script)
        wait_until_recording(recorder, small / "c")
        # when
        stall(hardware, seconds=2)
        _, errors = recorder.communicate(timeout=20)
    # then
    assert recorder.returncode == 1
    assert one_sentence(errors), errors
    assert "the command goes on" in errors
    assert (tmp_path / "result").read_text() == "done\n"


@pytest.mark.alone  # others would fill what little room there is
def test_a_disk_without_room_for_the_capture(tmp_path: Path, small: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        # given a spool that just fits
        recorder = start(hardware, small / "c")
        wait_until_recording(recorder, small / "c")
        (small / "ballast").write_bytes(bytes(shutil.disk_usage(small).free // 4096 * 4096 - 8192))
        # when
        recorder.send_signal(signal.SIGINT)
        _, errors = recorder.communicate(timeout=20)
    # then
    assert recorder.returncode == 1
    assert one_sentence(errors), errors
    assert f"iaprof recover {small}/c.spool -o FILE" in errors
    assert sorted(path.name for path in small.iterdir()) == ["ballast", "c.spool"]


def test_a_folder_that_is_removed_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, tmp_path / "gone" / "c")
        wait_until_recording(recorder, tmp_path / "gone" / "c")
        shutil.rmtree(tmp_path / "gone")
        recorder.send_signal(signal.SIGINT)
        _, errors = recorder.communicate(timeout=20)
    assert recorder.returncode == 1
    assert one_sentence(errors), errors
    assert "No such file or directory" in errors


def test_a_spool_that_is_swapped_is_not_followed(tmp_path: Path) -> None:
    """In a folder of others, the name may lead elsewhere by the time that the recording ends."""
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, tmp_path / "c")
        wait_until_recording(recorder, tmp_path / "c")
        os.rename(tmp_path / "c.spool", tmp_path / "moved")
        os.mkfifo(tmp_path / "c.spool")
        recorder.send_signal(signal.SIGINT)
        _, errors = recorder.communicate(timeout=20)
    assert recorder.returncode == 0, errors
    assert CaptureReader(tmp_path / "c").header["recovered"] is False


def test_a_gpu_that_vanishes_for_good(tmp_path: Path) -> None:
    hardware = Hardware(tmp_path / "gpu")
    with hardware, contextlib.suppress(Exception):
        # given
        recorder = start(hardware, tmp_path / "c", "-d", "2")
        wait_until_recording(recorder, tmp_path / "c")
        # when
        hardware.kill()
        time.sleep(0.5)
        before = cpu_seconds(recorder.pid)
        time.sleep(0.5)
        spent = cpu_seconds(recorder.pid) - before
        _, errors = recorder.communicate(timeout=20)
    # then the recorder waits for it without haste, and says what is missing
    assert recorder.returncode == 0, errors
    assert spent < 0.1
    assert {"reset", "gap"} & {loss["what"] for loss in CaptureReader(tmp_path / "c").header["losses"]}


@pytest.mark.alone
def test_launches_without_end_do_not_keep_the_recorder_awake(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, tmp_path / "c")
        wait_until_recording(recorder, tmp_path / "c")
        # given a program that launches hundreds of thousands of times per second
        environment = os.environ | {"STANDIN_DUMP_DIR": str(tmp_path)}
        program = subprocess.Popen(
            matmul("--seconds", 1.6, "--rate", 0, "--no-gpu"), env=environment, stdout=subprocess.DEVNULL
        )
        time.sleep(0.5)
        # when
        before = cpu_seconds(recorder.pid)
        time.sleep(1)
        spent = cpu_seconds(recorder.pid) - before
        program.wait()
        recorder.send_signal(signal.SIGINT)
        _, errors = recorder.communicate(timeout=30)
    # then it reads them in bulk, not as each comes
    assert recorder.returncode == 0, errors
    assert spent < 0.3
    assert CaptureReader(tmp_path / "c").header["totals"]["launches"] > 50_000


def test_the_commands_own_business(tmp_path: Path) -> None:
    """It has our standard input, may end at once, and may leave a process behind."""
    with Hardware(tmp_path / "gpu") as hardware:
        command = [*IAPROF, "record", *NO_SYMBOLS, "-q", "-f", "-o", str(tmp_path / "c"), "--"]
        environment = os.environ | hardware.env()
        done = subprocess.run(
            [*command, "cat"], env=environment, input="text", capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "text", "")
        begun = time.monotonic()
        script = "sleep 30 > /dev/null 2>&1 & echo $!"
        done = subprocess.run(
            [*command, "sh", "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        os.kill(int(done.stdout), signal.SIGKILL)
        assert time.monotonic() - begun < 15
