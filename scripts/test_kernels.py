"""`make test-kernels`: tests that Debian's kernels load iaprof's BPF programs, which then record launches of each kind.

    .venv/bin/python scripts/test_kernels.py [SUITE|IMAGE...]

Needs neither KVM nor a GPU nor root. Downloads the kernel of each suite (linux-image-amd64), checks its signatures,
unpacks it into the user's cache, and boots it with qemu-system-x86_64. The initramfs contains this checkout, the Python
of its .venv, and the drivers and programs of the tests, which are compiled here; tests/kernels/guest.py runs in it. The
results become rows of docs/platforms.md. IMAGE is the path of a kernel that has none, of any origin.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from driver import driver as real_driver, opencl as real_opencl  # noqa: E402 - needs the line above
from integration.handles import driver as played_driver  # noqa: E402
from kernels import jobs_module  # noqa: E402
from kernels.initramfs import Initramfs  # noqa: E402
from standin import hardware, runtime  # noqa: E402

SUITES = ("bookworm", "trixie", "trixie-backports", "unstable")
PROBED = ("usdt", "layout", "attach", "inject", "opencl")
CHECKS = ("programs", "stacks", *PROBED, "side-band", "jobs", "record")
NO_JOBS = {"jobs": "-"}  # of kernels without xe, and those without packages
LAUNCHES = 3  # of each kernel, as in guest.py
MEMORY = 3072  # MiB; the initramfs needs twice its size while it is unpacked
LIMIT = 1500  # seconds, enough for an emulated machine on a busy one
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iaprof-tests" / "kernels"
CPU = "max,-avx2"  # with the AVX2 of QEMU 7.2, NumPy sorts a third of all short arrays wrongly
BOOT = "console=ttyS0 panic=-1 quiet PYTHONHASHSEED=0"  # of init: an old kernel has no random numbers yet
FAILED = "FAILED"
SOURCES = sorted((ROOT / "bpf" / "c").glob("*.c"))
PAGE = ROOT / "docs" / "platforms.md"
LAUNCHING = ROOT / "tests" / "pythons" / "programs"
_FIRST_COLUMNS = "| Kernel of | Date |"


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel."""

    suite: str
    version: str  # as in `uname -r`
    package: str  # version of the package; empty if it came from elsewhere
    image: Path
    modules: Path | None = (
        None  # a folder with those of jobs_module.NAMES; None: this kernel has no driver that needs them
    )


def main() -> None:
    """Tests all kernels; the exit code is 1 if one failed."""
    if shutil.which("qemu-system-x86_64") is None:
        sys.exit(
            "test-kernels: qemu-system-x86_64 is missing; "
            "install it: apt-get install --no-install-recommends qemu-system-x86"
        )
    CACHE.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="run-", dir=CACHE) as name:
        folder = Path(name)
        archive = folder / "initramfs.cpio"
        make_initramfs(folder, archive)
        say(f"the initramfs has {archive.stat().st_size >> 20} MiB")
        for suite in sys.argv[1:] or SUITES:
            kernel = Kernel(suite, "it", "", Path(suite)) if "/" in suite else unpacked(suite)
            begun = time.monotonic()
            say(f"{suite}: booting {kernel.version}")
            told = boot(kernel, with_modules(kernel, archive, folder), folder)
            seconds = round(time.monotonic() - begun)
            for check, (ok, said) in told.items():
                say(f"{suite}: {check}: {'yes' if ok else 'no'}{': ' + said if said else ''}")
            loading = told.get("programs", (True, ""))
            unloaded = None if loading[0] else loading  # which is why most other checks did not run
            results = {check: result(told.get(check, unloaded)) for check in CHECKS}
            results |= {} if kernel.modules else NO_JOBS
            well = "end" in told and FAILED not in results.values()
            say(f"{suite}: {'as it should be' if well else FAILED} in {seconds} s")
            if not well:
                failed = True
                print_console(folder)
            if kernel.package:
                write_row(kernel, results)
    sys.exit(failed)


def say(text: str) -> None:
    """Prints a line of progress."""
    print(f"test-kernels: {text}", flush=True)


# --- kernels


def unpacked(suite: str) -> Kernel:
    """Returns a suite's newest kernel; downloads it if it is not in the cache."""
    with tempfile.TemporaryDirectory(prefix="debs-", dir=CACHE) as name:
        folder = Path(name)
        (meta,) = download(suite, folder / "meta", "linux-image-amd64")
        found = re.search(r"linux-image-(\S+) \(= ([^)]+)\)", field(meta, "Depends"))
        assert found, f"{meta.name} depends on no kernel"
        version, package = found[1], found[2]
        image = CACHE / f"vmlinuz-{version}_{package}"
        if not image.exists():
            (deb,) = download(suite, folder / "image", f"linux-image-{version}")
            if f"linux-binary-{version}" in field(deb, "Depends"):  # since Linux 7 the image has its own package
                (deb,) = download(suite, folder / "binary", f"linux-binary-{version}")
            subprocess.run(["dpkg-deb", "-x", deb, folder / "root"], check=True)
            (found_image,) = [*folder.glob("root/boot/vmlinuz-*"), *folder.glob("root/usr/lib/modules/*/vmlinuz")]
            found_image.rename(image)
        modules = CACHE / f"modules-{version}_{package}"
        if not modules.exists() and has_xe(version):
            (folder / "build").mkdir()
            jobs_module.build(suite, version, download, folder / "build", modules)
    return Kernel(suite, version, package, image, modules if has_xe(version) else None)


def has_xe(version: str) -> bool:
    """Whether a kernel has the driver whose GPUs sample stalls; it came with Linux 6.8."""
    return tuple(map(int, version.split(".")[:2])) >= (6, 8)


def download(suite: str, folder: Path, *packages: str, depends: bool = False) -> list[Path]:
    """Downloads packages of a suite, and with `depends` those that they need, and checks their signatures."""
    options = ["--depends"] if depends else []
    subprocess.run([ROOT / "scripts" / "debian-packages", *options, suite, folder, *packages], check=True)
    return list(folder.glob("*.deb"))


def field(deb: Path, name: str) -> str:
    """Returns a field of a package's description."""
    return subprocess.run(["dpkg-deb", "--field", deb, name], stdout=subprocess.PIPE, text=True, check=True).stdout


# --- the initramfs


def make_initramfs(folder: Path, archive: Path) -> None:
    """Writes the initramfs; compiles the tests' drivers and programs into `folder`."""
    files = Initramfs()
    plan: dict[str, Any] = {
        "programs": [name for source in SOURCES for name in re.findall(r"^int (on_\w+)\(", source.read_text(), re.M)],
        "usdt": standin(files, folder / "standin"),
        "layout": played(files, folder / "played"),
        **real(files, folder / "real"),
        "record": recording(files, folder / "recorded"),
    }
    files.text("/plan.json", json.dumps(plan))
    python = Path(sys.prefix) / "bin" / "python"
    files.text("/init", f"#!{python} -B\nfrom kernels import guest\n\nguest.main()\n", 0o755)
    add_python(files, python)
    for where in ("/tmp", "/proc", "/sys", "/dev", "/var/cache"):  # noqa: S108
        files.folder(where)
    files.write(archive)


def add_python(files: Initramfs, python: Path) -> None:
    """Adds the interpreter, its standard library, NumPy, and iaprof."""
    files.add(python)
    files.add(Path(sys.prefix) / "pyvenv.cfg")
    unused = {
        "test",
        "tests",
        "__pycache__",
        "site-packages",
        "dist-packages",
        "idlelib",
        "tkinter",
        "ensurepip",
        "lib2to3",
    }
    files.add(Path(sysconfig.get_path("stdlib")), but=lambda path: path.name in unused)
    packages = Path(sysconfig.get_path("purelib"))
    for name in packages_of("iaprof"):
        files.add(packages / name, but=is_unused)
    import iaprof

    source = Path(iaprof.__file__).parent
    files.text(str(packages / "guest.pth"), f"{source.parent}\n{ROOT / 'tests'}\n")
    files.add(source / "__init__.py")
    files.add(source / "__main__.py")
    for name in ("basics", "bpf", "cli", "formats", "gpu", "record", "report", "sandbox", "symbols", "timelines"):
        files.add(source / name, but=lambda path: path.name == "__pycache__")
    for name in (
        "kernels/guest.py",
        "kernels/jobs_module.py",
        "integration/walking.py",
        "standin/hardware.py",
        "standin/sysfs.py",
        "pythons/frames.py",
    ):
        files.add(ROOT / "tests" / name)


def packages_of(name: str, known: set[str] | None = None) -> set[str]:
    """Returns the files and folders in site-packages of what a distribution needs, without extras."""
    known = set() if known is None else known
    found: set[str] = set()
    for requirement in metadata.requires(name) or ():
        needed = re.split(r"[^\w.-]", requirement)[0]
        if "extra ==" in requirement or needed in known:
            continue
        known.add(needed)
        with contextlib.suppress(metadata.PackageNotFoundError):  # for another Python or system
            files = metadata.files(needed) or ()
            found |= {path.parts[0] for path in files if path.parts[0] not in ("..", "__pycache__")}
            found |= packages_of(needed, known)
    return found


def is_unused(path: Path) -> bool:
    """Whether a file of a package is not needed to record: tests, headers, and Arrow's libraries for other things."""
    unused = {"tests", "__pycache__", "include", "src"}
    return path.name in unused or path.suffix == ".a" or path.name.startswith(("libarrow_flight", "libarrow_substrait"))


def standin(files: Initramfs, folder: Path) -> dict[str, Any]:
    """Adds the runtime with probes, and a program; returns its part of the plan."""
    programs = runtime.build(folder)
    module = runtime.debug_elf("bmg", "matmul")
    for path in (programs.library, programs.workload, module):
        files.add(path)
    launches = 3 * LAUNCHES
    words = runtime.command([module], "--launches", launches, "--rate", 0, programs=programs)
    return {"library": str(programs.library), "command": words, "environment": {}, "launches": launches}


def played(files: Initramfs, folder: Path) -> dict[str, Any]:
    """Adds a driver without probes; returns its part of the plan, with the driver's layout."""
    built = played_driver.build(folder)
    files.add(built.library)
    files.add(built.program)
    words = [str(built.program), "kernel", "1", "1", "0", str(LAUNCHES), "0"]
    return {"library": str(built.library), "command": words, "layout": built.layout.to_json()}


def recording(files: Initramfs, folder: Path) -> dict[str, Any]:
    """Adds a program in Python that tells its frames, and the stand-in's GPU; returns its part of the plan."""
    folder.mkdir()
    programs, linked, calls = hardware.build(), runtime.build().library, folder / "libcalls.so"
    words = ["cc", *runtime.COMMON, "-O2", "-fPIC", "-shared", f"-I{runtime.SOURCES}", LAUNCHING / "launching_calls.c"]
    subprocess.run([*words, linked, f"-Wl,-rpath,{linked.parent}", "-o", calls], check=True)
    module = runtime.debug_elf("bmg", "matmul")
    for path in (programs.gpu, programs.driver, linked, calls, module, LAUNCHING / "launching.py"):
        files.add(path)
    files.add(LAUNCHING / "launches.py")
    return {
        "hardware": [str(programs.gpu), str(programs.driver)],
        "library": str(linked),
        "program": [str(LAUNCHING / "launches.py"), str(calls), str(module), "multiply_basic"],
    }


def real(files: Initramfs, folder: Path) -> dict[str, Any]:
    """Adds Intel's runtime for Level Zero and OpenCL; returns its parts of the plan."""
    folder.mkdir()
    level_zero = real_driver.build(folder)
    opencl = real_opencl.build(level_zero, folder)
    module = real_driver.zebin("bmg", "matmul")
    for path in (level_zero.workload, opencl.workload, module):
        files.add(path)
    files.add(level_zero.folder / "etc")
    files.add(level_zero.folder / real_driver.LIBRARIES, but=lambda path: path.name.startswith("libocloc"))
    options = ("--launches", LAUNCHES)
    of_level_zero = {
        "library": str(level_zero.library),
        "command": level_zero.command([module], *options),
        "environment": added(level_zero.environment("bmg")),
    }
    of_opencl = {
        "library": str(opencl.library),
        "command": opencl.command([module], *options),
        "environment": added(opencl.environment("bmg")),
    }
    return {"attach": of_level_zero, "inject": of_level_zero, "opencl": of_opencl}


def added(environment: dict[str, str]) -> dict[str, str]:
    """Returns the variables that differ from this process's environment."""
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}


# --- the guest


def boot(kernel: Kernel, archive: Path, folder: Path) -> dict[str, tuple[bool, str]]:
    """Boots a kernel, and waits until it powers off; returns the result and text of each check."""
    console, report = folder / "console", folder / "report"
    report.unlink(missing_ok=True)
    words = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", CPU, "-smp", "2", "-m", str(MEMORY)]
    words += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    words += ["-serial", f"file:{console}", "-serial", f"file:{report}"]
    words += ["-kernel", str(kernel.image), "-initrd", str(archive), "-append", BOOT]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL) as guest:
        try:
            guest.wait(LIMIT)
        except subprocess.TimeoutExpired:
            say(f"{kernel.suite}: it did not end within {LIMIT} s")
        finally:
            guest.kill()
    lines = report.read_text().splitlines() if report.exists() else []
    return {line["check"]: (line["ok"], line["said"]) for line in map(json.loads, lines)}


def with_modules(kernel: Kernel, archive: Path, folder: Path) -> Path:
    """Returns an initramfs with the kernel's modules, too, in /modules: a second archive behind the first."""
    if kernel.modules is None:
        return archive
    files, own, both = Initramfs(), folder / "modules.cpio", folder / "both.cpio"
    for name in jobs_module.NAMES:
        files.content(f"/modules/{name}.ko", (kernel.modules / f"{name}.ko").read_bytes())
    files.write(own)
    with both.open("wb") as file:
        for part in (archive, own):
            with part.open("rb") as source:
                shutil.copyfileobj(source, file)
            file.write(bytes(-file.tell() % 512))
    return both


def print_console(folder: Path) -> None:
    """Prints the last lines of the guest's console."""
    for line in (folder / "console").read_text(errors="replace").splitlines()[-40:]:
        print(f"    {line}")


def result(told: tuple[bool, str] | None) -> str:
    """Returns a check's cell in the page's table, from its result and text; `told` is None if the check did not run."""
    return "yes" if told is not None and told[0] else FAILED


def write_row(kernel: Kernel, results: dict[str, str]) -> None:
    """Writes results to the page, in place of the kernel's earlier ones."""
    row = f"| {kernel.suite} | {datetime.now(UTC):%Y-%m-%d} | {kernel.package} | {' | '.join(results.values())} |"
    lines = PAGE.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(_FIRST_COLUMNS)) + 2
    end = next((number for number in range(begin, len(lines)) if not lines[number].startswith("|")), len(lines))
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in [*lines[begin:end], row]}
    in_order = sorted(rows, key=lambda suite: (SUITES.index(suite) if suite in SUITES else len(SUITES), suite))
    PAGE.write_text("\n".join([*lines[:begin], *(rows[suite] for suite in in_order), *lines[end:]]) + "\n")


if __name__ == "__main__":
    main()
