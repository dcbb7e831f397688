"""Metrics of NVIDIA's GPUs: what NVML says becomes rows, and what it does not say a sentence."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from iaprof.formats.capture.metric_values import decode
from iaprof.record.sources import metrics, nvml
from iaprof.record.sources.metrics import PAUSE, Metering, Metrics
from iaprof.record.sources.nvml import Facts, Nvml, NvmlGpu
from unit.record.fakenvml import DRIVER_NOT_LOADED, GPU_IS_LOST, NOT_SUPPORTED, UNKNOWN, FakeNvml

S = 1_000_000_000
BUS = "0000:01:00.0"


class Clock:
    """CLOCK_MONOTONIC, which stands still but for calls of NVML that take time."""

    now = 0

    def monotonic_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(BUS)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def measure(library: Nvml) -> Metrics:
    return Metrics([NvmlGpu(library, 3, BUS, "/dev/nvidia0")])


def taken(measured: Metrics) -> list[tuple[str, int, Any]]:
    """All that was measured: (name, stream, value)."""
    rows = [row for meta, data in measured.take() for row in decode(meta, data).to_pylist()]
    return [(row["name"], row["stream"], row["value"]) for row in rows]


def test_a_gpu_with_everything(fake: FakeNvml, clock: Clock) -> None:
    library = Nvml()
    measured = measure(library)
    measured.sample()
    clock.now += S
    fake.answers |= {"TotalEnergyConsumption": 5_700_500, "Temperature": -2, "UtilizationRates": (100, 41)}
    measured.sample()
    assert measured.problems == []
    assert taken(measured) == [
        ("frequency-actual-MHz", 3, 1980.0),
        ("frequency-memory-MHz", 3, 3201.0),
        ("busy-compute-percent", 3, 100.0),
        ("busy-memory-percent", 3, 41.0),
        ("power-card-W", 3, pytest.approx(650.0)),
        ("energy-card-J", 3, pytest.approx(5700.5)),
        ("temperature-gpu-C", 3, -2.0),
        ("memory-used-MiB", 3, 3072.0),
    ]
    measured.close()
    library.close()
    assert fake.opened == 0
    assert measure(library).problems == ["NVML is closed"]


def test_without_the_package_there_is_one_sentence(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    library = Nvml()
    measured = Metrics([NvmlGpu(library, number, BUS, f"/dev/nvidia{number}") for number in range(8)])
    measured.sample()
    assert measured.problems == [nvml.NO_PACKAGE]
    assert taken(measured) == []
    assert library.facts(BUS) == Facts()
    library.close()


def test_without_the_library_there_is_one_sentence(fake: FakeNvml, clock: Clock) -> None:
    fake.fails["nvmlInit"] = DRIVER_NOT_LOADED
    library = Nvml()
    assert measure(library).problems == [
        "NVIDIA's GPUs have no metrics, as NVML cannot be used: Driver Not Loaded"
    ]  # fmt: skip
    library.close()


def test_a_gpu_that_nvml_does_not_know(fake: FakeNvml, clock: Clock) -> None:
    fake.buses.clear()
    library = Nvml()
    assert measure(library).problems == ["/dev/nvidia0: nothing is measured: NVML says 'Not Found'"]
    assert library.facts(BUS) == Facts()


def test_what_a_gpu_cannot_measure_is_said_and_the_rest_is_measured(fake: FakeNvml, clock: Clock) -> None:
    for name in ("UtilizationRates", "TotalEnergyConsumption", "MemoryInfo"):
        fake.fails[f"nvmlDeviceGet{name}"] = NOT_SUPPORTED
    measured = measure(Nvml())
    measured.sample()
    clock.now += S
    measured.sample()
    assert [name for name, _, _ in taken(measured)] == [
        "frequency-actual-MHz", "frequency-memory-MHz", "power-card-W", "temperature-gpu-C",
    ]  # fmt: skip
    assert measured.problems == [
        f"/dev/nvidia0: {what} is not measured: NVML says 'Not Supported'"
        for what in ("its use", "its energy", "its memory")
    ]


def test_a_gpu_that_can_measure_nothing(fake: FakeNvml, clock: Clock) -> None:
    fake.fails |= dict.fromkeys([name for name in dir(fake) if name.startswith("nvmlDeviceGet")], NOT_SUPPORTED)
    del fake.fails["nvmlDeviceGetHandleByPciBusId"]
    measured = measure(Nvml())
    measured.sample()
    assert len(measured.problems) == 7
    assert taken(measured) == []


def test_older_drivers_and_packages(fake: FakeNvml, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.fails |= dict.fromkeys(("nvmlDeviceGetFieldValues", "nvmlDeviceGetTemperatureV"), NOT_SUPPORTED)
    monkeypatch.delattr(FakeNvml, "nvmlMemory_v2")
    monkeypatch.setattr(
        FakeNvml, "nvmlDeviceGetMemoryInfo", lambda fake, gpu: SimpleNamespace(used=fake.answers["MemoryInfo"])
    )
    measured = measure(Nvml())
    measured.sample()
    clock.now += S
    measured.sample()
    assert measured.problems == []
    values = {name: value for name, _, value in taken(measured)}
    assert (values["power-card-W"], values["temperature-gpu-C"], values["memory-used-MiB"]) == (600.0, 48.0, 3072.0)
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetMemoryInfo")
    (problem,) = measure(Nvml()).problems
    assert problem == "/dev/nvidia0: its memory is not measured: nvidia-ml-py is too old for it"


def test_a_number_that_is_not_there_now_takes_only_itself(fake: FakeNvml, clock: Clock) -> None:
    measured = measure(Nvml())
    for second in range(5):
        fake.fails = {"nvmlDeviceGetUtilizationRates": UNKNOWN} if second in (2, 3) else {}
        measured.sample()
        clock.now += S
    names = [name for name, _, _ in taken(measured)]
    assert names.count("busy-compute-percent") == names.count("busy-memory-percent") == 2
    assert names.count("power-card-W") == names.count("energy-card-J") == 4
    assert measured.problems == []


def test_a_gpu_that_vanishes_is_reported_once_and_what_was_read_stays(fake: FakeNvml, clock: Clock) -> None:
    measured = measure(Nvml())
    for second in range(6):
        if second == 3:
            fake.fails = dict.fromkeys(("nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperatureV"), GPU_IS_LOST)
        measured.sample()
        clock.now += S
    assert measured.problems == [
        f"/dev/nvidia0: {what} cannot be measured any more: NVML says 'GPU is lost'"
        for what in ("clocks, use, power and energy", "temperature and memory")
    ]
    names = [name for name, _, _ in taken(measured)]
    assert names.count("power-card-W") == names.count("temperature-gpu-C") == 2
    assert taken(measured) == []


def test_the_library_is_asked_seldom(fake: FakeNvml, clock: Clock) -> None:
    measured = measure(Nvml())
    fake.calls.clear()
    for _ in range(1000):  # 10 s
        measured.sample()
        clock.now += S // 100
    assert fake.calls.count("nvmlDeviceGetTotalEnergyConsumption") == 100
    assert fake.calls.count("nvmlDeviceGetTemperatureV") == 10


def test_a_slow_library_is_asked_more_seldom(
    fake: FakeNvml, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    # given a library that takes 5 ms to say how much energy was used
    def slow(fake: FakeNvml, gpu: str) -> int:
        clock.now += 5_000_000
        spent.append(5_000_000)
        return 1

    spent: list[int] = []
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetTotalEnergyConsumption", slow)
    measured = measure(Nvml())
    spent.clear()
    begin = clock.now
    while clock.now < begin + 100 * S:
        measured.sample()
        clock.now += S // 100
    assert 0 < sum(spent) <= (clock.now - begin) / PAUSE + 5_000_000


def test_a_library_that_was_slow_once_is_asked_as_often(
    fake: FakeNvml, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    # given that another program has the CPU for 50 ms, while one of many answers is waited for
    def answer(fake: FakeNvml, gpu: str) -> int:
        asked.append(clock.now)
        clock.now += 50_000_000 if len(asked) == 10 else 0
        return 1

    asked: list[int] = []
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetTotalEnergyConsumption", answer)
    measured = measure(Nvml())
    for _ in range(300):  # 3 s
        measured.sample()
        clock.now += S // 100
    assert max(after - before for before, after in pairwise([*asked, clock.now])) < S // 4


def test_gpus_that_appear_while_it_records(fake: FakeNvml, clock: Clock) -> None:
    # given a sampler whose GPUs become known with their contexts, the second one unknown to NVML
    library = Nvml()
    known: list[NvmlGpu] = []
    opened: list[bool] = []
    told: list[str] = []
    actions: list[Any] = []
    sampler: Any = SimpleNamespace(open_metrics=lambda: opened.append(True), metered=lambda: list(known))
    journal: Any = SimpleNamespace(inform=told.append)
    loop: Any = SimpleNamespace(at=lambda due, action: actions.append(action))
    source = Metering(sampler, 10_000_000)
    source.start(journal, loop)
    source.resume()
    actions.pop()()
    assert (opened, told) == ([True], [])
    # when
    known.append(NvmlGpu(library, 0, BUS, "/dev/nvidia0"))
    known.append(NvmlGpu(library, 1, "0000:02:00.0", "/dev/nvidia1"))
    for _ in range(3):
        actions.pop()()
        clock.now += S
    # then
    assert told == ["/dev/nvidia1: nothing is measured: NVML says 'Not Found'"]
    assert source._metrics is not None
    assert {stream for _, stream, _ in taken(source._metrics)} == {0}
    source.close()


def test_the_loop_wakes_when_numbers_are_due(fake: FakeNvml, clock: Clock) -> None:
    # given a GPU whose numbers are due ten times a second, and metrics that may be read a hundred times
    sampler: Any = SimpleNamespace(open_metrics=lambda: None, metered=lambda: [NvmlGpu(Nvml(), 0, BUS, "/dev/nvidia0")])
    asked: list[tuple[int, Any]] = []
    loop: Any = SimpleNamespace(at=lambda due, action: asked.append((due, action)))
    source = Metering(sampler, 10_000_000)
    source.start(SimpleNamespace(inform=None), loop)  # type: ignore[arg-type]
    source.resume()
    # when
    begin = clock.now
    while (next_beat := asked[-1])[0] <= begin + 10 * S:
        clock.now = next_beat[0]
        next_beat[1]()
    # then
    assert source._metrics is not None
    read = [name for name, *_ in taken(source._metrics)].count("energy-card-J")
    assert 99 <= read <= len(asked) <= 101
    source.close()


def test_nothing_is_opened_without_metrics() -> None:
    opened: list[bool] = []
    sampler: Any = SimpleNamespace(open_metrics=lambda: opened.append(True))
    Metering(sampler, 0)
    assert opened == []


@pytest.mark.parametrize(
    ("compute", "cores", "multiprocessors"),
    [
        ((9, 0), 16896, 132),
        ((8, 0), 6912, 108),
        ((8, 9), 18176, 142),
        ((7, 0), 5120, 80),
        ((12, 1), 6144, 48),
        ((6, 1), 3584, None),
        ((13, 0), 20480, None),
        ((9, 0), 0, None),
    ],
)
def test_facts(fake: FakeNvml, compute: tuple[int, int], cores: int, multiprocessors: int | None) -> None:
    fake.answers |= {"CudaComputeCapability": compute, "NumGpuCores": cores, "MigMode": [1, 1]}
    assert Nvml().facts(BUS) == Facts(compute, multiprocessors, True)
    fake.fails = {"nvmlDeviceGetMigMode": NOT_SUPPORTED, "nvmlDeviceGetNumGpuCores": NOT_SUPPORTED}
    assert Nvml().facts(BUS) == Facts(compute, None, None)
