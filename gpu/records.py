"""Describes layouts of stall records, and decodes records by whole columns.

A record has 64 bytes, little endian. Only its first two or three 64-bit words contain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RECORD_BYTES = 64


@dataclass(frozen=True, eq=False)
class RecordLayout:
    """The layout of a record's bits. Each layout exists once: layouts are compared by identity."""

    name: str  # in a capture's header
    reasons: tuple[str, ...]  # in the order of tables; a layout may lack counters for some
    words: int  # the number of 64-bit words that contain data
    ip_bits: int  # the width of the ip field, which begins at bit 0 and has addresses / 8
    first_bits: Mapping[str, int]  # by reason: the first bit of its 8-bit counter, counted from bit 0 of the first word

    @property
    def address_mask(self) -> int:
        """The bits of a GPU address that a record holds, out of 48."""
        return min((1 << (self.ip_bits + 3)) - 1, (1 << 48) - 1)

    def columns(self, records: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
        """Returns the words with data as columns: a list of `words` arrays, uint64[n] each.

        Args:
            records: uint64[n, 8], as read from the stream.
        """
        return [records[:, word].copy() for word in range(self.words)]

    def ips(self, words: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        """Returns each record's instruction address in bytes, as many bits as the record holds: uint64[n].

        Args:
            words: as `columns` returns them.
        """
        return (words[0] & np.uint64((1 << self.ip_bits) - 1)) << np.uint64(3)

    def counts(self, words: list[NDArray[np.uint64]], reason: str) -> NDArray[np.uint8]:
        """Returns each record's counter for `reason`: uint8[n]; zeros if the layout has none."""
        first = self.first_bits.get(reason)
        if first is None:
            return np.zeros(len(words[0]), np.uint8)
        word, shift = divmod(first, 64)
        value = words[word] >> np.uint64(shift)
        if shift > 56:  # the counter continues in the next word
            value = value | words[word + 1] << np.uint64(64 - shift)
        return value.astype(np.uint8)  # the cast keeps the low 8 bits

    def add_counts(self, words: list[NDArray[np.uint64]], reason: str, shift: int, into: NDArray[np.uint64]) -> None:
        """Adds each record's counter for `reason`, shifted left by `shift` bits, to `into`: uint64[n]."""
        first = self.first_bits.get(reason)
        if first is None:
            return
        word, start = divmod(first, 64)
        value = words[word] >> np.uint64(start)
        if start > 56:  # the counter continues in the next word
            value |= words[word + 1] << np.uint64(64 - start)
        value &= np.uint64(0xFF)
        value <<= np.uint64(shift)
        into += value
