"""What iaprof knows of a generation of GPUs, and how one is found. The rows themselves are a vendor's: gpu/intel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from iaprof.gpu.records import RecordLayout

ANY = None
"""In place of a minor version: all that no other row has."""


@dataclass(frozen=True, eq=False)
class Generation:
    """Those GPUs whose stalls and instructions are alike."""

    name: str  # as the vendor calls it, for headers, tables and messages: "Xe2"
    versions: tuple[tuple[int, int | None], ...]  # graphics IP: major and minor, which may be ANY
    layout: RecordLayout | None  # of its stall records; None if it has no sampling of stalls
    platform: IntEnum | None  # as which its decoder knows it; None if there is none
    devices: Mapping[int | None, str] = field(default_factory=dict)  # what GPUs are called, by minor version

    def has(self, major: int, minor: int) -> bool:
        """Whether a graphics IP version is one of this generation's."""
        return (major, minor) in self.versions or (major, ANY) in self.versions

    def device(self, minor: int) -> str:
        """What GPUs of that minor version are called; empty if nothing is known."""
        return self.devices.get(minor) or self.devices.get(ANY, "")
