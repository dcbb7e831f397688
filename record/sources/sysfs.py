"""Numbers that the kernel shows as files, one number each, read again and again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from iaprof.formats.capture.metrics import MISSING

_MOST_DIGITS = 64
_U64 = (1 << 64) - 1


class NumberFiles:
    """Files that stay open. Each read asks the driver anew."""

    def __init__(self) -> None:
        """Begins with none."""
        self._fds: list[int] = []

    def __len__(self) -> int:
        return len(self._fds)

    def add(self, path: Path) -> int:
        """Opens one more; gives its index in what `read` returns.

        Raises:
            OSError: it cannot be opened.
        """
        self._fds.append(os.open(path, os.O_RDONLY))
        return len(self._fds) - 1

    def read(self) -> bytes:
        """Their numbers, little-endian u64 each, negative ones as two's complement; MISSING for what gives none now.

        Raises:
            OSError: the device is gone.
        """
        numbers = b""
        for fd in self._fds:
            try:
                number = int(os.pread(fd, _MOST_DIGITS, 0)) & _U64
            except ValueError:
                number = MISSING
            except OSError as error:
                if error.errno == errno.ENODEV:
                    raise
                number = MISSING
            numbers += number.to_bytes(8, "little")
        return numbers

    def close(self) -> None:
        """Closes them."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
