"""A card's sensors, as the driver shows them through hwmon: energy, temperature, fan.

Names and units: Documentation/hwmon/sysfs-interface.rst, Linux 6.18.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_INPUT = re.compile(r"(energy|temp|fan)([0-9]+)_input")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]+")


@dataclass(frozen=True)
class Sensor:
    """A sensor that can be read."""

    kind: str  # `energy`, in microjoules since some time; `temp`, in thousandths of a degree Celsius; `fan`, in RPM
    place: str  # of which part of the card, as the driver calls it, or the sensor's number
    path: Path


def sensors(device: Path) -> Iterator[Sensor]:
    """The sensors of a card.

    Args:
        device: its folder in sysfs.
    """
    for path in sorted(device.glob("hwmon/hwmon*/*_input")):
        if found := _INPUT.fullmatch(path.name):
            yield Sensor(found[1], _place(path, found[2]), path)


def _place(path: Path, number: str) -> str:
    try:
        label = path.with_name(path.name.replace("_input", "_label")).read_text()
    except (OSError, ValueError):
        return number
    return _NOT_IN_NAMES.sub("-", label.strip())[:32] or number
