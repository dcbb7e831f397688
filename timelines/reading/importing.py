"""Imports traces: makes one capture of any number of files, each of which is in one of FORMATS."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from iaprof.basics.errors import IaprofError
from iaprof.basics.quantities import counted
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.formats.imports.encoded_text import refuse_compressed, unpacked_start
from iaprof.sandbox.parent import AnswerError, SandboxError
from iaprof.timelines.reading.children import PIECE_BYTES, Children
from iaprof.timelines.reading.chrome_file import is_chrome, read_chrome
from iaprof.timelines.reading.dialect_detection import FLEX, ONE_FILE_PER_RANK, TORCH
from iaprof.timelines.reading.extent import Extent
from iaprof.timelines.reading.imported_file import FileFacts, ImportedFile, ReadAgain, Reading, Remembered
from iaprof.timelines.reading.perfetto.file import is_perfetto, read_perfetto
from iaprof.timelines.reading.source import Source

_KINDS = ("slice", "counter", "flow", "instant")
_GROUP_ROWS, _GROUP_BYTES = 1 << 16, 12 << 20
_MOST_FILES = 1 << 16
_SNIFFED = 1 << 12  # bytes


@dataclass
class TraceFacts:
    """What was found in all files."""

    files: list[FileFacts]
    first_ns: int | None
    last_ns: int | None


@dataclass(frozen=True)
class Format:
    """A format of traces."""

    is_one: Callable[[bytes], bool]  # whether a file with this beginning may be in it
    is_text: bool  # else it is read as it is, in no encoding
    read: Callable[[ImportedFile], None]


CHROME = Format(is_chrome, is_text=True, read=read_chrome)
PERFETTO = Format(is_perfetto, is_text=False, read=read_perfetto)
FORMATS = (CHROME, PERFETTO)


def is_trace(start: bytes) -> bool:
    """Whether a file with this beginning may be a trace of any format, or a compressed one."""
    plain = unpacked_start(start)
    return any(each.is_one(plain) for each in FORMATS)


def import_traces(
    paths: Sequence[Path],
    output: BinaryIO,
    tell: Callable[[int], None],
    children: Children | None = None,
    piece_bytes: int = PIECE_BYTES,
    names: Sequence[str] = (),
) -> TraceFacts:
    """Writes a capture of traces.

    Args:
        paths: the files.
        output: receives the capture.
        tell: called with the number of bytes read so far.
        children: read the files; None for one on each CPU, two at most.
        piece_bytes: how much each gets at once.
        names: of the files, for messages and the header; their paths if empty.

    Raises:
        IaprofError: a file is not a trace, or cannot be read.
        OSError: the capture cannot be written.
    """
    if len(paths) >= _MOST_FILES:
        raise IaprofError(f"{len(paths):,} files are too many for one capture: import at most {_MOST_FILES - 1:,}")
    remembered = [Remembered() for _ in paths]
    readers = min(len(os.sched_getaffinity(0)), 2)
    own = children or Children(readers)
    unpack_zstd = False
    try:
        while True:
            output.seek(0)
            output.truncate()
            writer = CaptureWriter(output, _KINDS)
            header: dict[str, Any] = {}
            try:
                facts = _Import(paths, names or [*map(str, paths)], writer, tell, own, remembered, piece_bytes).run()
                header = _header(facts)
                return facts
            except ReadAgain:
                if children is None and not unpack_zstd and any(each.needs_zstd for each in remembered):
                    unpack_zstd = True
                    own.close()
                    own = Children(readers, unpack_zstd=True)
                continue
            finally:
                writer.close(header)  # always, or pyarrow prints an error to stderr
    finally:
        if children is None:
            own.close()


class _Import:
    def __init__(
        self,
        paths: Sequence[Path],
        names: Sequence[str],
        writer: CaptureWriter,
        tell: Callable[[int], None],
        children: Children,
        remembered: Sequence[Remembered],
        piece_bytes: int,
    ) -> None:
        self._paths, self._names, self._remembered = paths, names, remembered
        self._groups = {kind: _Group(kind, writer) for kind in _KINDS}
        self._done = 0
        self._reading = Reading(
            children,
            piece_bytes,
            lambda done: tell(self._done + done),
            lambda kind, table: self._groups[kind].add(table),
        )

    def run(self) -> TraceFacts:
        """Reads all files."""
        facts = []
        for number, (path, name) in enumerate(zip(self._paths, self._names, strict=True)):
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for its writer
            except OSError as error:
                raise IaprofError(f"{name} cannot be read: {error.strerror}") from error
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise IaprofError(
                        f"{name} is not a file: traces are read from files, or one from 'iaprof import -'"
                    )
                facts.append(self._read(number, name, file))
            except (SandboxError, AnswerError) as error:
                raise IaprofError(f"{name} cannot be read: {error}") from error
            finally:
                self._done += os.fstat(file).st_size
                os.close(file)
        _number_ranks(facts)
        for group in self._groups.values():
            group.flush()
        extent = reduce(Extent.joined, (group.extent for group in self._groups.values()))
        return TraceFacts(facts, *extent.without_placeholders())

    def _read(self, number: int, name: str, descriptor: int) -> FileFacts:
        """Reads a file in its format; a file in no known format is read as JSON, which raises what is wrong."""
        converter = self._reading.children.converter
        source = Source(descriptor, name, converter, is_text=False)
        start, _ = source.bytes(0, _SNIFFED)
        refuse_compressed(start, name)
        found = next((each for each in FORMATS if each.is_one(start)), CHROME)
        source = Source(descriptor, name, converter, found.is_text, start)
        file = ImportedFile(number, source, self._reading, self._remembered[number])
        found.read(file)
        return file.finish()


def _number_ranks(files: Sequence[FileFacts]) -> None:
    """Gives a rank to files without one: 0, or the next free rank where a tool writes a file for each rank."""
    for dialect in {file.dialect for file in files}:
        own = [file for file in files if file.dialect == dialect]
        told = {file.rank for file in own}
        free = (rank for rank in count() if rank not in told)
        unranked = [file for file in own if file.rank is None]
        if dialect == TORCH and len(unranked) > 1:
            text = "it tells no rank (distributedInfo), as {} do not: all of them are rank 0, and their devices are one"
            unranked[0].problems.append(text.format(counted(len(unranked) - 1, "other file")))
        for file in own:
            if file.rank is None:
                file.rank = next(free) if dialect in ONE_FILE_PER_RANK else 0
            if dialect != FLEX:
                file.ranks = [file.rank]


class _Group:
    """Collects rows of a kind until there are enough for a row group."""

    def __init__(self, kind: str, writer: CaptureWriter) -> None:
        self._kind, self._writer = kind, writer
        self._tables: list[pa.Table] = []
        self._rows = self._bytes = 0
        self.extent = Extent()

    def add(self, table: pa.Table) -> None:
        """Adds rows."""
        if not len(table):
            return
        times = table["time_ns"]
        ends = pc.add(times, table["duration_ns"]) if self._kind == "slice" else times
        if self._kind == "instant":  # metadata may have no time
            times = ends = times.filter(pc.not_equal(table["phase"].cast(pa.string()), "M"))
        self.extent = self.extent.joined(Extent.of(times, ends))
        self._tables.append(table)
        self._rows += len(table)
        self._bytes += table["args"].nbytes if "args" in table.column_names else 0
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the rows."""
        if not self._tables:
            return
        table = pa.concat_tables(self._tables).unify_dictionaries()
        self._tables, self._rows, self._bytes = [], 0, 0
        columns = [table[field.name] for field in KINDS[self._kind]]
        arrays = [pa.concat_arrays(column.chunks) for column in columns]
        fields = [field.with_type(array.type) for field, array in zip(KINDS[self._kind], arrays, strict=True)]
        self._writer.write(self._kind, pa.StructArray.from_arrays(arrays, fields=fields))


def _header(facts: TraceFacts) -> dict[str, Any]:
    """The header that a recorder would write, with the members for which traces have facts."""
    counts = [file.counts for file in facts.files]
    first, last = facts.first_ns or 0, facts.last_ns or 0
    totals = {
        name: sum(getattr(each, name) for each in counts) for name in ("slices", "counter_values", "flows", "instants")
    }
    return {
        "clock": {"monotonic_ns": first, "realtime_ns": 0},
        "end_ns": last,
        "streams": [],
        "totals": totals,
        "losses": [],
        "imported": {"format": "trace", "files": len(facts.files)},
        "traces": [file.as_dict() for file in facts.files],
    }
