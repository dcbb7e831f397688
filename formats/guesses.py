"""The mark of frames that are guesses: callers that were found without call frame information (docs/stacks.md).

The mark is a suffix of the frame's text, as stackcollapse-perf.pl marks kinds of code: so it is in each format that has
the text, and frames that are guesses do not merge with those that are known.
"""

from __future__ import annotations

SUFFIX = "_[guessed]"
MARK = "?"
"""Stands before the name in pictures, where the end of a name has often no room."""
NOTE = (
    f"Frames marked {MARK} are guesses, as what they called has no call frame information: they and their callers "
    "can be wrong."
)


def is_guess(text: str) -> bool:
    """Whether the frame with this text is a guess."""
    return text.endswith(SUFFIX)


def shortened(text: str, most: int, end: str) -> str:
    """The first `most` characters of a longer text, and `end` in place of the others, but for the mark."""
    return text if len(text) <= most else text[:most] + end + (SUFFIX if is_guess(text) else "")


def unmarked(text: str) -> str:
    """The text of a frame without the mark."""
    return text.removesuffix(SUFFIX)
