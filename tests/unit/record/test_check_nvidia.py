"""`iaprof check` on machines with NVIDIA's driver, and on those without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.cli.verbs import check as command
from iaprof.gpu.vendors import VENDORS
from iaprof.record.checks import bpf, gpus, kernel, libraries, limits, nvidia, pythons, stacks
from iaprof.record.checks.result import Check, Level
from iaprof.record.sources import cupti, render_nodes
from iaprof.record.sources.nvml import NO_PACKAGE
from unit.record.fakenvidia import CLOSED, NvidiaMachine, machine_of_nvidia
from unit.record.fakenvml import DRIVER_NOT_LOADED, NOT_SUPPORTED

__all__ = ["machine_of_nvidia"]

CUPTI_12, CUPTI_13 = "/opt/cu12/lib/libcupti.so.12", "/opt/cu13/lib/libcupti.so.13"


@pytest.fixture
def machine(machine_of_nvidia: NvidiaMachine, monkeypatch: pytest.MonkeyPatch) -> NvidiaMachine:
    for name in [name for name in os.environ if name.startswith(("CUDA", "NSYS", "NV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(nvidia, "built_library", lambda path: path)
    monkeypatch.setattr(nvidia, "check_folders", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(render_nodes, "render_nodes", list)
    return machine_of_nvidia


def found(alone: bool = True) -> dict[str, Check]:
    return {check.name: check for check in nvidia.checks(alone)}


def levels(alone: bool = True) -> dict[str, str]:
    return {name: check.level.value for name, check in found(alone).items() if check.level is not Level.OK}


def test_a_machine_where_all_is_well(machine: NvidiaMachine) -> None:
    machine.install("NVIDIA H200", "NVIDIA H200")
    machine.cupti = [CUPTI_13, CUPTI_12]
    checks = list(nvidia.checks(alone=True))
    assert {check.level for check in checks} == {Level.OK}
    assert {check.mend for check in checks} == {""}
    assert [(check.name, check.text) for check in checks] == [
        ("driver", "580.159.03, new enough for CUDA 13 (580)"),
        ("nvidia0", "NVIDIA H200, compute capability 9.0 (Hopper), 132 multiprocessors"),
        ("nvidia1", "NVIDIA H200, compute capability 9.0 (Hopper), 132 multiprocessors"),
        (
            "permission",
            "RmProfilingAdminOnly is 1: only root may sample, and the command of 'sudo iaprof record' runs as root; "
            "one that becomes another user is not sampled",
        ),
        (
            "CUPTI",
            "for CUDA 13, which fits the driver; a program that brings its own, as PyTorch does, is sampled with that "
            "one",
        ),
        ("library", "'record -- COMMAND' has the driver load libiaprof_cuda.so"),
        ("metrics", "clocks, use, power, energy, temperature and memory by NVML"),
    ]
    assert found()["CUPTI"].file == CUPTI_13
    assert machine.nvml.opened == 0


def test_a_machine_without_says_nothing(machine: NvidiaMachine) -> None:
    machine.add_to_bus("0000:00:02.0", 0x8086, 0xE20B, 0x030000)
    assert found() == {}
    assert machine.nvml.calls == []


def test_a_gpu_that_the_driver_does_not_drive(machine: NvidiaMachine) -> None:
    machine.add_to_bus("0000:41:00.0", 0x10DE, 0x2330, 0x030200)
    machine.add_to_bus("0000:41:00.1", 0x10DE, 0x22BA, 0x040300)  # its sound
    (check,) = nvidia.checks(alone=True)
    assert (check.level, check.mend) == (Level.WARNING, "sudo modprobe nvidia")
    assert check.text.startswith("the GPU 0000:41:00.0 is NVIDIA's, and NVIDIA's driver does not drive it")


@pytest.mark.parametrize(
    ("version", "level", "said"),
    [
        (CLOSED, Level.OK, "535.129.03, new enough for CUDA 12 (525)"),
        ("NVIDIA UNIX x86_64 Kernel Module  470.223.02  Sat Oct  7", Level.PROBLEM, "470.223.02 is too old: sampling"),
        ("NVIDIA UNIX Open Kernel Module for x86_64  610.15  x", Level.OK, "610.15, new enough for CUDA 13 (580)"),
        ("something else", Level.WARNING, "its version is unknown"),
    ],
)
def test_versions_of_the_driver(machine: NvidiaMachine, version: str, level: Level, said: str) -> None:
    machine.install("NVIDIA A100", version=version)
    check = found()["driver"]
    assert check.level is level
    assert check.text.startswith(said)


@pytest.mark.parametrize(
    ("version", "paths", "level", "file", "said", "mend"),
    [
        (CLOSED, [CUPTI_13, CUPTI_12], Level.OK, CUPTI_12, "for CUDA 12, which fits", ""),
        (
            CLOSED, [CUPTI_13], Level.WARNING, CUPTI_13,
            "for CUDA 13, which needs the driver 580 or newer: this one is 535.129.03",
            "pip install nvidia-cuda-cupti-cu12",
        ),
        ("?", [CUPTI_13], Level.OK, CUPTI_13, "for CUDA 13; a program", ""),
        (CLOSED, ["/x/libcupti.so.11"], Level.WARNING, "/x/libcupti.so.11",
         "for CUDA 11, which is too old: CUDA 12 or newer is needed", "pip install nvidia-cuda-cupti-cu12"),
        (CLOSED, [], Level.WARNING, "", "none was found", "pip install nvidia-cuda-cupti-cu12"),
        ("NVIDIA  580.1.2 x", [], Level.WARNING, "", "none was found", "pip install nvidia-cuda-cupti"),
    ],
)  # fmt: skip
def test_whether_cupti_fits_the_driver(
    machine: NvidiaMachine, version: str, paths: list[str], level: Level, file: str, said: str, mend: str
) -> None:
    machine.install("NVIDIA A100", version=version)
    machine.cupti = paths
    check = found()["CUPTI"]
    assert (check.level, check.file, check.mend) == (level, file, mend)
    assert check.text.startswith(said)


def test_which_versions_fit() -> None:
    for library, driver, is_fit in [
        ("libcupti.so.12", "525.60.13", True), ("libcupti.so.12", "580.65.06", True), ("libcupti.so.12", "520", False),
        ("libcupti.so.13", "580.65.06", True), ("libcupti.so.13", "575.57.08", False), ("libcupti.so.13", "", True),
        ("libcupti.so.14", "580.65.06", True), ("libcupti.so.11.8", "580.65.06", False), ("libcupti.so", "580", False),
    ]:  # fmt: skip
        assert cupti.fits(f"/a/{library}", driver) is is_fit, (library, driver)


@pytest.mark.parametrize(
    ("admin_only", "uid", "level"), [(0, 1000, Level.OK), (1, 0, Level.OK), (1, 1000, Level.WARNING)]
)
def test_who_may_sample(
    machine: NvidiaMachine, monkeypatch: pytest.MonkeyPatch, admin_only: int, uid: int, level: Level
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    machine.install("NVIDIA H200", admin_only=admin_only)
    check = found()["permission"]
    assert check.level is level
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in check.mend) is (level is Level.WARNING)
    assert f"RmProfilingAdminOnly is {admin_only}" in check.text


def test_drivers_that_do_not_say_who_may_sample(machine: NvidiaMachine) -> None:
    machine.install("NVIDIA H200")
    (machine.root / "driver/params").write_text("EnableMSI: 1\n")
    assert found()["permission"].level is Level.WARNING
    (machine.root / "driver/params").unlink()
    assert found()["permission"].level is Level.WARNING


def test_a_gpu_that_is_too_old_is_a_problem_unless_another_vendor_s_works(machine: NvidiaMachine) -> None:
    machine.install("Tesla P100")
    machine.nvml.answers["CudaComputeCapability"] = (6, 0)
    assert levels() == {"nvidia0": "problem", "CUPTI": "warning"}
    assert levels(alone=False) == {"nvidia0": "warning", "CUPTI": "warning"}
    assert "compute capability 7.0 (Volta) or newer" in found()["nvidia0"].text


def test_mig(machine: NvidiaMachine) -> None:
    machine.install("NVIDIA H100", "NVIDIA H100", "NVIDIA H100")
    for path in ("gpu0/mig/gi1/ci0/access", "gpu0/mig/gi2/ci0/access", "gpu1/mig/gi1/ci0/access",
                 "gpu1/mig/gi1/ci1/access"):  # fmt: skip
        machine.write(f"driver/capabilities/{path}", "DeviceFileMinor: 3\nDeviceFileMode: 292\n")
    machine.write("driver/capabilities/mig/config", "")
    first, second = [check for check in nvidia.checks(alone=True) if check.name == "MIG"]
    assert first.level is Level.OK and first.text.startswith("nvidia0 is divided into instances: a program is sampled")
    assert second.level is Level.WARNING and "nvidia1" in second.text and "gi1 into several compute" in second.text


def test_mig_that_only_nvml_tells(machine: NvidiaMachine) -> None:
    machine.install("NVIDIA H100")
    machine.nvml.answers["MigMode"] = [1, 1]
    assert found()["MIG"].level is Level.OK
    machine.nvml.fails["nvmlDeviceGetMigMode"] = NOT_SUPPORTED
    assert "MIG" not in found()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("CUDA_INJECTION64_PATH", "/opt/libToolsInjection64.so", "in place of /opt/libToolsInjection64.so"),
        ("NSYS_PROFILING_SESSION_ID", "7", "NSYS_PROFILING_SESSION_ID is set"),
    ],
)  # fmt: skip
def test_other_profilers_in_the_environment(
    machine: NvidiaMachine, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    machine.install("NVIDIA H200")
    monkeypatch.setenv(variable, value)
    check = found()["other profilers"]
    assert check.level is Level.WARNING
    assert said in check.text


def test_mps_in_the_environment_and_as_a_process(machine: NvidiaMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.install("NVIDIA H200")
    assert "MPS" not in found()
    machine.run(["nvidia-cuda-mps-control"])
    assert found()["MPS"].level is Level.WARNING
    (machine.root / "proc/100/comm").unlink()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    assert found()["MPS"].level is Level.WARNING


def test_other_profilers_that_run(machine: NvidiaMachine) -> None:
    machine.install("NVIDIA A100")
    machine.nvml.answers["CudaComputeCapability"] = (8, 0)
    machine.run(["bash", "nv-hostengine", "nsys", "ncu"])
    machine.write("proc/self/comm", "ncu\n")
    checks = [check for check in nvidia.checks(alone=True) if check.name == "other profilers"]
    assert [check.text.partition(":")[0] for check in checks] == [
        "Nsight Systems runs (process 102)", "Nsight Compute runs (process 103)", "DCGM runs (process 101)",
    ]  # fmt: skip
    assert checks[-1].mend == "dcgmi profile --pause"
    # DCGM has other means on Hopper
    machine.nvml.answers["CudaComputeCapability"] = (9, 0)
    assert "DCGM" not in " ".join(check.text for check in nvidia.checks(alone=True))


def test_without_our_library_nothing_is_recorded(machine: NvidiaMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Path:
        raise IaprofError(f"this installation lacks {path.name}")

    monkeypatch.setattr(nvidia, "built_library", refuse)
    machine.install("NVIDIA H200")
    machine.cupti = [CUPTI_13]
    assert levels() == {"library": "problem"}
    assert "this installation lacks libiaprof_cuda.so" in found()["library"].text


def test_without_metrics(machine: NvidiaMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.install("NVIDIA H200")
    machine.nvml.fails["nvmlInit"] = DRIVER_NOT_LOADED
    check = found()["metrics"]
    assert (check.level, check.mend) == (Level.WARNING, "")
    assert check.text.endswith("NVML cannot be used: Driver Not Loaded")
    assert found()["nvidia0"].text == "NVIDIA H200"
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    check = found()["metrics"]
    assert f"{check.text}: {check.mend}" == NO_PACKAGE
    assert check.mend == "pip install nvidia-ml-py"


def test_names_of_gpus_are_only_cleaned_where_they_are_printed(machine: NvidiaMachine) -> None:
    machine.install("a\x1b[31m")
    assert command._as_dict(found()["nvidia0"])["text"].startswith("a\\x1b[31m, compute")


# ---- with other checks ----


def quiet(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Leaves out what is slow; returns what the others were asked."""
    asked: dict[str, Any] = {}

    def note(name: str) -> Any:
        def checks(*arguments: Any) -> Iterator[Check]:
            asked[name] = arguments
            return iter(())

        return checks

    for module in (bpf, kernel, libraries, limits, pythons, stacks):
        monkeypatch.setattr(module, "checks", note(module.__name__.rpartition(".")[2]))
    monkeypatch.setattr(command, "_decoder", lambda vendor: asked.setdefault(vendor.name, ()) or iter(()))
    return asked


def test_a_machine_with_nvidia_s_only_has_no_lines_about_intel_s(
    machine: NvidiaMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = quiet(monkeypatch)
    machine.install("NVIDIA H200")
    machine.cupti = [CUPTI_13]
    # given a render node that NVIDIA's driver made
    monkeypatch.setattr(render_nodes, "render_nodes", lambda: ["/dev/dri/renderD128"])
    monkeypatch.setattr(render_nodes, "pci_address", lambda path: "0000:01:00.0")
    monkeypatch.setattr(VENDORS[0], "installed_decoder", lambda: "")
    checks = [check for check in command._checks(tmp_path) if isinstance(check, Check)]
    assert {check.group for check in checks} == {"NVIDIA"}
    assert not [check for check in checks if check.level is not Level.OK]
    assert asked["kernel"] == (False,)
    assert asked["limits"] == (tmp_path, [])
    assert "libraries" not in asked
    assert [name for name in asked if name in ("intel", "nvidia")] == ["nvidia"]


def test_a_machine_without_any_gpu_lacks_intel_s(
    machine: NvidiaMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = quiet(monkeypatch)
    for vendor in VENDORS:
        monkeypatch.setattr(vendor, "installed_decoder", lambda: "")
    (check,) = (check for check in command._checks(tmp_path) if isinstance(check, Check))
    assert (check.group, check.name, check.level) == ("GPUs", "none", Level.PROBLEM)
    assert asked["kernel"] == (True,)
    assert "libraries" in asked
    assert [name for name in asked if name in ("intel", "nvidia")] == ["intel"]


def test_intel_s_problems_are_warnings_where_nvidia_s_can_be_recorded(
    machine: NvidiaMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_nodes, "render_nodes", lambda: ["/dev/dri/renderD129"])
    monkeypatch.setattr(render_nodes, "pci_address", lambda path: "0000:00:02.0")
    assert [check.level for check in gpus.checks()] == [Level.PROBLEM]
    assert gpus.vendors() == {"intel"}
    machine.install("NVIDIA H200")
    assert [check.level for check in gpus.checks()] == [Level.WARNING]
    assert gpus.vendors() == {"intel", "nvidia"}


def test_versions_of_the_kernel_where_there_are_no_eu_stalls() -> None:
    assert kernel._version("6.14.0", xe=False).level is Level.OK
    old = kernel._version("6.8.0-45-generic", xe=False)
    assert old.level is Level.WARNING
    assert "EU stalls" not in old.text and "--waits needs 6.13" in old.text
