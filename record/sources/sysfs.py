"""Files of the kernel that hold one number each and are read again and again."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from iaprof.formats.capture.metrics import MISSING

_MOST_DIGITS = 64
_U64 = (1 << 64) - 1


class NumberFiles:
    """Open files. Each read asks the driver again."""

    def __init__(self) -> None:
        """Begins without files."""
        self._fds: list[int] = []

    def __len__(self) -> int:
        return len(self._fds)

    def add(self, path: Path) -> int:
        """Opens one more file; returns its index in what `read` returns.

        Raises:
            OSError: the file cannot be opened.
        """
        self._fds.append(os.open(path, os.O_RDONLY))
        return len(self._fds) - 1

    def read(self) -> bytes:
        """Returns the numbers, little-endian u64, negative ones as two's complement; MISSING where there is none now.

        Raises:
            OSError: the device has vanished.
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
        """Closes the files."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
