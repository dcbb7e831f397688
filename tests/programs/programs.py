# SPDX-License-Identifier: Apache-2.0
"""Programs that nobody here wrote, on Intel's real runtime without a GPU: how they are started.

    programs = prepare(folder)
    run = programs.python("with_dpnp.py", LEVEL_ZERO_V2)       # what to execute, with which environment
    run = programs.program("clpeak", "--kernel-latency")

scripts/test-programs says what there is and where it comes from. The scripts in work/ run in that folder's Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from driver.driver import without_a_gpu
from driver.opencl import opencl_without_a_gpu
from programs.counting import Place

HERE = Path(__file__).resolve().parent
LIBRARIES = "usr/lib/x86_64-linux-gnu"  # in the prepared folder
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-stringop-truncation",
    "-shared",
    "-fPIC",
    f"-I{HERE.parent / 'standin'}",
)

# SYCL's adapters: how a program is made to use it, and the library whose frames its launches then have.
LEVEL_ZERO_V1 = {"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu", "SYCL_UR_USE_LEVEL_ZERO_V2": "0"}
LEVEL_ZERO_V2 = {"ONEAPI_DEVICE_SELECTOR": "level_zero:gpu", "SYCL_UR_USE_LEVEL_ZERO_V2": "1"}
OPENCL = {"ONEAPI_DEVICE_SELECTOR": "opencl:gpu"}

# What programs call to launch, by the loader whose exports these are. No program here uses the other forms.
LAUNCHES = {
    "libze_loader.so.1": (
        "zeCommandListAppendLaunchKernel",
        "zeCommandListAppendLaunchCooperativeKernel",
        "zeCommandListAppendLaunchKernelWithParameters",
        "zeCommandListAppendLaunchKernelWithArguments",
    ),
    "libOpenCL.so.1": ("clEnqueueNDRangeKernel", "clEnqueueTask"),
}

# A program with a root of its own, where the prepared folder's links, paths and loader are what they are in Debian:
# the runtime reads /proc, and programs write to the working folder.
_IN_ITS_OWN_ROOT = """
mount -t proc proc "$0/proc" && mount --bind "$1" "$0/work" || exit 125
root=$0
shift
exec unshare --root="$root" --wd=/work -- "$@"
"""


@dataclass(frozen=True)
class Run:
    """A program, ready to be executed."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)  # besides ours
    own_root: bool = False

    def with_settings(self, **settings: str) -> Run:
        """The same with more of an environment."""
        return replace(self, environment={**self.environment, **settings})

    def started(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Words and environment for executing it in `folder`, whose file `pid` gets its process id.

        A program in a root of its own gets its environment late: paths in it lead nowhere for anyone else.
        """
        if not self.own_root:
            return self.words, os.environ | {**self.environment, "PROGRAMS_PID": str(folder / "pid")}
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        start = ["sh", "-c", 'echo $$ >"$0" && exec env "$@"', str(folder / "pid")]
        return [*start, *settings, *self.words], dict(os.environ)


@dataclass(frozen=True)
class Programs:
    """The prepared folder, and the library that is preloaded."""

    folder: Path
    preloaded: Path

    @property
    def libraries(self) -> Path:
        """Where Debian's are."""
        return self.folder / LIBRARIES

    @property
    def drivers(self) -> list[Path]:
        """The runtimes: Level Zero's and OpenCL's."""
        return [self.libraries / "libze_intel_gpu.so.1", self.libraries / "intel-opencl/libigdrcl.so"]

    @property
    def dpnp_tests(self) -> Path:
        """The folder of dpnp's own tests."""
        return self.folder / "usr/local/lib/python3.14/dist-packages/dpnp/tests"

    def python(self, script: str, settings: Mapping[str, str], *arguments: str | Path) -> Run:
        """A script of work/ in the folder's Python."""
        return self._run("python3.14", HERE / "work" / script, *arguments).with_settings(**settings)

    def program(self, name: str, *arguments: str | Path) -> Run:
        """A program of the folder."""
        return self._run(name, *arguments)

    def _run(self, name: str, *arguments: str | Path) -> Run:
        # Their C library is newer than this machine's may be, so they run with its own dynamic linker.
        linker = [self.libraries / "ld-linux-x86-64.so.2", "--preload", self.preloaded]
        paths = ["--library-path", f"{self.libraries}:{self.folder / 'usr/local/lib'}"]
        words = [*linker, *paths, self.folder / "usr/bin" / name, *arguments]
        return Run([str(word) for word in words], _environment(self.libraries))

    def in_its_own_root(self, work: Path, name: str, *arguments: str | Path, script: str = "") -> Run:
        """A program or script that runs in `work` with root and mounts of its own, as in a container.

        Nothing is preloaded.
        """
        if script:
            shutil.copy(HERE / "work" / script, work)
        words = [Path("/usr/bin") / name, *([script] if script else []), *arguments]
        start = ["unshare", "--mount", "--", "sh", "-c", _IN_ITS_OWN_ROOT, self.folder, work]
        environment = _environment(Path("/") / LIBRARIES) | {"LD_LIBRARY_PATH": "/usr/local/lib"}
        return Run([str(word) for word in (*start, *words)], environment, own_root=True)

    def launch_functions(self) -> list[Place]:
        """Where each launch passes exactly once: exports of the loaders. pyopencl has a loader of its own."""
        own = sorted((self.folder / "usr/local").rglob("pyopencl/.libs/libOpenCL-*.so*"))
        files = [(self.libraries / name, functions) for name, functions in LAUNCHES.items()]
        files += [(file, LAUNCHES["libOpenCL.so.1"]) for file in own]
        return [place for file, functions in files for place in _exports(file, functions)]


def prepare(folder: Path) -> Programs:
    """Compile what is preloaded into `folder`; where the programs are not there yet, download them."""
    script = HERE.parents[1] / "scripts" / "test-programs"
    prepared = Path(subprocess.run([script], stdout=subprocess.PIPE, check=True, text=True).stdout.strip())
    preloaded = folder / "preloaded.so"
    source = (f"-I{prepared / 'usr/include'}", str(HERE / "preloaded.c"), str(HERE / "dispatched.c"))
    subprocess.run([os.environ.get("CC", "cc"), *FLAGS, *source, "-o", str(preloaded)], check=True)
    return Programs(prepared, preloaded)


def _environment(libraries: Path) -> dict[str, str]:
    return {
        **without_a_gpu("bmg", libraries / "libze_intel_gpu.so.1"),
        **opencl_without_a_gpu(libraries / "intel-opencl/libigdrcl.so"),
        "PYOPENCL_NO_CACHE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _exports(file: Path, functions: tuple[str, ...]) -> list[Place]:
    words = ["readelf", "--wide", "--dyn-syms", "--segments", str(file)]
    lines = [
        line.split() for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    # LOAD, offset, virtual address, physical address, size in the file
    loads = [[int(word, 16) for word in line[1:5]] for line in lines if line[:1] == ["LOAD"]]
    places = []
    for line in lines:
        if len(line) == 8 and line[3] == "FUNC" and (name := line[7].split("@")[0]) in functions:
            address = int(line[1], 16)
            (offset,) = (address - at + start for start, at, _, size in loads if at <= address < at + size)
            places.append(Place(name, file, offset))
    assert places, f"{file} exports none of {functions}"
    return places
