"""Which names a recording puts into its capture."""

from __future__ import annotations

from enum import StrEnum


class Symbols(StrEnum):
    """The values of `--symbols`."""

    NEEDED = "needed"  # names of the addresses in the stacks
    ALL = "all"  # and of all other functions of the same files
    NONE = "none"
