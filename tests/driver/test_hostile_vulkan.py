# SPDX-License-Identifier: Apache-2.0
"""Files that pretend to be Mesa's Vulkan driver: they cost a recording some seconds at most, and others nothing."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver.test_calibrating import dispatches, on_gpus, record, said, unknown
from driver.test_vulkan_recording import calibrated, record_command
from driver.vulkan import DEVICES, Mesa, read_run, walkers_of
from iaprof.bpf.driver_layout import CACHE
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.bpf.processes import running_pids
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.process_maps import maps_of
from iaprof.record.kernels.calibrating import SECONDS
from iaprof.report.join.executions import count_launches
from integration.recording import IAPROF
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf
__all__ = ["calibrated", "unknown"]  # fixtures

EXPORTS = """
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) { (void)version; return 0; }
"""
FIND = "void *vk_icdGetInstanceProcAddr(void *instance, const char *name) { (void)instance; (void)name; "
FAKES = {
    "ends": f"{FIND} return 0; }} __attribute__((constructor)) static void f(void) {{ _exit(0); }}",
    "crashes": f"{FIND} *(volatile int *)1 = 1; return 0; }}",
    "has no functions": f"{FIND} return 0; }}",
    "says too much": f'{FIND} for (int i = 0; i < 1 << 22; i++) fputs("\\033[2J\\n", stderr); raise(9); return 0; }}',
    "forges an answer": f"""{FIND} for (int fd = 3; fd < 64; fd++) {{
        const char *answer = "{{\\"devices\\": [{{\\"name\\": \\"\\\\u001b[2J\\", \\"version\\": \\"\\\\n\\"}}]}}";
        if (pwrite(fd, answer, strlen(answer), 0) < 0) continue; }} _exit(0); }}""",
    "has too many devices": f"""
        static int many(void *a, uint32_t *count, void *b) {{ (void)a; (void)b; *count = 0xffffffff; return 0; }}
        static int made(void *a, void *b, void **c) {{ (void)a; (void)b; *c = (void *)made; return 0; }}
        {FIND} return strstr(name, "Enumerate") ? (void *)many : (void *)made; }}""",
}
FAKES["leaves processes"] = f"""{FIND} exit(0); }}
    __attribute__((constructor)) static void f(void) {{
        if (!fork() && setsid() && !fork()) for (int n = 0; n < 600; n++) usleep(100000);
        if (getppid() < 2) for (int n = 0; n < 600; n++) usleep(100000);
    }}"""
WITHOUT_END = {
    "never loads": f"{FIND} return 0; }} __attribute__((constructor)) static void f(void) {{ for (;;) pause(); }}",
    "never answers": f"{FIND} signal(15, SIG_IGN); for (;;); }}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "driver"
    folder.mkdir()
    yield folder
    for path in CACHE.iterdir():
        if path.suffix == ".problem":
            path.unlink()


def fake(source: str, folder: Path, build_id: str = "sha1") -> Path:
    """A driver of root's that pretends to be Mesa's."""
    path = folder / "libvulkan_intel.so"
    (folder / "fake.c").write_text(EXPORTS + source)
    flags = ["-O1", "-w", "-shared", "-fPIC", f"-Wl,--build-id={build_id}"]
    subprocess.run(["cc", *flags, "-o", str(path), str(folder / "fake.c")], check=True)
    return path


@pytest.mark.parametrize("what", FAKES | WITHOUT_END)
def test_a_driver_that_is_none_costs_some_seconds_and_one_sentence(
    vulkan: dict[str, Mesa], what: str, tmp_path: Path, folder: Path
) -> None:
    library = fake((FAKES | WITHOUT_END)[what], folder)
    with Hardware(tmp_path / "gpu", "bmg") as hardware:
        environment = on_gpus(vulkan["unstable"], hardware, LD_LIBRARY_PATH=str(folder))
        begun = time.monotonic()
        done = record(["--", "/usr/bin/env", "-u", "LD_LIBRARY_PATH", "true"], environment, tmp_path / "capture")
        took = time.monotonic() - begun
    # then
    with library.open("rb") as file:
        build_id = LibraryFile(file).build_id()
    assert not (CACHE / f"{build_id}.json").exists()
    assert [pid for pid in running_pids() if str(library).encode() in maps_of(pid)] == []
    lines = said(done.stderr, str(library))  # a machine may have a driver of its own
    assert len(lines) == 1, done.stderr
    (line,) = lines
    assert "its build is not known, and cannot be calibrated: " in line
    assert "\x1b" not in done.stderr and len(line) < 600
    assert took < SECONDS + 60, "a machine may be busy; it is not without an end"
    if what in WITHOUT_END:
        assert f"it has not ended after {SECONDS:.0f} s" in line


def test_a_file_with_mesa_s_build_id_costs_no_others_dispatches(
    unknown: dict[str, Mesa], tmp_path: Path, folder: Path
) -> None:
    # given: Mesa's layout, and another process with a library that has the same build-id and no such functions
    mesa = unknown["unstable"]
    environment = os.environ | {"LD_PRELOAD": str(mesa.with_devices(DEVICES["bmg"]))}
    subprocess.run([*IAPROF, "calibrate", str(mesa.library)], env=environment, check=True, capture_output=True)
    library = fake(FAKES["has no functions"], folder, build_id=f"0x{mesa.build_id}")
    mapper = "import ctypes, sys, time; ctypes.CDLL(sys.argv[1]); print(flush=True); time.sleep(60)"
    with (
        Hardware(tmp_path / "gpu", "bmg") as hardware,
        subprocess.Popen(["python3", "-c", mapper, str(library)], stdout=subprocess.PIPE) as other,
    ):
        assert other.stdout is not None and other.stdout.readline()
        # when
        environment = on_gpus(mesa, hardware, VK_DRIVER_FILES=str(mesa.manifest))
        command = mesa.command("bmg", tmp_path, "--rounds", 3, "--submits", 1)
        done = record(["--", *command], environment, tmp_path / "capture")
        assert other.poll() is None
        other.kill()
    # then
    run = read_run(done.stdout, tmp_path)
    assert dispatches(tmp_path / "capture", run.pid) == walkers_of(run) != {}
    lines = said(done.stderr, str(library))
    assert len(lines) == 1, done.stderr
    (line,) = lines
    assert f"{library} is not probed: " in line


BOMBS = {
    "pools reset in loops": ("--pool", "--rounds", 2000, "--submits", 1, "--dispatches", 1),
    "pipelines made in loops": ("--anew", "--names", "--rounds", 300, "--submits", 1, "--dispatches", 2),
    "submitted again and again": ("--secondary", "--rounds", 1, "--submits", 1000, "--dispatches", 20),
    "very many dispatches": ("--rounds", 1, "--submits", 2, "--dispatches", 20_000),
}


@pytest.mark.parametrize("what", BOMBS)
def test_what_command_buffers_do_in_loops_is_counted(calibrated: dict[str, Mesa], what: str, tmp_path: Path) -> None:
    mesa = calibrated["unstable"]
    printed, _, _ = record_command(mesa, "bmg", tmp_path, mesa.command("bmg", tmp_path, *BOMBS[what]))
    run = read_run(printed, tmp_path)
    assert set(dispatches(tmp_path / "capture", run.pid)) == set(walkers_of(run))
    # then: what a full ring buffer has lost is counted, and nothing else is missing
    header = CaptureReader(tmp_path / "capture").header
    losses = CaptureReader(tmp_path / "capture").table("loss").to_pylist()
    assert [loss for loss in losses if loss["what"] in ("unreadable", "incomplete", "unfinished")] == []
    lost = sum(loss["count"] or 0 for loss in losses if loss["source"] in ("launches", "command lists"))
    totals = count_launches(CaptureReader(tmp_path / "capture"))
    assert totals is not None
    reported = totals.launches
    assert reported == len(run.walkers) or (lost and reported < len(run.walkers)), (header["totals"], losses)
