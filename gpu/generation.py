"""Describes a generation of GPUs. The table of generations is the vendor's (gpu/intel)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from iaprof.gpu.records import RecordLayout

ANY = None
"""As a minor version: all those that no other row has."""


@dataclass(frozen=True, eq=False)
class Generation:
    """GPUs with the same stall records and instruction set."""

    name: str  # the vendor's name, for headers, tables and messages: "Xe2"
    versions: tuple[tuple[int, int | None], ...]  # graphics IP versions: major, and minor or ANY
    layout: RecordLayout | None  # of stall records; None: the hardware does not sample stalls
    platform: IntEnum | None  # the decoder's name of the instruction set; None: no decoder
    devices: Mapping[int | None, str] = field(default_factory=dict)  # names of GPUs, by minor version or ANY

    def has(self, major: int, minor: int) -> bool:
        """Whether a graphics IP version belongs to this generation."""
        return (major, minor) in self.versions or (major, ANY) in self.versions

    def device(self, minor: int) -> str:
        """Returns the name of GPUs with that minor version; "" if unknown."""
        return self.devices.get(minor) or self.devices.get(ANY, "")
