"""The functions that copy and fill memory, as numbered in BPF records."""

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
"""Records have the 1-based position in this tuple: append only."""
UNKNOWN_BYTES = (1 << 64) - 1
"""In records of transfers: the size is not known."""


def function_number(function: str) -> int:
    """The number of a function in records; 0 if it transfers nothing."""
    return FUNCTIONS.index(function) + 1 if function in FUNCTIONS else 0
