"""What is said of a driver whose copies and fills are not recorded, nor the kernels of its own that do them."""

from __future__ import annotations

from typing import Any

MEMBER = "copies"
"""The member of a library in a capture's header: whether they are recorded; it is missing where no launches are."""
CLAUSE = (
    "copies and fills are not recorded, and stalls of the driver's own kernels, which do them, are at no known kernel"
)


def sentence(library: Any) -> str:
    """One without its full stop for a library in a header, which may be anyone's; empty if there is nothing to say."""
    match library:
        case {"path": str(path), "copies": False}:
            return f"{path}: {CLAUSE}"
    return ""
