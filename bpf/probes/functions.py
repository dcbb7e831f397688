"""The drivers' functions that copy, fill, or wait for the GPU, and those of the injected library in place of them.

NVIDIA's are exported by its driver's library, which has no layout that iaprof needs to know.
"""

from __future__ import annotations

from iaprof.bpf.driver_layout import Action, Entry
from iaprof.bpf.probes.library_file import LibraryFile, exported
from iaprof.formats.header.waits import FUNCTIONS

LEVEL_ZERO_TRANSFERS = {
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
OPENCL_TRANSFERS = {
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
CUDA_TRANSFERS = {
    "cuMemcpy": (Action.TRANSFER, 2),
    "cuMemcpyAsync": (Action.TRANSFER, 2),
    "cuMemcpyHtoD": (Action.TRANSFER, 2),
    "cuMemcpyHtoDAsync": (Action.TRANSFER, 2),
    "cuMemcpyDtoH": (Action.TRANSFER, 2),
    "cuMemcpyDtoHAsync": (Action.TRANSFER, 2),
    "cuMemcpyDtoD": (Action.TRANSFER, 2),
    "cuMemcpyDtoDAsync": (Action.TRANSFER, 2),
    "cuMemcpyPeer": (Action.TRANSFER, 4),
    "cuMemcpyPeerAsync": (Action.TRANSFER, 4),
    "cuMemcpy2D": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemcpy2DAsync": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemcpy2DUnaligned": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemcpy3D": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemcpy3DAsync": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemcpyBatchAsync": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemsetD8": (Action.TRANSFER, 2),
    "cuMemsetD8Async": (Action.TRANSFER, 2),
    "cuMemsetD16": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemsetD16Async": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemsetD32": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemsetD32Async": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemsetD2D8": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemsetD2D8Async": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemsetD2D32": (Action.TRANSFER_UNKNOWN, 0),
    "cuMemsetD2D32Async": (Action.TRANSFER_UNKNOWN, 0),
}
"""The same of CUDA's functions; those that fill words or rectangles are given no number of bytes."""
CUDA_LAUNCHES = ("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel", "cuGraphLaunch")
CUDA_WAITS = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize")
_CUDA_VERSIONS = ("", "_v2", "_v3")
_CUDA_STREAMS = ("", "_ptds", "_ptsz")  # the stream that a call without one means: the legacy one, or the thread's own
LEVEL_ZERO_WAITS = tuple(name for name in FUNCTIONS.values() if name.startswith("ze"))
OPENCL_WAITS = {"clFinish": 0, "clWaitForEvents": 1}
"""By name: number of the argument that is the handle, or the array of handles."""

_PREFIX = "iaprof_"  # of the exported names, so that programs do not call these functions by accident
_FUNCTIONS = {
    **dict.fromkeys(LEVEL_ZERO_WAITS, (Action.WAIT, 0)),
    **{name: (Action.WAIT, handle) for name, handle in OPENCL_WAITS.items()},
    **LEVEL_ZERO_TRANSFERS,
    **OPENCL_TRANSFERS,
}


def cuda_entries(library: LibraryFile) -> list[tuple[Entry, int]]:
    """Returns the functions of NVIDIA's driver that copy, fill and wait, in all their versions, and their file offsets.

    Raises:
        ProbeError: the file is broken.
    """
    functions = {**CUDA_TRANSFERS, **dict.fromkeys(CUDA_WAITS, (Action.WAIT, 0))}
    of_symbol = {
        f"{name}{version}{stream}": name for name in functions for version in _CUDA_VERSIONS for stream in _CUDA_STREAMS
    }
    found = exported(library, of_symbol)
    at: dict[int, str] = {}  # one function may have several names
    for symbol, offset in sorted(found.items(), key=lambda item: len(item[0])):
        at.setdefault(offset, of_symbol[symbol])
    return [(Entry(name, functions[name][0], offset, functions[name][1]), offset) for offset, name in at.items()]


def cuda_launches(library: LibraryFile) -> list[int]:
    """Returns the file offsets of the functions of NVIDIA's driver that launch, in all versions for streams.

    Raises:
        ProbeError: the file is broken.
    """
    names = (f"{name}{stream}" for name in CUDA_LAUNCHES for stream in _CUDA_STREAMS)
    return sorted(set(exported(library, names).values()))


def injected_entries(library: LibraryFile) -> list[tuple[Entry, int]]:
    """Returns the injected library's functions (libiaprof_inject.so) that wait, copy and fill, and their file offsets.

    Each function is a jump to the driver's function, so the arguments are in the registers that the ABI prescribes.

    Raises:
        ProbeError: the file is broken.
    """
    found = exported(library, (f"{_PREFIX}{name}" for name in _FUNCTIONS))
    names = {name.removeprefix(_PREFIX): offset for name, offset in found.items()}
    return [
        (Entry(name, action, names[name], handle), names[name])
        for name, (action, handle) in _FUNCTIONS.items()
        if name in names
    ]
