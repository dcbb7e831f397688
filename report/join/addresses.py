"""Numbers instruction addresses 0, 1, 2, ... in the order in which they first appear.

Hashing a hundred million addresses would take longer than the rest of the join. Kernels are compact, so a page table
maps addresses to numbers; only the page numbers of addresses beyond 4 GiB are hashed.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_PAGE_BITS = 10  # in units of instructions, mostly of 8 bytes: a page is 8 KiB of code
# The pages of 4 GiB, with such units: records of most GPUs hold no more than 32 bits of an address.
_LOW_PAGES = 1 << 19


class Addresses:
    """The numbers of the addresses seen so far, for records that hold the same number of address bits."""

    def __init__(self, unit_bits: int) -> None:
        """Starts without addresses.

        Args:
            unit_bits: addresses are multiples of 1 << unit_bits bytes.
        """
        self._unit_bits = np.uint64(unit_bits)
        self._pages: dict[int, int] = {}  # page -> its number
        self._low_pages = np.full(_LOW_PAGES, -1, np.int32)  # the same for the first 4 GiB; -1: not seen yet
        self._table = np.empty(0, np.int32)  # [pages << _PAGE_BITS]: an address's number; -1: not seen yet
        self.ips = np.empty(0, np.uint64)
        """uint64[numbers]: the address, in bytes, that has each number."""

    def number(self, ips: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the number of each address: int64[n]. New addresses get the next free numbers.

        Args:
            ips: uint64[n], bytes, multiples of the unit.
        """
        places = ips >> self._unit_bits
        if not len(places) or places.max() >> np.uint64(_PAGE_BITS) < len(self._low_pages):
            places = places.astype(np.int32)  # halves the memory traffic
            page = places >> _PAGE_BITS
            number = self._low_pages[page]
            if (number < 0).any():
                self._number_pages(np.unique(page[number < 0]))
                number = self._low_pages[page]
        else:
            encoded = pa.array(places >> np.uint64(_PAGE_BITS)).dictionary_encode()
            distinct = encoded.dictionary.to_pylist()
            page_numbers = np.array([self._pages.setdefault(each, len(self._pages)) for each in distinct], np.int32)
            number = page_numbers[encoded.indices.to_numpy()]
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

    def _number_pages(self, pages: NDArray[np.int64]) -> None:
        for page in pages.tolist():
            self._low_pages[page] = self._pages.setdefault(page, len(self._pages))

    def _add(self, ips: NDArray[np.uint64], slot: NDArray[np.int64]) -> None:
        new, first = np.unique(slot, return_index=True)
        self._table[new] = len(self.ips) + np.arange(len(new), dtype=np.int32)
        self.ips = np.append(self.ips, ips[first])
