"""Warns that a driver's copies and fills are not recorded, or not the driver's own kernels that do them."""

from __future__ import annotations

from typing import Any

MEMBER = "copies"
"""The member of a library in a capture's header: whether transfers are recorded; missing if launches are not."""
OWN_KERNELS = "own_kernels"
"""Whether the driver's own kernels are recorded; if it is missing, they are if copies are."""
CLAUSE = (
    "copies and fills are not recorded, and stalls of the driver's own kernels, which do them, are at no known kernel"
)
OWN_CLAUSE = (
    "copies and fills are recorded, but not the driver's own kernels that do them: their stalls are at no known kernel"
)


def sentence(library: Any) -> str:
    """A sentence, without a full stop, about a library in a header (untrusted); empty if there is nothing to say."""
    match library:
        case {"path": str(path), "copies": False}:
            return f"{path}: {CLAUSE}"
        case {"path": str(path), "copies": True, "own_kernels": False}:
            return f"{path}: {OWN_CLAUSE}"
    return ""
