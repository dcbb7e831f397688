"""Records of stalls as hardware writes them: how their bits are laid out, and their decoding by whole columns.

A record has 64 bytes, little endian, of which only the first 64-bit words hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RECORD_BYTES = 64


@dataclass(frozen=True, eq=False)
class RecordLayout:
    """How a record's bits are laid out. Each layout exists once: they are compared by identity."""

    name: str  # in a capture's header
    reasons: tuple[str, ...]  # that its counters may be for, in the order of tables; some have no counter in it
    words: int  # how many of a record's 64-bit words hold something
    ip_bits: int  # width of the instruction pointer / 8, which begins at bit 0
    first_bits: Mapping[str, int]  # where the counters that a record has begin, counted from bit 0 of its first word

    @property
    def address_mask(self) -> int:
        """The bits of a GPU address that a record holds; no more than the 48 that there are."""
        return min((1 << (self.ip_bits + 3)) - 1, (1 << 48) - 1)

    def columns(self, records: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
        """The words that hold something, as columns: `words` of uint64[n].

        Args:
            records: uint64[n, 8], as read.
        """
        return [records[:, word].copy() for word in range(self.words)]

    def ips(self, words: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        """Each record's instruction address in bytes, as far as the record holds it: uint64[n].

        Args:
            words: as `columns` gives them.
        """
        return (words[0] & np.uint64((1 << self.ip_bits) - 1)) << np.uint64(3)

    def counts(self, words: list[NDArray[np.uint64]], reason: str) -> NDArray[np.uint8]:
        """Each record's counter for `reason`: uint8[n]; zeros where the layout has none."""
        first = self.first_bits.get(reason)
        if first is None:
            return np.zeros(len(words[0]), np.uint8)
        word, shift = divmod(first, 64)
        value = words[word] >> np.uint64(shift)
        if shift > 56:  # the field goes on in the next word
            value = value | words[word + 1] << np.uint64(64 - shift)
        return value.astype(np.uint8)  # the cast keeps the low 8 bits

    def add_counts(self, words: list[NDArray[np.uint64]], reason: str, shift: int, into: NDArray[np.uint64]) -> None:
        """Adds each record's counter for `reason` to `into`, uint64[n], as a digit `shift` bits from the right."""
        first = self.first_bits.get(reason)
        if first is None:
            return
        word, start = divmod(first, 64)
        value = words[word] >> np.uint64(start)
        if start > 56:  # the field goes on in the next word
            value |= words[word + 1] << np.uint64(64 - start)
        value &= np.uint64(0xFF)
        value <<= np.uint64(shift)
        into += value
