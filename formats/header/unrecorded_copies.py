"""Warns that a driver's copies and fills are not recorded, or not the driver's own kernels that do them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iaprof.basics.clean import clean

if TYPE_CHECKING:
    from iaprof.formats.capture.reader import CaptureReader

_MOST_SENTENCES = 20

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


def unrecorded(capture: CaptureReader) -> list[str]:
    """A sentence for each driver whose copies and fills, or own kernels, are not recorded, over all parts."""
    libraries = [part.header.get("libraries") for part in capture.parts]
    texts = [sentence(library) for each in libraries if isinstance(each, list) for library in each]
    return [clean(text) for text in list(dict.fromkeys(filter(None, texts)))[:_MOST_SENTENCES]]
