"""Options whose values are words of a list: checked, with the word that was probably meant, and completed by shells."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
