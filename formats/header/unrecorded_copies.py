"""What is said of a driver whose copies and fills are not recorded, or not the kernels of its own that do them."""

from __future__ import annotations

from typing import Any

MEMBER = "copies"
"""The member of a library in a capture's header: whether they are recorded; it is missing where no launches are."""
OWN_KERNELS = "own_kernels"
"""Whether these kernels are; where it is missing, they are if copies are."""
CLAUSE = (
    "copies and fills are not recorded, and stalls of the driver's own kernels, which do them, are at no known kernel"
)
OWN_CLAUSE = (
    "copies and fills are recorded, but not the driver's own kernels that do them: their stalls are at no known kernel"
)


def sentence(library: Any) -> str:
    """One without its full stop for a library in a header, which may be anyone's; empty if there is nothing to say."""
    match library:
        case {"path": str(path), "copies": False}:
            return f"{path}: {CLAUSE}"
        case {"path": str(path), "copies": True, "own_kernels": False}:
            return f"{path}: {OWN_CLAUSE}"
    return ""
