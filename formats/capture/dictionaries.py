"""Operations on dictionary columns that do not decode them: a small file may repeat a long text in a million rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.ranges import batches

_DECODED_BYTES = 64 << 20


def combined(column: pa.ChunkedArray) -> pa.Array:
    """A chunked column as one array; its dictionaries are unified.

    Raises:
            pa.ArrowException: the values do not fit into one array.
    """
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def deduplicated(texts: pa.Array) -> pa.DictionaryArray:
    """The same values, with a dictionary in which each text occurs once and every text is used."""
    if not pa.types.is_dictionary(texts.type):
        return texts.dictionary_encode()
    used = texts.indices.dictionary_encode()
    once = texts.dictionary.take(used.dictionary).dictionary_encode()
    return pa.DictionaryArray.from_arrays(once.indices.take(used.indices), once.dictionary)


def map_texts(texts: pa.DictionaryArray, change: Callable[[Any], Any]) -> pa.DictionaryArray:
    """Replaces each distinct value by `change(value)`, which has the same type."""
    texts = deduplicated(texts)
    values = (change(value.as_py()) for value in texts.dictionary)  # a generator, as values may be long
    return deduplicated(pa.DictionaryArray.from_arrays(texts.indices, pa.array(values, texts.type.value_type)))


def with_null_rows(texts: pa.DictionaryArray) -> pa.DictionaryArray:
    """The same values, with nulls in the rows instead of the dictionary."""
    valid = texts.dictionary.is_valid().to_numpy(zero_copy_only=False)
    number = pa.array((np.cumsum(valid) - 1).astype(np.int32), mask=~valid)
    return pa.DictionaryArray.from_arrays(number.take(texts.indices), texts.dictionary.drop_null())


def decoded_bytes(texts: pa.DictionaryArray) -> int:
    """The size of the values of all rows if they were decoded, in bytes."""
    lengths = pc.cast(pc.binary_length(texts.dictionary), pa.int64())
    return pc.sum(lengths.take(texts.indices)).as_py() or 0


def bounded_slices(texts: pa.DictionaryArray) -> Iterator[slice]:
    """Gives slices of rows whose decoded values have at most _DECODED_BYTES; a longer value is a range by itself."""
    lengths = pc.fill_null(pc.cast(pc.binary_length(texts.dictionary), pa.int64()).take(texts.indices), 0).to_numpy()
    return batches(lengths, _DECODED_BYTES)


def shared_texts(texts: pa.ChunkedArray) -> list[Any]:
    """The text of each row; rows with the same text share one object."""
    found: list[Any] = []
    for chunk in texts.chunks:
        encoded = deduplicated(chunk)
        own = [*encoded.dictionary.to_pylist(), None]
        found += (own[number] for number in encoded.indices.fill_null(len(own) - 1).to_pylist())
    return found


def rows_where(texts: pa.ChunkedArray, is_wanted: Callable[[str | None], bool]) -> NDArray[np.bool_]:
    """Whether `is_wanted` accepts each row's text: bool[n]. Calls it once for each distinct text of a chunk."""
    found = [np.empty(0, bool)]
    for chunk in texts.chunks:
        encoded = deduplicated(chunk)
        wanted = [*(is_wanted(text.as_py()) for text in encoded.dictionary), is_wanted(None)]
        numbers = encoded.indices.fill_null(len(wanted) - 1).to_numpy(zero_copy_only=False)
        found.append(np.array(wanted, bool)[numbers])
    return np.concatenate(found)


def rows_equal(texts: pa.ChunkedArray, text: str) -> NDArray[np.bool_]:
    """Whether each row's text is `text`: bool[n]."""
    return rows_where(texts, lambda each: each == text)


def number_texts(texts: pa.ChunkedArray, numbers: dict[str | None, int]) -> NDArray[np.int64]:
    """The number of each row's text: int64[n]. Adds new texts to `numbers`, with the next free numbers."""
    found = [np.empty(0, np.int64)]
    for chunk in texts.chunks:
        encoded = deduplicated(chunk)
        own = [numbers.setdefault(text.as_py(), len(numbers)) for text in encoded.dictionary]
        if encoded.indices.null_count:
            own.append(numbers.setdefault(None, len(numbers)))
        indices = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
        found.append(np.array(own, np.int64)[indices])
    return np.concatenate(found)
