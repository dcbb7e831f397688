"""Checks of what the sandbox's child answers: it chews hostile bytes, so it may be in an attacker's hands.

What passes has the types and bounds that the rest of report relies on. The layout is report.gpu_reader's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from iaprof.basics.errors import IaprofError

LARGEST = 1 << 48  # addresses, offsets and lines
_LONGEST_SENTENCE = 600
_SURROGATE = re.compile("[\ud800-\udfff]")


class AnswerError(IaprofError):
    """The child answered what it never would in good health."""

    def __init__(self) -> None:
        super().__init__("the reader process answered nonsense")


def integers(value: Any, limit: int = LARGEST, lowest: int = 0) -> list[int]:
    """A list of integers from `lowest` up to, not including, `limit`."""
    if not isinstance(value, list) or not all(type(each) is int and lowest <= each < limit for each in value):
        raise AnswerError
    return value


def integer(value: Any, limit: int = LARGEST) -> int:
    """An integer from 0 up to, not including, `limit`."""
    return integers([value], limit)[0]


def strings_of(value: Any) -> list[str]:
    """A list of strings that any encoder takes: JSON can smuggle in lone surrogates."""
    if not isinstance(value, list):
        raise AnswerError
    for each in value:
        if not isinstance(each, str) or not (each.isascii() or _SURROGATE.search(each) is None):
            raise AnswerError
    return value


def string(value: Any) -> str:
    """A string."""
    return strings_of([value])[0]


def sentence(text: str) -> str:
    """The child's words for a person to read: on one line, not endless, and without anything a terminal acts upon."""
    text = text if len(text) <= _LONGEST_SENTENCE else text[:_LONGEST_SENTENCE] + "..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def list_of(value: Any) -> list[Any]:
    """A list of anything."""
    if not isinstance(value, list):
        raise AnswerError
    return value


def ascending(offsets: Sequence[int]) -> None:
    """Each offset is larger than the one before."""
    if any(later <= earlier for earlier, later in pairwise(offsets)):
        raise AnswerError
