"""Where profiles are kept between questions: a folder, or a URL, of segments."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import iaprof
from iaprof.basics.errors import IaprofError
from iaprof.basics.files import cache_home, open_regular
from iaprof.formats.stores import StoreError, file_system, is_url, reason, shown, within
from iaprof.gpu.vendors import VENDORS
from iaprof.report.fleet.mapping import MapOptions
from iaprof.report.fleet.segment import VERSION, Segment, SegmentError, keys_in
from iaprof.report.fleet.sources import DEFAULT_TIMEOUT_S

NONE = "none"
"""In place of a folder: nothing is kept."""
_NAME = re.compile(r"profiles-[0-9a-f]{16}\.parquet")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_T = TypeVar("_T")
_MOST_FAILURES = 3  # in turn, before nothing more is written


class CacheError(IaprofError):
    """Profiles cannot be kept; the text says why and what to do."""


class Cache:
    """The segments for one set of options."""

    def __init__(self, place: str, options: MapOptions, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Looks which profiles there are.

        Args:
            place: a folder or a URL; NONE to keep nothing.
            options: what profiles depend on besides their captures.
            timeout_s: how long a store may take for each request.

        Raises:
            CacheError: it cannot be read or made.
        """
        self._place = place
        self._timeout_s = timeout_s
        self._folder = f"{place.rstrip('/')}/{options_key(options)}"
        self._segment_of: dict[str, str] = {}  # its name, by key of a profile
        self._spilled: dict[str, tuple[int, int]] = {}  # by the name of a segment: its offset and size in _spill
        self._spill: BinaryIO | None = None
        self.failed = 0  # profiles that could not be kept
        self.failure = ""  # why: a sentence
        self._failures_in_turn = 0
        if place == NONE:
            return
        with self._failures("read"):
            for name in self._limited(self._names):
                # Damaged, removed meanwhile, or no file: its captures are mapped again.
                with contextlib.suppress(SegmentError, *self._ignored()):
                    self._segment_of |= dict.fromkeys(self._limited(partial(self._keys_in, name)), name)

    def segments_with(self, keys: Collection[str]) -> dict[str, list[str]]:
        """Returns the segments that hold profiles, with the keys of these; keys without a profile are in none."""
        found: dict[str, list[str]] = {}
        for key in dict.fromkeys(keys):
            if key in self._segment_of:
                found.setdefault(self._segment_of[key], []).append(key)
        return found

    def read(self, name: str) -> bytes:
        """Returns the content of a segment.

        Raises:
            CacheError: it cannot be read.
        """
        with self._failures("read"):
            if name in self._spilled and self._spill is not None:
                offset, size = self._spilled[name]
                return os.pread(self._spill.fileno(), size, offset)
            return self._limited(partial(self._content, name))

    def remove(self, name: str) -> None:
        """Removes a damaged segment, so that nobody reads it again; not where that is not allowed."""
        if self._spilled.pop(name, None):
            return
        with contextlib.suppress(CacheError), self._failures("removed"):
            if is_url(self._place):
                system, path = file_system(f"{self._folder}/{name}")
                self._limited(partial(system.rm_file, path))
            else:
                os.unlink(f"{self._folder}/{name}")

    def add(self, written: bytes, keys: Collection[str], mode: int = 0o600, *, needed: bool = False) -> None:
        """Keeps a segment, if possible: `failed` and `failure` tell what was not.

        Args:
            written: its content.
            keys: those of its profiles.
            mode: of the file, in a folder.
            needed: whether this process reads it again, for which a temporary file will do if it is not kept.
        """
        name = f"profiles-{secrets.token_hex(8)}.parquet"
        if self._kept(name, written, keys, mode) or (needed and self._spills(name, written)):
            self._segment_of |= dict.fromkeys(keys, name)

    def _kept(self, name: str, written: bytes, keys: Collection[str], mode: int) -> bool:
        if self._place == NONE:
            return False
        try:
            if self._failures_in_turn < _MOST_FAILURES:  # a store that does not answer may take a minute to say so
                self._write(name, written, mode)
                self._failures_in_turn = 0
                return True
        except CacheError as error:
            self.failure = self.failure or str(error)
            self._failures_in_turn += 1
        self.failed += len(keys)
        return False

    def _spills(self, name: str, written: bytes) -> bool:
        """Adds a segment to a file without a name, of which nothing stays however this process ends."""
        try:
            if self._spill is None:
                self._spill = tempfile.TemporaryFile(buffering=0)
            offset = self._spill.seek(0, os.SEEK_END)
            if self._spill.write(written) < len(written):
                self._spill.truncate(offset)
                return False
        except OSError:  # the disk is full: the captures are mapped again
            return False
        self._spilled[name] = offset, len(written)
        return True

    def _write(self, name: str, written: bytes, mode: int) -> None:
        with self._failures("written"):
            if is_url(self._place):
                system, path = file_system(f"{self._folder}/{name}")
                self._limited(partial(system.pipe_file, path, written))
                return
            unfinished = Path(self._folder) / f".{name}.new"
            unfinished.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                with open(os.open(unfinished, _CREATE, mode), "wb") as file:
                    file.write(written)
                unfinished.replace(Path(self._folder) / name)
            except OSError:
                with contextlib.suppress(OSError):
                    unfinished.unlink()
                raise

    def _names(self) -> list[str]:
        if is_url(self._place):
            system, path = file_system(self._folder)
            if not system.exists(path):
                return []
            names = [each.rpartition("/")[2] for each in system.ls(path, detail=False)]
        else:
            names = []
            with contextlib.suppress(PermissionError):  # another user's: nothing can be kept there either
                names = os.listdir(self._folder) if os.path.isdir(self._folder) else []
        return sorted(name for name in names if _NAME.fullmatch(name))

    def _keys_in(self, name: str) -> list[str]:
        with self._open(name) as file:
            return keys_in(file, name)

    def _content(self, name: str) -> bytes:
        with self._open(name) as file:
            return file.read()

    def _limited(self, work: Callable[[], _T]) -> _T:
        """Does something that a store may never finish."""
        if not is_url(self._place):
            return work()
        try:
            return within(self._timeout_s, self._place, work)
        except StoreError as error:
            raise CacheError(f"{error}: name another place with --cache, or --cache {NONE}") from None

    def _open(self, name: str) -> BinaryIO:
        if not is_url(self._place):
            return open_regular(f"{self._folder}/{name}")
        system, path = file_system(f"{self._folder}/{name}")
        opened: BinaryIO = system.open(path, "rb")
        return opened

    def _ignored(self) -> tuple[type[Exception], ...]:
        """Returns the errors of opening one segment that say nothing of the others."""
        return (FileNotFoundError,) if is_url(self._place) else (OSError,)

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except IaprofError:
            raise
        except Exception as error:
            why = reason(error, self._place)
            if why is None:
                raise
            raise CacheError(
                f"the profiles in {shown(self._place)} cannot be {what} ({why}): name another place with --cache, or "
                f"--cache {NONE}"
            ) from None


def options_key(options: MapOptions) -> str:
    """Returns a key of the options, of this version and of the decoders: other ones make other profiles."""
    decoders = [vendor.installed_decoder() for vendor in VENDORS]
    told = [iaprof.__version__, VERSION, *decoders, _plain(options)]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it, the same in every process."""
    if is_dataclass(value):
        return [[field.name, _plain(getattr(value, field.name))] for field in fields(value)]
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, re.Pattern):
        return value.pattern
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, tuple | list):
        return list(map(_plain, value))
    return str(value) if isinstance(value, Path) else value


def usual_place() -> str:
    """Returns the user's own folder for profiles.

    Raises:
        CacheError: the user has none.
    """
    try:
        home = cache_home(os.environ) or Path.home() / ".cache"
    except RuntimeError:
        raise CacheError(
            f"profiles cannot be kept, as this user has no home: name a place with --cache, or --cache {NONE}"
        ) from None
    return str(home / "iaprof" / "profiles")


def written(segment: Segment) -> bytes:
    """Returns a segment as a file's content."""
    file = io.BytesIO()
    segment.write(file)
    return file.getvalue()
