"""Downloads debug information and executables by build-id from debuginfod servers.

Only the servers in DEBUGINFOD_URLS are asked. Their files go to the cache folder that all clients share, and are used
only if they are ELF files of that build. A server that is slow, absent or sends anything else is not asked again;
only names are lost.

The protocol and the cache are those of elfutils: debuginfod(8), debuginfod_find_debuginfo(3).
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from iaprof.basics.files import cache_home
from iaprof.sandbox.parent import sentence
from iaprof.symbols.symbolizers.binaries import Binaries, BinaryError
from iaprof.symbols.symbolizers.debug_files import Candidate

if TYPE_CHECKING:
    import http.client
    import urllib.request

_LONGEST_WAIT_S = 30.0  # for the next bytes; elfutils' default is 90 s
_LONGEST_DOWNLOAD_S = 120.0  # for one file, unless DEBUGINFOD_MAXTIME says otherwise
_LARGEST_BYTES = 4 << 30  # of one file, unless DEBUGINFOD_MAXSIZE says otherwise
_MISS_S = 600.0  # how long elfutils remembers that a file does not exist
_MOST_SERVERS = 8
_CHUNK = 1 << 18
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Kind(StrEnum):
    """The kind of a file of a build, as servers call it."""

    DEBUG_INFO = "debuginfo"
    EXECUTABLE = "executable"


@dataclass(frozen=True)
class Bounds:
    """Limits of one download."""

    wait_s: float = _LONGEST_WAIT_S
    download_s: float = _LONGEST_DOWNLOAD_S
    size: int = _LARGEST_BYTES


class _NotFound(Exception):
    """The server does not have the file."""


class _TooLarge(Exception):
    """The server says that the file is larger than the limit."""


class _NotWritten(Exception):
    """The download cannot be written to a file; the text says why."""


class _Failed(Exception):
    """The server failed and is not asked again; the text says why."""


class Debuginfod:
    """The servers of one user."""

    def __init__(self, urls: Sequence[str], cache: Path | None, bounds: Bounds = Bounds()) -> None:
        """Sends no request yet.

        Args:
            urls: of the servers, in the order in which to ask them.
            cache: the folder for downloaded files; None for no cache.
            bounds: limits of one download.
        """
        self._urls = [url.rstrip("/") for url in urls][:_MOST_SERVERS]
        self._cache, self._bounds = cache, bounds
        self._failed: set[str] = set()

    @classmethod
    def of_environment(cls) -> Self | None:
        """Makes a client from the DEBUGINFOD_ variables; returns None if they name no http:// or https:// server."""
        urls = os.environ.get("DEBUGINFOD_URLS", "").split()
        urls = [url for url in urls if url.lower().startswith(("http://", "https://"))]
        if not urls:
            return None
        wait = _number(os.environ, "DEBUGINFOD_TIMEOUT") or _LONGEST_WAIT_S
        bounds = Bounds(
            min(wait, _LONGEST_WAIT_S),
            min(_number(os.environ, "DEBUGINFOD_MAXTIME") or _LONGEST_DOWNLOAD_S, threading.TIMEOUT_MAX),
            int(_number(os.environ, "DEBUGINFOD_MAXSIZE")) or _LARGEST_BYTES,
        )
        return cls(urls, _default_cache(os.environ), bounds)

    def find(self, build_id: bytes, kind: Kind, binaries: Binaries, problems: list[str]) -> Candidate | None:
        """Returns a file of a build, from the cache or a server; None if there is none.

        Args:
            build_id: of 2 to 64 bytes.
            kind: of the file.
            binaries: reads the file's build-id, to check it.
            problems: gets a sentence for each server that failed.
        """
        folder = None if self._cache is None else self._cache / build_id.hex()
        if folder is not None:
            cached, is_missing = self._cached(folder / kind, build_id, binaries)
            if cached is not None or is_missing:
                return cached
        everyone_answered = True
        for url in self._urls:
            if url in self._failed:
                everyone_answered = False
                continue
            host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
            try:
                with _NewFile(folder, kind) as new:
                    self._download(f"{url}/buildid/{build_id.hex()}/{kind}", new.file)
                    reader = new.reader()
                    try:
                        self._check(reader, build_id, binaries)
                        new.keep()
                    except BaseException:
                        os.close(reader)
                        raise
                    return Candidate(reader, f"{host} (debuginfod)")
            except _NotFound:
                continue
            except _TooLarge:
                problems.append(f"debuginfod server {host} has a file of more than {self._bounds.size} bytes")
            except _Failed as failure:
                self._failed.add(url)
                problems.append(f"debuginfod server {host} {failure}")
            except (_NotWritten, OSError) as error:
                problems.append(f"what debuginfod server {host} sends cannot be kept: {error}")
            everyone_answered = False
        if everyone_answered and folder is not None:
            with contextlib.suppress(OSError), _NewFile(folder, kind) as new:
                new.keep()  # an empty file: no server has it
        return None

    def _cached(self, path: Path, build_id: bytes, binaries: Binaries) -> tuple[Candidate | None, bool]:
        """Returns the file in the cache, and whether the cache says that no server had it a short time ago."""
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                return None, False
            if status.st_size == 0:  # no server had it; other clients make such files unreadable
                return None, time.time() - status.st_mtime < self._miss_s()
            file = os.open(path, _OPEN)
        except OSError:
            return None, False
        try:
            self._check(file, build_id, binaries)
        except _Failed:
            os.close(file)
            return None, False
        return Candidate(file, str(path)), False

    def _miss_s(self) -> float:
        """Returns for how many seconds a miss counts; a file in the cache may set it."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return float(((self._cache or Path()) / "cache_miss_s").read_bytes()[:20])
        return _MISS_S

    @staticmethod
    def _check(file: int, build_id: bytes, binaries: Binaries) -> None:
        try:
            facts = binaries.facts(file)
        except BinaryError as error:
            raise _Failed(f"sent what is not a file of that build: {error}") from None
        if facts.build_id != build_id:
            raise _Failed("sent a file of another build")

    def _download(self, url: str, file: int) -> None:
        """Downloads a URL into a file. Raises _NotFound, _TooLarge, _NotWritten or _Failed."""
        download = _Download(url, os.dup(file), self._bounds)
        # A thread, as urllib cannot limit the time of a whole transfer: resolving a name or reading headers may hang.
        thread = threading.Thread(target=download.run, daemon=True)
        thread.start()
        thread.join(self._bounds.download_s)
        if thread.is_alive():
            raise _Failed(f"took longer than {self._bounds.download_s:g} s")
        if download.error is not None:
            raise download.error


class _NewFile:
    """A file that is written under a temporary name in the cache, or without a name if the cache is not writable."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder, self._name = folder, name

    def __enter__(self) -> Self:
        self._temporary: str | None = None
        with contextlib.suppress(OSError):
            if self._folder is not None and _is_ours(self._folder):
                self._folder.mkdir(0o700, parents=True, exist_ok=True)
                self.file, self._temporary = tempfile.mkstemp(prefix=f".{self._name}.", dir=self._folder)
        if self._temporary is None:
            with tempfile.TemporaryFile() as file:
                self.file = os.dup(file.fileno())
        return self

    def reader(self) -> int:
        """Returns a read-only descriptor of the file, which stays open after the `with` block."""
        return os.open(f"/proc/self/fd/{self.file}", _OPEN)

    def keep(self) -> None:
        """Gives the file its final name."""
        if self._temporary is not None and self._folder is not None:
            os.rename(self._temporary, self._folder / self._name)
            self._temporary = None

    def __exit__(self, *_: object) -> None:
        os.close(self.file)
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)


@dataclass
class _Download:
    """One request, which runs in a thread of its own."""

    url: str
    file: int  # its own descriptor: the thread may still write when nobody waits for it any more
    bounds: Bounds
    error: Exception | None = field(default=None)

    def run(self) -> None:
        """Fills the file; sets `error` if that fails."""
        try:
            self._run(time.monotonic() + self.bounds.download_s)
        except (_NotFound, _TooLarge, _NotWritten, _Failed) as error:
            self.error = error
        finally:
            os.close(self.file)

    def _run(self, end: float) -> None:
        # Imported here, as most reports ask no server, and this takes 20 ms.
        import http.client
        import urllib.error
        import urllib.request

        try:
            request = urllib.request.Request(self.url, headers={"User-Agent": "iaprof"})  # noqa: S310 (of_environment)
            with _opener().open(request, timeout=self.bounds.wait_s) as response:
                length = response.length
                if length is not None and length > self.bounds.size:
                    raise _TooLarge
                received = 0
                while chunk := response.read1(_CHUNK):
                    received += len(chunk)
                    if received > self.bounds.size:
                        raise _Failed(f"sends more than {self.bounds.size} bytes")
                    if time.monotonic() > end:
                        raise _Failed(f"took longer than {self.bounds.download_s:g} s")
                    _write(self.file, chunk)
                if length is not None and received != length:
                    raise _Failed("broke off in the middle of a file")
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.client.NOT_FOUND:
                raise _NotFound from None
            raise _Failed(f"answered with HTTP status {error.code}") from None
        except (_TooLarge, _NotWritten, _Failed):
            raise
        except Exception as error:  # noqa: BLE001 (a hostile answer may make the library raise anything)
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise _Failed(f"did not answer within {self.bounds.wait_s:g} s") from None
            raise _Failed(sentence(f"cannot be asked: {reason}"[:200])) from None


def _opener() -> urllib.request.OpenerDirector:
    """Returns an opener for http and https only: a server cannot redirect to files, FTP or data: URLs."""
    import urllib.request

    class Redirects(urllib.request.HTTPRedirectHandler):
        """Follows redirects over HTTP only, and at most five of them."""

        max_redirections = 5

        def http_error_302(
            self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
        ) -> Any:
            """Follows without reading the redirect's body: the library would read all of it, and it may be endless."""
            fp.close()
            return super().http_error_302(req, fp, code, msg, headers)

        http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        Redirects(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _write(file: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    try:
        while view:
            view = view[os.write(file, view) :]
    except OSError as error:
        raise _NotWritten(error.strerror) from None


def _number(environment: Mapping[str, str], name: str) -> float:
    """Returns a variable's positive number; 0 for anything else."""
    try:
        value = float(environment.get(name, ""))
    except ValueError:
        return 0.0
    return value if 0 < value < float("inf") else 0.0


def _default_cache(environment: Mapping[str, str]) -> Path | None:
    """Returns the folder that debuginfod clients of this user share; None if the user has no home."""
    if path := environment.get("DEBUGINFOD_CACHE_PATH"):
        return Path(path)
    home = cache_home(environment)
    return home / "debuginfod_client" if home else None


def _is_ours(folder: Path) -> bool:
    """Tells whether the nearest existing parent folder is ours: root must not make files in another user's home."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.stat().st_uid == os.geteuid()
