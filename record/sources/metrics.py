"""Metrics of GPUs and of recorded processes: raw numbers, from which formats/capture/metric_values.py makes values.

Cards and kernels differ in what can be measured; what cannot is reported once and left out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from iaprof.formats.capture.metrics import (
    FREQUENCY_ACTUAL,
    FREQUENCY_REQUESTED,
    MISSING,
    Derivation,
    Metric,
    busy,
    describe,
)
from iaprof.record.cpu_use import CpuUse
from iaprof.record.sources.pmu import EventGroup, Pmu
from iaprof.record.sources.xe import Device, Gt

_MOST_DIGITS = 64
_U64 = (1 << 64) - 1


class NumberFiles:
    """Open files. Each read asks the driver again."""

    def __init__(self) -> None:
        """Begins without files."""
        self._fds: list[int] = []

    def __len__(self) -> int:
        return len(self._fds)

    def add(self, path: Path) -> int:
        """Opens one more file; returns its index in what `read` returns.

        Raises:
            OSError: the file cannot be opened.
        """
        self._fds.append(os.open(path, os.O_RDONLY))
        return len(self._fds) - 1

    def read(self) -> bytes:
        """Returns the numbers, little-endian u64, negative ones as two's complement; MISSING where there is none now.

        Raises:
            OSError: the device has vanished.
        """
        numbers = b""
        for fd in self._fds:
            try:
                number = int(os.pread(fd, _MOST_DIGITS, 0)) & _U64
            except ValueError:
                number = MISSING
            except OSError as error:
                if error.errno == errno.ENODEV:
                    raise
                number = MISSING
            numbers += number.to_bytes(8, "little")
        return numbers

    def close(self) -> None:
        """Closes the files."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


_INPUT = re.compile(r"(energy|temp|fan)([0-9]+)_input")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]+")


@dataclass(frozen=True)
class Sensor:
    """A readable sensor."""

    kind: str  # `energy`, in microjoules since some time; `temp`, in millidegrees Celsius; `fan`, in RPM
    place: str  # the part of the card, as the driver labels it, or the sensor's number
    path: Path


def sensors(device: Path) -> Iterator[Sensor]:
    """Yields the sensors of a card.

    Args:
        device: the card's folder in sysfs.
    """
    for path in sorted(device.glob("hwmon/hwmon*/*_input")):
        if match := _INPUT.fullmatch(path.name):
            yield Sensor(match[1], _place(path, match[2]), path)


def _place(path: Path, number: str) -> str:
    try:
        label = path.with_name(path.name.replace("_input", "_label")).read_text()
    except (OSError, ValueError):
        return number
    return _NOT_IN_NAMES.sub("-", label.strip())[:32] or number


DRM = Path("/sys/class/drm")
ENERGY_NS = 100_000_000  # the firmware updates energy at times of its own: over shorter spans power would jump
SLOW_NS = 1_000_000_000

_FREQUENCIES = (
    (FREQUENCY_ACTUAL, "gt-actual-frequency", "act_freq"),
    (FREQUENCY_REQUESTED, "gt-requested-frequency", "cur_freq"),
)
"""Metrics; events of the PMU; files in freq0 with the same numbers (drivers/gpu/drm/xe/xe_gt_freq.c)."""

_NEVER = sys.maxsize

_CLASSES = {0: "render", 1: "copy", 2: "video-decode", 3: "video-enhance", 4: "compute"}
"""DRM_XE_ENGINE_CLASS_* of xe_drm.h, Linux 6.15; its other classes are not hardware."""


@dataclass(frozen=True)
class MeteredGt:
    """A GT whose metrics are recorded."""

    stream: int  # index into the header's `streams`
    device: Device
    gt: Gt


class Metrics:
    """All metrics."""

    def __init__(self, gts: Sequence[MeteredGt]) -> None:
        """Opens what can be measured of these GTs and their cards; nothing is measured before the first `sample`."""
        self.problems: list[str] = []  # sentences that say what is not measured; grows when a device vanishes
        self._cpu = CpuUse()
        self._counters: list[_Counters] = []
        for gt in gts:
            self.add(gt)

    def add(self, metered: MeteredGt) -> None:
        """Measures one more GT, and its card if this is the card's first GT."""
        first = all(counters.card != metered.device.pci_address for counters in self._counters)
        self._open_gt(metered)
        if first:
            self._open_card(metered)

    def watch(self, pids: Iterable[int]) -> None:
        """Measures the CPU use of these processes, too; of many processes, of those named last."""
        self._cpu.watch(pids, time.monotonic_ns())

    def sample(self) -> None:
        """Reads what is due. Never raises: a device that has vanished is a problem."""
        now = time.monotonic_ns()
        for source in self._sources():
            if now >= source.due:
                source.due = now + source.period_ns
                try:
                    source.sample(now)
                except OSError as error:
                    self.problems.append(f"{source} cannot be measured any more: {error.strerror}")
                    source.close()
                    source.due = _NEVER

    def take(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields what was read since the last call: descriptions and rows for formats.capture.metric_values.decode."""
        for source in self._sources():
            if rows := source.take():
                yield source.meta, rows
        self._counters = [counters for counters in self._counters if counters.due < _NEVER]

    def close(self) -> None:
        """Closes all metrics; `take` still returns the rest."""
        for source in self._sources():
            source.close()
            source.due = _NEVER

    def _sources(self) -> list[_Counters | CpuUse]:
        return [*self._counters, self._cpu]

    def _open_gt(self, metered: MeteredGt) -> None:
        try:
            pmu = Pmu(metered.device.pci_address)
        except (OSError, ValueError) as error:
            pmu = None
            self._add_problem(metered, "its engines' use", f"the card's perf PMU is needed for it: {_why(error)}")
        events, files = EventGroup(), NumberFiles()
        counted: list[Metric] = []
        shown: list[Metric] = []
        folder = _folder(metered) / f"tile{metered.gt.tile}" / f"gt{metered.gt.id}" / "freq0"
        for name, event, file in _FREQUENCIES:
            with contextlib.suppress(OSError, ValueError):
                if pmu is not None and pmu.unit(event) == "MHz":
                    counted.append(Metric(name, Derivation.STEP, (1 + events.add(pmu, event, gt=metered.gt.id),)))
                    continue
            try:
                shown.append(Metric(name, Derivation.VALUE, (1 + files.add(folder / file),)))
            except OSError as error:
                self._add_problem(metered, name, _why(error))
        if pmu is not None:
            counted += self._engines(metered, pmu, events)
        self._add_counters(metered, "the counters", events, counted, 0)
        self._add_counters(metered, "the frequency", files, shown, 0)

    def _engines(self, metered: MeteredGt, pmu: Pmu, events: EventGroup) -> Iterator[Metric]:
        ticks: dict[int, list[tuple[int, int]]] = {}
        for engine in metered.device.engines:
            if engine.gt != metered.gt.id or engine.engine_class not in _CLASSES:
                continue
            fields = {"gt": engine.gt, "engine_class": engine.engine_class, "engine_instance": engine.instance}
            try:
                active = 1 + events.add(pmu, "engine-active-ticks", **fields)
                total = 1 + events.add(pmu, "engine-total-ticks", **fields)
            except (OSError, ValueError) as error:
                self._add_problem(metered, f"the use of its {_CLASSES[engine.engine_class]} engine", _why(error))
            else:
                ticks.setdefault(engine.engine_class, []).append((active, total))
        for engine_class, pairs in ticks.items():
            active_columns, total_columns = zip(*pairs, strict=True)
            yield Metric(busy(_CLASSES[engine_class]), Derivation.SHARE, active_columns, total_columns, 100.0)

    def _open_card(self, metered: MeteredGt) -> None:
        energy, other_files = NumberFiles(), NumberFiles()
        energies: list[Metric] = []
        other_metrics: list[Metric] = []
        for sensor in sensors(_folder(metered)):
            files = energy if sensor.kind == "energy" else other_files
            try:
                column = (1 + files.add(sensor.path),)
            except OSError as error:
                self._add_problem(metered, str(sensor.path), _why(error))
                continue
            match sensor.kind:
                case "energy":
                    energies.append(Metric(f"energy-{sensor.place}-J", Derivation.VALUE, column, scale=1e-6))
                    energies.append(Metric(f"power-{sensor.place}-W", Derivation.RATE, column, scale=1e-6))
                case "temp":
                    other_metrics.append(Metric(f"temperature-{sensor.place}-C", Derivation.VALUE, column, scale=1e-3))
                case "fan":
                    other_metrics.append(Metric(f"fan-{sensor.place}-RPM", Derivation.VALUE, column))
        self._add_counters(metered, "the energy", energy, energies, ENERGY_NS)
        self._add_counters(metered, "temperature and fan", other_files, other_metrics, SLOW_NS)

    def _add_counters(
        self, metered: MeteredGt, what: str, numbers: EventGroup | NumberFiles, metrics: list[Metric], period_ns: int
    ) -> None:
        if metrics:
            self._counters.append(_Counters(metered, what, numbers, metrics, period_ns))
        else:
            numbers.close()

    def _add_problem(self, metered: MeteredGt, what: str, why: str) -> None:
        self.problems.append(f"{_name(metered)}: {what} is not measured: {why}")


class _Counters:
    """Numbers that are read together every `period_ns` (0: with each `sample`), and their rows."""

    def __init__(
        self, metered: MeteredGt, what: str, numbers: EventGroup | NumberFiles, metrics: list[Metric], period_ns: int
    ) -> None:
        self.card = metered.device.pci_address
        self.meta = describe(metered.stream, 1 + len(numbers), metrics)
        self.period_ns, self.due = period_ns, 0
        self._name = f"{_name(metered)}: {what}"
        self._numbers = numbers
        self._rows = bytearray()
        self._row = b""

    def __str__(self) -> str:
        return self._name

    def sample(self, now: int) -> None:
        self._row = now.to_bytes(8, "little") + self._numbers.read()
        self._rows += self._row

    def take(self) -> bytes:
        if len(self._rows) <= len(self._row):  # a rate needs two rows
            return b""
        rows, self._rows = bytes(self._rows), bytearray(self._row)
        return rows

    def close(self) -> None:
        self._numbers.close()


def _name(metered: MeteredGt) -> str:
    return f"{metered.device.path} (GT {metered.gt.id})"


def _folder(metered: MeteredGt) -> Path:
    return DRM / os.path.basename(metered.device.path) / "device"


def _why(error: Exception) -> str:
    return f"{error.filename or 'perf'}: {error.strerror}" if isinstance(error, OSError) else str(error)
