"""URLs among the words of a command line, where a path may stand, too."""

from __future__ import annotations

import re
from urllib.parse import urlsplit, urlunsplit

from iaprof.basics.clean import clean

_URL = re.compile(r"\b[a-z][a-z0-9+.-]*:/+[^\s'\"<>]+", re.IGNORECASE)
_PASSWORD = re.compile(r"^(?!\[)[^@]*:(?!\d*\W*$)")
"""The beginning of a user's name and password that has a slash, `?` or `#`: what seems to be the host has no port."""


def is_url(word: str) -> bool:
    """Whether a word is a URL, and no path."""
    scheme, found, _ = word.partition("://")
    return bool(found) and scheme.replace("+", "").isalnum()


def shown(name: str) -> str:
    """Returns a path or URL for people: clean, and without what a URL has of credentials."""
    if not is_url(name):
        return clean(without_credentials(name))
    try:
        scheme, place, path, _, _ = urlsplit(name)
    except ValueError:  # brackets that hold no address
        return clean(name.partition("://")[0] + "://")
    if "@" not in place and _PASSWORD.match(place):
        place, path = path.rpartition("@")[2], ""
    return clean(urlunsplit((scheme, place.rpartition("@")[2], path, "", "")))


def without_credentials(text: str) -> str:
    """Returns a text, such as a library's error, whose URLs have neither user, password, query nor fragment."""

    def shorter(url: re.Match[str]) -> str:
        scheme, slashes, rest = re.split(r"(:/+)", url[0], maxsplit=1)
        place, slash, path = _parts(rest)
        if "@" not in place and _PASSWORD.match(place):
            place, slash, path = _parts(rest.rpartition("@")[2]) if "@" in rest else ("", "", "")
        return scheme + slashes + place.rpartition("@")[2] + slash + path

    return _URL.sub(shorter, text)


def _parts(rest: str) -> tuple[str, str, str]:
    """Divides a URL without its scheme, query and fragment at the first slash."""
    return re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
