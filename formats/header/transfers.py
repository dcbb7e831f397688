"""The functions by which programs have memory copied and filled, as records and captures name them."""

from __future__ import annotations

FUNCTIONS = (
    "zeCommandListAppendMemoryCopy",
    "zeCommandListAppendMemoryCopyRegion",
    "zeCommandListAppendMemoryCopyFromContext",
    "zeCommandListAppendMemoryCopyWithParameters",
    "zexCommandListAppendMemoryCopyWithParameters",
    "zeCommandListAppendMemoryFill",
    "zeCommandListAppendMemoryFillWithParameters",
    "zexCommandListAppendMemoryFillWithParameters",
    "zeCommandListAppendImageCopy",
    "zeCommandListAppendImageCopyRegion",
    "zeCommandListAppendImageCopyToMemory",
    "zeCommandListAppendImageCopyFromMemory",
    "zeCommandListAppendImageCopyToMemoryExt",
    "zeCommandListAppendImageCopyFromMemoryExt",
    "clEnqueueReadBuffer",
    "clEnqueueWriteBuffer",
    "clEnqueueCopyBuffer",
    "clEnqueueReadBufferRect",
    "clEnqueueWriteBufferRect",
    "clEnqueueCopyBufferRect",
    "clEnqueueFillBuffer",
    "clEnqueueReadImage",
    "clEnqueueWriteImage",
    "clEnqueueCopyImage",
    "clEnqueueCopyImageToBuffer",
    "clEnqueueCopyBufferToImage",
    "clEnqueueFillImage",
    "clEnqueueSVMMemcpy",
    "clEnqueueSVMMemFill",
    "clEnqueueMemcpyINTEL",
    "clEnqueueMemFillINTEL",
    "clEnqueueMemsetINTEL",
)
"""A record of a transfer has the place in this list, from 1 on: only add to its end."""
UNKNOWN_BYTES = (1 << 64) - 1
"""In place of the bytes of a transfer's record whose size is not known."""


def number_of(function: str) -> int:
    """The number that records have for a function; 0 for one that transfers nothing."""
    return FUNCTIONS.index(function) + 1 if function in FUNCTIONS else 0
