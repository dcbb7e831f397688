"""EU-stall records as the hardware writes them: three layouts, and their decoding by whole columns.

A record is 64 bytes, little endian, of which only the first two or three 64-bit words hold anything. The bit
positions are those of the kernel's xe driver (drivers/gpu/drm/xe/xe_eu_stall.c, Linux 6.15) and, for Xe3p, of its
successor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

RECORD_BYTES = 64

REASONS = (
    "active",
    "control",
    "pipestall",
    "send",
    "dist_acc",
    "sbid",
    "sync",
    "inst_fetch",
    "other",
    "tdr",
)
"""The ten counters of a record, in the order of Intel's own text format."""


@dataclass(frozen=True)
class _Bits:
    words: int
    ip: int
    first: dict[str, int]


class Layout(Enum):
    """How a record's bits are laid out; the value is its name in a capture's header."""

    PVC = "pvc"
    XE2 = "xe2"
    XE3P = "xe3p"

    @classmethod
    def from_ip_version(cls, major: int, minor: int) -> Layout | None:
        """The layout of a GT's graphics IP version; None where there is no EU-stall sampling."""
        if (major, minor) == (12, 60):
            return cls.PVC
        if 20 <= major < 35:
            return cls.XE2
        return cls.XE3P if major >= 35 else None

    @staticmethod
    def is_guess(major: int, minor: int) -> bool:
        """Whether what `from_ip_version` says of this version is a guess.

        No GPU has such a version as far as this iaprof knows, and `from_ip_version` assumes that its records are those
        of the newest GPU before it, as the driver does until it learns otherwise.
        """
        return (major, minor) != (12, 60) and major not in _KNOWN_SINCE_XE2

    @property
    def words(self) -> int:
        """How many of a record's 64-bit words hold something."""
        return _BITS[self].words

    @property
    def ip_bits(self) -> int:
        """Width of `ip`: 29 is the low part of an address in a 4 GiB window, 61 a whole address (both / 8)."""
        return _BITS[self].ip

    @property
    def address_mask(self) -> int:
        """The bits of a GPU address that a record's `ip` holds: 32, or all 48 that there are."""
        return min((1 << (self.ip_bits + 3)) - 1, (1 << 48) - 1)

    @property
    def first_bits(self) -> dict[str, int]:
        """Where the counters begin that a record has, counted from bit 0 of its first word."""
        return _BITS[self].first

    def ips(self, words: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        """Each record's instruction address in bytes, as far as the record holds it: uint64[n].

        Args:
            words: `self.words` columns, each uint64[n].
        """
        return (words[0] & np.uint64((1 << self.ip_bits) - 1)) << np.uint64(3)

    def counts(self, words: list[NDArray[np.uint64]], reason: str) -> NDArray[np.uint8]:
        """Each record's counter for `reason`: uint8[n]; zeros where the layout has none."""
        first = _BITS[self].first.get(reason)
        if first is None:
            return np.zeros(len(words[0]), np.uint8)
        word, shift = divmod(first, 64)
        value = words[word] >> np.uint64(shift)
        if shift > 56:  # the field goes on in the next word
            value = value | words[word + 1] << np.uint64(64 - shift)
        return value.astype(np.uint8)  # the cast keeps the low 8 bits

    def add_counts(self, words: list[NDArray[np.uint64]], reason: str, shift: int, into: NDArray[np.uint64]) -> None:
        """Adds each record's counter for `reason` to `into`, uint64[n], as a digit `shift` bits from the right."""
        first = _BITS[self].first.get(reason)
        if first is None:
            return
        word, start = divmod(first, 64)
        value = words[word] >> np.uint64(start)
        if start > 56:  # the field goes on in the next word
            value |= words[word + 1] << np.uint64(64 - start)
        value &= np.uint64(0xFF)
        value <<= np.uint64(shift)
        into += value


_KNOWN_SINCE_XE2 = (20, 30, 35)  # graphics versions; drivers/gpu/drm/xe/xe_pci.c, Linux 6.18

_PVC_FIRST = {
    "active": 29,
    "other": 37,
    "control": 45,
    "pipestall": 53,
    "send": 61,
    "dist_acc": 69,
    "sbid": 77,
    "sync": 85,
    "inst_fetch": 93,
}
_XE2_FIRST = {**_PVC_FIRST, "tdr": 29, "active": 101}

_BITS = {
    Layout.PVC: _Bits(2, 29, _PVC_FIRST),
    Layout.XE2: _Bits(2, 29, _XE2_FIRST),
    Layout.XE3P: _Bits(3, 61, {reason: first + 32 for reason, first in _XE2_FIRST.items()}),
}


def guessed_layout(gpu: str, ip_version: str, layout: str) -> str:
    """The sentence about a GPU whose records are read by a layout that is a guess."""
    return (
        f"{gpu} has graphics IP {ip_version}, which this version of iaprof does not know: its stall records are "
        f"taken for {layout} records, which is a guess, so kernels and counts may be wrong; use a newer iaprof"
    )


def significant_words(records: NDArray[np.uint64], layout: Layout) -> list[NDArray[np.uint64]]:
    """The words that hold something, as columns.

    Args:
        records: uint64[n, 8], the records as read.
        layout: of these records.
    """
    return [records[:, word].copy() for word in range(layout.words)]
