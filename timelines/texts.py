"""The texts of a trace, each once; events have their codes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

NO_TEXT = -1  # the code of an absent text


class Texts:
    """Texts with codes, from 0 on. Regular expressions are tried once on each text, not on each event."""

    def __init__(self) -> None:
        """Starts without texts."""
        self._texts = pa.array([], pa.large_string())
        self._matches: dict[str, NDArray[np.bool_]] = {}  # by pattern
        self._codes: dict[str, int] = {}  # of single texts that were asked for

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, code: int) -> str:
        return str(self._texts[code])

    @property
    def values(self) -> pa.LargeStringArray:
        """All texts, by code."""
        return self._texts

    def codes(self, texts: pa.Array | pa.ChunkedArray | Sequence[str | None]) -> NDArray[np.int32]:
        """Returns the codes of texts, and adds those that are new; NO_TEXT for nulls."""
        array = texts if isinstance(texts, pa.Array | pa.ChunkedArray) else pa.array(texts, pa.large_string())
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.unify_dictionaries().chunks) if array.num_chunks else array.combine_chunks()
        encoded = array if pa.types.is_dictionary(array.type) else pc.dictionary_encode(array)
        distinct = encoded.dictionary.cast(pa.large_string())
        known = self._known(distinct)
        new = pc.unique(distinct.filter(pc.is_null(known)))
        if len(new):
            self._texts = pa.concat_arrays([self._texts, new])
            known = self._known(distinct)
        if not len(known):
            return np.full(len(encoded), NO_TEXT, np.int32)
        places = pc.fill_null(encoded.indices.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        codes: NDArray[np.int32] = known.to_numpy(zero_copy_only=False).astype(np.int32)[places]
        codes[pc.is_null(encoded.indices).to_numpy(zero_copy_only=False)] = NO_TEXT
        return codes

    def _known(self, distinct: pa.LargeStringArray) -> pa.Int32Array:
        """Returns the codes of distinct texts; null for new ones."""
        if 4 * len(distinct) >= len(self._texts):
            return pc.index_in(distinct, value_set=self._texts)
        # Hashing the fewer ones, and looking all others up, takes a tenth of the time.
        places = pc.index_in(self._texts, value_set=distinct)
        found = np.flatnonzero(pc.is_valid(places).to_numpy(zero_copy_only=False))
        codes = np.full(len(distinct), NO_TEXT, np.int32)
        codes[places.take(pa.array(found)).to_numpy(zero_copy_only=False)] = found
        return pa.array(codes, mask=codes < 0)

    def code(self, text: str) -> int:
        """Returns the code of a text, and adds it if it is new."""
        if text not in self._codes:
            self._codes[text] = int(self.codes([text])[0])
        return self._codes[text]

    def matches(self, codes: NDArray[np.int32], pattern: str) -> NDArray[np.bool_]:
        """Tells for each code whether a regular expression (RE2) is found in its text; False for NO_TEXT."""
        found = self._matches.get(pattern, np.zeros(1, bool))
        known = len(found) - 1  # the last one is NO_TEXT's
        if known < len(self._texts):
            new = pc.match_substring_regex(self._texts[known:], pattern).to_numpy(zero_copy_only=False)
            self._matches[pattern] = found = np.concatenate([found[:-1], new, [False]])
        return np.asarray(found[codes], bool)

    def replaced(self, codes: NDArray[np.int32], pattern: str, replacement: str) -> NDArray[np.int32]:
        """Returns the codes of texts in which all matches of a regular expression (RE2) are replaced."""
        used = np.zeros(len(self._texts), bool)
        used[codes[codes >= 0]] = True
        used[used] = self.matches(np.flatnonzero(used).astype(np.int32), pattern)
        changed = np.flatnonzero(used)
        if not len(changed):
            return codes
        new = self.codes(pc.replace_substring_regex(self._texts.take(pa.array(changed)), pattern, replacement))
        table = np.arange(len(self._texts), dtype=np.int32)
        table[changed] = new
        return np.where(codes >= 0, table[np.maximum(codes, 0)], NO_TEXT).astype(np.int32)

    def taken(self, codes: NDArray[np.int32]) -> pa.LargeStringArray:
        """Returns the texts of codes; null for NO_TEXT."""
        return self._texts.take(pa.array(codes, mask=codes < 0))
