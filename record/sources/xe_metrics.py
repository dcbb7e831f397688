"""Metrics of Intel's GPUs under the xe driver: engines' use, frequencies, energy, temperature, fan.

A card's perf PMU counts its engines' ticks and sums up its frequencies. Its files in sysfs say which bits select what:
`type`, `cpumask`, `format/` and `events/`. The events' meaning: drivers/gpu/drm/xe/xe_pmu.c, Linux 6.18. Open events
keep the GT awake, as an EU-stall stream does anyway.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from iaprof.bpf.perf_event import FORMAT_GROUP, Attr, open_event
from iaprof.formats.capture.metrics import (
    FREQUENCY_ACTUAL,
    FREQUENCY_REQUESTED,
    MISSING,
    Derivation,
    Metric,
    busy,
)
from iaprof.record.sources.metered import Measured, Metered, NotMeasured
from iaprof.record.sources.stall_driver import Device, Gt

DRM = Path("/sys/class/drm")
ENERGY_NS = 100_000_000  # the firmware updates energy at times of its own: over shorter spans power would jump
SLOW_NS = 1_000_000_000

_FREQUENCIES = (
    (FREQUENCY_ACTUAL, "gt-actual-frequency", "act_freq"),
    (FREQUENCY_REQUESTED, "gt-requested-frequency", "cur_freq"),
)
"""Metrics; events of the PMU; files in freq0 with the same numbers (drivers/gpu/drm/xe/xe_gt_freq.c)."""

_CLASSES = {0: "render", 1: "copy", 2: "video-decode", 3: "video-enhance", 4: "compute"}
"""DRM_XE_ENGINE_CLASS_* of xe_drm.h, Linux 6.15; its other classes are not hardware."""


class XeGt(Metered):
    """A GT under the xe driver."""

    def __init__(self, stream: int, device: Device, gt: Gt) -> None:
        self.stream, self._device, self._gt = stream, device, gt
        self.card, self.name = device.pci_address, f"{device.path} (GT {gt.id})"

    def open(self, with_card: bool) -> Iterator[Measured | NotMeasured]:
        """See Metered."""
        yield from self._open_gt()
        if with_card:
            yield from self._open_card()

    def _open_gt(self) -> Iterator[Measured | NotMeasured]:
        try:
            pmu = Pmu(self.card)
        except (OSError, ValueError) as error:
            pmu = None
            yield self._not("its engines' use", f"the card's perf PMU is needed for it: {_why(error)}")
        events, files = EventGroup(), NumberFiles()
        counted: list[Metric] = []
        shown: list[Metric] = []
        folder = self._folder() / f"tile{self._gt.tile}" / f"gt{self._gt.id}" / "freq0"
        for name, event, file in _FREQUENCIES:
            with contextlib.suppress(OSError, ValueError):
                if pmu is not None and pmu.unit(event) == "MHz":
                    counted.append(Metric(name, Derivation.STEP, (1 + events.add(pmu, event, gt=self._gt.id),)))
                    continue
            try:
                shown.append(Metric(name, Derivation.VALUE, (1 + files.add(folder / file),)))
            except OSError as error:
                yield self._not(name, _why(error))
        if pmu is not None:
            yield from self._open_engines(pmu, events, counted)
        yield Measured("the counters", events, counted, 0)
        yield Measured("the frequency", files, shown, 0)

    def _open_engines(self, pmu: Pmu, events: EventGroup, counted: list[Metric]) -> Iterator[NotMeasured]:
        """Adds the use of each class of engines to what is counted."""
        ticks: dict[int, list[tuple[int, int]]] = {}
        for engine in self._device.engines:
            if engine.gt != self._gt.id or engine.engine_class not in _CLASSES:
                continue
            fields = {"gt": engine.gt, "engine_class": engine.engine_class, "engine_instance": engine.instance}
            try:
                active = 1 + events.add(pmu, "engine-active-ticks", **fields)
                total = 1 + events.add(pmu, "engine-total-ticks", **fields)
            except (OSError, ValueError) as error:
                yield self._not(f"the use of its {_CLASSES[engine.engine_class]} engine", _why(error))
            else:
                ticks.setdefault(engine.engine_class, []).append((active, total))
        for engine_class, pairs in ticks.items():
            active_columns, total_columns = zip(*pairs, strict=True)
            name = busy(_CLASSES[engine_class])
            counted.append(Metric(name, Derivation.SHARE, active_columns, total_columns, 100.0))

    def _open_card(self) -> Iterator[Measured | NotMeasured]:
        energy, other_files = NumberFiles(), NumberFiles()
        energies: list[Metric] = []
        other_metrics: list[Metric] = []
        for sensor in sensors(self._folder()):
            files = energy if sensor.kind == "energy" else other_files
            try:
                column = (1 + files.add(sensor.path),)
            except OSError as error:
                yield self._not(str(sensor.path), _why(error))
                continue
            match sensor.kind:
                case "energy":
                    energies.append(Metric(f"energy-{sensor.place}-J", Derivation.VALUE, column, scale=1e-6))
                    energies.append(Metric(f"power-{sensor.place}-W", Derivation.RATE, column, scale=1e-6))
                case "temp":
                    other_metrics.append(Metric(f"temperature-{sensor.place}-C", Derivation.VALUE, column, scale=1e-3))
                case "fan":
                    other_metrics.append(Metric(f"fan-{sensor.place}-RPM", Derivation.VALUE, column))
        yield Measured("the energy", energy, energies, ENERGY_NS)
        yield Measured("temperature and fan", other_files, other_metrics, SLOW_NS)

    def _not(self, what: str, why: str) -> NotMeasured:
        return NotMeasured(f"{self.name}: {what} is not measured: {why}")

    def _folder(self) -> Path:
        return DRM / os.path.basename(self._device.path) / "device"


def _why(error: Exception) -> str:
    return f"{error.filename or 'perf'}: {error.strerror}" if isinstance(error, OSError) else str(error)


DEVICES = Path("/sys/bus/event_source/devices")
_CONFIGS = ("config", "config1", "config2")
_FORMAT = re.compile(r"(config[12]?):([0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*)")


class Pmu:
    """The PMU of one card."""

    def __init__(self, pci_address: str) -> None:
        """Finds the card's PMU.

        Raises:
            OSError: there is none.
            ValueError: its files are not those of a PMU.
        """
        self._folder = DEVICES / f"xe_{pci_address.replace(':', '_')}"
        self._type = int(self._text("type"))
        # The driver's counts are of the whole card, and can be read on this CPU only.
        self.cpu = int(re.split("[-,]", self._text("cpumask"))[0])

    def _text(self, *path: str) -> str:
        return self._folder.joinpath(*path).read_text().strip()

    def unit(self, event: str) -> str:
        """Returns the unit of an event; empty for a plain number."""
        try:
            return self._text("events", f"{event}.unit")
        except OSError:
            return ""

    def attr(self, event: str, **fields: int) -> Attr:
        """Returns the attributes with which to open an event.

        Args:
            event: the event's name.
            fields: values of fields of `format/`, for instance `gt`.

        Raises:
            OSError: there is no such event or field.
            ValueError: sysfs has unexpected content.
        """
        values: dict[str, int] = {}
        for term in self._text("events", event).split(","):
            name, _, value = term.partition("=")
            values[name] = int(value or "1", 0)
        attr = Attr(type=self._type, read_format=FORMAT_GROUP)
        for name, number in {**values, **fields}.items():
            config, bits = self._place(name, number)
            setattr(attr, config, getattr(attr, config) | bits)
        return attr

    def _place(self, field: str, value: int) -> tuple[str, int]:
        """Returns where a field's value goes: the attributes' member, and its bits."""
        if field in _CONFIGS:
            return field, value
        format_ = _FORMAT.fullmatch(self._text("format", field))
        if format_ is None:
            raise ValueError(f"{self._folder.name} has a field '{field}' of unknown form")
        bits = 0
        for span in format_[2].split(","):  # the value's lowest bits go to the first span
            first, _, last = span.partition("-")
            width = int(last or first) - int(first) + 1
            bits |= (value & (1 << width) - 1) << int(first)
            value >>= width
        if value:
            raise ValueError(f"{self._folder.name} cannot hold that value in '{field}'")
        return format_[1], bits


class EventGroup:
    """Events that are read together, at one instant and with one system call."""

    def __init__(self) -> None:
        """Begins without events."""
        self._fds: list[int] = []

    def __len__(self) -> int:
        return len(self._fds)

    def add(self, pmu: Pmu, event: str, **fields: int) -> int:
        """Opens one more event, which counts from now on; returns its index in what `read` returns.

        Raises:
            OSError: there is no such event, or the kernel refuses.
            ValueError: sysfs has unexpected content.
        """
        leader = self._fds[0] if self._fds else -1
        self._fds.append(open_event(pmu.attr(event, **fields), -1, pmu.cpu, leader))
        return len(self._fds) - 1

    def read(self) -> bytes:
        """Returns each event's count since it was opened, little-endian u64.

        Raises:
            OSError: the device is gone.
        """
        length = 8 * (1 + len(self._fds))
        counts = os.read(self._fds[0], length)
        if len(counts) != length:  # how the kernel ends events of a PMU that has vanished
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return counts[8:]

    def close(self) -> None:
        """Closes the events."""
        for fd in reversed(self._fds):
            os.close(fd)
        self._fds.clear()


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
