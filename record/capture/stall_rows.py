"""The rows of samples of a capture: one for each read of a stream, with the words of its records as lists."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import WORDS, make_rows
from iaprof.gpu.samples import SampleRows
from iaprof.record.spool import Frame

_RECORDS_PER_GROUP = 1 << 20
_READS_PER_GROUP = 1 << 18


class StallRows:
    """Collects reads of one vendor's samples until they fill a row group."""

    def __init__(self, sample_rows: SampleRows) -> None:
        """Begins without reads."""
        self.kind, self._columns, self._required = sample_rows.kind, sample_rows.columns, sample_rows.required
        self._reads: list[Frame] = []
        self.records = 0

    @property
    def reads(self) -> int:
        """The number of reads."""
        return len(self._reads)

    @property
    def is_full(self) -> bool:
        """Whether the reads fill a row group."""
        return self.records >= _RECORDS_PER_GROUP or len(self._reads) >= _READS_PER_GROUP

    def add(self, read: Frame) -> None:
        """Adds a read: its payload is columns of words, uint64[part, records].

        Raises:
            ValueError: the length is not that of whole records.
        """
        if not self._required <= read.part <= len(self._columns) or len(read.payload) % (8 * read.part):
            raise ValueError("its length is not that of records")
        self._reads.append(read)
        self.records += len(read.payload) // (8 * read.part)

    def rows(self) -> pa.StructArray:
        """Makes a row for each read."""
        columns = [list(np.frombuffer(read.payload, np.uint64).reshape(read.part, -1)) for read in self._reads]
        lengths = np.array([len(words[0]) for words in columns], np.int64)
        lists = {}
        for word, name in enumerate(self._columns):
            has = np.array([len(words) > word for words in columns])
            parts = [words[word] for words in columns if len(words) > word]
            values = np.concatenate(parts) if parts else np.empty(0, np.uint64)
            lists[name] = _lists(np.where(has, lengths, 0), values, ~has)
        return make_rows(
            self.kind,
            {
                "time_ns": np.array([read.time for read in self._reads], np.uint64),
                "begin_ns": np.array([read.begin for read in self._reads], np.uint64),
                "stream": np.array([read.source for read in self._reads], np.uint16),
                **lists,
            },
        )


def _lists(lengths: NDArray[np.int64], values: NDArray[np.uint64], null: NDArray[np.bool_]) -> pa.Array:
    """Makes a list array with `lengths[i]` values in row i, null where `null` says so."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, pa.uint64()), type=WORDS, mask=pa.array(null))
