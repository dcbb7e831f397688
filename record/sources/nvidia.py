"""The GPUs of NVIDIA's driver as users know them: what the driver, the PCI bus and NVML say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from iaprof.gpu.nvidia.architectures import GENERATIONS, instruction_set
from iaprof.record.sources.nvml import Nvml

GPUS = Path("/proc/driver/nvidia/gpus")
DEFAULT_PERIOD = 18  # as a power of 2, GPU cycles between samples of each multiprocessor
PERIODS = range(5, 32)
OLDEST = (7, 0)
TOO_OLD = "CUPTI samples instructions on GPUs of compute capability 7.0 (Volta) or newer"
_PCI = Path("/sys/bus/pci/devices")
_VENDOR = 0x10DE


@dataclass(frozen=True)
class Gpu:
    """A GPU, as NVIDIA's driver describes it in /proc."""

    bus: str  # in lower case: domain:bus:device.function
    name: str
    minor: str  # of /dev/nvidiaN; empty if unknown

    @property
    def card(self) -> str:
        """Its name, such as nvidia0; empty if unknown."""
        return f"nvidia{self.minor}" if self.minor else ""

    @property
    def path(self) -> str:
        """Its device node; empty if unknown."""
        return f"/dev/{self.card}" if self.minor else ""


def find_gpus() -> list[Gpu]:
    """Returns the GPUs of NVIDIA's driver."""
    found = []
    for path in sorted(GPUS.glob("*/information")):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        found.append(Gpu(path.parent.name.lower(), values.get("Model", ""), values.get("Device Minor", "")))
    return found


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
    layout: str  # of its records
    rates: tuple[int, ...] = tuple(1 << period for period in PERIODS)  # GPU cycles between samples, fastest first
    default_rate: int = 1 << DEFAULT_PERIOD


def devices() -> tuple[list[Device], str]:
    """Returns the GPUs, and why less is known of them than could be; empty if all is known."""
    gpus = find_gpus()
    if not gpus:
        return [], ""
    from iaprof.gpu.nvidia.records import PC_SAMPLES  # which imports NumPy

    nvml = Nvml()
    try:
        found = []
        for gpu in gpus:
            facts = nvml.facts(gpu.bus)
            compute = facts.compute_capability
            known = instruction_set(*compute) if compute else None
            found.append(
                Device(
                    card=gpu.card,
                    path=gpu.path,
                    name=gpu.name,
                    pci_address=gpu.bus,
                    pci_id=_pci_id(gpu.bus),
                    compute_capability=f"{compute[0]}.{compute[1]}" if compute else None,
                    generation=GENERATIONS[known] if known else None,
                    multiprocessors=facts.multiprocessors,
                    mig=facts.mig,
                    problem=TOO_OLD if compute and compute < OLDEST else "",
                    layout=PC_SAMPLES.name,
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
