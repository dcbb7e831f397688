"""Intel's EU-stall records: layouts of their bits, decoded by whole columns.

A record has 64 bytes, little endian. Only its first two or three 64-bit words contain data.

Sources: the Linux kernel's xe driver (drivers/gpu/drm/xe/xe_eu_stall.c, Linux 6.15); for Xe3p, a later version of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from iaprof.gpu.code import ADDRESS_MASK
from iaprof.gpu.intel.reasons import REASONS, ROWS
from iaprof.gpu.samples import Fields, SampleLayout, SampleRows

RECORD_BYTES = 64


@dataclass(frozen=True, eq=False)
class RecordLayout(SampleLayout):
    """The layout of a record's bits."""

    name: str
    reasons: tuple[str, ...]  # a layout may lack counters for some
    words: int  # the number of 64-bit words that contain data
    ip_bits: int  # the width of the ip field, which begins at bit 0 and has addresses / 8
    first_bits: Mapping[str, int]  # by reason: the first bit of its 8-bit counter; counters follow one another

    @property
    def rows(self) -> SampleRows:
        """See SampleLayout."""
        return ROWS

    @property
    def address_mask(self) -> int:
        """See SampleLayout."""
        return min((1 << (self.ip_bits + 3)) - 1, ADDRESS_MASK)

    def columns(self, records: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
        """Returns the words with data as columns: a list of `words` arrays, uint64[n] each.

        Args:
            records: uint64[n, 8], as read from the stream.
        """
        return [records[:, word].copy() for word in range(self.words)]

    def ips(self, words: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        """See SampleLayout; the words are as `columns` returns them."""
        return (words[0] & np.uint64((1 << self.ip_bits) - 1)) << np.uint64(3)

    def counts(self, words: list[NDArray[np.uint64]], reason: str) -> NDArray[np.uint8]:
        """See SampleLayout."""
        first = self.first_bits.get(reason)
        if first is None:
            return np.zeros(len(words[0]), np.uint8)
        word, shift = divmod(first, 64)
        value = words[word] >> np.uint64(shift)
        if shift > 56:  # the counter continues in the next word
            value = value | words[word + 1] << np.uint64(64 - shift)
        return value.astype(np.uint8)  # the cast keeps the low 8 bits

    @cached_property
    def fields(self) -> Fields:
        """See SampleLayout."""
        reasons = tuple(sorted(self.first_bits, key=self.first_bits.__getitem__))
        return Fields((1 << self.ip_bits) - 1, 3, reasons, self.first_bits[reasons[0]], 8)

    def packed(self, words: list[NDArray[np.uint64]]) -> list[NDArray[np.uint64]]:
        """See SampleLayout."""
        return words

    def ip_sql(self) -> str:
        """See SampleLayout."""
        return f"(w0 & {(1 << self.ip_bits) - 1}) << 3"

    def count_sql(self, reason: str) -> str:
        """See SampleLayout."""
        first = self.first_bits.get(reason)
        if first is None:
            return "0"
        word, shift = divmod(first, 64)
        if shift <= 56:
            return f"(w{word} >> {shift}) & 255"
        rest = 64 - shift  # bits in this word; the counter continues in the next one
        return f"(w{word} >> {shift}) | ((w{word + 1} & {(1 << 8 - rest) - 1}) << {rest})"


_PVC = {
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
_XE2 = {**_PVC, "tdr": 29, "active": 101}

PVC = RecordLayout("pvc", REASONS, 2, 29, _PVC)
XE2 = RecordLayout("xe2", REASONS, 2, 29, _XE2)
XE3P = RecordLayout("xe3p", REASONS, 3, 61, {reason: first + 32 for reason, first in _XE2.items()})
