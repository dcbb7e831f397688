"""Parses values: words of a list, and sizes and times in perf's notation, such as 500M, 2G, 90s, 10m."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches

from iaprof.basics.errors import UsageError


def checked_choice(text: str, choices: Iterable[str], option: str) -> str:
    """Returns an option's value if it is one of the choices.

    Raises:
        UsageError: it is not.
    """
    known = list(choices)
    if text not in known:
        raise UsageError(f"{option} takes {', '.join(known)}, not '{text}'{meant(text, known)}")
    return text


def meant(text: str, choices: Iterable[str]) -> str:
    """Returns the end of a message: the choice that is most like the text, or nothing if none is like it."""
    found = get_close_matches(text, list(choices), 1)
    return f": did you mean {found[0]}?" if found else ""


def one_of(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns what completes a value, for typer's `autocompletion`."""
    known = list(choices)

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in known if choice.startswith(incomplete)]

    return complete


_SIZE = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TIME = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST_PID = 32  # characters; int() refuses thousands of digits
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z])")


def size(text: str, option: str) -> int:
    """Parses a size such as `500M` into bytes: B, K, M, G or T, in powers of 1,024 like perf's.

    Raises:
        UsageError: the value is not a size above 0.
    """
    found = _NUMBER.fullmatch(text)
    bytes_ = int(float(found[1]) * _SIZE.get(found[2].lower(), 0)) if found else 0
    if not bytes_:
        raise UsageError(f"{option} takes a size such as 500M or 2G (B, K, M, G or T), not '{text}'")
    return bytes_


def size_or_time(text: str, option: str) -> tuple[int | None, float | None]:
    """Parses a size in bytes or a time in seconds, like perf: B, k or an upper-case letter is a size; s, m, h, d: time.

    Raises:
        UsageError: the value is neither.
    """
    found = _NUMBER.fullmatch(text)
    if found and found[2] in _TIME and float(found[1]) > 0:
        return None, float(found[1]) * _TIME[found[2]]
    if found and found[2] in "BKMGTk" and float(found[1]) > 0:
        return size(text, option), None
    raise UsageError(f"{option} takes a size such as 500M or 2G, or a time such as 90s, 10m or 1h, not '{text}'")


def percent(text: str, option: str) -> float:
    """Parses a share such as `1%`, `0.5%` or `2`.

    Raises:
        UsageError: the value is not a share above 0.
    """
    found = re.fullmatch(r"([0-9]{1,5}(?:\.[0-9]{1,9})?)%?", text)
    if not found or not float(found[1]):
        raise UsageError(f"{option} takes percent of one CPU, such as 1% or 0.5%, not '{text}'")
    return float(found[1])


def pids(texts: list[str] | None, option: str = "-p", what: str = "pids") -> tuple[int, ...]:
    """Parses pids or thread ids such as `-p 12,34 -p 56`.

    Raises:
        UsageError: a value is not a pid.
    """
    found = []
    for text in ",".join(texts or []).split(","):
        if not text.strip():
            continue
        if not text.strip().isdecimal() or len(text) > _LONGEST_PID or not 0 < int(text) < 1 << 22:
            raise UsageError(f"{option} takes {what}, separated by commas, not '{text}'")
        found.append(int(text))
    return tuple(found)


def words_of(texts: Sequence[str] | None, option: str) -> list[str]:
    """Splits comma-separated values: `a,b -x c` gives a, b, c.

    Raises:
        UsageError: all are empty.
    """
    words = [word.strip() for text in texts or [] for word in text.split(",") if word.strip()]
    if texts and not words:  # for example an empty shell variable, which would select everything
        raise UsageError(f"{option} takes at least one")
    return words
