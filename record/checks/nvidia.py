"""NVIDIA's GPUs: the driver, what it permits, CUPTI, other profilers, and what of our own is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from iaprof.basics.errors import IaprofError
from iaprof.record.checks.result import Check, Level, shortened
from iaprof.record.kernels.drivers import BUILT_FOR_CUDA, INJECTION_VARIABLE, built_library, check_folders
from iaprof.record.sources import nvidia
from iaprof.record.sources.cupti import MINIMUM, cuda_of, cupti_paths, driver_version, fits, newest_cuda

GROUP = "NVIDIA"
DRIVER = Path("/proc/driver/nvidia")
PROC = Path("/proc")
_MOST_BYTES = 1 << 16
_MOST_PROCESSES = 1 << 15
_ADMIN_ONLY = re.compile(r"^RmProfilingAdminOnly:\s*(\d+)", re.MULTILINE)
_PERMIT = (
    "echo options nvidia NVreg_RestrictProfilingToAdminUsers=0 | sudo tee /etc/modprobe.d/nvidia-profiling.conf"
)  # fmt: skip
_DCGM, _MPS = "nv-hostengine", "nvidia-cuda-mps"  # processes' names, which the kernel cuts at 15 characters
_PROFILERS = {"nsys": "Nsight Systems", "nsys-launcher": "Nsight Systems", "ncu": "Nsight Compute"}


def checks(alone: bool) -> Iterator[Check]:
    """Checks what recording NVIDIA's GPUs needs; nothing on a machine without them.

    Args:
        alone: no other vendor's GPU can be recorded, so what keeps these from being recorded is a problem.
    """
    for check in _checks():
        yield check if alone or check.level is not Level.PROBLEM else replace(check, level=Level.WARNING)


def _checks() -> Iterator[Check]:
    devices, unknown = nvidia.devices()
    if not devices:
        yield from _undriven()
        return
    version = driver_version()
    yield _driver(version)
    for device in devices:
        yield _gpu(device)
    yield from _mig(devices)
    yield _permission()
    yield _cupti(cupti_paths(), version)
    yield _library()
    yield from _others(devices, os.environ)
    yield _metrics(unknown)


def _undriven() -> Iterator[Check]:
    for bus in nvidia.undriven():
        text = f"the GPU {bus} is NVIDIA's, and NVIDIA's driver does not drive it: install the driver, or load it"
        yield Check(GROUP, "driver", Level.WARNING, text, "sudo modprobe nvidia")


def _driver(version: str) -> Check:
    cuda = newest_cuda(version)
    if cuda is None:
        return Check(GROUP, "driver", Level.WARNING, "its version is unknown, and so which CUPTI fits it")
    if not cuda:
        text = f"{version} is too old: sampling needs {MINIMUM[min(MINIMUM)]} or newer, for CUDA {min(MINIMUM)}"
        return Check(GROUP, "driver", Level.PROBLEM, text)
    return Check(GROUP, "driver", Level.OK, f"{version}, new enough for CUDA {cuda} ({MINIMUM[cuda]})")


def _gpu(device: nvidia.Device) -> Check:
    known = [device.name or "unnamed"]
    if device.compute_capability:
        generation = f" ({device.generation})" if device.generation else ""
        known.append(f"compute capability {device.compute_capability}{generation}")
    if device.multiprocessors:
        known.append(f"{device.multiprocessors} multiprocessors")
    name, text = device.card or device.pci_address, ", ".join(known)
    if device.problem:
        return Check(GROUP, name, Level.PROBLEM, f"{text}: {device.problem}")
    return Check(GROUP, name, Level.OK, text)


def _mig(devices: list[nvidia.Device]) -> Iterator[Check]:
    """Says which GPUs are divided into instances, and whether several share what CUPTI samples."""
    for device in devices:
        instances = sorted((DRIVER / "capabilities").glob(f"gpu{device.card.removeprefix('nvidia')}/mig/gi*"))
        shared = [path.name for path in instances if len(list(path.glob("ci*"))) > 1]
        if shared:
            text = (
                f"{device.card} is divided into instances, and {', '.join(shared)} into several compute instances, "
                "which CUPTI does not sample: a GPU instance needs a single compute instance of its whole size"
            )
            yield Check(GROUP, "MIG", Level.WARNING, text)
        elif instances or device.mig:
            text = (
                f"{device.card} is divided into instances: a program is sampled in its own, if that is of the whole "
                "size of its GPU instance"
            )
            yield Check(GROUP, "MIG", Level.OK, text)


def _permission() -> Check:
    name = "permission"
    try:
        with open(DRIVER / "params", "rb") as file:
            match = _ADMIN_ONLY.search(file.read(_MOST_BYTES).decode(errors="replace"))
    except OSError:
        match = None
    if match is None:
        text = "unknown whether the driver lets everyone sample: the command may have to run as root"
        return Check(GROUP, name, Level.WARNING, text)
    if match[1] == "0":
        return Check(GROUP, name, Level.OK, "RmProfilingAdminOnly is 0: everyone may sample")
    text = "RmProfilingAdminOnly is 1: only root may sample, and the command of 'sudo iaprof record' runs as root"
    if os.geteuid() == 0:
        text += "; one that becomes another user is not sampled"
        return Check(GROUP, name, Level.OK, text)
    return Check(GROUP, name, Level.WARNING, f"{text}. With this, and after a reboot, everyone may sample", _PERMIT)


def _cupti(paths: Sequence[str], version: str) -> Check:
    """Checks the CUPTI library that a program without its own one gets."""
    own = "a program that brings its own, as PyTorch does, is sampled with that one"
    newest = newest_cuda(version)
    mend = f"pip install nvidia-cuda-cupti{'-cu12' if newest == 12 else ''}"
    if not paths:
        text = f"none was found in CUDA's folder or Python's: {own}; others are not sampled"
        return Check(GROUP, "CUPTI", Level.WARNING, text, mend)
    path = next((path for path in paths if fits(path, version)), paths[0])
    cuda, file = cuda_of(path), shortened(path)
    if fits(path, version):
        known = ", which fits the driver" if version else ""
        return Check(GROUP, "CUPTI", Level.OK, f"for CUDA {cuda}{known}; {own}", file=file)
    if cuda in MINIMUM:
        text = f"for CUDA {cuda}, which needs the driver {MINIMUM[cuda]} or newer: this one is {version}"
    else:
        text = f"for CUDA {cuda or 'of an unknown version'}, which is too old: CUDA {min(MINIMUM)} or newer is needed"
    return Check(GROUP, "CUPTI", Level.WARNING, text, mend, file)


def _library() -> Check:
    try:
        built_library(BUILT_FOR_CUDA)
        check_folders()
    except IaprofError as error:
        return Check(GROUP, "library", Level.PROBLEM, f"iaprof cannot sample in its command: {error}")
    return Check(GROUP, "library", Level.OK, f"'record -- COMMAND' has the driver load {BUILT_FOR_CUDA.name}")


def _others(devices: list[nvidia.Device], environment: Mapping[str, str]) -> Iterator[Check]:
    """Says what else may use the hardware that samples: of a process, of a GPU."""
    if path := environment.get(INJECTION_VARIABLE):
        text = f"{INJECTION_VARIABLE} is set: iaprof's command gets iaprof's library in place of {shortened(path)}"
        yield Check(GROUP, "other profilers", Level.WARNING, text, f"unset {INJECTION_VARIABLE}")
    if name := next((name for name in sorted(environment) if name.startswith(("NSYS_", "NV_NSIGHT_"))), ""):
        text = f"{name} is set, as in a program that Nsight profiles: only one of both can use CUPTI in a process"
        yield Check(GROUP, "other profilers", Level.WARNING, text)
    running = _running()
    for name, tool in _PROFILERS.items():
        if name in running:
            text = f"{tool} runs (process {running[name]}): what it profiles at the same time is not sampled"
            yield Check(GROUP, "other profilers", Level.WARNING, text)
    if _DCGM in running and any(_version_of(device) < (9, 0) for device in devices):
        text = (
            f"DCGM runs (process {running[_DCGM]}): if it collects profiling metrics, nothing is sampled on GPUs older "
            "than Hopper. Pause it while you record, and go on with dcgmi profile --resume"
        )
        yield Check(GROUP, "other profilers", Level.WARNING, text, "dcgmi profile --pause")
    if _MPS in running or "CUDA_MPS_PIPE_DIRECTORY" in environment:
        text = "MPS is in use: programs that share a GPU through it may not be sampled; end it if nobody needs it"
        yield Check(GROUP, "MPS", Level.WARNING, text, "echo quit | sudo nvidia-cuda-mps-control")


def _version_of(device: nvidia.Device) -> tuple[int, int]:
    major, _, minor = (device.compute_capability or "0.0").partition(".")
    return int(major), int(minor)


def _running() -> dict[str, int]:
    """Returns those programs of interest that run, by the name of their process, with a pid."""
    wanted = {_DCGM, _MPS, *_PROFILERS}
    found: dict[str, int] = {}
    for number, entry in enumerate(os.scandir(PROC)):
        if number >= _MOST_PROCESSES:
            break
        if not entry.name.isdecimal():
            continue
        try:
            with open(os.path.join(entry.path, "comm"), "rb") as file:
                name = file.read(32).decode(errors="replace").strip()
        except OSError:
            continue
        if name in wanted:
            found.setdefault(name, int(entry.name))
    return found


def _metrics(unknown: str) -> Check:
    if unknown:
        mend = "pip install nvidia-ml-py" if "pip install" in unknown else ""
        return Check(GROUP, "metrics", Level.WARNING, unknown.partition(": pip install")[0], mend)
    return Check(GROUP, "metrics", Level.OK, "clocks, use, power, energy, temperature and memory by NVML")
