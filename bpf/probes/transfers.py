"""The drivers' functions that copy and fill, and which argument gives the number of bytes."""

from __future__ import annotations

from iaprof.bpf.driver_layout import Action

LEVEL_ZERO = {
    "zeCommandListAppendMemoryCopy": (Action.TRANSFER, 3),
    "zeCommandListAppendMemoryCopyRegion": (Action.TRANSFER_REGION, 2),
    "zeCommandListAppendMemoryCopyFromContext": (Action.TRANSFER, 4),
    "zeCommandListAppendMemoryCopyWithParameters": (Action.TRANSFER, 3),
    "zexCommandListAppendMemoryCopyWithParameters": (Action.TRANSFER, 3),
    "zeCommandListAppendMemoryFill": (Action.TRANSFER, 4),
    "zeCommandListAppendMemoryFillWithParameters": (Action.TRANSFER, 4),
    "zexCommandListAppendMemoryFillWithParameters": (Action.TRANSFER, 4),
    "zeCommandListAppendImageCopy": (Action.TRANSFER_UNKNOWN, 0),
    "zeCommandListAppendImageCopyRegion": (Action.TRANSFER_UNKNOWN, 0),
    "zeCommandListAppendImageCopyToMemory": (Action.TRANSFER_UNKNOWN, 0),
    "zeCommandListAppendImageCopyFromMemory": (Action.TRANSFER_UNKNOWN, 0),
    "zeCommandListAppendImageCopyToMemoryExt": (Action.TRANSFER_UNKNOWN, 0),
    "zeCommandListAppendImageCopyFromMemoryExt": (Action.TRANSFER_UNKNOWN, 0),
}
"""By name: action and `handle` of the function's Entry."""
OPENCL = {
    "clEnqueueReadBuffer": (Action.TRANSFER, 4),
    "clEnqueueWriteBuffer": (Action.TRANSFER, 4),
    "clEnqueueCopyBuffer": (Action.TRANSFER, 5),
    "clEnqueueReadBufferRect": (Action.TRANSFER_SIZES, 5),
    "clEnqueueWriteBufferRect": (Action.TRANSFER_SIZES, 5),
    "clEnqueueCopyBufferRect": (Action.TRANSFER_SIZES, 5),
    "clEnqueueFillBuffer": (Action.TRANSFER, 5),
    "clEnqueueReadImage": (Action.TRANSFER_UNKNOWN, 0),
    "clEnqueueWriteImage": (Action.TRANSFER_UNKNOWN, 0),
    "clEnqueueCopyImage": (Action.TRANSFER_UNKNOWN, 0),
    "clEnqueueCopyImageToBuffer": (Action.TRANSFER_UNKNOWN, 0),
    "clEnqueueCopyBufferToImage": (Action.TRANSFER_UNKNOWN, 0),
    "clEnqueueFillImage": (Action.TRANSFER_UNKNOWN, 0),
    "clEnqueueSVMMemcpy": (Action.TRANSFER, 4),
    "clEnqueueSVMMemFill": (Action.TRANSFER, 4),
    "clEnqueueMemcpyINTEL": (Action.TRANSFER, 4),
    "clEnqueueMemFillINTEL": (Action.TRANSFER, 4),
    "clEnqueueMemsetINTEL": (Action.TRANSFER, 3),
}
"""The same of OpenCL's functions."""
MAY_COPY = (
    "clEnqueueMapBuffer",
    "clEnqueueMapImage",
    "clEnqueueUnmapMemObject",
    "clEnqueueSVMMap",
    "clEnqueueSVMUnmap",
)
"""OpenCL's functions that are not transfers, but may copy."""
