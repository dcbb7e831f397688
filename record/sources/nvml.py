"""NVIDIA's management library NVML: what it knows of a GPU, and the metrics that it measures.

It is libnvidia-ml.so.1, which comes with the driver; the package nvidia-ml-py calls it (its module is called pynvml).
A call takes from 10 us to some ms, as the driver may have to ask the GPU's firmware. NVML has samples of its own: the
use of a GPU is that of the last 1/6 to 1 s, so asking often tells nothing new.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from iaprof.formats.capture.metrics import FREQUENCY_ACTUAL, MISSING, Derivation, Metric, busy
from iaprof.record.sources.metered import Measured, Metered, NotMeasured

FAST_NS = 100_000_000  # clocks, power, energy, use
SLOW_NS = 1_000_000_000  # temperature, memory
NO_PACKAGE = "metrics of NVIDIA's GPUs need the package nvidia-ml-py: pip install nvidia-ml-py"
_U64 = (1 << 64) - 1
_UNINITIALIZED, _DRIVER_NOT_LOADED, _GPU_IS_LOST, _RESET_REQUIRED, _GPU_NOT_FOUND = 1, 9, 15, 16, 28
_GONE = (_UNINITIALIZED, _DRIVER_NOT_LOADED, _GPU_IS_LOST, _RESET_REQUIRED, _GPU_NOT_FOUND)
"""NVML_ERROR_*, after which nothing can be measured any more."""
_CORES = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_NEWER_CORES, _NEWEST = 128, (12, 1)
"""FP32 cores of each multiprocessor by compute capability, up to _NEWEST: CUDA C++ Programming Guide."""


@dataclass(frozen=True)
class Facts:
    """What NVML knows of a GPU; None if it does not say."""

    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    mig: bool | None = None  # whether it is divided into instances


class Nvml:
    """The library, or the reason why there is none."""

    def __init__(self) -> None:
        """Opens the library. That may take seconds if no program uses a GPU, as the driver then initializes them."""
        self.problem = ""  # a sentence
        self.module: Any = None
        try:
            import pynvml
        except ImportError:
            self.problem = NO_PACKAGE
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.problem = f"NVIDIA's GPUs have no metrics, as NVML cannot be used: {error}"
            return
        self.module = pynvml

    def find(self, bus: str) -> Any:
        """Returns the library's handle of the GPU with this PCI address; NVMLError if there is none."""
        return self.module.nvmlDeviceGetHandleByPciBusId(bus)

    def facts(self, bus: str) -> Facts:
        """Returns what the library knows of a GPU."""
        if self.problem:
            return Facts()
        nvml = self.module
        try:
            gpu = self.find(bus)
        except nvml.NVMLError:
            return Facts()
        names = ("CudaComputeCapability", "NumGpuCores", "MigMode")
        capability, cores, mig = (self._answer(f"nvmlDeviceGet{name}", gpu) for name in names)
        compute = None if capability is None else (int(capability[0]), int(capability[1]))
        return Facts(compute, _multiprocessors(cores, compute), None if mig is None else bool(mig[0]))

    def _answer(self, function: str, gpu: Any) -> Any:
        try:
            return getattr(self.module, function)(gpu)
        except (self.module.NVMLError, AttributeError):  # an older driver, an older package
            return None

    def close(self) -> None:
        """Closes the library."""
        if self.module is not None:
            with contextlib.suppress(self.module.NVMLError):
                self.module.nvmlShutdown()
            self.module, self.problem = None, "NVML is closed"


def _multiprocessors(cores: int | None, compute: tuple[int, int] | None) -> int | None:
    if cores is None or compute is None or not min(_CORES) <= compute <= _NEWEST:
        return None
    return cores // _CORES.get(compute, _NEWER_CORES) or None


# Each asks for numbers: (pynvml, the GPU's handle). NVMLError if there are none.


def _sm_clock(nvml: Any, gpu: Any) -> Sequence[int]:
    return (nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),)


def _memory_clock(nvml: Any, gpu: Any) -> Sequence[int]:
    return (nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),)


def _use(nvml: Any, gpu: Any) -> Sequence[int]:
    rates = nvml.nvmlDeviceGetUtilizationRates(gpu)
    return rates.gpu, rates.memory


def _instant_power(nvml: Any, gpu: Any) -> Sequence[int]:
    (answer,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])
    if answer.nvmlReturn:
        raise nvml.NVMLError(answer.nvmlReturn)
    return (answer.value.uiVal,)


def _power(nvml: Any, gpu: Any) -> Sequence[int]:
    return (nvml.nvmlDeviceGetPowerUsage(gpu),)  # the mean of a second on GPUs that know the power of the instant, too


def _energy(nvml: Any, gpu: Any) -> Sequence[int]:
    return (nvml.nvmlDeviceGetTotalEnergyConsumption(gpu),)


def _temperature(nvml: Any, gpu: Any) -> Sequence[int]:
    return (nvml.nvmlDeviceGetTemperatureV(gpu, nvml.NVML_TEMPERATURE_GPU),)


def _old_temperature(nvml: Any, gpu: Any) -> Sequence[int]:
    return (nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),)


def _memory(nvml: Any, gpu: Any) -> Sequence[int]:
    return (nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).used,)


def _old_memory(nvml: Any, gpu: Any) -> Sequence[int]:
    return (nvml.nvmlDeviceGetMemoryInfo(gpu).used,)  # with what the driver reserves


_Read = Callable[[Any, Any], Sequence[int]]


@dataclass(frozen=True)
class _Quantity:
    """Something that NVML measures."""

    what: str
    reads: tuple[_Read, ...]  # the first one that works is used
    metrics: tuple[tuple[str, float], ...]  # the names of its numbers, and the factors to the units in the names


_QUANTITIES = (
    (
        "clocks, use, power and energy",
        FAST_NS,
        (
            _Quantity("the clock of its multiprocessors", (_sm_clock,), ((FREQUENCY_ACTUAL, 1.0),)),
            _Quantity("its memory's clock", (_memory_clock,), (("frequency-memory-MHz", 1.0),)),
            _Quantity("its use", (_use,), ((busy("compute"), 1.0), (busy("memory"), 1.0))),
            _Quantity("its power", (_instant_power, _power), (("power-card-W", 1e-3),)),
            _Quantity("its energy", (_energy,), (("energy-card-J", 1e-3),)),
        ),
    ),
    (
        "temperature and memory",
        SLOW_NS,
        (
            _Quantity("its temperature", (_temperature, _old_temperature), (("temperature-gpu-C", 1.0),)),
            _Quantity("its memory", (_memory, _old_memory), (("memory-used-MiB", 2.0**-20),)),
        ),
    ),
)
"""What is read together, and how often."""


class NvmlGpu(Metered):
    """A GPU of NVIDIA's driver."""

    def __init__(self, nvml: Nvml, stream: int, bus: str, name: str) -> None:
        self._nvml, self.stream, self.card, self.name = nvml, stream, bus, name

    def open(self, with_card: bool) -> Iterator[Measured | NotMeasured]:
        """See Metered."""
        if self._nvml.problem:
            yield NotMeasured(self._nvml.problem)
            return
        nvml = self._nvml.module
        try:
            gpu = self._nvml.find(self.card)
        except nvml.NVMLError as error:
            yield NotMeasured(f"{self.name}: nothing is measured: NVML says '{error}'")
            return
        for what, period_ns, quantities in _QUANTITIES if with_card else ():
            numbers = _Numbers(nvml, gpu)
            metrics: list[Metric] = []
            for quantity in quantities:
                column = 1 + len(numbers)
                if why := numbers.add(quantity.reads, len(quantity.metrics)):
                    yield NotMeasured(f"{self.name}: {quantity.what} is not measured: {why}")
                    continue
                for place, (name, scale) in enumerate(quantity.metrics):
                    metrics.append(Metric(name, Derivation.VALUE, (column + place,), scale=scale))
            yield Measured(what, numbers, metrics, period_ns)


class _Numbers:
    """Numbers of a GPU. Each read asks the driver again."""

    def __init__(self, nvml: Any, gpu: Any) -> None:
        self._nvml, self._gpu = nvml, gpu
        self._reads: list[tuple[_Read, int]] = []

    def __len__(self) -> int:
        return sum(width for _, width in self._reads)

    def add(self, reads: Sequence[_Read], width: int) -> str:
        """Adds the numbers of the first of these that works; returns why none does, or ""."""
        why = ""
        for read in reads:
            try:
                read(self._nvml, self._gpu)
            except self._nvml.NVMLError as error:
                why = f"NVML says '{error}'"
            except AttributeError:  # an older package
                why = why or "nvidia-ml-py is too old for it"
            else:
                self._reads.append((read, width))
                return ""
        return why

    def read(self) -> bytes:
        """See Numbers."""
        numbers: list[int] = []
        for read, width in self._reads:
            try:
                numbers += read(self._nvml, self._gpu)
            except self._nvml.NVMLError as error:
                if error.value in _GONE:
                    raise OSError(errno.ENODEV, f"NVML says '{error}'") from error
                numbers += [MISSING] * width
        return b"".join((number & _U64).to_bytes(8, "little") for number in numbers)

    def close(self) -> None:
        """See Numbers: nothing is open for them."""
