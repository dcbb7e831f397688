# SPDX-License-Identifier: Apache-2.0
"""Mesa's Vulkan driver of an unknown build: a recording calibrates it by itself, if root alone can have written it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.vulkan import DEVICES, RELEASES, Mesa, read_run, read_walkers, record_lines, walkers_of
from iaprof.bpf.driver_layout import CACHE, Layout
from iaprof.formats.capture.reader import CaptureReader
from integration.recording import BARE, IAPROF
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf

WINDOW = 0x200000000
NOBODY = 65534
CALIBRATED = re.compile(r": its build was not known, and was calibrated in \d+\.\d s$")


@pytest.fixture
def unknown(vulkan: dict[str, Mesa]) -> Iterator[dict[str, Mesa]]:
    """Both releases' drivers, of which nothing is known."""
    hidden = []
    for mesa in vulkan.values():
        for path in (CACHE / f"{mesa.build_id}.json", CACHE / f"{mesa.build_id}.problem"):
            if path.exists():
                hidden.append((path.rename(path.with_suffix(f"{path.suffix}.hidden")), path))
    yield vulkan
    for mesa in vulkan.values():
        for suffix in ("json", "problem"):
            (CACHE / f"{mesa.build_id}.{suffix}").unlink(missing_ok=True)
    for path, name in hidden:
        path.rename(name)


def on_gpus(mesa: Mesa, hardware: Hardware, devices: str = "bmg", **more: str) -> dict[str, str]:
    """The environment of a recorder whose machine has these GPUs, also for the driver that it calibrates."""
    ids = ",".join(DEVICES[device] for device in devices.split(","))
    environment = os.environ | hardware.env()
    preloaded = ":".join(filter(None, (environment.get("LD_PRELOAD", ""), str(mesa.with_devices(ids)))))
    return environment | {"LD_PRELOAD": preloaded} | more


def record(words: list[str], environment: dict[str, str], capture: Path) -> subprocess.CompletedProcess[str]:
    command = [*IAPROF, "record", "-o", str(capture), *BARE, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def dispatches(capture: Path, pid: int) -> Counter[int]:
    """By the shader's offset."""
    rows = CaptureReader(capture).table("launch").to_pylist()
    return Counter(row["address"] - WINDOW for row in rows if row["pid"] == pid)


def said(text: str, library: str = "libvulkan_intel.so") -> list[str]:
    """Lines about the driver."""
    return [line for line in text.splitlines() if library in line]


@pytest.mark.parametrize("release", RELEASES)
def test_the_driver_of_vulkan_s_manifest_is_known_when_the_command_starts(
    unknown: dict[str, Mesa], release: str, tmp_path: Path
) -> None:
    # given
    mesa = unknown[release]
    # when: twice
    for again in (False, True):
        folder = tmp_path / str(again)
        folder.mkdir()
        with Hardware(folder / "gpu", "bmg") as hardware:
            environment = on_gpus(mesa, hardware, VK_DRIVER_FILES=str(mesa.manifest))
            command = mesa.command("bmg", folder, "--rounds", 3, "--submits", 1)
            done = record(["--", *command], environment, folder / "capture")
        # then: every dispatch is recorded, and one line says why it took longer, the first time
        run = read_run(done.stdout, folder)
        assert dispatches(folder / "capture", run.pid) == walkers_of(run) != Counter()
        lines = said(done.stderr)
        assert len(lines) == (not again), lines
        assert again or CALIBRATED.search(lines[0])
    # and it is kept as `iaprof calibrate` keeps it
    kept = CACHE / f"{mesa.build_id}.json"
    output = tmp_path / "layout"
    environment = os.environ | {"LD_PRELOAD": str(mesa.with_devices(DEVICES["bmg"]))}
    words = [*IAPROF, "calibrate", str(mesa.library), "-o", str(output)]
    subprocess.run(words, env=environment, check=True, capture_output=True)
    assert kept.read_text() == output.read_text()
    assert (kept.stat().st_uid, kept.stat().st_mode & 0o7777) == (0, 0o644)


def test_a_running_program_s_driver_is_calibrated_while_it_is_recorded(
    unknown: dict[str, Mesa], tmp_path: Path
) -> None:
    # given: a program that has mapped a driver that no manifest names
    mesa = unknown["unstable"]
    command = mesa.command("bmg", tmp_path, "--rounds", 3, "--submits", 1, "--seconds", 60)
    with (
        Hardware(tmp_path / "gpu", "bmg") as hardware,
        subprocess.Popen(command, env=os.environ | {"STANDIN_DIR": str(hardware.folder)}) as program,
    ):
        # when: for some time after it is known
        ready = "was calibrated in"
        text = record_lines(
            on_gpus(mesa, hardware), tmp_path / "capture", tmp_path / "walkers", program, expected=ready
        )
        program.kill()
    # then
    assert set(dispatches(tmp_path / "capture", program.pid)) == {each.kernel for each in read_walkers(tmp_path)}
    first, second = said(text)
    assert "is not probed" in first and "it is being calibrated" in first
    assert CALIBRATED.search(second)


def outdate(mesa: Mesa) -> str:
    """Puts a layout there as iaprof made it before it knew of draws and lanes; returns what it makes now."""
    kept = CACHE / f"{mesa.build_id}.json"
    environment = os.environ | {"LD_PRELOAD": str(mesa.with_devices(DEVICES["bmg"]))}
    subprocess.run([*IAPROF, "calibrate", str(mesa.library)], env=environment, check=True, capture_output=True)
    new = kept.read_text()
    layout = json.loads(new)
    for name in ("drawn", "stages", "kind", "stage", "simd", "revision"):
        del layout[name]
    layout["entries"] = [
        entry for entry in layout["entries"] if entry["action"] not in ("draw", "made", "made-to-draw")
    ]
    kept.write_text(json.dumps(layout))
    return new


OUTDATED = "its build was known to an older iaprof only, and was calibrated in "


def test_a_layout_of_an_older_iaprof_is_made_anew_before_the_command_starts(
    unknown: dict[str, Mesa], tmp_path: Path
) -> None:
    mesa = unknown["trixie"]
    new = outdate(mesa)
    for again in (False, True):
        folder = tmp_path / str(again)
        folder.mkdir()
        with Hardware(folder / "gpu", "bmg") as hardware:
            environment = on_gpus(mesa, hardware, VK_DRIVER_FILES=str(mesa.manifest))
            command = mesa.command("bmg", folder, "--rounds", 3, "--submits", 1, "--entries")
            done = record(["--", *command], environment, folder / "capture")
        # then: the recording has what only the new one knows, and says once why it took longer
        rows = CaptureReader(folder / "capture").table("launch").to_pylist()
        assert {row["name"].split(" ")[0] for row in rows} == {"calc", "look"}
        assert [OUTDATED in line for line in said(done.stderr)] == [True] * (not again)
        assert (CACHE / f"{mesa.build_id}.json").read_text() == new


@pytest.mark.parametrize("trusted", [True, False])
def test_a_running_program_is_recorded_by_the_old_layout_which_is_made_anew_for_others(
    unknown: dict[str, Mesa], trusted: bool, tmp_path: Path
) -> None:
    # given: a program that has mapped a driver that no manifest names
    mesa = unknown["unstable"]
    new = outdate(mesa)
    old = (CACHE / f"{mesa.build_id}.json").read_text()
    command = mesa.command("bmg", tmp_path, "--rounds", 3, "--submits", 1, "--seconds", 60)
    mesa.library.chmod(0o644 if trusted else 0o646)
    try:
        with (
            Hardware(tmp_path / "gpu", "bmg") as hardware,
            subprocess.Popen(command, env=os.environ | {"STANDIN_DIR": str(hardware.folder)}) as program,
        ):
            # when
            ready = OUTDATED if trusted else ""
            text = record_lines(
                on_gpus(mesa, hardware), tmp_path / "capture", tmp_path / "walkers", program, expected=ready
            )
            program.kill()
    finally:
        mesa.library.chmod(0o644)
    # then
    assert set(dispatches(tmp_path / "capture", program.pid)) == {each.kernel for each in read_walkers(tmp_path)}
    assert [OUTDATED in line for line in said(text)] == [True] * trusted
    assert (CACHE / f"{mesa.build_id}.json").read_text() == (new if trusted else old)


def _problem(mesa: Mesa, folder: Path, library: Path) -> str:
    """What a recording says of a driver that a program has mapped; none of its code was run."""
    (folder / "gpu").mkdir()
    mapper = (
        "import mmap, sys, time; f = open(sys.argv[1], 'rb');"
        "m = mmap.mmap(f.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC); time.sleep(1)"
    )
    with Hardware(folder / "gpu", "bmg") as hardware:
        environment = on_gpus(mesa, hardware, LD_LIBRARY_PATH=str(library.parent))
        words = ["--", "/usr/bin/env", "-u", "LD_PRELOAD", "-u", "LD_LIBRARY_PATH", "python3", "-c", mapper]
        done = record([*words, str(library)], environment, folder / "capture")
    assert not (CACHE / f"{mesa.build_id}.json").exists()
    (line,) = said(done.stderr)
    return line


@pytest.mark.parametrize("what", ["owner", "group", "everybody"])
def test_a_driver_that_somebody_else_can_write_is_not_run(unknown: dict[str, Mesa], what: str, tmp_path: Path) -> None:
    # given: Mesa beside its libraries, as another user has built it, or may change it
    mesa = unknown["unstable"]
    folder = tmp_path / "driver"
    folder.mkdir()
    library = folder / mesa.library.name
    shutil.copy(mesa.library, library)
    if what == "owner":
        os.chown(library, NOBODY, NOBODY)
    library.chmod({"owner": 0o755, "group": 0o775, "everybody": 0o757}[what])
    # then
    line = _problem(mesa, tmp_path, library)
    assert "users other than root can change it; run 'sudo iaprof calibrate LIBRARY'" in line


def test_a_driver_in_a_file_system_that_root_does_not_trust_is_not_run(
    unknown: dict[str, Mesa], tmp_path: Path
) -> None:
    mesa = unknown["unstable"]
    folder = tmp_path / "stick"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nosuid,mode=755", "stick", str(folder)], check=True)
    try:
        shutil.copy(mesa.library, folder / mesa.library.name)
        line = _problem(mesa, tmp_path, folder / mesa.library.name)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # a recording of all processes may have opened it, too
    assert "its file system is mounted nosuid, so what is on it may not be root's" in line


def test_what_cannot_be_calibrated_is_not_tried_again_at_each_recording(
    unknown: dict[str, Mesa], tmp_path: Path
) -> None:
    # given: a machine without a GPU that the driver knows
    mesa, told = unknown["trixie"], []
    for again in (False, True):
        folder = tmp_path / str(again)
        folder.mkdir()
        with Hardware(folder / "gpu", "bmg") as hardware:
            environment = os.environ | hardware.env() | {"VK_DRIVER_FILES": str(mesa.manifest)}
            done = record(["--", "true"], environment, folder / "capture")
        told.append(said(done.stderr))
    # then: it is said once
    assert len(told[0]) == 1
    assert "its build is not known, and cannot be calibrated: it finds no GPU here that it can use" in told[0][0]
    assert told[1] == []
    assert json.loads((CACHE / f"{mesa.build_id}.problem").read_text())["problem"].startswith("it finds no GPU")
    # and `iaprof calibrate` tries it
    environment = os.environ | {"LD_PRELOAD": str(mesa.with_devices(DEVICES["bmg"]))}
    subprocess.run([*IAPROF, "calibrate", str(mesa.library)], env=environment, check=True, capture_output=True)
    assert Layout.from_json((CACHE / f"{mesa.build_id}.json").read_text()).driver == "vulkan"


def test_options_that_do_not_attach_calibrate_nothing(unknown: dict[str, Mesa], tmp_path: Path) -> None:
    mesa = unknown["unstable"]
    with Hardware(tmp_path / "gpu", "bmg") as hardware:
        environment = on_gpus(mesa, hardware, VK_DRIVER_FILES=str(mesa.manifest))
        done = record(["--launches", "probes", "--", "true"], environment, tmp_path / "capture")
    assert said(done.stderr) == []
    assert not any((CACHE / f"{mesa.build_id}.{suffix}").exists() for suffix in ("json", "problem"))
