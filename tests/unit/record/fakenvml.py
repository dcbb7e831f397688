"""A stand-in for the module pynvml of the package nvidia-ml-py: GPUs with settable answers, each of which can fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED, NOT_FOUND, DRIVER_NOT_LOADED, GPU_IS_LOST, UNKNOWN = 3, 6, 9, 15, 999
_TEXTS = {3: "Not Supported", 6: "Not Found", 9: "Driver Not Loaded", 15: "GPU is lost", 999: "Unknown Error"}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return _TEXTS[self.value]


class FakeNvml:
    """The module. Its answers are those of an H200 (132 multiprocessors)."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_FI_DEV_POWER_INSTANT, nvmlMemory_v2 = 186, 0x2000028

    def __init__(self, *buses: str) -> None:
        self.buses = list(buses)
        self.fails: dict[str, int] = {}  # errors of functions by their names
        self.calls: list[str] = []
        self.opened = 0
        self.answers: dict[str, Any] = {
            "ClockInfo": {1: 1980, 2: 3201},
            "UtilizationRates": (97, 40),
            "PowerInstant": 650_000,
            "PowerUsage": 600_000,
            "TotalEnergyConsumption": 5_000_000,
            "Temperature": 48,
            "MemoryInfo": 3 << 30,
            "CudaComputeCapability": (9, 0),
            "NumGpuCores": 16896,
            "MigMode": [0, 0],
        }

    def _answer(self, name: str, function: str = "") -> Any:
        function = function or f"nvmlDeviceGet{name}"
        self.calls.append(function)
        if function in self.fails:
            raise NVMLError(self.fails[function])
        return self.answers.get(name)

    def nvmlInit(self) -> None:
        self._answer("", "nvmlInit")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self._answer("", "nvmlShutdown")
        self.opened -= 1

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:
        self._answer("HandleByPciBusId")
        if bus not in self.buses:
            raise NVMLError(NOT_FOUND)
        return bus

    def nvmlDeviceGetClockInfo(self, gpu: str, clock: int) -> int:
        return int(self._answer("ClockInfo")[clock])

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:
        of_gpu, of_memory = self._answer("UtilizationRates")
        return SimpleNamespace(gpu=of_gpu, memory=of_memory)

    def nvmlDeviceGetFieldValues(self, gpu: str, fields: list[int]) -> list[Any]:
        assert fields == [self.NVML_FI_DEV_POWER_INSTANT]
        self.calls.append("nvmlDeviceGetFieldValues")
        failure = self.fails.get("nvmlDeviceGetFieldValues", 0)
        return [SimpleNamespace(nvmlReturn=failure, value=SimpleNamespace(uiVal=self.answers["PowerInstant"]))]

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        return int(self._answer("PowerUsage"))

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:
        return int(self._answer("TotalEnergyConsumption"))

    def nvmlDeviceGetTemperatureV(self, gpu: str, sensor: int) -> int:
        return int(self._answer("Temperature", "nvmlDeviceGetTemperatureV"))

    def nvmlDeviceGetTemperature(self, gpu: str, sensor: int) -> int:
        return int(self._answer("Temperature"))

    def nvmlDeviceGetMemoryInfo(self, gpu: str, version: int = 1) -> Any:
        reserved = 0 if version == self.nvmlMemory_v2 else 1 << 30
        return SimpleNamespace(used=self._answer("MemoryInfo") + reserved)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: str) -> tuple[int, int]:
        major, minor = self._answer("CudaComputeCapability")
        return major, minor

    def nvmlDeviceGetNumGpuCores(self, gpu: str) -> int:
        return int(self._answer("NumGpuCores"))

    def nvmlDeviceGetMigMode(self, gpu: str) -> list[int]:
        current, pending = self._answer("MigMode")
        return [current, pending]
