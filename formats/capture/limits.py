"""Limits on what a capture may declare, and the error for a capture that exceeds them or is damaged.

iaprof's own captures stay far below these limits. They bound the memory and time that an untrusted file can cost.
"""

from __future__ import annotations

from iaprof.basics.errors import IaprofError

HEADER_KEY = b"iaprof"
MAX_ROWS = 1 << 23  # per row group
MAX_GROUP_BYTES = 1 << 31
MAX_HEADER_BYTES = 1 << 26
MAX_PARTS = (1 << 16) - 1
PARTS_PER_GROUP = 16  # bounds the overhead of reading a single part: at most this factor
MAX_TEXT_BYTES = 1 << 14  # a path of 4,096 bytes, every byte escaped
MAX_VALUE_BYTES = 1 << 30  # of one kind of row in memory, or, for a large capture:
MAX_EXPANSION = 1000  # times the file's size. Real stalls take 4 times their size in the file.


class CaptureError(IaprofError):
    """The file is no capture, is incomplete or damaged, or has a format that this version cannot read."""
