# SPDX-License-Identifier: Apache-2.0
"""Mesa's Vulkan driver for Intel's GPUs without a GPU, as a test uses it: build the program, run it, read both ledgers.

    with build(folder) as drivers:
        run = drivers["unstable"].run("bmg", folder, "--rounds", 5)

Devices, pipelines, code and batches are real; nothing is computed. compute.c says what the program can do,
tests/standin/render.c what takes the place of the kernel's driver, and scripts/test-vulkan where Mesa comes from.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from driver.driver import FLAGS, HERE, LIBRARIES, LINK
from iaprof.bpf.probes.library_file import LibraryFile
from integration.recording import BARE, IAPROF, ended, until_recording
from waiting import until

MODULES = HERE.parents[1] / "record" / "calibrate" / "modules"
DEVICES = {"bmg": "e20b", "lnl": "64a0", "ptl": "b080"}  # PCI ids
RELEASES = ("unstable", "trixie")
SHADERS = (1, 2, 3, 4)  # of the program: number n is dispatched by dispatch_n, in n groups


@dataclass(frozen=True)
class Walker:
    """A COMPUTE_WALKER in a submitted batch."""

    pid: int
    kernel: int  # offset of its first instruction from the instruction base
    simd: int
    groups: tuple[int, int, int]  # of threads


@dataclass(frozen=True)
class Primitive:
    """A 3DPRIMITIVE or 3DMESH_3D in a submitted batch."""

    pid: int
    vertices: int  # or groups; 0 of an indirect draw
    # Vertex to fragment, task, mesh, as driver_layout.STAGES without compute: offsets from the instruction base.
    kernels: tuple[int | None, ...]

    @property
    def fragment(self) -> int | None:
        """The kernel of the fragment shader."""
        return self.kernels[4]

    @property
    def is_own(self) -> bool:
        """Whether it is the driver's own, which has a fragment shader alone, or none at all."""
        return self.kernels[0] is None and self.kernels[-1] is None


@dataclass(frozen=True)
class Run:
    """What a run of the program did, as it says itself, and as the batches say."""

    pid: int
    appended: dict[int, int]  # dispatches in command buffers, by shader
    submitted: dict[int, int]  # the same for each time that a command buffer was submitted
    ns: float  # mean time of a dispatch
    walkers: list[Walker]


@dataclass(frozen=True)
class Mesa:
    """A release's Mesa, and the programs that were built for it."""

    release: str
    prepared: Path  # the folder that scripts/test-vulkan makes
    program: Path
    standin: Path  # what takes the place of the kernel's driver, to preload
    manifest: Path  # for Vulkan's loader

    @property
    def libraries(self) -> Path:
        """The folder with the release's libraries."""
        return self.prepared / self.release / LIBRARIES

    @property
    def library(self) -> Path:
        """The driver."""
        return self.libraries / "libvulkan_intel.so"

    @property
    def build_id(self) -> str:
        """The driver's, in hexadecimal."""
        with self.library.open("rb") as file:
            return LibraryFile(file).build_id()

    def with_devices(self, ids: str) -> Path:
        """The stand-in with other devices, given by PCI ids, where no variable can say which."""
        fixed = self.standin.with_name(f"librender-{ids}.so")
        if fixed.exists():
            return fixed
        known = self.standin.read_bytes()
        default = ",".join(DEVICES.values()).encode()
        assert known.count(default) == 1
        fixed.write_bytes(known.replace(default, ids.encode().ljust(len(default), b"\0")))
        return fixed

    def settings(self, device: str, folder: Path) -> dict[str, str]:
        """What makes Mesa believe in a device, one of DEVICES, with files of its own in `folder`."""
        return {
            "LD_PRELOAD": str(self.standin),
            "STANDIN_RENDER": DEVICES[device],
            "STANDIN_WALKERS": str(folder / "walkers"),
            "STANDIN_DRAWS": str(folder / "draws"),
            "VK_DRIVER_FILES": str(self.manifest),
            "VK_LOADER_LAYERS_DISABLE": "~implicit~",
            "INTEL_FORCE_PROBE": "*",  # Mesa 25.0 counts Panther Lake as experimental
            "MESA_SHADER_CACHE_DISABLE": "1",
        }

    def command(self, device: str, folder: Path, *options: str | int) -> list[str]:
        """The command line of the program, with its settings, which a recorder must not have."""
        shaders = [self.prepared / "shaders" / f"{name}.spv" for name in ("special", "table")]
        settings = [f"{name}={value}" for name, value in self.settings(device, folder).items()]
        return [str(word) for word in ("env", *settings, self.program, *options, *shaders)]

    def draw_command(self, device: str, folder: Path, *options: str | int) -> list[str]:
        """The same of the program that draws, draw.c; with --mesh, which it does not get, it has mesh shaders."""
        names = ("vertex", "fragment", "geometry", "control", "evaluation", "special")
        shaders = [self.prepared / "shaders" / f"{name}.spv" for name in names]
        settings = [f"{name}={value}" for name, value in self.settings(device, folder).items()]
        program = self.program.with_name(f"draw-{self.release}")
        if "--mesh" in options:
            options = tuple(option for option in options if option != "--mesh")
            shaders += [MODULES / f"{name}.spv" for name in ("mesh", "task")]
        return [str(word) for word in ("env", *settings, program, *options, *shaders)]

    def operate_command(self, device: str, folder: Path, *options: str | int) -> list[str]:
        """The same of the program that copies and clears, operate.c."""
        settings = [f"{name}={value}" for name, value in self.settings(device, folder).items()]
        program = self.program.with_name(f"operate-{self.release}")
        return [str(word) for word in ("env", *settings, program, *options)]

    def ggml_command(self, device: str, folder: Path, rounds: int) -> list[str]:
        """The command line of the program in ggml.c, which only unstable has; ggml names its pipelines."""
        settings = self.settings(device, folder) | {"GGML_VK_DEBUG_MARKERS": "1"}
        backend = self.libraries / "ggml/backends0/libggml-vulkan.so"
        program = self.program.with_name("ggml")
        return [
            "env",
            *(f"{name}={value}" for name, value in settings.items()),
            str(program),
            str(backend),
            str(rounds),
        ]

    def run(self, device: str, folder: Path, *options: str | int) -> Run:
        """Runs the program."""
        command = self.command(device, folder, *options)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=True)
        return read_run(done.stdout, folder)


def read_run(stdout: str, folder: Path) -> Run:
    """Reads what the program printed, and the ledger in the folder that `settings` was given."""
    told = json.loads(stdout)
    appended, submitted = (dict(zip(SHADERS, told[name], strict=True)) for name in ("appended", "submitted"))
    walkers = [walker for walker in read_walkers(folder) if walker.pid == told["pid"]]
    return Run(told["pid"], appended, submitted, told["ns"], walkers)


def read_walkers(folder: Path) -> list[Walker]:
    """Reads the ledger of COMPUTE_WALKERs."""
    walkers = []
    for line in (folder / "walkers").read_text().splitlines():
        pid, kernel, simd, x, y, z = line.split()
        walkers.append(Walker(int(pid), int(kernel, 16), int(simd), (int(x), int(y), int(z))))
    return walkers


def read_primitives(folder: Path) -> list[Primitive]:
    """Reads the ledger of 3DPRIMITIVEs."""
    primitives = []
    for line in (folder / "draws").read_text().splitlines():
        pid, vertices, *kernels = line.split()
        offsets = tuple(None if kernel == "-" else int(kernel, 16) for kernel in kernels)
        primitives.append(Primitive(int(pid), int(vertices), offsets))
    return primitives


def count_lines(ledger: Path) -> int:
    """How many commands a ledger has so far."""
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


def record_lines(
    environment: dict[str, str], capture: Path, ledger: Path, program: subprocess.Popen[bytes], expected: str = ""
) -> str:
    """Records the machine, from the middle of a program's work on.

    Ends when it has said what is expected, and then the program's ledger has got 400 more lines.

    Returns:
        All that it said.
    """
    until(lambda: count_lines(ledger) > 100, program)
    said = capture.with_name("said")
    with said.open("w") as stderr:
        words = [*IAPROF, "record", "-o", str(capture), *BARE]
        with subprocess.Popen(words, env=environment, stderr=stderr, text=True) as recorder:
            until_recording(recorder)
            until(lambda: expected in said.read_text(), program)
            enough = count_lines(ledger) + 400
            until(lambda: count_lines(ledger) >= enough, program)
            ended(recorder)
    return said.read_text()


def walkers_of(run: Run) -> Counter[int]:
    """How often each kernel was submitted, by its offset from the instruction base."""
    return Counter(walker.kernel for walker in run.walkers)


@contextmanager
def build(folder: Path) -> Iterator[dict[str, Mesa]]:
    """Compiles the programs into `folder`, by release; where Mesa is not there yet, downloads it."""
    # For the stand-in, which `iaprof calibrate` loads as another user: pytest's folders are its user's alone.
    public = Path(tempfile.mkdtemp(prefix="iaprof-vulkan-"))
    public.chmod(0o755)
    script = HERE.parents[1] / "scripts" / "test-vulkan"
    prepared = Path(subprocess.run([script], stdout=subprocess.PIPE, check=True, text=True).stdout.strip())
    standin = public / "librender.so"
    sources = HERE.parent / "standin"
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-fPIC", "-shared")
    _compile([*flags, f"-I{sources}", f"-I{prepared / 'include'}", str(sources / "render.c")], standin)
    yield {release: _build(release, prepared, standin, folder) for release in RELEASES}
    shutil.rmtree(public)


def _build(release: str, prepared: Path, standin: Path, folder: Path) -> Mesa:
    program, manifest = folder / f"compute-{release}", folder / f"{release}.json"
    mesa = Mesa(release, prepared, program, standin, manifest)
    places = (f"-Wl,-rpath,{mesa.libraries}", f"-Wl,--dynamic-linker,{mesa.libraries / 'ld-linux-x86-64.so.2'}")
    sources = (f"-I{prepared / 'include'}", str(HERE / "compute.c"), str(mesa.libraries / "libvulkan.so.1"))
    _compile([*FLAGS, *LINK, *places, *sources], program)
    for other in ("draw", "operate"):
        sources = (sources[0], str(HERE / f"{other}.c"), sources[2])
        _compile([*FLAGS, *LINK, *places, *sources], program.with_name(f"{other}-{release}"))
    if release == "unstable":
        ggml = [str(mesa.libraries / f"lib{name}.so.0") for name in ("ggml", "ggml-base")]
        _compile([*FLAGS, *LINK, *places, f"-I{prepared / 'include'}", str(HERE / "ggml.c"), *ggml], folder / "ggml")
    icd = {"library_path": str(mesa.library), "api_version": "1.4.0"}
    manifest.write_text(json.dumps({"file_format_version": "1.0.1", "ICD": icd}))
    return mesa


def _compile(words: Sequence[str], output: Path) -> None:
    subprocess.run([os.environ.get("CC", "cc"), *words, "-o", str(output)], check=True)


@contextmanager
def changed(mesa: Mesa, old: bytes, new: bytes) -> Iterator[Path]:
    """A driver beside the libraries that it needs, with other bytes in place of some."""
    folder = Path(tempfile.mkdtemp(dir=mesa.prepared))  # where links to its libraries can be
    try:
        folder.chmod(0o755)
        for library in mesa.libraries.iterdir():
            if library.is_file() and library != mesa.library:
                (folder / library.name).hardlink_to(library.resolve())
        content = mesa.library.read_bytes()
        assert old in content
        path = folder / mesa.library.name
        path.write_bytes(content.replace(old, new))
        yield path
    finally:
        shutil.rmtree(folder)
