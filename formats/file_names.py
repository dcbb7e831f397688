r"""File names as text. Linux has any bytes in them; captures and messages have UTF-8.

A byte that is not UTF-8 becomes `\xff`, as the kernel's records are decoded (formats/wire/sideband.py). A file name can
have these four characters, too, so there may be two names for a text; whoever opens a file tries both.
"""

from __future__ import annotations

import re

_ESCAPED = re.compile(rb"\\x([89a-f][0-9a-f])")


def as_text(name: bytes) -> str:
    """Returns a file name as text."""
    return name.decode("utf-8", "backslashreplace")


def possible_names(text: str) -> list[bytes]:
    """Returns the file names that a text can stand for, the likeliest first; none for a text that no name has.

    Args:
        text: as `as_text` made it; or a path of this process, in which Python has such bytes as surrogates.
    """
    try:
        literal = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return []
    unescaped = _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), literal)
    return [literal] if as_text(unescaped) != as_text(literal) or unescaped == literal else [unescaped, literal]
