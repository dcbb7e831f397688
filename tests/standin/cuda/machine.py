# SPDX-License-Identifier: Apache-2.0
"""A machine with NVIDIA's driver and no GPU of Intel's: what the recorder sees in /proc, shown by xe.c's library."""

from __future__ import annotations

from pathlib import Path

from standin import hardware
from standin.cuda.runtime import build

INFORMATION = """\
Model: \t\t {name}
IRQ:   \t\t 77
GPU UUID: \t GPU-{number:08x}-0000-0000-0000-000000000000
Video BIOS: \t 96.00.00.00.00
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {bus}
Device Minor: \t {number}
GPU Firmware: \t 580.159.04
GPU Excluded:\t No
"""
"""Of /proc/driver/nvidia/gpus/BUS/information, as driver 580 writes it."""


class Machine:
    """The files of a machine with some GPUs."""

    def __init__(self, folder: Path, gpus: int = 2) -> None:
        """Makes the files."""
        self.folder, self.programs, self._gpus = folder, build(), gpus
        root = folder / "sysfs"
        for each in ("dev/dri", "sys/class/drm", "proc/sys/dev"):
            (root / each).mkdir(parents=True)
        for number in range(gpus):
            bus = f"0000:{0x1B + number:02x}:00.0"
            gpu = root / "proc/driver/nvidia/gpus" / bus
            gpu.mkdir(parents=True)
            (gpu / "information").write_text(INFORMATION.format(name="Stand-in GPU", number=number, bus=bus))
        (root / "proc/driver/nvidia/params").write_text("RmProfilingAdminOnly: 0\n")
        version = "NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@host)"
        (root / "proc/driver/nvidia/version").write_text(f"NVRM version: {version}\nGCC version:  gcc version 13\n")

    @property
    def ledger(self) -> Path:
        """Where programs write what they did: runtime.read_ledgers."""
        return self.folder / "ledger"

    def env(self, *faults: str) -> dict[str, str]:
        """What a recorder needs in its environment, and the program that it starts."""
        return {
            "LD_PRELOAD": str(hardware.build().driver),
            "STANDIN_DIR": str(self.folder),
            "STANDIN_CUDA_DEVICES": str(self._gpus),
            **self.programs.env(self.ledger, faults),
        }
