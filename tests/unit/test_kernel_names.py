"""What kernels are called in reports: demangled, and told apart where different code has one name."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from iaprof.formats.capture import CaptureReader
from iaprof.formats.folded import Folded
from iaprof.formats.profile import Shape
from iaprof.report.gpu_module import GpuModules
from iaprof.report.profile import build
from unit.capturing import capture, launch, record, stall
from unit.zebins import debug_elf

BASIC = {"bmg": 0x8000_FFBE_0000, "lnl": 0x8001_FFFE_5000, "ptl": 0x8001_FFFE_4000}  # where multiply_basic lies


def folded(path: Path) -> str:
    out = io.StringIO()
    with GpuModules() as modules:
        Folded().write(build(CaptureReader(path), modules).profile, Shape(), out)
    return out.getvalue()


def recorded(path: Path, devices: list[str], module: str = "matmul") -> Path:
    """A capture of one process that compiled a module for each device, and has one stall at each one's beginning."""
    kernels = [
        {"time_ns": 1, "pid": 7, "path": device, "digest": device.encode() * 8, "size": 1,
         "elf": debug_elf(device, module)}
        for device in devices
    ]  # fmt: skip
    launches = [launch(10 + i, 7, BASIC[device], size=1024, name="multiply_basic") for i, device in enumerate(devices)]
    stalls = [stall(1000, *(record(BASIC[device], sbid=1 + i) for i, device in enumerate(devices)))]
    return capture(path, kernel=kernels, launch=launches, stall=stalls)


def test_one_code_at_two_addresses_is_one_kernel(tmp_path: Path) -> None:
    # given modules that hold the same code, compiled for two GPUs of a generation
    text = folded(recorded(tmp_path / "c", ["bmg", "lnl"]))
    # then their stalls come together
    (line,) = text.splitlines()
    assert line.endswith(" 3")
    assert "/build/zebin/src/matmul.cl_[G];multiply_basic_[G];" in line


def test_different_code_of_one_name_is_told_apart(tmp_path: Path) -> None:
    # given a third module whose code is another
    text = folded(recorded(tmp_path / "c", ["bmg", "lnl", "ptl"]))
    # then it has a name of its own, and the other two have one together
    counts = {
        line.split("matmul.cl_[G];")[1].split("_[G]")[0]: int(line.rsplit(" ", 1)[1]) for line in text.splitlines()
    }
    assert sorted(counts.values()) == [3, 3]
    assert len(counts) == 2
    assert all(name.startswith("multiply_basic [code ") for name in counts)
    # which is the same in every report
    assert folded(tmp_path / "c") == text


@pytest.mark.parametrize("device", ["bmg", "lnl", "ptl"])
def test_a_module_without_debug_information(tmp_path: Path, device: str) -> None:
    """Such as the driver's own kernels are: names and instructions, no source."""
    elf = (Path(__file__).parents[1] / "data" / "zebin" / device / "matmul.zebin").read_bytes()
    path = capture(
        tmp_path / "c",
        kernel=[{"time_ns": 1, "pid": 7, "path": "x", "digest": b"1" * 32, "size": 1, "elf": elf}],
        launch=[launch(10, 7, 0x4000, size=1024, name="multiply_basic")],
        stall=[stall(1000, record(0x4000, sbid=5))],
    )
    (line,) = folded(path).splitlines()
    assert ";-;multiply_basic_[G];" in line
    assert line.endswith(";sbid_[g];0x0_[g] 5")
