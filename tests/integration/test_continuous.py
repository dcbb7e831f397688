"""A recorder that stays: its room on disk, its budget, what a restart finds, and the rights that its unit leaves it."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from iaprof.bpf.perf_event import CpuClock
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.members import MEMBERS
from integration.recording import (
    BARE,
    IAPROF,
    IN_TURN,
    cpu_seconds,
    environment,
    iaprof,
    losses,
    spool_of,
    until_recording,
)
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough
from waiting import until

pytestmark = pytest.mark.bpf
ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "docs" / "continuous" / "iaprof.service"
_CAPABILITIES = {
    "CAP_DAC_READ_SEARCH": 2, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_IPC_LOCK": 14, "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21, "CAP_SYS_NICE": 23, "CAP_SYS_RESOURCE": 24, "CAP_SYSLOG": 34, "CAP_PERFMON": 38, "CAP_BPF": 39,
}  # fmt: skip
"""linux/capability.h"""
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38  # linux/prctl.h


def started(
    hardware: Hardware, capture: Path, *words: str, before: Callable[[], None] | None = None
) -> subprocess.Popen[str]:
    recorder = subprocess.Popen(
        [*IAPROF, "record", "-v", "-o", str(capture), *words],
        env=os.environ | environment(hardware),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )
    until_recording(recorder)
    return recorder


def launches(hardware: Hardware, seconds: float) -> None:
    command = runtime.command([runtime.debug_elf("bmg", "matmul")], "--seconds", seconds)
    subprocess.run(
        command, env=os.environ | {"STANDIN_DIR": str(hardware.folder)}, stdout=subprocess.DEVNULL, check=True
    )


def ended(recorder: subprocess.Popen[str]) -> str:
    recorder.send_signal(signal.SIGINT)
    _, errors = recorder.communicate(timeout=300)
    assert recorder.returncode == 0, errors
    return errors


@thorough
def test_files_keep_to_their_room_over_a_restart(tmp_path: Path) -> None:
    # given a recorder that is killed, and what it leaves
    capture = tmp_path / "cap.parquet"
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = started(hardware, capture, "--switch-output=1s", "--max-total=10G", *BARE)
        launches(hardware, 3)
        until(lambda: len(list(tmp_path.glob("cap.2*.parquet"))) >= 2, recorder)
        recorder.kill()
        recorder.communicate()
        wrapped = tmp_path / "iaprof"
        wrapped.write_text(f'#!/bin/sh\nexec {" ".join(IAPROF)} "$@"\n')
        wrapped.chmod(0o755)
        recover = ROOT / "docs" / "continuous" / "recover-spools"
        subprocess.run(["sh", recover, tmp_path], env=os.environ | {"IAPROF": str(wrapped)}, check=True)
        assert not list(tmp_path.glob("*.spool"))
        assert CaptureReader(capture).header["recovered"] is True
        sizes = [path.stat().st_size for path in tmp_path.glob("cap.2*.parquet")]
        # when another one has room for one and a half of the largest
        room = max([*sizes, capture.stat().st_size]) * 3 // 2
        recorder = started(hardware, capture, "--switch-output=1s", f"--max-total={room}B", *BARE)
        launches(hardware, 4)
        errors = ended(recorder)
    # then the finished files fit, and the last one says how many had to go
    kept = list(tmp_path.glob("cap.2*.parquet"))
    assert sum(path.stat().st_size for path in kept) <= room
    header = CaptureReader(capture).header
    assert header["removed_files"]["files"] == errors.count("--max-total: removed") > 0
    assert "cap.parquet is cap.2" in errors


@thorough
def test_sampling_is_thinned_to_the_budget(tmp_path: Path) -> None:
    # given a budget that CPU samples of all CPUs pass, and launches do not
    capture = tmp_path / "cap.parquet"
    with Hardware(tmp_path / "gpu") as hardware:
        recorder = started(hardware, capture, "--max-cpu=0.1%", "--cpu-freq=999", "--switch-output=20s")
        launches(hardware, 45)
        errors = ended(recorder)
    files = [CaptureReader(path) for path in (*sorted(tmp_path.glob("cap.2*.parquet")), capture)]
    assert all(each.header.keys() <= MEMBERS.keys() for each in files)
    changes = [change for each in files for change in each.header["thinned"]]
    assert changes[0]["cpu_hz"] < 999
    assert (f"{changes[0]['cpu_hz']} CPU samples/s" if changes[0]["cpu_hz"] else "no CPU samples") in errors
    assert "to stay within --max-cpu" in errors
    # and each file says what was in force
    assert files[-1].header["thinned"][0] in files[-2].header["thinned"]
    assert "sampling was changed" in iaprof("info", capture).out
    # nothing else is thinned, and what the hardware drops, where others keep the recorder from reading in time, is told
    total, ledger = sum(each.header["totals"]["stalls"] for each in files), hardware.ledger()
    assert total + ledger.records_dropped == ledger.records_produced
    assert any(loss["what"] == "overflow" for each in files for loss in each.header["losses"]) == bool(ledger.overflows)


@thorough
def test_a_clock_changes_its_rate() -> None:
    probes = LaunchProbes()
    clock = CpuClock(probes.maps["on_sample"], 499)
    busy = subprocess.Popen(["sh", "-c", "while :; do :; done"])

    def counted() -> int:
        """Samples of a second of CPU time."""
        probes.samples.read()
        parts, end = [], cpu_seconds(busy.pid) + 1
        while cpu_seconds(busy.pid) < end:
            time.sleep(0.1)
            parts.append(probes.samples.read())
        return int((np.concatenate(parts)["pid"] == busy.pid).sum())

    try:
        clock.enable(True)
        fast = counted()
        clock.change(49)
        slow = counted()
        clock.enable(False)
        none = counted()
    finally:
        busy.kill()
        busy.wait()
        clock.close()
        probes.close()
    assert 3 * slow < fast
    assert 0 < slow <= 60
    assert none == 0


def limited() -> None:
    """The rights of the unit."""
    (kept,) = re.findall(r"(?m)^CapabilityBoundingSet=(.*)", UNIT.read_text())
    numbers = {_CAPABILITIES[name] for name in kept.split()}
    libc = ctypes.CDLL(None)
    for number in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        if number not in numbers:
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


@IN_TURN
@thorough
def test_the_units_capabilities_are_enough(tmp_path: Path) -> None:
    """Programs of another user launch; everything is recorded and named as with all rights."""
    headers = []
    for before in (None, limited):
        capture = tmp_path / f"{before is None}.parquet"
        with Hardware(tmp_path / f"gpu{before is None}") as hardware:
            recorder = started(hardware, capture, before=before)
            launches(hardware, 2)
            ended(recorder)
            header, ledger = CaptureReader(capture).header, hardware.ledger()
        # Nothing is lost but, on a busy machine, what a recorder has no time for: records to read, stacks to finish.
        # These launches have no handles, but those of the driver's tests, which may run beside, have broken ones.
        assert header["totals"]["stalls"] + ledger.records_dropped == ledger.records_produced
        own = (loss for loss in losses(capture, ledger) if "kernels' handles" not in loss["detail"])
        lost = {loss["what"] for loss in own if loss["source"] != "stacks"}
        assert lost == ({"overflow"} if ledger.overflows else set())
        headers.append(header)
    assert headers[1]["stack_ends"]["launches"]["whole"] > headers[1]["totals"]["launches"] // 4
    assert all(header["totals"]["modules"] for header in headers)  # others may run beside
    assert not spool_of(capture).exists()
