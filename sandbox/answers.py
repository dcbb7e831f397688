"""Checks the answers of the sandbox's child: it parses hostile bytes, so an attacker may control it.

The functions check types and bounds of JSON values and return them. The module that sends a request knows the layout of
the answer: report/gpu/module.py, symbols/symbolizers/binaries.py and others.
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
    """The child's answer is invalid: it is broken, or controlled by an attacker."""

    def __init__(self) -> None:
        super().__init__("the reader process answered nonsense")


def integers(value: Any, limit: int = LARGEST, lowest: int = 0) -> list[int]:
    """Checks a list of integers from `lowest` up to, but not including, `limit`."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise AnswerError
    if value and not (lowest <= min(value) and max(value) < limit):
        raise AnswerError
    return value


def integer(value: Any, limit: int = LARGEST) -> int:
    """Checks an integer from 0 up to, but not including, `limit`."""
    return integers([value], limit)[0]


def string_list(value: Any) -> list[str]:
    """Checks a list of strings that can be encoded: JSON allows lone surrogates, which encoders refuse."""
    if not isinstance(value, list):
        raise AnswerError
    for each in value:
        if not isinstance(each, str) or not (each.isascii() or _SURROGATE.search(each) is None):
            raise AnswerError
    return value


def string(value: Any) -> str:
    """Checks a string that can be encoded."""
    return string_list([value])[0]


def sentence(text: str) -> str:
    """Makes the child's text safe to print: one line of limited length, without characters that control a terminal."""
    text = text if len(text) <= _LONGEST_SENTENCE else text[:_LONGEST_SENTENCE] + "..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def any_list(value: Any) -> list[Any]:
    """Checks a list, but not its elements."""
    if not isinstance(value, list):
        raise AnswerError
    return value


def ascending(offsets: Sequence[int]) -> None:
    """Checks that each offset is larger than the one before."""
    if any(later <= earlier for earlier, later in pairwise(offsets)):
        raise AnswerError
