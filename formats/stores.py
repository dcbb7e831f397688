"""Captures in stores: URLs, fsspec's file systems, and why a file or an object cannot be used, as a sentence ends.

A URL may stand where a command line has a path.
"""

from __future__ import annotations

import inspect
import os
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit, urlunsplit

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError

_URL = re.compile(r"\b[a-z][a-z0-9+.-]*:/+[^\s'\"<>]+", re.IGNORECASE)
_PASSWORD = re.compile(r"^(?!\[)[^@]*:(?!\d*\W*$)")
"""The beginning of a user's name and password that has a slash, `?` or `#`: what seems to be the host has no port."""

EXTRA = "pip install 'iaprof[fleet]'"
_MOST_FOLDERS = 100  # in a name
_MOST_TEXT = 300  # characters of what a store says
_T = TypeVar("_T")


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


@dataclass(frozen=True)
class StoredFile:
    """What CaptureReader needs of it; `str` of it is its name for messages."""

    name: str
    size: int  # bytes
    open: Callable[[], BinaryIO]  # opens it; whoever gave this closes what it opens

    def __str__(self) -> str:
        return self.name


class StoreError(IaprofError):
    """A store cannot be used; the text says why and what to do."""


def file_system(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in it.

    The file system raises RecursionError where folders lie too deep in folders.

    Raises:
        StoreError: fsspec, or its package for the scheme, is missing.
    """
    scheme = url.partition("://")[0]
    try:
        import fsspec
    except ImportError:
        raise StoreError(f"{shown(url)}: URLs need fsspec: {EXTRA}") from None
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise StoreError(f"{shown(url)}: {told(str(error))}") from None
    except ValueError:
        raise StoreError(
            f"there are no URLs with {clean(scheme)}://: choose from s3://, gs://, az://, https:// and others of fsspec"
        ) from None
    except OSError as error:  # some connect at once
        raise StoreError(f"{shown(url)} cannot be read: {error.strerror or type(error).__name__}") from None
    if inspect.iscoroutinefunction(listing := getattr(type(system), "_ls", None)):
        system._ls = _not_too_deep(partial(listing, system))
    return system, path


def _not_too_deep(listing: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Makes listing a folder raise RecursionError for one that is too deep, as pages may link to others without end.

    fsspec goes into folders of folders by recursion, in the thread of its event loop. Python's own limit may end that
    anywhere in there: a transport of asyncio that is closed by halves calls back without end.
    """

    async def listed(path: str, *words: Any, **options: Any) -> Any:
        if path.count("/") > _MOST_FOLDERS:
            raise RecursionError
        return await listing(path, *words, **options)

    return listed


def within(seconds: float, name: str, work: Callable[[], _T]) -> _T:
    """Does something with a store for a limited time: a store may never answer, answer byte by byte, or list no end.

    What takes too long goes on in its thread, which does not keep the process from ending.

    Args:
        seconds: the limit.
        name: the URL.
        work: what to do.

    Raises:
        StoreError: it takes longer.
    """
    done: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((True, work()))
        except BaseException as error:  # noqa: BLE001 (raised below)
            done.put((False, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        is_done, found = done.get(timeout=seconds)
    except Empty:
        raise StoreError(f"{shown(name)} takes longer than {seconds:g} s (--timeout)") from None
    if not is_done:
        raise found
    answer: _T = found
    return answer


def reason(error: Exception, name: str) -> str | None:
    """Returns why a file or an object cannot be used. Stores have errors of many kinds.

    Args:
        error: what was raised.
        name: the path or URL.

    Returns:
        The reason, clean; None for what is not an error of a file system, but a defect of this program.
    """
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if isinstance(error, PermissionError) and is_url(name):
        return "your credentials do not allow it"
    if isinstance(error, OSError) and error.errno and not is_url(name):
        return os.strerror(error.errno)
    if not isinstance(error, OSError) and not is_url(name):
        return None
    return told(getattr(error, "strerror", None) or str(error).strip() or type(error).__name__)


def told(why: str) -> str:
    """Returns the first line of a library's error for people: clean, and without credentials."""
    return clean(without_credentials(why.strip().partition("\n")[0]))[:_MOST_TEXT]
