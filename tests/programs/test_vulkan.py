# SPDX-License-Identifier: Apache-2.0
"""ncnn, wgpu, taichi and vkmark on Mesa's Vulkan driver: what is recorded is what their batches say."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from driver.test_calibrating import WINDOW, on_gpus
from driver.test_vulkan_draws import by_stage, in_batches, reported_by_stage
from driver.test_vulkan_recording import calibrated, reported_launches
from driver.vulkan import DEVICES, RELEASES, Mesa, read_primitives, read_walkers
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from integration.recording import BARE, IAPROF
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf
__all__ = ["calibrated"]  # a fixture

HERE = Path(__file__).resolve().parent
ROUNDS = {"ncnn": 10, "wgpu": 30, "taichi": 20}
ENTRIES = {"wgpu": "triple"}
FUNCTIONS = {"ncnn": "infer", "wgpu": "triple", "taichi": "<module>"}  # of the scripts in `work`, which dispatch


@pytest.fixture(scope="session")
def prepared() -> Path:
    script = HERE.parents[1] / "scripts" / "test-vulkan-programs"
    return Path(subprocess.run([script], stdout=subprocess.PIPE, check=True, text=True).stdout.strip())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("program", ROUNDS)
def test_every_dispatch_of_a_python_program_is_recorded_with_its_stack(
    calibrated: dict[str, Mesa], prepared: Path, program: str, device: str, tmp_path: Path
) -> None:
    # given: Python with the libraries of its release of Debian, whose C library may be newer than this machine's
    release, version, folder, packages = "unstable", "3.14", prepared, "packages"
    if program == "taichi":
        release, version, folder, packages = "trixie", "3.13", prepared / "trixie", "taichi"
    mesa = calibrated[release]
    settings = mesa.settings(device, tmp_path) | {
        "PYTHONHOME": f"{folder}/usr",
        "PYTHONPATH": f"{prepared}/{packages}",
        "HOME": str(tmp_path),
    }
    preloaded = settings.pop("LD_PRELOAD")
    linker = [str(mesa.libraries / "ld-linux-x86-64.so.2"), "--library-path", str(mesa.libraries)]
    python = [*linker, "--preload", preloaded, f"{folder}/usr/bin/python{version}"]
    script = [str(HERE / "work" / f"with_{program}.py"), str(ROUNDS[program])]
    # when
    with Hardware(tmp_path / "gpu", device) as hardware:
        variables = [f"{name}={value}" for name, value in settings.items()]
        words = [*IAPROF, "record", "-o", str(tmp_path / "capture"), *BARE, "--", "env", "-u", "LD_PRELOAD", *variables]
        environment = on_gpus(mesa, hardware, device, VK_DRIVER_FILES=str(mesa.manifest))
        done = subprocess.run([*words, *python, *script], env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    # then
    walkers = Counter(walker.kernel for walker in read_walkers(tmp_path))
    capture = CaptureReader(tmp_path / "capture")
    rows = capture.table("launch").to_pylist()
    assert {row["address"] - WINDOW for row in rows if not row["flags"] & LaunchFlags.OWN} == set(walkers)
    assert sum(walkers.values()) >= ROUNDS[program]
    launches = reported_launches(tmp_path / "capture")
    own = {name: launches.pop(name) for name in list(launches) if name.startswith("blorp")}
    assert Counter(launches.values()) == Counter(walkers.values())
    # and what the program has the driver copy and clear
    primitives = Counter(primitive.fragment for primitive in read_primitives(tmp_path))
    del primitives[None]
    assert Counter(own.values()) == Counter(primitives.values())
    # and the stacks say which function of the script it was
    report = subprocess.run([*IAPROF, "report", str(tmp_path / "capture")], capture_output=True, text=True, check=True)
    kernel = ENTRIES.get(program, "compute")  # a program's entry point, if it is not called `main`
    stalls = [line for line in report.stdout.splitlines() if f";{kernel} " in line]
    assert stalls and os.path.exists(script[0])
    assert sum(FUNCTIONS[program] in line for line in stalls) >= 0.9 * len(stalls)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("release", RELEASES)
def test_every_draw_of_vkmark_is_recorded(
    calibrated: dict[str, Mesa], release: str, device: str, tmp_path: Path
) -> None:
    # given: scenes of vkmark, which records a command buffer for each image and submits it once a frame
    mesa = calibrated[release]
    settings = mesa.settings(device, tmp_path)
    preloaded = settings.pop("LD_PRELOAD")
    folder = mesa.prepared / release
    linker = [str(mesa.libraries / "ld-linux-x86-64.so.2"), "--library-path", str(mesa.libraries)]
    where = [
        "--winsys=headless",
        "--winsys-dir",
        f"{mesa.libraries}/vkmark",
        "--data-dir",
        f"{folder}/usr/share/vkmark",
    ]
    scenes = [word for scene in ("vertex", "shading", "cube", "clear") for word in ("-b", f"{scene}:duration=0.5")]
    vkmark = [*linker, "--preload", preloaded, f"{folder}/vkmark", *where, *scenes]
    # when
    with Hardware(tmp_path / "gpu", device) as hardware:
        variables = [f"{name}={value}" for name, value in settings.items()]
        words = [*IAPROF, "record", "-o", str(tmp_path / "capture"), *BARE, "--", "env", "-u", "LD_PRELOAD", *variables]
        environment = on_gpus(mesa, hardware, device, VK_DRIVER_FILES=str(mesa.manifest))
        done = subprocess.run([*words, *vkmark], env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    # then: each shader as often as the batches have it, and the driver's own, which clear
    drawn = read_primitives(tmp_path)
    primitives = [primitive for primitive in drawn if not primitive.is_own]
    truth = in_batches(primitives, read_walkers(tmp_path))
    assert sum(truth.values()) > 100
    assert reported_by_stage(tmp_path / "capture") == by_stage(truth)
    capture = CaptureReader(tmp_path / "capture")
    rows = capture.table("launch").to_pylist()
    recorded, own = (
        {row["address"] - WINDOW for row in rows if bool(row["flags"] & LaunchFlags.OWN) is is_own}
        for is_own in (False, True)
    )
    assert recorded == {kernel for _, kernel in truth}
    assert own == {primitive.fragment for primitive in drawn if primitive.is_own} - {None}
    assert capture.table("loss").to_pylist() == []
