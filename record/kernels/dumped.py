"""Kernels that were described at their launch (bpf/c/handles.c), put together from their pieces to placed modules.

A module's kernels are described one by one, over the whole recording, so all that is kept of them meanwhile is where in
the spool their pieces are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from iaprof.formats.wire.launches import CHUNK, ChunkOf
from iaprof.record.capture.spool import Frame, SpoolReader
from iaprof.record.kernels.placed_elf import PlacedKernel, compose

HEAD = np.dtype([(name, CHUNK[name]) for name in CHUNK.names or () if name != "data"])
# Of two threads that launch a kernel for the first time, the one that describes it may have begun a little later. That
# is less than it takes to destroy a module and to create another at its place.
SAME_TIME_NS = 1_000_000
MAX_WHOLE_BYTES = 1 << 28  # MOST_CODE_BYTES of handles.c, which is more than it sends of a module


@dataclass(frozen=True)
class AboutPiece:
    """The head of a CHUNK; see formats.wire.launches.CHUNK."""

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
    """What a CHUNK frame says of itself; ValueError where it is none."""
    if len(frame.payload) < HEAD.itemsize:
        raise ValueError("it is too short for a piece")
    return AboutPiece(*np.frombuffer(frame.payload, HEAD, 1)[0].item())


@dataclass
class _Whole:
    """Something that comes in pieces, and where in the spool they are."""

    total: int = 0
    pieces: dict[int, tuple[int, int]] = field(default_factory=dict)  # position and checksum, by offset

    def read(self, spool: SpoolReader) -> bytes | None:
        """All of it; None where something is missing."""
        data = bytearray()
        while len(data) < self.total:
            if len(data) not in self.pieces:
                return None
            position, _ = self.pieces[len(data)]
            data += spool.frame_at(position).payload[HEAD.itemsize :]
        return bytes(data[: self.total])


@dataclass
class _Module:
    """A module of a process, from its creation to its end."""

    pid: int
    time_ns: int
    wholes: dict[tuple[int, int], _Whole] = field(default_factory=dict)  # by ChunkOf and address of the kernel
    addresses: dict[int, None] = field(default_factory=dict)  # of kernels, in order

    def add(self, about: AboutPiece, position: int, checksum: int) -> bool:
        """Takes a piece, unless another came for its place before."""
        of = (about.what, 0 if about.what == ChunkOf.MODULE else about.address)
        whole = self.wholes.setdefault(of, _Whole(about.total))
        self.time_ns = min(self.time_ns, about.time)
        self.addresses[about.address] = None
        if whole.total != about.total:
            return False
        _, known = whole.pieces.setdefault(about.offset, (position, checksum))
        return known == checksum

    def whole(self, what: ChunkOf, address: int, spool: SpoolReader) -> bytes | None:
        """What was put together; None where something is missing, or nothing came."""
        return self.wholes.get((what, address), _Whole()).read(spool) or None


@dataclass(frozen=True)
class PlacedModule:
    """A module as its process had it."""

    pid: int
    time_ns: int  # no later than the first launch of one of its kernels
    elf: bytes  # in the form that debug ELFs have


class Described:
    """All pieces of a spool."""

    def __init__(self) -> None:
        # What is not there whole; known when `modules` is through.
        self.kernels_unfinished = self.modules_unfinished = 0
        self._modules: list[_Module] = []
        self._current: dict[tuple[int, int, int], _Module] = {}

    def add(self, frame: Frame) -> None:
        """Takes a CHUNK frame; ValueError where it is none."""
        about = about_piece(frame)
        if about.total > MAX_WHOLE_BYTES or about.what not in ChunkOf.__members__.values():
            raise ValueError("it is a piece of nothing")
        data = frame.payload[HEAD.itemsize :]
        key = (about.pid, about.module, about.module_time)
        if key not in self._current:
            self._begin(key, about.module_time)
        if not data:  # could not be read, and is sent again
            self._current[key].addresses[about.address] = None
            return
        checksum = zlib.crc32(data)
        if not self._current[key].add(about, frame.position, checksum):
            # Another module, or another kernel of it, came to the same place without a word.
            self._begin(key, about.time).add(about, frame.position, checksum)

    def _begin(self, key: tuple[int, int, int], time_ns: int) -> _Module:
        self._current[key] = _Module(key[0], time_ns)
        self._modules.append(self._current[key])
        return self._current[key]

    def modules(self, spool: SpoolReader) -> Iterator[PlacedModule]:
        """Each module with the kernels that are known whole.

        Args:
            spool: that all frames came from.
        """
        for module in self._modules:
            kernels = []
            for address in module.addresses:
                name = module.whole(ChunkOf.NAME, address, spool)
                code = module.whole(ChunkOf.CODE, address, spool)
                if name and code:
                    kernels.append(PlacedKernel(name.decode("utf-8", "backslashreplace"), address, code))
            binary = module.whole(ChunkOf.MODULE, 0, spool)
            self.kernels_unfinished += len(module.addresses) - len(kernels)
            self.modules_unfinished += binary is None and (ChunkOf.MODULE, 0) in module.wholes
            if kernels:
                since = max(module.time_ns - SAME_TIME_NS, 0)
                yield PlacedModule(module.pid, since, compose(binary, kernels))
