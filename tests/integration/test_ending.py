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

from iaprof.formats.capture.reader import CaptureReader
from iaprof.record.spool import FrameKind, SpoolReader
from integration.recording import (
    BARE,
    IAPROF,
    cpu_seconds,
    ended,
    has_stalls,
    iaprof,
    lost_launches,
    one_sentence,
    spool_of,
    spooled,
    until_recording,
    voluntary_switches,
)
from integration.refused import where_it_is_refused
from limits import Within
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough
from waiting import until

pytestmark = pytest.mark.bpf


def matmul(*options: str | float) -> list[str]:
    return runtime.command([runtime.debug_elf("bmg", "matmul")], *options)


def start(hardware: Hardware, capture: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A recorder that was just started."""
    command = [*IAPROF, "record", "-o", str(capture), *BARE, *words]
    environment = os.environ | hardware.env() | (env or {})
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_stopped_terminal_does_not_stop_it(tmp_path: Path) -> None:
    # given a recorder with a status line in a terminal, in which someone types Ctrl-S
    ours, terminal = os.openpty()
    with Hardware(tmp_path / "gpu") as hardware, open(ours, "r+b", buffering=0) as ours_file:
        command = [*IAPROF, "record", "-o", str(tmp_path / "c"), *BARE]
        recorder = subprocess.Popen(command, env=os.environ | hardware.env(), stderr=terminal)
        os.close(terminal)
        until_recording(recorder)
        ours_file.write(b"\x13")
        # when the status line has been drawn several times, or would have been
        stopped_ns = time.monotonic_ns()
        until(lambda: newest_metrics(tmp_path / "c") > stopped_ns + 3 * 10**9, recorder)
        recorder.send_signal(signal.SIGINT)
        until((tmp_path / "c").exists, recorder)
        # then it waits for the terminal only to say that it has ended
        assert recorder.poll() is None
        ours_file.write(b"\x11")
        said = b""
        while b"wrote" not in said:
            said += ours_file.read(1 << 16)
        assert recorder.wait(timeout=300) == 0
    assert b"more message" not in said


def newest_metrics(capture: Path) -> int:
    """When the last metrics were read that are in the spool, CLOCK_MONOTONIC ns."""
    with contextlib.closing(SpoolReader(spool_of(capture))) as reader:
        return max((frame.time for frame in reader.frames({FrameKind.METRICS})), default=0)


@contextlib.contextmanager
def stalling(hardware: Hardware) -> Iterator[None]:
    """Makes megabytes of stalls."""
    environment = os.environ | {"STANDIN_DIR": str(hardware.folder)}
    command = matmul("--seconds", 600, "--rate", 100, "--duration-us", 9000)
    program = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        program.terminate()
        program.wait()


def _maps(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return b""  # it ended


@thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_it_starts(tmp_path: Path, number: signal.Signals) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        # given a recorder whose child has begun to load BPF's compiler
        words = [*IAPROF, "record", "-o", str(tmp_path / "c"), *BARE]
        command = where_it_is_refused(tmp_path, *words, env=hardware.env())
        recorder = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        children = Path(f"/proc/{recorder.pid}/task/{recorder.pid}/children")
        while not any(b"libbcc" in _maps(int(pid)) for pid in children.read_text().split()):
            assert recorder.poll() is None
        # when
        recorder.send_signal(number)
        _, errors = recorder.communicate(timeout=300)
    # then
    assert recorder.returncode == 128 + number
    assert one_sentence(errors), errors
    assert "nothing was recorded" in errors
    assert list(tmp_path.glob("c*")) == []


def test_a_terminal_that_closes_ends_it_in_good_order_and_nohup_keeps_it(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, tmp_path / "c")
        until_recording(recorder)
        recorder.stderr.close()  # type: ignore[union-attr]
        recorder.send_signal(signal.SIGHUP)
        assert recorder.wait(timeout=300) == 0
        assert CaptureReader(tmp_path / "c").header["recovered"] is False
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        recorder = start(hardware, tmp_path / "d")
        signal.signal(signal.SIGHUP, before)
        until_recording(recorder)
        recorder.send_signal(signal.SIGHUP)
        hung_up = time.monotonic_ns()
        size = spool_of(tmp_path / "d").stat().st_size
        until(lambda: spool_of(tmp_path / "d").stat().st_size > size, recorder)  # metrics come all the time
        assert "wrote" in ended(recorder)
        assert CaptureReader(tmp_path / "d").header["end_ns"] > hung_up


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, which has room for what a recorder tells of the processes that there are."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "none", str(path)], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def stopped(recorder: subprocess.Popen[str]) -> Iterator[None]:
    """A recorder stands still meanwhile."""
    recorder.send_signal(signal.SIGSTOP)
    until(lambda: Path(f"/proc/{recorder.pid}/stat").read_text().rpartition(") ")[2].startswith("T"), recorder)
    yield
    recorder.send_signal(signal.SIGCONT)


def leave_room(disk: Path, kilobytes: int) -> None:
    """Fills a disk but for so much."""
    with (disk / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, (shutil.disk_usage(disk).free // 4096 - kilobytes // 4) * 4096)


@pytest.mark.alone  # others would fill what little room there is
def test_a_disk_that_fills(tmp_path: Path, small: Path) -> None:
    with Hardware(tmp_path / "gpu", rate=100_000) as hardware:
        # given
        recorder = start(hardware, small / "c")
        until_recording(recorder)
        with stalling(hardware):
            until(lambda: has_stalls(small / "c"), recorder)
            # when
            with stopped(recorder):
                leave_room(small, 256)
            _, errors = recorder.communicate(timeout=300)
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
        gate = tmp_path / "gate"
        script = f"until [ -e {gate} ]; do sleep 0.1; done; echo done > {tmp_path}/result"
        recorder = start(hardware, small / "c", "--", "sh", "-c", script)
        until_recording(recorder)
        # when
        with stopped(recorder):
            leave_room(small, 256)
        with stalling(hardware):
            assert recorder.stderr is not None
            errors = recorder.stderr.readline()
        gate.touch()
        errors += recorder.communicate(timeout=300)[1]
    # then
    assert recorder.returncode == 1
    assert one_sentence(errors), errors
    assert "the command continues" in errors
    assert (tmp_path / "result").read_text() == "done\n"


@pytest.mark.alone  # others would fill what little room there is
def test_a_disk_without_room_for_the_capture(tmp_path: Path, small: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        # given a spool that just fits
        recorder = start(hardware, small / "c", "--cpu-freq", "0", "--metric-interval", "0")
        until_recording(recorder)
        with stopped(recorder):  # what the machine's processes do meanwhile needs room, too
            leave_room(small, 32)
            # when
            recorder.send_signal(signal.SIGINT)
        _, errors = recorder.communicate(timeout=300)
    # then
    assert recorder.returncode == 1
    assert one_sentence(errors), errors
    assert f"iaprof recover {small}/c.spool -o FILE" in errors
    assert sorted(path.name for path in small.iterdir()) == ["ballast", "c.spool"]


def test_a_folder_that_is_removed_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, tmp_path / "gone" / "c")
        until_recording(recorder)
        shutil.rmtree(tmp_path / "gone")
        recorder.send_signal(signal.SIGINT)
        _, errors = recorder.communicate(timeout=300)
    assert recorder.returncode == 1
    lines = errors.splitlines(keepends=True)  # it may have warned of what other tests run meanwhile
    assert all(map(one_sentence, lines)), errors
    assert "No such file or directory" in lines[-1]


def test_a_spool_that_is_swapped_is_not_followed(tmp_path: Path) -> None:
    """In a folder of others, the name may lead elsewhere by the time that the recording ends."""
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, tmp_path / "c")
        until_recording(recorder)
        os.rename(tmp_path / "c.spool", tmp_path / "moved")
        os.mkfifo(tmp_path / "c.spool")
        recorder.send_signal(signal.SIGINT)
        _, errors = recorder.communicate(timeout=300)
    assert recorder.returncode == 0, errors
    assert CaptureReader(tmp_path / "c").header["recovered"] is False


def test_a_gpu_that_vanishes_for_good(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        # given
        recorder = start(hardware, tmp_path / "c")
        until_recording(recorder)
        # when
        hardware.kill()
        until(lambda: spooled(tmp_path / "c", FrameKind.LOSS), recorder)
        before, began = cpu_seconds(recorder.pid), time.monotonic()
        time.sleep(0.5)
        spent, passed = cpu_seconds(recorder.pid) - before, time.monotonic() - began
        ended(recorder)
    # then the recorder waits for it without haste, and says what is missing
    assert spent < 0.6 * passed
    assert {"reset", "gap"} & {loss["what"] for loss in CaptureReader(tmp_path / "c").header["losses"]}


@pytest.mark.alone
def test_launches_without_end_do_not_keep_the_recorder_awake(tmp_path: Path, within: Within) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = start(hardware, tmp_path / "c")
        until_recording(recorder)
        # given a program that launches hundreds of thousands of times per second
        environment = os.environ | {"STANDIN_DUMP_DIR": str(tmp_path)}
        command = matmul("--launches", 200_000, "--rate", 0, "--no-gpu")
        waits, cpu_s, began = voluntary_switches(recorder.pid), cpu_seconds(recorder.pid), time.monotonic()
        # when
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        waits, cpu_s, passed = (
            voluntary_switches(recorder.pid) - waits,
            cpu_seconds(recorder.pid) - cpu_s,
            time.monotonic() - began,
        )
        ended(recorder)
    # then it reads them in bulk, not as each comes
    reader = CaptureReader(tmp_path / "c")
    launches, losses = reader.header["totals"]["launches"], reader.table("loss").to_pylist()
    # Where others keep it from reading in time, the buffer fills up.
    assert launches + lost_launches(losses) >= 200_000
    assert waits < launches / 100
    if within.measures:
        assert cpu_s < 0.3 * passed


@thorough
def test_the_commands_own_business(tmp_path: Path) -> None:
    """It has our standard input, may end at once, may crash, and may leave a process behind."""
    with Hardware(tmp_path / "gpu") as hardware:
        command = [*IAPROF, "record", *BARE, "-q", "-f", "-o", str(tmp_path / "c"), "--"]
        environment = os.environ | hardware.env()
        done = subprocess.run(
            [*command, "cat"], env=environment, input="text", capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "text", "")
        crash = [word for word in command if word != "-q"] + ["sh", "-c", "ulimit -c 0; kill -SEGV $$"]
        done = subprocess.run(crash, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 128 + signal.SIGSEGV
        assert done.stderr.startswith("iaprof: signal 11 (Segmentation fault) ended the command\n")
        script = "sleep 600 > /dev/null 2>&1 & echo $!"
        done = subprocess.run(
            [*command, "sh", "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        os.kill(int(done.stdout), signal.SIGKILL)  # it runs
