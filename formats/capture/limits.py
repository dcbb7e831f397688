"""What a capture may declare, and the error for one that declares more, or is damaged.

Our own captures are far below these limits; a stranger's must not make us allocate and compute at will.
"""

from __future__ import annotations

from iaprof.basics.errors import IaprofError

HEADER_KEY = b"iaprof"
MAX_ROWS = 1 << 23  # in a row group
MAX_GROUP_BYTES = 1 << 31
MAX_HEADER_BYTES = 1 << 26
MAX_PARTS = (1 << 16) - 1
PARTS_PER_GROUP = 16  # who reads one part reads at most so many times what there is
MAX_TEXT_BYTES = 1 << 14  # a path of 4,096 bytes of which each had to be escaped
MAX_VALUE_BYTES = 1 << 30  # of a kind's values in memory; those of a large capture may have more:
MAX_EXPANSION = 1000  # times the file's size. Real stalls have 4 times the bytes that they have in the file.


class CaptureError(IaprofError):
    """A file is no capture, or no whole one, or not one that this version reads."""
