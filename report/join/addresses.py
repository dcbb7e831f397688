"""Small numbers for instruction addresses, in the order in which they come.

Hashing a hundred million addresses would take longer than everything else. Kernels are compact, so addresses are looked
up in tables of pages instead; and what is looked up is at most a page's number.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_PAGE_BITS = 10  # of addresses / 8: 8 KiB of code
_LOW_PAGES = 1 << 19  # those of 4 GiB, which is all that most GPUs' records tell apart


class Addresses:
    """The addresses of one layout of records that were met so far."""

    def __init__(self) -> None:
        """None yet."""
        self._pages: dict[int, int] = {}  # the number of each page
        self._low = np.full(_LOW_PAGES, -1, np.int32)  # the same of the first pages
        self._table = np.empty(0, np.int32)  # the number at each place of each page; -1 for none
        self.ips = np.empty(0, np.uint64)
        """The address of each number, bytes."""

    def number(self, ips: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The number of each address (bytes, multiples of 8): int64[n]. New ones get numbers above all others."""
        places = ips >> np.uint64(3)
        if not len(places) or places.max() >> np.uint64(_PAGE_BITS) < len(self._low):
            places = places.astype(np.int32)  # half the bytes to move
            page = places >> _PAGE_BITS
            number = self._low[page]
            if (number < 0).any():
                self._meet(np.unique(page[number < 0]))
                number = self._low[page]
        else:
            encoded = pa.array(places >> np.uint64(_PAGE_BITS)).dictionary_encode()
            met = encoded.dictionary.to_pylist()
            of_page = np.array([self._pages.setdefault(each, len(self._pages)) for each in met], np.int32)
            number = of_page[encoded.indices.to_numpy()]
            places = (places & np.uint64((1 << _PAGE_BITS) - 1)).astype(np.int32)
        slot = number << _PAGE_BITS | places & ((1 << _PAGE_BITS) - 1)
        missing = (len(self._pages) << _PAGE_BITS) - len(self._table)
        if missing:
            self._table = np.append(self._table, np.full(missing, -1, np.int32))
        found = self._table[slot]
        unknown = found < 0
        if unknown.any():
            self._add(ips[unknown], slot[unknown])
            found = self._table[slot]
        numbers: NDArray[np.int64] = found.astype(np.int64)
        return numbers

    def _meet(self, pages: NDArray[np.int64]) -> None:
        for page in pages.tolist():
            self._low[page] = self._pages.setdefault(page, len(self._pages))

    def _add(self, ips: NDArray[np.uint64], slot: NDArray[np.int64]) -> None:
        new, first = np.unique(slot, return_index=True)
        self._table[new] = len(self.ips) + np.arange(len(new), dtype=np.int32)
        self.ips = np.append(self.ips, ips[first])
