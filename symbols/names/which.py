"""Which names a capture gets."""

from __future__ import annotations

from enum import StrEnum


class Symbols(StrEnum):
    """What `--symbols` takes."""

    NEEDED = "needed"  # those of the addresses in its stacks
    ALL = "all"  # and those of all other functions of the same files
    NONE = "none"
