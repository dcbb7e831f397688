"""What the join does with each record: records.c does it, over whole columns, without the interpreter's lock.

An address has a number: the cell << PLACE_BITS | the place within the cell, those of `CellAddresses`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import distinct_values
from iaprof.gpu.code import ADDRESS_MASK
from iaprof.gpu.samples import Fields
from iaprof.report.join.library import ADDRESS, NUMBER, check, data, library
from iaprof.report.join.tally import Growing

PLACE_BITS = 32
_PAGE_BITS = 10  # in units of instructions, mostly of 8 bytes: a page is 8 KiB of code
_NARROW_BITS, _NARROW_COLUMNS = 8, 16
_WORD_BITS = 64
_Ints = NDArray[np.int64]
_Words = list[NDArray[np.uint64]]


class _Pages(ctypes.Structure):
    """struct pages."""

    _fields_ = (
        ("number", ADDRESS), ("first", ADDRESS), ("count", NUMBER), ("table", ADDRESS), ("size", NUMBER),
        ("mask", NUMBER), ("shift", ctypes.c_uint32), ("unit_bits", ctypes.c_uint32), ("page_bits", ctypes.c_uint32),
    )  # fmt: skip


class _Counters(ctypes.Structure):
    """struct counters."""

    _fields_ = tuple((name, ctypes.c_uint32) for name in ("words", "first_bit", "bits", "count"))


class _Pairs(ctypes.Structure):
    """struct pairs."""

    _fields_ = (
        ("numbers", ADDRESS), ("records", NUMBER), ("lengths", ADDRESS), ("reads", NUMBER), ("read", ADDRESS),
        ("cell", ADDRESS), ("value", ADDRESS), ("pairs", NUMBER), ("of_cell", ADDRESS), ("cells", NUMBER),
        ("step", NUMBER),
    )  # fmt: skip


class Addresses:
    """Keeps a number for each instruction address.

    One is for records that hold the same number of address bits. Kernels are compact, so a table has a place for each
    unit of the pages on which instructions stalled.
    """

    def __init__(self, unit_bits: int) -> None:
        """Starts without addresses.

        Args:
            unit_bits: addresses are multiples of 1 << unit_bits bytes, the unit.
        """
        self._unit_bits, self._page_bits = unit_bits, unit_bits + _PAGE_BITS
        self._pages, self._first = np.empty(0, np.uint64), np.empty(0, np.int64)  # ascending; its first slot of each
        self._table = np.empty(0, np.int64)  # [slots]: an address's number; -1: not known
        self._last_slots = np.empty(0, np.int64)  # of those that were added last
        self._ips = Growing(np.uint64)

    @property
    def ips(self) -> NDArray[np.uint64]:
        """uint64[addresses]: all that were added, in bytes."""
        return self._ips.values

    def find(self, words: NDArray[np.uint64], fields: Fields, numbers: _Ints) -> int:
        """Finds the number of each record's address, -1 for those that have none; returns how many have none.

        Args:
            words: uint64[n], the first words of records.
            fields: where these have the addresses.
            numbers: int64[n], gets the numbers.
        """
        pages = _Pages(
            data(self._pages), data(self._first), len(self._pages), data(self._table), len(self._table),
            fields.address_mask & ADDRESS_MASK >> fields.address_shift, fields.address_shift, self._unit_bits,
            self._page_bits,
        )  # fmt: skip
        assert len(words) == len(numbers)
        return int(library().join_number(ctypes.byref(pages), data(words), len(words), data(numbers)))

    def add(self, ips: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Adds those of these addresses, uint64[n], that are not known, and returns them: uint64[added].

        They have no numbers until `set_last`, which comes before any others are added.
        """
        ips = distinct_values(ips)  # all else is done with these few
        pages = ips >> np.uint64(self._page_bits)
        pages = pages[np.append(True, pages[1:] != pages[:-1])] if len(pages) else pages
        at = np.searchsorted(self._pages, pages)
        known = at < len(self._pages)
        known[known] = self._pages[at[known]] == pages[known]
        new = pages[~known]
        if len(new):
            first = len(self._table) + (np.arange(len(new)) << _PAGE_BITS)
            order = np.argsort(pages := np.append(self._pages, new))
            self._pages, self._first = pages[order], np.append(self._first, first)[order]
            self._table = np.append(self._table, np.full(len(new) << _PAGE_BITS, -1))
        slot = self._slot(ips)
        order = np.argsort(slot, kind="stable")
        one = np.diff(slot[order], prepend=-1) > 0  # of addresses in the same unit, as only hostile captures have, one
        unknown = order[one & (self._table[slot[order]] < 0)]
        added = ips[unknown]
        self._last_slots = slot[unknown]
        self._ips.extend(added)
        return added

    def set_last(self, numbers: _Ints) -> None:
        """Gives numbers to the addresses that were added last: int64[added]."""
        self._table[self._last_slots] = numbers

    def _slot(self, ips: NDArray[np.uint64]) -> _Ints:
        """Returns where each address, whose page is there, lies in the table: int64[n]."""
        first = self._first[np.searchsorted(self._pages, ips >> np.uint64(self._page_bits))]
        unit = (ips >> np.uint64(self._unit_bits)) & np.uint64((1 << _PAGE_BITS) - 1)
        return np.asarray(first + unit.view(np.int64))


class ReadCells:
    """The distinct pairs of a read and a cell of some records, and what each record has of its pair."""

    def __init__(self, numbers: _Ints, lengths: _Ints, cells: int) -> None:
        """Finds the pairs.

        Args:
            numbers: int64[records], of the records' addresses.
            lengths: int64[reads], the number of records of each.
            cells: how many there are.
        """
        self._numbers, self._lengths, self._cells = numbers, lengths, cells
        read, cell, seen = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64), np.full(cells, -1)
        count = library().join_pairs(
            data(numbers), len(numbers), data(lengths), len(lengths), data(seen), cells, data(read), data(cell)
        )
        check(count)
        self.read, self.cell = read[:count].copy(), cell[:count].copy()
        """int64[pairs] each, sorted by read and cell."""

    def of_records(self, values: _Ints) -> _Ints:
        """Returns the value of each record's pair, plus the place of its address in the cell: int64[records].

        Args:
            values: int64[pairs], not below 0.
        """
        found = np.empty(len(self._numbers), np.int64)
        with self._pairs(values, places=True) as pairs:
            check(library().join_place(ctypes.byref(pairs), data(found)))
        return found

    def add(self, fields: Fields, words: _Words, first_rows: _Ints, rows: NDArray[Any], places: bool = True) -> None:
        """Adds the counts of records to rows, as the function `add` does to those that `of_records` returns.

        Args:
            fields: where the records have them.
            words: uint64[records] each.
            first_rows: int64[pairs], the row of each pair's first address.
            rows: see the function.
            places: False adds the records of all addresses to that row.
        """
        counters, pointers = _counters(fields, words, len(self._numbers), rows)
        with self._pairs(first_rows, places) as pairs:
            check(library().join_sum(ctypes.byref(pairs), ctypes.byref(counters), pointers, data(rows), len(rows)))

    @contextmanager
    def _pairs(self, values: _Ints, places: bool) -> Iterator[_Pairs]:
        assert len(values) == len(self.read)
        scratch = np.empty(self._cells, np.int64)
        yield _Pairs(
            data(self._numbers), len(self._numbers), data(self._lengths), len(self._lengths), data(self.read),
            data(self.cell), data(values), len(values), data(scratch), self._cells, int(places),
        )  # fmt: skip


def sum_columns(fields: Fields) -> tuple[int, type[np.generic]]:
    """Returns how many columns, at least one for each reason, the rows have to which `add` adds, and their type."""
    return (_NARROW_COLUMNS, np.uint32) if fields.bits == _NARROW_BITS else (len(fields.reasons), np.uint64)


def add(fields: Fields, words: _Words, slots: _Ints, rows: NDArray[Any]) -> None:
    """Adds the counts of records to rows.

    Args:
        fields: where the records have them.
        words: uint64[records] each.
        slots: int64[records], the row of each record.
        rows: of as many columns, and of that type, as `sum_columns` says.
    """
    counters, pointers = _counters(fields, words, len(slots), rows)
    check(library().join_add(ctypes.byref(counters), pointers, data(slots), len(slots), data(rows), len(rows)))


def _counters(fields: Fields, words: _Words, records: int, rows: NDArray[Any]) -> tuple[_Counters, Any]:
    """Returns where the records have their counters, and pointers to their words."""
    columns, type_ = sum_columns(fields)
    assert rows.shape[1:] == (columns,) and rows.dtype == type_
    assert all(len(word) == records for word in words)
    counters = _Counters(len(words), fields.first_bit, fields.bits, len(fields.reasons))
    return counters, (ADDRESS * len(words))(*map(data, words))
