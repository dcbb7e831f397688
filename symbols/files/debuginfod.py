"""Files from debuginfod servers, which give debug information and executables for build-ids.

Servers are asked only where DEBUGINFOD_URLS names some. What they send is kept in the folder that all clients share,
and counts only when it is an ELF file of that build. A server that is slow, absent, or sends anything else costs only
names, and is not asked again.

The protocol and the cache are those of elfutils: debuginfod(8), debuginfod_find_debuginfo(3).
"""

from __future__ import annotations

import contextlib
import http.client
import os
import stat
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, Self

from iaprof.sandbox.answers import sentence
from iaprof.symbols.files.debug_files import Candidate
from iaprof.symbols.names.binaries import Binaries, BinaryError

_LONGEST_WAIT_S = 30.0  # for the next bytes; elfutils' default is 90 s
_LONGEST_DOWNLOAD_S = 120.0  # for one file, where DEBUGINFOD_MAXTIME does not say
_LARGEST_BYTES = 4 << 30  # of one file, where DEBUGINFOD_MAXSIZE does not say
_MISS_S = 600.0  # how long elfutils remembers that there is no such file
_MOST_SERVERS = 8
_CHUNK = 1 << 18
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Kind(StrEnum):
    """What of a build is asked for."""

    DEBUG_INFO = "debuginfo"
    EXECUTABLE = "executable"


@dataclass(frozen=True)
class Bounds:
    """What one download may take."""

    wait_s: float = _LONGEST_WAIT_S
    download_s: float = _LONGEST_DOWNLOAD_S
    size: int = _LARGEST_BYTES


class _NotThere(Exception):
    """The server does not have it."""


class _TooLarge(Exception):
    """The server says that it is larger than what is taken."""


class _Unkept(Exception):
    """It cannot be written to a file; the text says why."""


class _Failed(Exception):
    """The server is not to be asked again; the text says why."""


class Debuginfod:
    """The servers of one user."""

    def __init__(self, urls: Sequence[str], cache: Path | None, bounds: Bounds = Bounds()) -> None:
        """Asks nothing yet.

        Args:
            urls: of the servers, in the order in which they are asked.
            cache: where files are kept; None for nowhere.
            bounds: of one download.
        """
        self._urls = [url.rstrip("/") for url in urls][:_MOST_SERVERS]
        self._cache, self._bounds = cache, bounds
        self._failed: set[str] = set()

    @classmethod
    def of_environment(cls) -> Self | None:
        """As the DEBUGINFOD_ variables say; None where they name no servers.

        Other addresses than http:// and https:// are passed over.
        """
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
        return cls(urls, _usual_cache(os.environ), bounds)

    def find(self, build_id: bytes, kind: Kind, binaries: Binaries, problems: list[str]) -> Candidate | None:
        """A file of a build, from the cache or a server.

        Args:
            build_id: of 2 to 64 bytes.
            kind: which of its files.
            binaries: says whether it is of that build.
            problems: gets a sentence for each server that failed.
        """
        folder = None if self._cache is None else self._cache / build_id.hex()
        if folder is not None:
            kept, is_missing = self._kept(folder / kind, build_id, binaries)
            if kept is not None or is_missing:
                return kept
        everyone_answered = True
        for url in self._urls:
            if url in self._failed:
                everyone_answered = False
                continue
            host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
            try:
                with _Place(folder, kind) as place:
                    self._download(f"{url}/buildid/{build_id.hex()}/{kind}", place.file)
                    reader = place.reader()
                    try:
                        self._check(reader, build_id, binaries)
                        place.keep()
                    except BaseException:
                        os.close(reader)
                        raise
                    return Candidate(reader, f"{host} (debuginfod)")
            except _NotThere:
                continue
            except _TooLarge:
                problems.append(f"debuginfod server {host} has a file of more than {self._bounds.size} bytes")
            except _Failed as failure:
                self._failed.add(url)
                problems.append(f"debuginfod server {host} {failure}")
            except (_Unkept, OSError) as error:
                problems.append(f"what debuginfod server {host} sends cannot be kept: {error}")
            everyone_answered = False
        if everyone_answered and folder is not None:
            with contextlib.suppress(OSError), _Place(folder, kind) as place:
                place.keep()
        return None

    def _kept(self, path: Path, build_id: bytes, binaries: Binaries) -> tuple[Candidate | None, bool]:
        """What the cache has; or that it knows, from not long ago, that there is no such file."""
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                return None, False
            if status.st_size == 0:  # other clients make it so that it cannot be opened
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
        """How long a miss counts, seconds: a file in the cache may say."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return float(((self._cache or Path()) / "cache_miss_s").read_bytes()[:20])
        return _MISS_S

    @staticmethod
    def _check(file: int, build_id: bytes, binaries: Binaries) -> None:
        try:
            facts = binaries.facts(file)
        except BinaryError as error:
            raise _Failed(f"sent what is no file of that build: {error}") from None
        if facts.build_id != build_id:
            raise _Failed("sent a file of another build")

    def _download(self, url: str, file: int) -> None:
        """Writes what is there into a file. Raises _NotThere, _TooLarge, _Unkept or _Failed."""
        work = _Download(url, os.dup(file), self._bounds)
        # Nothing of urllib keeps a limit on all of a transfer: looking up a name or reading headers may take for ever.
        thread = threading.Thread(target=work.run, daemon=True)
        thread.start()
        thread.join(self._bounds.download_s)
        if thread.is_alive():
            raise _Failed(f"took longer than {self._bounds.download_s:g} s")
        if work.error is not None:
            raise work.error


class _Place:
    """A file that is being made in a folder of the cache, or, where there can be none, one without a name."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder, self._name = folder, name

    def __enter__(self) -> Self:
        self._temporary: str | None = None
        with contextlib.suppress(OSError):
            if self._folder is not None and _ours(self._folder):
                self._folder.mkdir(0o700, parents=True, exist_ok=True)
                self.file, self._temporary = tempfile.mkstemp(prefix=f".{self._name}.", dir=self._folder)
        if self._temporary is None:
            with tempfile.TemporaryFile() as file:
                self.file = os.dup(file.fileno())
        return self

    def reader(self) -> int:
        """A descriptor that nothing can be written through, and that outlives this."""
        return os.open(f"/proc/self/fd/{self.file}", _OPEN)

    def keep(self) -> None:
        """Gives the file its name."""
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
    """One request; `run` it in a thread of its own."""

    url: str
    file: int  # a descriptor of its own, as it may be at work when nobody waits any more
    bounds: Bounds
    error: Exception | None = field(default=None)

    def run(self) -> None:
        """Fills the file; what went wrong is in `error`."""
        try:
            self._run(time.monotonic() + self.bounds.download_s)
        except (_NotThere, _TooLarge, _Unkept, _Failed) as error:
            self.error = error
        finally:
            os.close(self.file)

    def _run(self, end: float) -> None:
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
                raise _NotThere from None
            raise _Failed(f"answered with HTTP status {error.code}") from None
        except (_TooLarge, _Unkept, _Failed):
            raise
        except Exception as error:  # noqa: BLE001 (what a library makes of a stranger's answer may be anything)
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise _Failed(f"did not answer within {self.bounds.wait_s:g} s") from None
            raise _Failed(sentence(f"cannot be asked: {reason}"[:200])) from None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Goes on only over HTTP, and only so often."""

    max_redirections = 5

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> Any:
        """Goes on without what comes along with a redirect: the library would read all of it, and it may never end."""
        fp.close()
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _opener() -> urllib.request.OpenerDirector:
    """Knows http and https alone: no files, no FTP, no data: addresses, whatever a server redirects to."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _write(file: int, chunk: bytes) -> None:
    left = memoryview(chunk)
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError as error:
        raise _Unkept(error.strerror) from None


def _number(environment: Mapping[str, str], name: str) -> float:
    """A positive number; 0 for anything else."""
    try:
        value = float(environment.get(name, ""))
    except ValueError:
        return 0.0
    return value if 0 < value < float("inf") else 0.0


def _usual_cache(environment: Mapping[str, str]) -> Path | None:
    """Where the clients of this user keep files; None where there is no home."""
    if own := environment.get("DEBUGINFOD_CACHE_PATH"):
        return Path(own)
    base = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(environment.get("HOME", ""), ".cache")
    return Path(base) / "debuginfod_client" if os.path.isabs(base) else None


def _ours(folder: Path) -> bool:
    """Whether the next folder on the way that exists is ours: root makes no files in anybody's home."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.stat().st_uid == os.geteuid()
