"""URLs among the words of a command line, where a path may stand, too."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from iaprof.formats.profile import clean


def is_url(word: str) -> bool:
    """Whether a word is a URL, and no path."""
    scheme, found, _ = word.partition("://")
    return bool(found) and scheme.replace("+", "").isalnum()


def shown(name: str) -> str:
    """Returns a path or URL for people: clean, and without what a URL has of credentials."""
    if not is_url(name):
        return clean(name)
    scheme, place, path, _, _ = urlsplit(name)
    return clean(urlunsplit((scheme, place.rpartition("@")[2], path, "", "")))
