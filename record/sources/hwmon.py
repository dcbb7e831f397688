"""A card's sensors in hwmon: energy, temperature, fan.

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
