"""Captures by paths, patterns, folders and URLs: which there are, and how each is opened.

A capture in a store is read in ranges, through fsspec, whose file systems know the stores' credentials.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import open_regular
from iaprof.formats.stores import StoredFile, file_system, is_url, reason, shown, within

DEFAULT_TIMEOUT_S = 600.0
"""How long a capture may take, and the listing of a store."""
_PATTERN = "*?["
_ANY_DEPTH = re.compile(r"(?<![^/])\*\*(?:/|$)")
_READ_AT_ONCE = 1 << 20  # bytes: a smaller capture is read by one request
_MOST_FOOTER = 1 << 26  # bytes, that a key is made of
_PIECE = 1 << 20  # bytes that are read at once
_PROFILES = re.compile(r"(?:^|/)[0-9a-f]{16}/profiles-[0-9a-f]{16}\.parquet$")
"""What a cache of profiles consists of (cache.py), which may lie among captures."""
_TAIL = 8  # bytes: length of the footer, and the magic number


class SourceError(IaprofError):
    """Captures cannot be found or opened; the text says why and what to do."""


@dataclass(frozen=True)
class Source:
    """A capture: a file, or an object in a store."""

    name: str  # path or URL, with all that opening it needs
    size: int  # bytes
    etag: str = ""  # by which its store tells contents apart; "" for files

    @property
    def shown(self) -> str:
        """The name for people and profiles: without credentials, such as signatures of URLs."""
        return shown(self.name)

    @property
    def is_remote(self) -> bool:
        """Whether it lies in a store."""
        return is_url(self.name)

    def key(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Returns a key of its content: a digest, or its store and ETag; of a store without these, place and footer.

        Only who writes to a store vouches for its ETags: another one may give them to other contents.

        Args:
            timeout_s: how long that may take: a file may have terabytes of nothing.

        Raises:
            SourceError: it cannot be read.
            StoreError: its store takes too long.
        """
        return within(timeout_s, self.name, self._key) if self.is_remote else self._key(time.monotonic() + timeout_s)

    def status(self) -> tuple[int, ...]:
        """Returns what differs if the file was changed or replaced since, even for a moment; () for what is remote."""
        if self.is_remote:
            return ()
        try:
            found = os.stat(self.name)
        except OSError:
            return (0,)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def is_still(self, key: str, status: tuple[int, ...]) -> bool:
        """Whether a file has had this content since it had that status; only their store knows it of objects."""
        if self.is_remote:
            return True
        with contextlib.suppress(SourceError):
            return self.key() == key and self.status() == status
        return False

    def _key(self, deadline: float = 0.0) -> str:
        place = ""
        if self.is_remote:
            parts = urlsplit(self.shown)
            place = f"{parts.scheme}://{parts.netloc}" if self.etag else self.shown
        digest = hashlib.sha256(f"{self.size}\n{self.etag}\n{place}\n".encode("utf-8", "surrogatepass"))
        if not self.etag:
            with self._readable(), self._open() as file:
                if self.is_remote:
                    tail = _read_end(file, self.size, _TAIL)
                    length = struct.unpack("<I", tail[:4])[0] if len(tail) == _TAIL else 0
                    digest.update(_read_end(file, self.size, min(length + _TAIL, _MOST_FOOTER)))
                else:
                    while piece := file.read(_PIECE):
                        digest.update(piece)
                        if time.monotonic() > deadline:
                            raise SourceError(f"{self.shown} takes too long to read (--timeout)")
        return digest.hexdigest()[:32]

    @contextlib.contextmanager
    def opened(self) -> Iterator[Path | StoredFile]:
        """Yields what CaptureReader takes.

        Raises:
            SourceError: it cannot be read.
        """
        if not self.is_remote and self.name.isprintable():  # Arrow opens no path that is not UTF-8
            yield Path(self.name)
            return
        with self._readable(), contextlib.ExitStack() as files:
            yield StoredFile(shown(self.name), self.size, lambda: files.enter_context(self._open()))

    def _open(self) -> BinaryIO:
        if not self.is_remote:
            return open_regular(self.name)
        system, path = file_system(self.name)
        ranges = {"cache_type": "all"} if self.size <= _READ_AT_ONCE else {"cache_type": "none"}
        opened: BinaryIO = system.open(path, "rb", **ranges)
        return opened

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        with _failures(self.name):
            yield


def find_sources(words: Sequence[str], timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Source]:
    """Finds the captures that words name, in the order of the words; those of a word are sorted.

    A file counts once, by however many words, spellings of its path or links it is named; a copy of it counts, too.

    Args:
        words: paths, patterns of paths, folders (with all their `.parquet` files, at any depth), or URLs of these.
        timeout_s: how long a store may take to list what a URL names.

    Returns:
        The captures. Those that are gone meanwhile, or are not files, are among them: reading them says so.

    Raises:
        UsageError: a word names nothing.
        SourceError: a file that is named as such does not exist; a folder or a store cannot be read.
        StoreError: a store takes too long.
    """
    found: dict[str, Source] = {}
    for word in words:
        of_word = within(timeout_s, word, partial(_in_store, word)) if is_url(word) else list(_on_disk(word))
        if not of_word:
            raise UsageError(f"no capture is at {shown(word)}: neither a file, nor .parquet files in a folder")
        for source in of_word:
            found.setdefault(source.name if source.is_remote else os.path.realpath(source.name), source)
    return list(found.values())


def _on_disk(word: str) -> Iterator[Source]:
    if os.path.isdir(word):
        names = sorted(_below(word))
    elif os.path.lexists(word) or not any(mark in word for mark in _PATTERN):
        with _failures(word):
            os.stat(word)
        names = [word]
    else:
        names = sorted(name for name in set(_matches(word)) if not _is_profile(os.path.abspath(name)))
    for name in names:
        if not os.path.isdir(name):
            with contextlib.suppress(OSError):  # it is gone, or a link to nothing: reading it says so
                yield Source(name, os.stat(name).st_size)
                continue
            yield Source(name, 0)


def _matches(pattern: str) -> Iterator[str]:
    """Yields what a pattern matches, some of it several times.

    Unlike with `glob`, `**` follows no links to folders: two links to their own folder have matches without end.
    """
    before, *after = _ANY_DEPTH.split(pattern, maxsplit=1)
    if not after:
        yield from glob.iglob(pattern)
        return
    for top in glob.glob(before) if before else [""]:
        for place, folders, files in os.walk(top or "."):
            folders[:] = [name for name in folders if not name.startswith(".")]
            folder = place if top else place[2:]
            if after[0]:
                yield from _matches(os.path.join(glob.escape(folder), after[0]))
            else:
                yield from (os.path.join(folder, name) for name in files if not name.startswith("."))


def _below(folder: str) -> Iterator[str]:
    """Yields the names of the captures below a folder. Links to folders are not followed: they may lead back."""

    def refused(error: OSError) -> None:
        raise error

    with _failures(folder):
        for place, _, files in os.walk(folder, onerror=refused):
            names = (os.path.join(place, name) for name in files if name.endswith(".parquet"))
            yield from (name for name in names if not _is_profile(os.path.abspath(name)))


def _in_store(url: str) -> list[Source]:
    system, path = file_system(url)
    is_pattern = any(mark in path for mark in _PATTERN)
    sources = []
    with _failures(url):
        try:
            found = _found(system, path, is_pattern)
        except RecursionError:  # of the store's file system
            raise SourceError(f"{shown(url)} cannot be read: it has folders within folders without end") from None
        is_one = not is_pattern and path in found
        for name, info in sorted(found.items()):
            if not is_one and _is_profile(name):
                continue
            etag = info.get("ETag") or info.get("etag") or info.get("md5Hash") or info.get("content_md5") or ""
            sources.append(Source(system.unstrip_protocol(name), int(info.get("size") or 0), str(etag)))
    return sources


def _found(system: Any, path: str, is_pattern: bool) -> dict[str, dict[str, Any]]:
    """Returns what a store says of the captures that a path or pattern names, by name."""
    listed = system.glob(path, detail=True) if is_pattern else {path: _info(system, path)}
    found = {}
    for name, info in listed.items():
        if info.get("type") != "directory":
            found[name] = info
            continue
        below = system.find(name, detail=True)
        found |= {each: about for each, about in below.items() if each.endswith(".parquet")}
    return found


def _is_profile(name: str) -> bool:
    """Whether a file that nobody named is none of the captures, but has their profiles."""
    return _PROFILES.search(name) is not None


def _info(system: Any, path: str) -> dict[str, Any]:
    if path.endswith("/"):
        return {"type": "directory"}
    if path.endswith(".parquet"):  # a file, most likely: to know that it is no folder, HTTP would read all of it
        found: dict[str, Any] = system.info(path)
        return found
    return {"type": "directory"} if system.isdir(path) else system.info(path)


@contextlib.contextmanager
def _failures(name: str) -> Iterator[None]:
    """Turns the errors of file systems into sentences."""
    try:
        yield
    except IaprofError:
        raise
    except FileNotFoundError:
        raise SourceError(f"{shown(name)} does not exist") from None
    except Exception as error:
        why = reason(error, name)
        if why is None:
            raise
        raise SourceError(f"{shown(name)} cannot be read: {why}") from None


def _read_end(file: BinaryIO, size: int, length: int) -> bytes:
    file.seek(max(size - length, 0))
    return file.read(length)
