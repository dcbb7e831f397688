"""Kernels that were described at their launch (bpf/handles.c), put together from their pieces to placed modules.

A module's kernels are described one by one, over the whole recording, so all that is kept of them meanwhile is where in
the spool their pieces are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from iaprof.formats.launches import PIECE, PieceOf
from iaprof.record.placed_elf import PlacedKernel, compose
from iaprof.record.spool import Frame, SpoolReader

HEAD = np.dtype([(name, PIECE[name]) for name in PIECE.names or () if name != "data"])
MAX_WHOLE_BYTES = 1 << 26  # MOST_BINARY_BYTES of handles.c


@dataclass(frozen=True)
class AboutPiece:
    """What a PIECE says of itself; see formats.launches.PIECE."""

    time: int
    pid: int
    tid: int
    module: int
    module_time: int
    address: int
    size: int
    offset: int
    total: int
    what: int
    bytes: int


def about_piece(frame: Frame) -> AboutPiece:
    """What a PIECE frame says of itself; ValueError where it is none."""
    if len(frame.payload) < HEAD.itemsize:
        raise ValueError("it is too short for a piece")
    return AboutPiece(*np.frombuffer(frame.payload, HEAD, 1)[0].item())


@dataclass
class _Whole:
    """Something that comes in pieces, and where in the spool they are."""

    total: int
    pieces: dict[int, int] = field(default_factory=dict)  # by offset

    def read(self, spool: SpoolReader) -> bytes | None:
        """All of it; None where something is missing."""
        data = bytearray()
        while len(data) < self.total:
            position = self.pieces.get(len(data))
            piece = spool.frame_at(position).payload[HEAD.itemsize :] if position is not None else b""
            if not piece:
                return None
            data += piece
        return bytes(data[: self.total])


@dataclass
class _Module:
    """A module of a process, from its creation to its end."""

    pid: int
    time_ns: int
    wholes: dict[tuple[int, int], _Whole] = field(default_factory=dict)  # by PieceOf and address of the kernel
    sizes: dict[int, int] = field(default_factory=dict)  # of kernels, by address


@dataclass(frozen=True)
class PlacedModule:
    """A module as its process had it."""

    pid: int
    time_ns: int  # of the first launch of one of its kernels
    elf: bytes  # in the form that debug ELFs have


class Described:
    """All pieces of a spool."""

    def __init__(self) -> None:
        self._modules: dict[tuple[int, int, int], _Module] = {}

    def add(self, frame: Frame) -> None:
        """Takes a PIECE frame; ValueError where it is none."""
        about = about_piece(frame)
        if about.total > MAX_WHOLE_BYTES or about.what not in PieceOf.__members__.values():
            raise ValueError("it is a piece of nothing")
        key = (about.pid, about.module, about.module_time)
        module = self._modules.setdefault(key, _Module(about.pid, about.module_time))
        of = (about.what, 0 if about.what == PieceOf.MODULE else about.address)
        whole = module.wholes.setdefault(of, _Whole(about.total))
        whole.pieces.setdefault(about.offset, frame.position)
        module.sizes.setdefault(about.address, about.size)

    def modules(self, spool: SpoolReader) -> Iterator[PlacedModule]:
        """Each module with the kernels that are known whole.

        Args:
            spool: that all frames came from.
        """
        for module in self._modules.values():
            kernels = []
            for address in module.sizes:
                name = module.wholes.get((PieceOf.NAME, address), _Whole(0)).read(spool)
                code = module.wholes.get((PieceOf.CODE, address), _Whole(0)).read(spool)
                if name and code:
                    kernels.append(PlacedKernel(name.decode("utf-8", "backslashreplace"), address, code))
            if kernels:
                binary = module.wholes.get((PieceOf.MODULE, 0), _Whole(0)).read(spool)
                yield PlacedModule(module.pid, module.time_ns, compose(binary or None, kernels))
