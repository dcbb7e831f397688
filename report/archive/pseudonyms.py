"""What a redacted capture has in place of names and times: both follow from a secret key, and without it from nothing.

The same key gives the same hash for the same name, and moves the clocks of the same machine by the same time, so that
captures which are archived with one key can be compared, and merged.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import create

_KEY_BYTES = 32
_LONGEST_KEY = 4096  # bytes of a key file
_DIGITS = 8
_LETTERS = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_FURTHEST_NS = 1 << 57  # clocks are moved by less than this: 4.5 years
_NEAREST_NS = 1 << 52  # and by more than this: 52 days, so that nothing stays near its time
_LIMIT = 1 << 64  # above every valid time


class Pseudonyms:
    """Hashes and distances of clocks, by a key."""

    def __init__(self, key: bytes | None = None) -> None:
        """Takes a key, of any length; None: a new random one, which nobody has afterwards."""
        self._key = hashlib.blake2b(secrets.token_bytes(_KEY_BYTES) if key is None else key).digest()

    def name(self, what: str, text: str) -> str:
        """Returns a hash as a name, such as `process-1f3a90c2`; "" for ""."""
        return f"{what}-{self._hash(what, text)}" if text else ""

    def letters(self, what: str, text: str) -> str:
        """Returns a hash as a name without digits, such as `slice-cfjpakbm`; "" for ""."""
        return f"{what}-{self._hash(what, text).translate(_LETTERS)}" if text else ""

    def content(self, digest: bytes) -> bytes:
        """Returns a hash, of 20 bytes, in place of a build-id or a digest, which could be looked up."""
        return hashlib.blake2b(digest, key=self._key, digest_size=20, person=b"build-id").digest()

    def clocks(self, header: dict[str, Any]) -> Clocks:
        """Returns how to move the times of a recording; `header` is its own, of which host and boot count."""
        host = header.get("host")
        boot = f"{host.get('name')}:{host.get('boot_id')}" if isinstance(host, dict) else ""
        trace = self._distance("trace", "")
        # Times of what was imported alone are those of the traces, or of a text.
        monotonic = trace if "imported" in header else self._distance("monotonic", boot)
        return Clocks(monotonic, -self._distance("wall", ""), trace)

    def _distance(self, clock: str, text: str) -> int:
        return _NEAREST_NS + int.from_bytes(self._digest(clock, text, 8)) % (_FURTHEST_NS - _NEAREST_NS)

    def _hash(self, what: str, text: str) -> str:
        return self._digest(what, text, _DIGITS // 2).hex()

    def _digest(self, what: str, text: str, size: int) -> bytes:
        told = f"{what}:{text}".encode("utf-8", "surrogatepass")  # headers may have lone surrogates
        return hashlib.blake2b(told, key=self._key, digest_size=size).digest()


class Clocks:
    """How far a redacted recording's clocks are moved, each by a distance of its own, ns: durations stay.

    The monotonic clock and the wall clock together would tell when the machine was started.
    """

    def __init__(self, monotonic_ns: int, wall_ns: int, trace_ns: int) -> None:
        """Takes the distances to add to each clock; `trace_ns`: of traces that were not joined to a recording."""
        self.monotonic_ns = monotonic_ns
        self.wall_ns = wall_ns
        self.trace_ns = trace_ns

    def monotonic(self, value: Any) -> Any:
        """Moves a time of the header; what is none, or 0, stays."""
        return _moved(value, self.monotonic_ns)

    def of_header(self, clock: Any) -> Any:
        """Moves the header's `clock` or `clock_end`."""
        if not isinstance(clock, dict):
            return None
        moved = {"monotonic_ns": self.monotonic(clock.get("monotonic_ns"))}
        return moved | {"realtime_ns": _moved(clock.get("realtime_ns"), self.wall_ns)}


def _moved(value: Any, distance: int) -> Any:
    return max(value + distance, 1) if type(value) is int and 0 < value < _LIMIT else value


def read_key(path: Path) -> bytes:
    """Reads the key file of `--redact-key`; makes it, with a random key, if there is none.

    Raises:
        IaprofError: it cannot be read or made, others can read it, or it is not a key.
    """
    try:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            key = secrets.token_hex(_KEY_BYTES).encode() + b"\n"
            with open(create(path), "wb") as file:
                file.write(key)
            return key
        with open(fd, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise IaprofError(f"{path} is not a file: name another one with --redact-key")
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise IaprofError(f"others may read the key in {path}: chmod 600 it, or name another file")
            key = file.read(_LONGEST_KEY + 1)
    except OSError as error:
        raise IaprofError(f"the key {path} cannot be read or made: {error.strerror}") from error
    if not _KEY_BYTES <= len(key) <= _LONGEST_KEY:
        raise IaprofError(
            f"{path} is not a key, which has {_KEY_BYTES} to {_LONGEST_KEY:,} bytes: name a file that does not exist, "
            "and it is made"
        )
    return key
