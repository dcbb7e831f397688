"""Puts dumped kernels (bpf/c/handles.c) together from their chunks, to modules as their process had them.

BPF dumps a module's kernels one by one, over the whole recording. Meanwhile only the chunks' positions in the spool
are kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from iaprof.formats.wire.launches import CHUNK, ChunkOf
from iaprof.record.kernels.placed_elf import PlacedKernel, compose
from iaprof.record.spool import Frame, SpoolReader

HEAD = np.dtype([(name, CHUNK[name]) for name in CHUNK.names or () if name != "data"])
# Two threads may launch a kernel for the first time together, and the one that dumps it may have begun later by this.
# Destroying a module and creating another at its address takes longer.
SAME_TIME_NS = 1_000_000
MAX_WHOLE_BYTES = 1 << 28  # MOST_CODE_BYTES of handles.c; BPF sends less of a module


@dataclass(frozen=True)
class ChunkHead:
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


def chunk_head(frame: Frame) -> ChunkHead:
    """Reads the head of a frame's CHUNK; raises ValueError if the frame is too short."""
    if len(frame.payload) < HEAD.itemsize:
        raise ValueError("it is too short for a chunk")
    return ChunkHead(*np.frombuffer(frame.payload, HEAD, 1)[0].item())


@dataclass
class _Dump:
    """The name or code of a kernel, or a module, and where its chunks are in the spool."""

    total: int = 0
    chunks: dict[int, tuple[int, int]] = field(default_factory=dict)  # position and checksum, by offset

    def read(self, spool: SpoolReader) -> bytes | None:
        """Reads the chunks; returns None if one is missing."""
        data = bytearray()
        while len(data) < self.total:
            if len(data) not in self.chunks:
                return None
            position, _ = self.chunks[len(data)]
            data += spool.frame_at(position).payload[HEAD.itemsize :]
        return bytes(data[: self.total])


@dataclass
class _Module:
    """A module of a process, from its creation to its destruction."""

    pid: int
    time_ns: int
    dumps: dict[tuple[int, int], _Dump] = field(default_factory=dict)  # by ChunkOf and address of the kernel
    addresses: dict[int, None] = field(default_factory=dict)  # of kernels, in order of their chunks

    def add(self, head: ChunkHead, position: int, checksum: int) -> bool:
        """Adds a chunk; returns False if it contradicts an earlier one."""
        key = (head.what, 0 if head.what == ChunkOf.MODULE else head.address)
        dump = self.dumps.setdefault(key, _Dump(head.total))
        self.time_ns = min(self.time_ns, head.time)
        self.addresses[head.address] = None
        if dump.total != head.total:
            return False
        _, known = dump.chunks.setdefault(head.offset, (position, checksum))
        return known == checksum

    def whole(self, what: ChunkOf, address: int, spool: SpoolReader) -> bytes | None:
        """Reads a name, code or module; returns None if a chunk is missing."""
        return self.dumps.get((what, address), _Dump()).read(spool) or None


@dataclass(frozen=True)
class PlacedModule:
    """A module as its process had it."""

    pid: int
    time_ns: int  # no later than the first launch of one of its kernels
    elf: bytes  # like a debug ELF


class DumpedModules:
    """The modules whose kernels were dumped, from the chunks in a spool."""

    def __init__(self) -> None:
        # Incomplete ones; known when `modules` is exhausted.
        self.kernels_unfinished = self.modules_unfinished = 0
        self._modules: list[_Module] = []
        self._current: dict[tuple[int, int, int], _Module] = {}

    def add(self, frame: Frame) -> None:
        """Adds a CHUNK frame; raises ValueError if it is damaged."""
        head = chunk_head(frame)
        if head.total > MAX_WHOLE_BYTES or head.what not in ChunkOf.__members__.values():
            raise ValueError("it belongs to no file that has begun")
        data = frame.payload[HEAD.itemsize :]
        key = (head.pid, head.module, head.module_time)
        if key not in self._current:
            self._begin(key, head.module_time)
        if not data:  # BPF could not read it, and sends it again
            self._current[key].addresses[head.address] = None
            return
        checksum = zlib.crc32(data)
        if not self._current[key].add(head, frame.position, checksum):
            # Another module or kernel lies at the same address now, and nothing reported the end of the first.
            self._begin(key, head.time).add(head, frame.position, checksum)

    def _begin(self, key: tuple[int, int, int], time_ns: int) -> _Module:
        self._current[key] = _Module(key[0], time_ns)
        self._modules.append(self._current[key])
        return self._current[key]

    def modules(self, spool: SpoolReader) -> Iterator[PlacedModule]:
        """Yields each module, with its completely known kernels.

        Args:
            spool: the spool of all frames.
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
            self.modules_unfinished += binary is None and (ChunkOf.MODULE, 0) in module.dumps
            if kernels:
                since = max(module.time_ns - SAME_TIME_NS, 0)
                yield PlacedModule(module.pid, since, compose(binary, kernels))
