"""Modules, which hold code, and places in them: what symbolizers are asked to name."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ModuleKind(StrEnum):
    """The kind of a module. It decides what an address in the module means."""

    FILE = "file"  # an ELF file; addresses are offsets in the file, bytes
    VDSO = "vdso"  # the ELF image that the Linux kernel maps into every process; addresses are offsets in the image
    KERNEL = "kernel"  # the Linux kernel with its modules; addresses are virtual addresses
    GENERATED = "generated"  # code that a process generated; addresses are virtual addresses of that process


@dataclass(frozen=True, slots=True)
class Module:
    """A file or mapping with CPU code."""

    kind: ModuleKind
    path: str = ""  # of a FILE, as the process saw it; [vdso]; [kernel]; the name of a GENERATED mapping
    build_id: bytes | None = None  # of a FILE; None if it has none
    inode: int = 0  # of a FILE without a build-id; 0 if unknown
    pid: int = 0  # of GENERATED; for a FILE, any process that mapped it; 0 if unknown

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells modules apart: files with the same path and build-id are one module, whoever mapped them.

        The same build-id at another path is another module: a file that forges a build-id does not get at the names of
        the other file.
        """
        if self.kind is not ModuleKind.FILE:
            return self.kind, self.pid
        return self.build_id, self.path, self.inode


@dataclass(frozen=True, slots=True)
class Place:
    """An address in a module."""

    module: Module
    address: int  # see ModuleKind
