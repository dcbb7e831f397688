"""Warns that launches by a driver are slower, because the kernel single-steps the instructions at its probes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from iaprof.basics.quantities import and_more

MEMBER = "single_stepped"
"""The member of a library in a capture's header: names of functions or probes that are single-stepped."""
_MOST_NAMED = 3
_LONGEST_NAME = 100  # characters


def slow_launches(functions: Sequence[str]) -> str:
    """A clause about a driver.

    Args:
        functions: launching functions whose probe is single-stepped, or probes' names; at least one.
    """
    names = ", ".join(name[:_LONGEST_NAME] for name in functions[:_MOST_NAMED])
    return (
        f"a launch by {names}{and_more(len(functions) - _MOST_NAMED)} costs 2 to 10 µs more: "
        "the kernel single-steps the instruction at the probe"
    )


def sentence(library: Any) -> str:
    """A sentence, without a full stop, about a library in a header (untrusted); empty if there is nothing to say."""
    match library:
        case {"path": str(path), "single_stepped": [*names]} if names and all(type(name) is str for name in names):
            return f"{path}: {slow_launches(names)}"
    return ""
