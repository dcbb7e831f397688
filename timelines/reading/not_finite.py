"""Replaces numbers that are not finite, as C, C++ and Python print them, with null, which is valid JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from iaprof.timelines.reading.blocks import escaped

_WORD = re.compile(
    rb"(?<=[\[:, \t\r\n])[+-]?(?:inf(?:inity)?|nan(?:\(\w*\))?|1\.#(?:inf|ind|[qs]nan)0*)(?=[ \t\r\n,\]}])",
    re.IGNORECASE,
)
_OUTSIDE = re.compile(rb"[ \t\r\n]*[:,\]}]")  # follows the end of a text, rarely a quote that begins one
_NULL = b"null"


@dataclass
class WithNulls:
    """JSON in which null has replaced some words."""

    text: bytes
    words: list[tuple[int, int]] = field(default_factory=list)  # where, in `text`; and by how much null is longer

    def given(self, place: int) -> int:
        """Returns the offset in the original text of a place in `text` that is outside of words."""
        return place - sum(longer for word, longer in self.words if word < place)


def with_nulls(text: bytes) -> WithNulls:
    """Replaces numbers that are not finite, outside of texts, in JSON that may be damaged.

    A word is outside of a text if what follows the quote before it can only follow the end of a text.
    """
    found = list(_WORD.finditer(text))
    if not found:
        return WithNulls(text)
    raw = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(raw == ord('"'))
    quotes = quotes[~escaped(raw, quotes)]
    before = np.searchsorted(quotes, [word.start() for word in found]) - 1
    pieces, words, at, longer = [], [], 0, 0
    for word, quote in zip(found, before.tolist(), strict=True):
        if quote >= 0 and not _OUTSIDE.match(text, int(quotes[quote]) + 1):
            continue
        pieces += [text[at : word.start()], _NULL]
        words.append((word.start() + longer, len(_NULL) - len(word[0])))
        longer += words[-1][1]
        at = word.end()
    return WithNulls(b"".join([*pieces, text[at:]]), words)
