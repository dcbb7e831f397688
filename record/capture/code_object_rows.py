"""The `kernel` rows of a capture: code objects, each distinct content once, and the names of their kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pyarrow as pa

from iaprof.formats.wire.launches import CHUNK_BYTES, ChunkOf
from iaprof.record.capture.single_rows import json_object, single_row
from iaprof.record.kernels.dumped import HEAD, DumpedModules, chunk_head
from iaprof.record.kernels.kernel_names import KernelNames
from iaprof.record.spool import Frame, SpoolReader

IN_MEMORY = "[in memory]"  # in place of the path of a debug ELF: the recorder put the code object together
_BYTES_PER_GROUP = 64 << 20
_UNFINISHED = {
    "kernels": "launched kernels whose name or code was not sent before the recording ended: they have no instructions",
    "modules": "modules that were not sent completely before the recording ended: their kernels have no lines",
}


class CodeObjectRows:
    """Collects code objects until they fill a row group.

    Attributes:
        names: the names of their kernels, and of dumped kernels.
    """

    def __init__(self) -> None:
        """Begins without code objects."""
        self.names = KernelNames()
        self._dumped = DumpedModules()
        self._digests: set[str] = set()  # of contents that are in a row
        self._rows: list[pa.StructArray] = []
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether the rows fill a row group."""
        return self._bytes >= _BYTES_PER_GROUP

    def add_elf(self, frame: Frame) -> None:
        """Adds a debug ELF; raises ValueError, KeyError, TypeError or OverflowError if the frame is damaged."""
        about = json_object(frame.payload[: frame.part])
        content = frame.payload[frame.part :] if about["content"] else None
        self._add(frame.time, about["pid"], about["path"], about["digest"], about["size"], content)

    def add_chunk(self, frame: Frame) -> None:
        """Adds a chunk of a kernel or module that BPF dumped."""
        self._dumped.add(frame)
        about = chunk_head(frame)
        if about.what == ChunkOf.NAME and about.total < CHUNK_BYTES - 1:  # a longer one may be cut
            self.names.add(about.pid, about.time, about.address, frame.payload[HEAD.itemsize :])

    def add_dumped(self, spool: SpoolReader) -> Iterator[None]:
        """Adds the dumped code objects, once all frames were added; yields after each."""
        for module in self._dumped.modules(spool):
            digest = hashlib.sha256(module.elf).hexdigest()
            self._add(module.time_ns, module.pid, IN_MEMORY, digest, len(module.elf), module.elf)
            yield

    def unfinished(self) -> Iterator[tuple[str, int, str]]:
        """Describes what was dumped in part only: source, count and detail of a loss."""
        counts = {"kernels": self._dumped.kernels_unfinished, "modules": self._dumped.modules_unfinished}
        for source, detail in _UNFINISHED.items():
            if counts[source]:
                yield source, counts[source], detail

    def _add(self, time: int, pid: int, path: str, digest: str, size: int, content: bytes | None) -> None:
        self.names.add_module(pid, time, digest, content)
        # The same content may come twice: with the rotation state, and again from the process.
        content = content if digest not in self._digests else None
        row = {"time_ns": time, "pid": pid, "path": path, "digest": bytes.fromhex(digest), "size": size, "elf": content}
        self._rows.append(single_row("kernel", row))
        self._digests.update([digest] if content is not None else [])
        self._bytes += len(content or b"")

    def take(self) -> list[pa.StructArray]:
        """Returns the rows collected since the last call."""
        rows, self._rows, self._bytes = self._rows, [], 0
        return rows
