"""What metrics of Intel's GPUs under either driver need: their PMUs, files with numbers, and sensors of the card.

The files of a PMU in sysfs say which bits select what: `type`, `cpumask`, `format/` and `events/`.
"""

from __future__ import annotations

import errno
import os
import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from iaprof.bpf.perf_event import FORMAT_GROUP, Attr, open_event
from iaprof.formats.capture.metrics import MISSING, Derivation, Metric
from iaprof.record.sources.metered import Measured, Metered, NotMeasured
from iaprof.record.sources.stall_driver import Device, Gt

DRM = Path("/sys/class/drm")
ENERGY_NS = 100_000_000  # the firmware updates energy at times of its own: over shorter spans power would jump
SLOW_NS = 1_000_000_000


class IntelGt(Metered):
    """A GT."""

    def __init__(self, stream: int, device: Device, gt: Gt) -> None:
        """Takes a stream's index, GPU and GT."""
        self.stream, self.device, self.gt = stream, device, gt
        self.card, self.name = device.pci_address, f"{device.path} (GT {gt.id})"

    def open(self, with_card: bool) -> Iterator[Measured | NotMeasured]:
        """See Metered."""
        yield from self.open_gt()
        if with_card:
            yield from self._open_card()

    @abstractmethod
    def open_gt(self) -> Iterator[Measured | NotMeasured]:
        """Opens what can be measured of the GT alone; says once what cannot."""

    def _open_card(self) -> Iterator[Measured | NotMeasured]:
        energy, other_files = NumberFiles(), NumberFiles()
        energies: list[Metric] = []
        other_metrics: list[Metric] = []
        for sensor in sensors(self.folder()):
            files = energy if sensor.kind == "energy" else other_files
            try:
                column = (1 + files.add(sensor.path),)
            except OSError as error:
                yield self.lacks(str(sensor.path), why(error))
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

    def lacks(self, what: str, reason: str) -> NotMeasured:
        """Says what is not measured."""
        return NotMeasured(f"{self.name}: {what} is not measured: {reason}")

    def folder(self) -> Path:
        """Returns the card's folder in sysfs."""
        return DRM / os.path.basename(self.device.path) / "device"


def why(error: Exception) -> str:
    """Returns why something cannot be measured."""
    return f"{error.filename or 'perf'}: {error.strerror}" if isinstance(error, OSError) else str(error)


DEVICES = Path("/sys/bus/event_source/devices")
_CONFIGS = ("config", "config1", "config2")
_FORMAT = re.compile(r"(config[12]?):([0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*)")


class Pmu:
    """The PMU of one card."""

    def __init__(self, device: Device) -> None:
        """Finds the card's PMU.

        Raises:
            OSError: there is none.
            ValueError: its files are not those of a PMU.
        """
        self._folder = DEVICES / f"{device.driver}_{device.pci_address.replace(':', '_')}"
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

    def of_config(self, config: int) -> Attr:
        """Returns the attributes with which to open the event that has this number."""
        return Attr(type=self._type, config=config, read_format=FORMAT_GROUP)

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
        return self.add_attr(pmu.attr(event, **fields), pmu.cpu)

    def add_attr(self, attr: Attr, cpu: int) -> int:
        """Likewise, given the event's attributes and the CPU that counts; raises OSError if the kernel refuses."""
        leader = self._fds[0] if self._fds else -1
        self._fds.append(open_event(attr, -1, cpu, leader))
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
        return _part(path) or number
    return _NOT_IN_NAMES.sub("-", label.strip())[:32] or number


def _part(path: Path) -> str:
    """Returns what a folder of sensors is about: Intel's i915 has one for the card, i915, and one for each tile."""
    try:
        name = path.with_name("name").read_text().strip()
    except (OSError, ValueError):
        return ""
    if name == "i915":
        return "card"
    return _NOT_IN_NAMES.sub("-", name.removeprefix("i915_"))[:32] if name.startswith("i915_") else ""
