"""What code belongs to, and what a place in it is: the two things that names are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ModuleKind(StrEnum):
    """What a module is, and so what an address in it means."""

    FILE = "file"  # an ELF file: an offset in the file, bytes
    VDSO = "vdso"  # what the kernel maps into every process: an offset in it
    KERNEL = "kernel"  # the operating system's, its modules included: an address
    GENERATED = "generated"  # what one process made itself, while it ran: an address in that process


@dataclass(frozen=True, slots=True)
class Module:
    """Code that is named together."""

    kind: ModuleKind
    path: str = ""  # of a FILE, as the process saw it; [vdso]; [kernel]; empty for GENERATED
    build_id: bytes | None = None  # of a FILE; None when it has none
    inode: int = 0  # of a FILE without a build-id; 0 when unknown
    pid: int = 0  # of GENERATED; for a FILE any one process that mapped it, 0 when unknown

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells it from others: a file of one build-id at one path is one module, whoever mapped it.

        The same build at another path is another one: who copies a build-id does not get at the names of others.
        """
        if self.kind is not ModuleKind.FILE:
            return self.kind, self.pid
        return self.build_id, self.path, self.inode


@dataclass(frozen=True, slots=True)
class Place:
    """An address as a place in a module."""

    module: Module
    address: int  # see ModuleKind
