"""Texts from untrusted binaries, processes and captures, made safe to print."""

from __future__ import annotations

import re

# Letters and marks that show nothing, so that two names look like one: fillers, joiners, variation selectors.
INVISIBLE = (
    "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U00013441\U00013442\U00016fe4\U0001d159\U000e0000-\U000e0fff"
)
"""The inside of a class of a regular expression."""
_INVISIBLE = re.compile(f"[{INVISIBLE}]")


def clean(frame: str, separators: str = "") -> str:
    """Escapes control and invisible characters in a frame's text, and replaces each of `separators` by a colon.

    Names come from untrusted binaries, processes and captures: they must not break a line, a terminal or a format.
    """
    if frame.isascii() and frame.isprintable() and not any(mark in frame for mark in separators):
        return frame
    return "".join(
        ":" if character in separators else character if is_visible(character) else _escaped(ord(character))
        for character in frame
    )


def is_visible(character: str) -> bool:
    """Whether `clean` leaves a character as it is."""
    return character.isprintable() and _INVISIBLE.fullmatch(character) is None


def _escaped(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:  # how Python has a byte of a file name that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
