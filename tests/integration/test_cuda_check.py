"""`iaprof check` and `iaprof devices` on a machine with NVIDIA's GPUs only, which the stand-in shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.recording import iaprof
from standin.cuda.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    tmp_path.chmod(0o755)
    yield Machine(tmp_path / "machine")


def test_check_says_nothing_of_intel_s_gpus(machine: Machine, tmp_path: Path) -> None:
    # given CUPTI in a virtual environment
    cupti = tmp_path / "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcupti.so.13"
    cupti.parent.mkdir(parents=True)
    cupti.touch()
    # when
    done = iaprof("check", "--json", env=machine.env() | {"VIRTUAL_ENV": str(tmp_path / "venv"), "CUDA_HOME": ""})
    # then
    said: dict[str, Any] = json.loads(done.out)
    assert (done.code, said["works"], done.err) == (0, True, "")
    found = {each["name"]: each for each in said["checks"] if each["group"] == "NVIDIA"}
    assert [found[name]["level"] for name in ("driver", "nvidia0", "nvidia1", "permission", "CUPTI", "library")] == (
        ["ok"] * 6
    )
    assert found["driver"]["text"].startswith("580.159.04, new enough for CUDA 13")
    assert found["CUPTI"]["file"].endswith("site-packages/nvidia/cu13/lib/libcupti.so.13")
    assert {each["group"] for each in said["checks"]} == {"Kernel", "BPF", "Limits", "NVIDIA", "Stacks", "Report"}
    assert "EU stalls" not in done.out


def test_devices_are_nvidia_s(machine: Machine) -> None:
    done = iaprof("devices", env=machine.env())
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].split()[:2] == ["CARD", "PCI"]
    assert [line.split()[:2] for line in lines if line.startswith("nvidia")] == [
        ["nvidia0", "0000:1b:00.0"],
        ["nvidia1", "0000:1c:00.0"],
    ]
    assert max(map(len, lines)) <= 80


def test_a_device_or_rate_that_there_is_not(machine: Machine, tmp_path: Path) -> None:
    for options, said in ((["--device", "nvidia7"], "nvidia7"), (["--rate", "1000"], "2^5 to 2^31 cycles")):
        done = iaprof("record", "-o", tmp_path / "cap", *options, "--", "true", env=machine.env())
        assert done.code == 2
        assert said in done.err
        assert done.err.count("\n") == 1
