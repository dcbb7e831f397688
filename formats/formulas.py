"""Texts in CSV that a spreadsheet would evaluate as formulas get an apostrophe in front: names are untrusted."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_FORMULA = "^[=+\\-@\t\r\uff1d\uff0b\uff0d\uff20]"  # the last four are = + - @ of full width, which some take, too


def without_formula(text: str) -> str:
    """Returns a text that no spreadsheet evaluates."""
    return f"'{text}" if re.match(_FORMULA, text) else text


def without_formulas(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Does the same for texts, which may be null; those of a dictionary array are returned as a dictionary array."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(texts.type):
        codes = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
        return pa.DictionaryArray.from_arrays(codes.indices, without_formulas(codes.dictionary))
    is_formula = pc.fill_null(pc.match_substring_regex(texts, _FORMULA), fill_value=False)
    return pc.if_else(is_formula, pc.replace_substring_regex(texts, "^", "'"), texts)
