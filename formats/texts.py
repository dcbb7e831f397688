"""Texts of tables, whole columns at a time: names are untrusted, and terminals, people and spreadsheets get them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from iaprof.basics.clean import INVISIBLE, clean, is_visible

if TYPE_CHECKING:
    import pyarrow as pa

_FORMULA = "^[=+\\-@\uff1d\uff0b\uff0d\uff20]"  # the last four are = + - @ of full width, which some take, too
_UNUSUAL = "[^ -~]"  # what `clean` may change
HIDDEN = f"[\\p{{C}}\\p{{Zl}}\\p{{Zp}}{INVISIBLE}]"
"""A regular expression (RE2): what `clean` changes, but for spaces, and for characters that Unicode does not know."""


def csv_text(text: str) -> str:
    """Returns a text as CSV has it: clean, and behind an apostrophe if a spreadsheet would evaluate it."""
    cleaned = clean(text)
    return f"'{cleaned}" if re.match(_FORMULA, cleaned) else cleaned


def csv_texts(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Does the same for texts, as `changed` does."""
    return changed(texts, f"{_FORMULA}|{_UNUSUAL}", csv_text)


def clean_texts(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Does what `clean` does for texts, as `changed` does."""
    return changed(texts, _UNUSUAL, clean)


def escaped_json(texts: pa.Array) -> pa.Array:
    """Returns texts that are JSON, with JSON's escapes for characters that `clean` changes.

    Args:
        texts: of type string or large_string.
    """
    import numpy as np

    _, _, content = texts.buffers()
    if content is None or not content.size or np.frombuffer(content, np.uint8).max() <= ord("~"):  # as nearly always
        return texts
    return changed(texts, HIDDEN, lambda text: "".join(map(_in_json, text)))


def _in_json(character: str) -> str:
    # JSON has control characters of ASCII between its values only.
    return character if character < " " or is_visible(character) else json.dumps(character)[1:-1]


def changed(
    texts: pa.Array | pa.ChunkedArray, pattern: str, change: Callable[[str], str]
) -> pa.Array | pa.ChunkedArray:
    """Changes those of many texts that need it, each distinct one once.

    Args:
        texts: of any type of strings, or a dictionary array of them; they may be null.
        pattern: a regular expression (RE2), which is found in all texts that `change` changes.
        change: returns the text for another one.

    Returns:
        The texts, of the same type.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(texts, pa.ChunkedArray):
        return pa.chunked_array([changed(chunk, pattern, change) for chunk in texts.chunks], texts.type)
    if pa.types.is_dictionary(texts.type):
        return pa.DictionaryArray.from_arrays(texts.indices, changed(texts.dictionary, pattern, change))
    found = pc.fill_null(pc.match_substring_regex(texts, pattern), fill_value=False)
    if not pc.any(found).as_py():
        return texts
    chosen = texts.filter(found)
    distinct = pc.unique(chosen)
    new = pa.array([change(text) for text in distinct.to_pylist()], texts.type)
    return pc.replace_with_mask(texts, found, new.take(pc.index_in(chosen, distinct)))
