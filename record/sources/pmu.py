"""A card's perf PMU, which counts what its engines did and adds up its frequencies.

Which bits say what comes from the PMU's files in sysfs: `type`, `cpumask`, `format/` and `events/`. How the events
behave: drivers/gpu/drm/xe/xe_pmu.c, Linux 6.18. Open events keep the GT awake; an EU-stall stream does so anyway.
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
        """Finds it.

        Raises:
            OSError: there is none.
            ValueError: its files are not those of a PMU.
        """
        self._folder = DEVICES / f"xe_{pci_address.replace(':', '_')}"
        self._type = int(self._text("type"))
        # The driver answers for the whole card, and wants to be asked through this CPU.
        self.cpu = int(re.split("[-,]", self._text("cpumask"))[0])

    def _text(self, *path: str) -> str:
        return self._folder.joinpath(*path).read_text().strip()

    def unit(self, event: str) -> str:
        """The unit in which it counts; empty where it is a plain number."""
        try:
            return self._text("events", f"{event}.unit")
        except OSError:
            return ""

    def attr(self, event: str, **fields: int) -> Attr:
        """What to open for an event.

        Args:
            event: its name.
            fields: of `format/`, for instance `gt`.

        Raises:
            OSError: there is no such event or field.
            ValueError: sysfs says something else than it should.
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
        """Where a field's value goes: the member of the attributes, and the bits."""
        if field in _CONFIGS:
            return field, value
        format_ = _FORMAT.fullmatch(self._text("format", field))
        if format_ is None:
            raise ValueError(f"{self._folder.name} has a field '{field}' of unknown form")
        bits = 0
        for span in format_[2].split(","):  # the value's lowest bits go to the first one
            first, _, last = span.partition("-")
            width = int(last or first) - int(first) + 1
            bits |= (value & (1 << width) - 1) << int(first)
            value >>= width
        if value:
            raise ValueError(f"{self._folder.name} has no room for that value in '{field}'")
        return format_[1], bits


class EventGroup:
    """Events that are read together, at one instant and with one system call."""

    def __init__(self) -> None:
        """Begins with none."""
        self._fds: list[int] = []

    def __len__(self) -> int:
        return len(self._fds)

    def add(self, pmu: Pmu, event: str, **fields: int) -> int:
        """Opens one more, which counts from now on; gives its index in what `read` returns.

        Raises:
            OSError: there is none, or the kernel refuses.
            ValueError: sysfs says something else than it should.
        """
        leader = self._fds[0] if self._fds else -1
        self._fds.append(open_event(pmu.attr(event, **fields), -1, pmu.cpu, leader))
        return len(self._fds) - 1

    def read(self) -> bytes:
        """What each counted since it was opened, little-endian u64.

        Raises:
            OSError: the device is gone.
        """
        length = 8 * (1 + len(self._fds))
        counts = os.read(self._fds[0], length)
        if len(counts) != length:  # so the kernel ends events of a PMU that is no more
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return counts[8:]

    def close(self) -> None:
        """Closes the events."""
        for fd in reversed(self._fds):
            os.close(fd)
        self._fds.clear()
