# SPDX-License-Identifier: Apache-2.0
"""Builds jobs.c for one of Debian's kernels, with the kernel's own headers and tools, and takes the modules below it.

The tools are programs of the kernel's release, which may need a newer C library than this machine's: they are started
with the dynamic loader of that release.
"""

from __future__ import annotations

import lzma
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("drm", "gpu-sched", "jobs")
"""The modules, in the order in which they are loaded."""
Download = Callable[..., list[Path]]  # suite, folder, *packages, depends=False: returns the packages' files
_LOADER = "ld-linux-x86-64.so.2"
# What the scripts of these names start would look for programs beside themselves by their own name.
_STARTED = {"tools/objtool/objtool": "objtool.real-x86", "scripts/mod/modpost": "modpost.real-lsb-64"}


def build(suite: str, version: str, download: Download, folder: Path, target: Path) -> None:
    """Builds the module, and puts all of NAMES into the folder `target`.

    Args:
        suite: of Debian.
        version: of the kernel, as in `uname -r`.
        download: downloads packages of a suite into a new folder.
        folder: an empty one, for what is only needed meanwhile.
        target: created if all went well.

    Raises:
        CalledProcessError: something does not compile.
    """
    root, libraries = folder / "root", folder / "libraries"
    (headers,) = download(suite, folder / "headers", f"linux-headers-{version}")
    needed = [each.split()[0] for each in _field(headers, "Depends").split(", ")]
    others = [each for each in needed if each.startswith(("linux-headers-", "linux-kbuild-"))]
    for package in [headers, *download(suite, folder / "more", *others)]:
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    release = suite.removesuffix("-backports")  # whose libraries its packages use
    for package in download(release, folder / "libelf", "libelf1t64", depends=True):
        subprocess.run(["dpkg-deb", "-x", package, libraries], check=True)
    for module in _modules(suite, version, download, folder):
        subprocess.run(["dpkg-deb", "-x", module, root], check=True)
    (tools,) = root.glob("usr/lib/linux-kbuild-*")
    _start_with_their_library(tools, libraries / "usr" / "lib" / "x86_64-linux-gnu")
    (made_for,) = root.glob(f"usr/src/linux-headers-{version}")
    makefile = made_for / "Makefile"
    makefile.write_text(makefile.read_text().replace("/usr/src/", f"{root}/usr/src/"))
    source = folder / "module"
    source.mkdir()
    shutil.copy(HERE / "jobs.c", source)
    (source / "Kbuild").write_text("obj-m := jobs.o\n")
    words = [
        "make",
        "-s",
        "-C",
        str(made_for),
        f"M={source}",
        f"CC={HERE / 'cc'}",
        "KCFLAGS=-w",
        "CONFIG_DEBUG_INFO_BTF_MODULES=",
    ]
    subprocess.run([*words, "modules"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    unfinished = folder / "modules"
    unfinished.mkdir()
    for name in NAMES[:-1]:
        (packed,) = (root / "usr" / "lib" / "modules" / version).rglob(f"{name}.ko.xz")
        (unfinished / f"{name}.ko").write_bytes(lzma.decompress(packed.read_bytes()))
    shutil.copy(source / "jobs.ko", unfinished)
    unfinished.rename(target)


def _modules(suite: str, version: str, download: Download, folder: Path) -> list[Path]:
    """Returns the package with the kernel's modules, which since Linux 7 is not the image's."""
    found = download(suite, folder / "image", f"linux-image-{version}")
    if f"linux-modules-{version}" in _field(found[0], "Depends"):
        return download(suite, folder / "separate", f"linux-modules-{version}")
    return found


def _field(package: Path, name: str) -> str:
    return subprocess.run(["dpkg-deb", "--field", package, name], stdout=subprocess.PIPE, text=True, check=True).stdout


def _start_with_their_library(tools: Path, libraries: Path) -> None:
    """Replaces each program by a script that starts it with the dynamic loader in `libraries`."""
    for path in [each for each in tools.rglob("*") if each.is_file() and not each.is_symlink()]:
        with path.open("rb") as file:
            if file.read(4) != b"\x7fELF" or not path.stat().st_mode & 0o100:
                continue
        name = str(path.relative_to(tools))
        real = path.rename(path.with_name(path.name + ".elf"))
        start = f"{libraries / _LOADER} --library-path {libraries} {real}"
        path.write_text(f'#!/bin/sh\nexec {path.with_name(_STARTED[name]) if name in _STARTED else start} "$@"\n')
        path.chmod(0o755)
