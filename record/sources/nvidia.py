"""The GPUs of NVIDIA's driver as users know them: what the driver, the PCI bus and NVML say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from iaprof.gpu.nvidia.architectures import GENERATIONS, instruction_set
from iaprof.gpu.nvidia.records import PC_SAMPLES
from iaprof.record.sources.cuda import DEFAULT_PERIOD, PERIODS, find_gpus
from iaprof.record.sources.nvml import Nvml

OLDEST = (7, 0)
TOO_OLD = "CUPTI samples instructions on GPUs of compute capability 7.0 (Volta) or newer"
_PCI = Path("/sys/bus/pci/devices")
_VENDOR = 0x10DE


@dataclass(frozen=True)
class Device:
    """A GPU; what is not known is None."""

    card: str  # such as nvidia0
    path: str  # of its device node
    name: str
    pci_address: str
    pci_id: str  # vendor and device
    compute_capability: str | None
    generation: str | None
    multiprocessors: int | None
    mig: bool | None  # whether it is divided into instances
    problem: str  # why it cannot be sampled; empty if it can
    layout: str = PC_SAMPLES.name
    rates: tuple[int, ...] = tuple(1 << period for period in PERIODS)  # GPU cycles between samples, fastest first
    default_rate: int = 1 << DEFAULT_PERIOD


def devices() -> tuple[list[Device], str]:
    """Returns the GPUs, and why less is known of them than could be; empty if all is known."""
    gpus = find_gpus()
    if not gpus:
        return [], ""
    nvml = Nvml()
    try:
        found = []
        for gpu in gpus:
            facts = nvml.facts(gpu.bus)
            compute = facts.compute_capability
            known = instruction_set(*compute) if compute else None
            found.append(
                Device(
                    card=f"nvidia{gpu.minor}" if gpu.minor else "",
                    path=f"/dev/nvidia{gpu.minor}" if gpu.minor else "",
                    name=gpu.name,
                    pci_address=gpu.bus,
                    pci_id=_pci_id(gpu.bus),
                    compute_capability=f"{compute[0]}.{compute[1]}" if compute else None,
                    generation=GENERATIONS[known] if known else None,
                    multiprocessors=facts.multiprocessors,
                    mig=facts.mig,
                    problem=TOO_OLD if compute and compute < OLDEST else "",
                )
            )
        return found, nvml.problem
    finally:
        nvml.close()


def buses() -> set[str]:
    """Returns the PCI addresses of the GPUs."""
    return {gpu.bus for gpu in find_gpus()}


def undriven() -> list[str]:
    """Returns the PCI addresses of NVIDIA's GPUs that NVIDIA's driver does not drive."""
    driven = buses()
    found = []
    for path in sorted(_PCI.glob("*")):
        is_gpu = _number(path, "vendor") == _VENDOR and _number(path, "class") >> 16 == 3
        if is_gpu and path.name.lower() not in driven:
            found.append(path.name.lower())
    return found


def _pci_id(bus: str) -> str:
    return f"{_number(_PCI / bus, 'vendor') or _VENDOR:04x}:{_number(_PCI / bus, 'device'):04x}"


def _number(folder: Path, name: str) -> int:
    try:
        return int((folder / name).read_text(), 16)
    except (OSError, ValueError):
        return 0
