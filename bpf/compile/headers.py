"""Finds kernel headers for compiling BPF. They must be root's: they become part of programs that run in the kernel."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from iaprof.basics.files import only_root_can_change, others_write
from iaprof.bpf.bytecode import BpfUnavailable

VARIABLE = "BCC_KERNEL_SOURCE"
HEADERS_ADVICE = (
    "install the headers of the running kernel (Debian and Ubuntu: apt install linux-headers-$(uname -r); "
    "or any linux-headers package), or name their folder in BCC_KERNEL_SOURCE"
)
_READ_BY_CLANG = ("include", "arch/x86/include")


@dataclass(frozen=True)
class Headers:
    """Where headers are; without folders, bcc finds those of the running kernel itself."""

    about: str
    folders: tuple[Path, ...] = ()

    def prepare(self, private: Path) -> None:
        """Tells bcc where the headers are, in this process's environment.

        Args:
            private: a folder to which only root can write.
        """
        os.environ.pop(VARIABLE, None)
        if len(self.folders) == 1:
            os.environ[VARIABLE] = str(self.folders[0])
        elif self.folders:
            _join(private / "headers", list(self.folders))
            os.environ[VARIABLE] = str(private / "headers")


def find_headers(environment: Mapping[str, str]) -> Headers:
    """Finds headers that only root can change.

    The headers of any kernel serve: the programs use only pt_regs, which has the same layout in every x86-64 kernel.

    Args:
        environment: its BCC_KERNEL_SOURCE takes precedence.

    Raises:
        BpfUnavailable: there are no headers, or users other than root can change them.
    """
    if chosen := environment.get(VARIABLE):
        _require_root_owned(Path(chosen), f"{VARIABLE} names")
        return Headers(f"those in {chosen} ({VARIABLE})", (Path(chosen),))
    own = _own_headers()
    if own and all(map(_belongs_to_root, own)):
        return Headers("of the running kernel")
    if not own and _has_archive():
        return Headers("of the running kernel, in /sys/kernel/kheaders.tar.xz")
    if split := _split_headers():
        for folder in split:
            _require_root_owned(folder, "the kernel headers are in")
        return Headers("for another kernel version; these work", split)
    for folder in own:
        _require_root_owned(folder, "the running kernel's headers are in")
    raise BpfUnavailable(f"no kernel headers were found for compiling BPF: {HEADERS_ADVICE}")


def _require_root_owned(folder: Path, what: str) -> None:
    if not folder.is_dir():
        raise BpfUnavailable(f"{what} {folder}, which is not a folder: {HEADERS_ADVICE}")
    if not _belongs_to_root(folder):
        raise BpfUnavailable(
            f"{what} {folder}, and users other than root can change them: make root their owner (chown -R root:root, "
            f"chmod -R go-w), or {HEADERS_ADVICE}"
        )


def _belongs_to_root(folder: Path) -> bool:
    return only_root_can_change(folder) and all(map(_contains_only_roots, (folder / name for name in _READ_BY_CLANG)))


def _contains_only_roots(folder: Path) -> bool:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return True  # if the headers are split into two folders, each lacks some subfolders
    for entry in entries:
        status = entry.stat(follow_symlinks=False)
        if status.st_uid != 0 or (others_write(status) and not entry.is_symlink()):
            return False
        if entry.is_dir(follow_symlinks=False) and not _contains_only_roots(Path(entry.path)):
            return False
        if entry.is_symlink() and not only_root_can_change(Path(entry.path)):
            return False
    return True


def _own_headers() -> list[Path]:
    modules = Path("/lib/modules") / platform.release()
    return [modules / name for name in ("build", "source") if (modules / name).exists()]


def _has_archive() -> bool:
    return Path("/sys/kernel/kheaders.tar.xz").exists()


def _split_headers() -> tuple[Path, Path] | None:
    """Returns Debian's two header folders (flavour, common) of the newest version; None if they are not installed."""
    for common in sorted(Path("/usr/src").glob("linux-headers-*-common"), reverse=True):
        flavours = sorted(Path("/usr/src").glob(common.name.removesuffix("common") + "*"))
        for flavour in flavours:
            if flavour != common and (flavour / "include" / "generated").is_dir():
                return flavour, common
    return None


def _join(target: Path, sources: list[Path]) -> None:
    """Makes `target` the union of `sources`: folders that exist in several are merged, all else becomes links."""
    target.mkdir(exist_ok=True)
    for name in {entry.name for source in sources for entry in source.iterdir()}:
        found = [source / name for source in sources if (source / name).exists()]
        folders = [path for path in found if path.is_dir()]
        if len(folders) > 1:
            _join(target / name, folders)
        elif found:
            (target / name).symlink_to(found[0])
