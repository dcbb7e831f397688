"""A machine with NVIDIA's driver: its files in /proc, the PCI bus, NVML, CUPTI, processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from iaprof.record.checks import nvidia as checks
from iaprof.record.sources import cupti, nvidia
from unit.record.fakenvml import FakeNvml

OPEN = "NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (builder@host)  Fri Oct 10 2025"
CLOSED = "NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023"


class NvidiaMachine:
    """Its GPUs are nvidia0, nvidia1, ... at the PCI addresses 0000:01:00.0, 0000:02:00.0, ..."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.cupti: list[str] = []
        self.nvml = FakeNvml()
        folder = root / "driver"
        monkeypatch.setattr(nvidia, "GPUS", folder / "gpus")
        monkeypatch.setattr(cupti, "DRIVER_VERSION", folder / "version")
        monkeypatch.setattr(nvidia, "_PCI", root / "pci")
        monkeypatch.setattr(checks, "DRIVER", folder)
        monkeypatch.setattr(checks, "PROC", root / "proc")
        monkeypatch.setattr(checks, "cupti_paths", lambda: self.cupti)
        monkeypatch.setitem(sys.modules, "pynvml", self.nvml)
        (root / "proc").mkdir()

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def install(self, *names: str, version: str = OPEN, admin_only: int = 1, device: int = 0x2335) -> None:
        """Installs the driver, and GPUs with these names."""
        self.write("driver/version", f"NVRM version: {version}\nGCC version:  gcc version 13.3.0 (Ubuntu)\n")
        self.write("driver/params", f"ModifyDeviceFiles: 1\nRmProfilingAdminOnly: {admin_only}\nDmaRemapPeerMmio: 1\n")
        for number, name in enumerate(names):
            bus = f"0000:{number + 1:02x}:00.0"
            self.add_to_bus(bus, 0x10DE, device, 0x030200)
            self.write(
                f"driver/gpus/{bus}/information",
                f"Model: \t\t {name}\nIRQ:   \t\t 90\nGPU UUID: \t GPU-01234567\nBus Location: \t {bus}\n"
                f"Device Minor: \t {number}\nGPU Excluded:\t No\n",
            )
            self.nvml.buses.append(bus)

    def add_to_bus(self, bus: str, vendor: int, device: int, of_class: int) -> None:
        for name, number in (("vendor", vendor), ("device", device), ("class", of_class)):
            self.write(f"pci/{bus}/{name}", f"{number:#x}\n")

    def run(self, names: Sequence[str]) -> None:
        """Starts processes, from pid 100 on."""
        for number, name in enumerate(names):
            self.write(f"proc/{100 + number}/comm", f"{name[:15]}\n")


@pytest.fixture
def machine_of_nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvidiaMachine:
    return NvidiaMachine(tmp_path, monkeypatch)
