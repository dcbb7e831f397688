"""Small libraries as compilers and distributions make them: with debug information, or with a separate debug file."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

import elf_sections
from iaprof.symbols.names.names import Module, ModuleKind, Symbolized, Symbolizer

SOURCE = """
static int inner(int x) {{ return x * 3; }}
static __attribute__((noinline)) int {function}(int x) {{ return inner(x) ^ 5; }}
int exported(int x) {{ return {function}(x + 1); }}
"""


@dataclass(frozen=True)
class Build:
    """A library with debug information, and the offset of a local function in it."""

    path: Path
    build_id: bytes | None
    offset: int  # of the function

    def module(self, path: str | Path | None = None) -> Module:
        """The module of a process that mapped the library."""
        return Module(ModuleKind.FILE, str(path or self.path), self.build_id)


def build(path: Path, function: str = "here", build_id: str = "sha1") -> Build:
    """Compiles a library; another function name gives another build with the same code."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.parent / f"{function}.c"
    source.write_text(SOURCE.format(function=function))
    subprocess.run(
        ["gcc", "-O1", "-g", "-shared", "-fPIC", "-nostdlib", f"-Wl,--build-id={build_id}", "-o", path, source],
        check=True,
    )
    source.unlink()
    with path.open("rb") as file:
        elf = ELFFile(file)
        note = elf.get_section_by_name(".note.gnu.build-id")
        (offset,) = elf.address_offsets(elf_sections.symbol(elf, function, ".symtab")["st_value"])
        own_build_id = bytes.fromhex(next(note.iter_notes())["n_desc"]) if isinstance(note, NoteSection) else None
    return Build(path, own_build_id, offset)


def copied(built: Build, path: Path) -> Build:
    """Copies a build to another path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(built.path, path)
    return Build(path, built.build_id, built.offset)


def take_out_debug_information(built: Build, to: Path, *, link: bool = True, build_id: bool = True) -> None:
    """Moves a library's debug information to a debug file.

    Args:
        built: the library, which is stripped.
        to: the path of the debug file.
        link: whether the library names the debug file in .gnu_debuglink.
        build_id: whether the debug file has a build-id.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    without = [] if build_id else ["--remove-section=.note.gnu.build-id"]
    subprocess.run(["objcopy", "--only-keep-debug", *without, built.path, to], check=True)
    linked = [f"--add-gnu-debuglink={to}"] if link else []
    subprocess.run(["objcopy", "--strip-all", *linked, built.path], check=True)


def link_name(build_id: bytes, extension: str = "") -> Path:
    """`.build-id/ab/cdef`."""
    return Path(".build-id") / build_id.hex()[:2] / f"{build_id.hex()[2:]}{extension}"


def symbolize(symbolizer: Symbolizer, module: Module, offset: int) -> Symbolized:
    """Has a symbolizer name one address."""
    symbolized = symbolizer.name(module, np.array([offset], np.uint64), np.array([1], np.uint64))
    assert symbolized is not None
    return symbolized


def function_at(symbolized: Symbolized, offset: int) -> str | None:
    """The outermost function at an address; None if it has no name."""
    (row,) = symbolized.names.find(np.array([offset], np.uint64)).tolist()
    return symbolized.names.frames(row)[0].function if row >= 0 else None


@contextmanager
def no_descriptor_is_lost(sockets: bool = False) -> Iterator[None]:
    """Asserts that no file stays open that was not; what tests before have left may be closed meanwhile.

    Args:
        sockets: whether they count, too; a server in this process may open some.
    """
    before = open_files(sockets)
    yield
    assert open_files(sockets) <= before


def open_files(sockets: bool = False) -> set[tuple[str, str]]:
    """Descriptors and their targets, with or without sockets."""
    files = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor that lists them
            target = os.readlink(f"/proc/self/fd/{number}")
            if sockets or not target.startswith("socket:"):
                files.add((number, target))
    return files
