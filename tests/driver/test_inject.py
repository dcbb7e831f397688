# SPDX-License-Identifier: Apache-2.0
"""What the preloaded library tells is what the workload says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from driver.driver import DEVICES, Driver, Kernel, read_ledger, zebin
from driver.injecting import ALL_WAYS, Recorder, ledger_elfs, run
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.gpu.code import canonical

pytestmark = [pytest.mark.driver, pytest.mark.bpf]


def ledger_launches(kernels: Sequence[Kernel]) -> Counter[tuple[Any, ...]]:
    counted: Counter[tuple[Any, ...]] = Counter()
    for kernel in kernels:
        place = (canonical(kernel.function_pointer), kernel.isa.stat().st_size, kernel.name.encode())
        counted[kernel.pid, kernel.tid, *place] += sum(kernel.launches.values())
    return counted


@pytest.mark.parametrize("device", DEVICES)
def test_it_tells_what_the_ledger_says(driver: Driver, recorder: Recorder, device: str, tmp_path: Path) -> None:
    """Given processes whose threads create and destroy kernels while others launch, in every way."""
    modules = [zebin(device, "matmul"), zebin(device, "attention")]
    counts = ("--processes", 2, "--threads", 4, "--rounds", 3, "--launches", 5)
    environment = recorder.injection.environment(driver.environment(device))

    done = run(driver.command(modules, *counts, *ALL_WAYS), environment, tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    kernels = read_ledger(done.stdout, tmp_path)
    assert recorder.launches() == ledger_launches(kernels)
    assert recorder.elfs() == ledger_elfs(kernels)
    assert not recorder.left()


@pytest.mark.parametrize(
    "setting",
    [
        {"ZE_ENABLE_LOADER_DRIVER_DDI_PATH": "0"},  # the loader then calls by the tables that it was given
        {"ZE_ENABLE_LOADER_INTERCEPT": "1"},
        {"ZE_ENABLE_TRACING_LAYER": "1"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_every_path_through_the_loader_leads_to_it(
    driver: Driver, recorder: Recorder, setting: dict[str, str], tmp_path: Path
) -> None:
    environment = recorder.injection.environment(driver.environment("bmg") | setting)

    done = run(driver.command([zebin("bmg", "matmul")], *ALL_WAYS), environment, tmp_path)

    kernels = read_ledger(done.stdout, tmp_path)
    assert sum(kernel.launches["immediate"] for kernel in kernels) == 3
    assert recorder.launches() == ledger_launches(kernels)
    assert recorder.elfs() == ledger_elfs(kernels)


def test_what_cannot_be_written_is_told(driver: Driver, recorder: Recorder, tmp_path: Path) -> None:
    """Given a program to which the recorder's folder is read-only: the recorder finds no such file, which is a loss."""
    folder = recorder.injection.library.parent
    script = f'mount --bind {folder} {folder} && mount -o remount,bind,ro {folder} && exec "$0" "$@"'
    words = ["unshare", "--mount", "sh", "-c", script, *driver.command([zebin("bmg", "matmul")], *ALL_WAYS)]

    done = run(words, recorder.injection.environment(driver.environment("bmg")), tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert recorder.launches() == ledger_launches(read_ledger(done.stdout, tmp_path))
    paths = [os.fsdecode(record["path"].split(b"\0")[0]) for record in recorder.probes.compiled.read()]
    assert paths
    for path in paths:
        assert re.fullmatch(rf"{re.escape(str(folder))}/\d+-[0-9a-f]{{16}}\.elf: Read-only file system", path)
    assert not recorder.left()


OTHER_LIBRARY = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

void *dlsym(void *handle, const char *name)
{
    static void *(*next)(void *, const char *);
    if (!next)
        next = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!strcmp(name, "zeGetKernelProcAddrTable"))
        close(open("asked", O_CREAT | O_WRONLY, 0644));
    return next(handle, name);
}
"""


def test_another_preloaded_library_that_takes_dlsym_over_is_asked(
    driver: Driver, recorder: Recorder, tmp_path: Path
) -> None:
    library = tmp_path / "other.so"
    words = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(words, input=OTHER_LIBRARY, text=True, check=True)
    environment = recorder.injection.environment(driver.environment("bmg") | {"LD_PRELOAD": str(library)})

    done = run(driver.command([zebin("bmg", "matmul")]), environment, tmp_path)

    kernels = read_ledger(done.stdout, tmp_path)
    assert recorder.launches() == ledger_launches(kernels)
    assert recorder.elfs() == ledger_elfs(kernels)
    assert (tmp_path / "asked").exists()


CHAINS = {
    "sh": ["sh", "-c", '"$@"; exit $?', "sh"],
    "env": ["env", "-u", "HOME", "nice", "-n", "0"],
    "python": [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"],
    "posix_spawn": [
        sys.executable,
        "-c",
        "import os, sys; os.wait() if os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ) else 0",
    ],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_program_that_another_starts_is_recorded(
    driver: Driver, recorder: Recorder, chain: str, tmp_path: Path
) -> None:
    command = [*CHAINS[chain], *driver.command([zebin("bmg", "matmul")])]

    done = run(command, recorder.injection.environment(driver.environment("bmg")), tmp_path)

    kernels = read_ledger(done.stdout, tmp_path)
    assert len(kernels) == 3
    assert recorder.launches() == ledger_launches(kernels)
    assert recorder.elfs() == ledger_elfs(kernels)


def test_a_driver_that_is_recorded_in_another_way_is_left_alone(
    driver: Driver, recorder: Recorder, tmp_path: Path
) -> None:
    with driver.library.open("rb") as file:
        build_id = LibraryFile(file).build_id()
    skip = recorder.injection.library.with_name("skip")
    skip.write_text(f"{'0' * 40}\n{build_id}\n{'f' * 40}\n")

    environment = recorder.injection.environment(driver.environment("bmg"))
    done = run(driver.command([zebin("bmg", "matmul")]), environment, tmp_path)
    skip.write_text("")

    assert len(read_ledger(done.stdout, tmp_path)) == 3
    assert not recorder.launches()
    assert not recorder.elfs()
