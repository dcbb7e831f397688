# SPDX-License-Identifier: Apache-2.0
"""`iaprof calibrate` on Mesa's Vulkan driver: it finds what the batches confirm, or says why not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from driver.vulkan import DEVICES, RELEASES, Mesa, changed
from iaprof.bpf.driver_layout import MADE_BY, Action, Layout
from integration.recording import IAPROF, one_sentence

OF_THE_C_LIBRARY = ("ld-linux", "libc.", "libm.", "libdl.", "libpthread.", "librt.", "libresolv.", "libutil.", "libnss")
REQUIRED_SIZE = 1000225001  # VkPipelineShaderStageRequiredSubgroupSizeCreateInfo's sType


def calibrate(mesa: Mesa, output: Path, devices: str, library: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs it on devices of the stand-in, joined with ','."""
    ids = ",".join(DEVICES[device] for device in devices.split(",") if device)
    environment = os.environ | {"LD_PRELOAD": str(mesa.with_devices(ids))}
    words = [*IAPROF, "calibrate", str(library or mesa.library), "-o", str(output)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("release", RELEASES)
def test_devices_agree_and_have_functions_of_their_own(vulkan: dict[str, Mesa], release: str, tmp_path: Path) -> None:
    # given: layouts of single devices
    mesa, layouts = vulkan[release], {}
    for devices in (*DEVICES, ",".join(DEVICES)):
        output = tmp_path / devices
        done = calibrate(mesa, output, devices)
        assert done.returncode == 0, done.stderr
        layouts[devices] = Layout.from_json(output.read_text())
    together = layouts.pop(",".join(DEVICES))
    # then: they have their shaders in the same way, and one layout has the functions of all
    for layout in layouts.values():
        assert replace(layout, entries=()) == replace(together, entries=())
    assert together.simd
    assert {entry for layout in layouts.values() for entry in layout.entries} == set(together.entries)
    assert set(layouts["bmg"].entries) == set(layouts["lnl"].entries) != set(layouts["ptl"].entries)
    launches = [entry.name for entry in together.entries if entry.action is Action.LAUNCH]
    assert launches.count("vkCmdDispatchBase") == 2
    assert "vkCmdDispatch" not in launches, "it calls vkCmdDispatchBase"
    assert [entry.action for entry in together.entries].count(Action.OPERATION) == 2
    assert together.operations
    assert {name for _, name in together.operations.names} == {"blorp blit", "blorp clear", "blorp copy"}
    draws = [entry.name for entry in together.entries if entry.action is Action.DRAW]
    assert draws.count("vkCmdDraw") == draws.count("vkCmdDrawIndexed") == 2


@pytest.mark.root
def test_the_driver_that_a_process_of_a_container_maps_is_calibrated(vulkan: dict[str, Mesa], tmp_path: Path) -> None:
    # given a process with a root folder of its own, where the driver and what it needs are as in Flatpak's runtimes
    mesa = vulkan["unstable"]
    root = Path(tempfile.mkdtemp(dir=mesa.prepared))  # where links to its libraries can be
    root.chmod(0o755)
    system = root / "usr/lib/x86_64-linux-gnu"
    own = system / "GL/default/lib"
    own.mkdir(parents=True)
    for library in mesa.libraries.iterdir():
        if library.is_file():
            folder = system if library.name.startswith(OF_THE_C_LIBRARY) else own
            (folder / library.name).hardlink_to(library.resolve())
    script = "import os, sys; os.chroot(sys.argv[1]); print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", script, str(root)]
    try:
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            library = Path(f"/proc/{process.pid}/root", own.relative_to(root), mesa.library.name)
            # when
            done = calibrate(mesa, tmp_path / "layout", "bmg", library)
            process.communicate()
    finally:
        shutil.rmtree(root)
    # then its layout is that of the same build elsewhere
    assert done.returncode == 0, done.stderr
    assert calibrate(mesa, tmp_path / "other", "bmg").returncode == 0
    assert (tmp_path / "layout").read_text() == (tmp_path / "other").read_text()


@pytest.mark.parametrize("release", RELEASES)
def test_returns_are_instructions_that_return(vulkan: dict[str, Mesa], release: str, tmp_path: Path) -> None:
    # given: what objdump says of the functions that make pipelines
    mesa = vulkan[release]
    assert calibrate(mesa, tmp_path / "layout", "bmg").returncode == 0
    layout = Layout.from_json((tmp_path / "layout").read_text())
    for made_by, made in (*MADE_BY.items(), (Action.UPLOAD, Action.UPLOADED)):
        (start,) = (entry.address for entry in layout.entries if entry.action is made_by)
        found = {entry.address for entry in layout.entries if entry.action is made}
        words = ["objdump", "-d", "--no-show-raw-insn", f"--start-address={start}", f"--stop-address={start + 0x900}"]
        text = subprocess.run([*words, str(mesa.library)], capture_output=True, text=True, check=True).stdout
        returns = {int(line.split(":")[0], 16) for line in text.splitlines() if line.endswith("ret")}
        assert found and found <= returns


def test_without_a_gpu_it_is_refused_in_a_sentence(vulkan: dict[str, Mesa], tmp_path: Path) -> None:
    done = subprocess.run(
        [*IAPROF, "calibrate", str(vulkan["unstable"].library), "-o", str(tmp_path / "layout")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    told = done.stderr.splitlines(keepends=True)
    assert done.returncode == 1
    assert one_sentence(told[-1])
    assert "it finds no GPU here that it can use" in told[-1]
    assert not (tmp_path / "layout").exists()


def test_commands_of_an_unknown_kind_are_refused(vulkan: dict[str, Mesa], tmp_path: Path) -> None:
    # given: a driver whose walkers begin with another number, as those of a later GPU may
    mesa = vulkan["unstable"]
    old, new = (number.to_bytes(4, "little") for number in (0x72080026, 0x72090026))
    with changed(mesa, old, new) as library:
        # when
        done = calibrate(mesa, tmp_path / "layout", "bmg", library)
    # then
    assert done.returncode == 1
    assert "its commands for a dispatch are of a kind that iaprof does not know" in done.stderr
    assert not (tmp_path / "layout").exists()


def test_kernels_that_no_command_has_are_not_recorded(vulkan: dict[str, Mesa], tmp_path: Path) -> None:
    # given: a driver whose commands for fragment shaders begin with another number, as those of a later GPU may
    mesa = vulkan["unstable"]
    old, new = (number.to_bytes(4, "little") for number in (0x7820000A, 0x7821000A))
    with changed(mesa, old, new) as library:
        # when
        done = calibrate(mesa, tmp_path / "layout", "bmg", library)
    # then
    assert done.returncode == 0, done.stderr
    assert "its operations do not lead to their kernels" in done.stdout
    assert "draws are not recorded" in done.stdout
    layout = Layout.from_json((tmp_path / "layout").read_text())
    assert not layout.has_operations and not layout.has_draws and layout.operations is None


def test_lanes_that_walkers_do_not_prove_are_unknown(vulkan: dict[str, Mesa], tmp_path: Path) -> None:
    # given: a driver that does not know what a pipeline says of its lanes, so that all have as many
    mesa = vulkan["unstable"]
    old, new = (number.to_bytes(4, "little") for number in (REQUIRED_SIZE, REQUIRED_SIZE + 1))
    with changed(mesa, old, new) as library:
        # when
        done = calibrate(mesa, tmp_path / "layout", "bmg", library)
    # then: all else is known
    assert done.returncode == 0, done.stderr
    layout = Layout.from_json((tmp_path / "layout").read_text())
    assert layout.simd == 0 and layout.has_draws


@pytest.mark.parametrize("release", RELEASES)
def test_draws_of_an_unknown_kind_are_left_out_and_said_to_be_missing(
    vulkan: dict[str, Mesa], release: str, tmp_path: Path
) -> None:
    # given: a driver whose commands for vertex shaders begin with another number
    mesa = vulkan[release]
    old, new = (number.to_bytes(4, "little") for number in (0x78100007, 0x78190007))
    with changed(mesa, old, new) as library:
        # when
        done = calibrate(mesa, tmp_path / "layout", "bmg", library)
    # then: dispatches are recorded alone
    assert done.returncode == 0, done.stderr
    assert "Warning: draws are not recorded: as Intel" in done.stdout
    assert "its commands for a draw are of a kind that iaprof does not know" in done.stdout
    layout = Layout.from_json((tmp_path / "layout").read_text())
    assert not layout.has_draws and layout.drawn == ()
    assert Action.LAUNCH in {entry.action for entry in layout.entries}
