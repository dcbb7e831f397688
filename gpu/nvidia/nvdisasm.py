"""Finds NVIDIA's disassembler nvdisasm, which comes with CUDA, Triton, and wheels of NVIDIA's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from iaprof.gpu.instructions import Decoder, NoDecoder

PROGRAM_VARIABLE = "IAPROF_NVDISASM"
_PROGRAM = "nvdisasm"
_IN_WHEELS = ("nvidia/cu13/bin", "nvidia/cuda_nvdisasm/bin", "nvidia/cuda_nvcc/bin", "triton/backends/nvidia/bin")


def installed() -> str:
    """Returns the path of the program that would be run, and when it was changed; "" if there is none."""
    for path in candidates():
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            continue
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return f"{path} {status.st_mtime_ns}"
    return ""


def candidates() -> Iterator[str]:
    """Yields the paths at which it may be, in order."""
    if named := os.environ.get(PROGRAM_VARIABLE):
        yield named  # no fallback: the user wants this one
        return
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folders += [os.path.join(os.environ.get(name, ""), "bin") for name in ("CUDA_HOME", "CUDA_PATH")]
    folders.append("/usr/local/cuda/bin")
    folders += [os.path.join(folder, below) for folder in sys.path for below in _IN_WHEELS]
    for folder in folders:
        if os.path.isabs(folder):
            yield os.path.join(folder, _PROGRAM)


def open_decoder() -> Decoder:
    """See Vendor.open_decoder."""
    raise NoDecoder("instructions of NVIDIA's GPUs are not decoded yet")
