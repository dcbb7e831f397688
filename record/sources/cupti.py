"""The CUPTI libraries that are installed, and which of them work with the driver."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
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


def cupti_paths(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns where CUPTI may be, if a program has not loaded it: of the CUDA toolkit, of wheels beside a Python."""
    folders = [environment.get("CUDA_HOME", ""), environment.get("CUDA_PATH", ""), "/usr/local/cuda"]
    found = [*_libraries(Path(each) / "extras/CUPTI/lib64" for each in folders if each)]
    pythons = [environment.get("VIRTUAL_ENV", ""), environment.get("CONDA_PREFIX", ""), "/usr", "/usr/local"]
    wheels = (Path(root).glob("lib/python3*/*-packages/nvidia/*") for root in pythons if root)
    packages = (each for some in wheels for each in sorted(some))
    found += _libraries(each / "lib" for each in packages if each.name in ("cuda_cupti", "cu12", "cu13", "cu14"))
    return [path for path in dict.fromkeys(found) if ":" not in path]


def _libraries(folders: Iterable[Path]) -> Iterator[str]:
    for folder in folders:
        yield from sorted(map(str, folder.glob("libcupti.so.1[0-9]")), reverse=True)


def _major(version: str) -> int:
    return int(version.partition(".")[0])
