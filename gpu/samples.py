"""The interface of a vendor's samples: rows of a capture, and the addresses and counts in their records.

A read gives records. A capture has a row for each read, with the time of the read, the stream, and a list for each
column of the vendor's `SampleRows`: a record is an element of each list. A `SampleLayout` says what the elements mean.
A vendor has as many layouts as its hardware has kinds of records; a stream in the capture's header names its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from iaprof.gpu.code import ADDRESS_MASK

if TYPE_CHECKING:  # every verb imports this module for its help
    import numpy as np
    from numpy.typing import NDArray

ACTIVE = "active"
"""The reason that every vendor gives to samples in which the thread issued an instruction: it is no stall."""


class SampleRows(NamedTuple):
    """A vendor's kind of rows. Their first columns are `time_ns`, `begin_ns` and `stream`, as of all vendors."""

    kind: str  # the name of the kind of rows: "stall"
    columns: tuple[str, ...]  # lists of u64
    required: int  # so many of the columns, from the first on, are in every row; the others may be null
    since: int  # the first format of captures that has the kind


class Fields(NamedTuple):
    """Where records have their addresses and counts, for report/join/records.c; bits count from the first word on."""

    address_mask: int  # of the first word
    address_shift: int  # an address in bytes is these bits << address_shift
    reasons: tuple[str, ...]  # the counts follow one another
    first_bit: int  # of the first one, a multiple of `bits` unless these are 8
    bits: int  # of each count: 8, 16 or 64; of 8 bits there are at most 16


class SampleLayout(ABC):
    """The meaning of a record's words. Each layout exists once: layouts are compared by identity.

    `words` below is a list of the first `SampleLayout.words` columns of some rows, uint64[n] each, as they come from
    untrusted captures.
    """

    name: str  # in a capture's header; no two vendors have one of the same name
    reasons: tuple[str, ...]  # in the order of tables; ACTIVE is one of them
    words: int  # the number of columns that hold addresses and the counts of reasons

    @property
    @abstractmethod
    def rows(self) -> SampleRows:
        """The rows that have these records."""

    @property
    def unit_bits(self) -> int:
        """Instructions begin at multiples of 1 << unit_bits bytes."""
        return 3

    @property
    def most(self) -> int:
        """The largest count of a reason in a record."""
        return 0xFF

    @property
    def address_mask(self) -> int:
        """The bits of a GPU address that a record holds, out of 48."""
        return ADDRESS_MASK

    @abstractmethod
    def ips(self, words: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        """Returns each record's instruction address in bytes, as many bits as the record holds: uint64[n].

        Addresses are those at which launches and code objects say that kernels lie. If the hardware's records name a
        function and an offset in it, the source of samples gives addresses to functions (docs/internals.md).
        """

    @abstractmethod
    def counts(self, words: list[NDArray[np.uint64]], reason: str) -> NDArray[np.unsignedinteger]:
        """Returns each record's samples with `reason`, up to `most`: an unsigned type[n]; zeros if it has none."""

    @property
    def fields(self) -> Fields:
        """Where `packed` has addresses and counts."""
        return Fields(self.address_mask, 0, self.reasons, 64, 64)

    def packed(self, words: list[NDArray[np.uint64]]) -> list[NDArray[np.uint64]]:
        """Returns the records' `fields`: columns of words, uint64[n] each."""
        return [self.ips(words), *(self.counts(words, reason).astype("u8") for reason in self.reasons)]

    @abstractmethod
    def ip_sql(self) -> str:
        """Returns `ips` as an expression in SQL, whose columns w0, w1, ... are the words of a record."""

    @abstractmethod
    def count_sql(self, reason: str) -> str:
        """Returns `counts` as an expression in SQL; "0" if the records have no such reason."""

    def more_sql(self) -> Mapping[str, str]:
        """Returns what else queries show of a record: expressions, by the names of their columns.

        They may use the words of all columns; these are null where a row has none.
        """
        return {}
