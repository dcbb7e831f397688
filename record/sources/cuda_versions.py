"""Which versions of CUDA the installed driver of NVIDIA's runs, and so which of the CUPTI libraries work with it."""

from __future__ import annotations

import os
import re
from pathlib import Path

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
MINIMUM = {12: 525, 13: 580}
"""The oldest driver of each major version of CUDA: docs.nvidia.com/deploy/cuda-compatibility."""
_MOST_BYTES = 1 << 12
_VERSION = re.compile(r"^NVRM version:.*?\s(\d{3,4}(?:\.\d+)+)\s", re.MULTILINE)
_CUPTI = re.compile(r"libcupti\.so\.(\d+)")


def driver_version() -> str:
    """Returns the driver's version, such as 580.159.03; empty if there is none, or it does not tell."""
    try:
        with open(DRIVER_VERSION, "rb") as file:
            match = _VERSION.search(file.read(_MOST_BYTES).decode(errors="replace"))
    except OSError:
        return ""
    return match[1] if match else ""


def newest_cuda(driver: str) -> int | None:
    """Returns the newest major version of CUDA that a driver runs; 0 if none is recorded, None if it is unknown."""
    if not driver:
        return None
    return max((cuda for cuda, oldest in MINIMUM.items() if oldest <= _major(driver)), default=0)


def cuda_of(cupti: str) -> int:
    """Returns the major version of CUDA that a CUPTI library belongs to; 0 if its name does not tell."""
    match = _CUPTI.match(os.path.basename(cupti))
    return int(match[1]) if match else 0


def fits(cupti: str, driver: str) -> bool:
    """Whether a CUPTI library works with a driver, as far as is known: a driver runs older versions of CUDA, too."""
    cuda = cuda_of(cupti)
    return cuda >= min(MINIMUM) and (not driver or _major(driver) >= MINIMUM.get(cuda, 0))


def _major(version: str) -> int:
    return int(version.partition(".")[0])
