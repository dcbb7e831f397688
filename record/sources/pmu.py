"""A card's perf PMU, which counts its engines' ticks and sums up its frequencies.

The PMU's files in sysfs say which bits select what: `type`, `cpumask`, `format/` and `events/`. The events' meaning:
drivers/gpu/drm/xe/xe_pmu.c, Linux 6.18. Open events keep the GT awake, as an EU-stall stream does anyway.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from iaprof.bpf.perf_event import FORMAT_GROUP, Attr, open_event

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
