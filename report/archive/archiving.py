"""Writes a capture again together with the names of its CPU frames, so that other machines can show them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from iaprof.basics.files import replace_file
from iaprof.formats.capture.dictionaries import bounded_slices, combined
from iaprof.formats.capture.limits import MODULES, PROCESSES
from iaprof.formats.capture.merged import merged_members
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import FIELDS, KINDS, WHOLE
from iaprof.formats.capture.writer import CaptureWriter, Written
from iaprof.report.archive.pseudonyms import Pseudonyms
from iaprof.report.archive.redaction import Redaction, redacted_header
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.imported import build_imported
from iaprof.report.join.selection import Selection
from iaprof.report.profile import build
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.calls import StackAddresses
from iaprof.symbols.names.names import ModuleKind, Symbolizer
from iaprof.symbols.names.rows import Progress, write_names

_NAMES = ("module", "symbol")


def archive(
    capture: CaptureReader,
    output: Path,
    open_symbolizer: Callable[[CaptureReader], AbstractContextManager[Symbolizer]],
    progress: Progress,
    redact: Pseudonyms | None,
    keep_kernels: bool,
) -> Written:
    """Writes a capture again, with the names of CPU frames.

    Args:
        capture: the open capture. Its own names stay if the symbolizer asks it for names.
        output: the file to write; an existing one is replaced.
        open_symbolizer: opens the symbolizer for the capture or for a part of a merged one.
        progress: called with the progress of naming.
        redact: the hashes that replace what identifies people, machines and programs; None: replace nothing.
        keep_kernels: keep the debug ELFs of GPU kernels.

    Raises:
        CaptureError: the capture is damaged.
        IaprofError: the output cannot be written.
    """
    with replace_file(output) as file:
        kinds = {kind for kind in KINDS for part in capture.parts if part.count(kind)}
        writer = CaptureWriter(file, kinds | set(_NAMES))
        headers = []
        for number, part in enumerate(capture.parts):
            if capture.is_merged:
                writer.begin_part(number)
            with open_symbolizer(part) as names:
                headers.append(_write(part, writer, names, progress, redact, keep_kernels))
        header = headers[0]
        if capture.is_merged:
            counts = Counter[str]()
            for each in headers:
                counts.update(each["symbols"])
            whole = redacted_header(capture.header, redact) if redact else capture.header
            clock = {name: value for name, value in merged_members(headers).items() if redact and name == "clock"}
            header = {**whole, **clock, "symbols": dict(counts), "parts": headers}
        writer.close(header)
        return Written(header, file.tell())


def _write(
    capture: CaptureReader,
    writer: CaptureWriter,
    symbolizer: Symbolizer,
    progress: Progress,
    redact: Pseudonyms | None,
    keep_kernels: bool,
) -> dict[str, Any]:
    """Writes the rows of one part; returns its header."""
    needed = StackAddresses()
    for table in capture.tables("stack"):
        needed.add(table)
    capture.check(needed.processes, PROCESSES)
    spaces = AddressSpaces(capture.table("mapping"), capture.table("process"))
    modules = list(needed.modules(spaces))
    capture.check(len(modules), MODULES)
    kernel = [addresses for module, addresses, _ in modules if module.kind is ModuleKind.KERNEL]
    kernel_addresses = kernel[0] if kernel else np.empty(0, np.uint64)
    redaction = Redaction(redact, capture.header, spaces, kernel_addresses, keep_kernels) if redact else None
    for kind in KINDS:
        for table in capture.tables(kind) if kind not in _NAMES else ():
            if redaction is not None:
                table = redaction.rows(kind, table)
            elif kind == "kernel" and not keep_kernels:
                table = table.set_column(table.schema.get_field_index("elf"), "elf", pa.nulls(len(table), pa.binary()))
            for rows in rows_of(kind, table):
                writer.write(kind, rows)
    counts = write_names(writer, modules, symbolizer, progress, rewrite=None if redaction is None else redaction.module)
    header = {**capture.header, "symbols": counts, "matched": _matched(capture)}
    return redacted_header(header, redact) if redact else header


def _matched(capture: CaptureReader) -> dict[str, float]:
    """Joins the capture, and returns the shares of matched samples, which `iaprof info` shows without a join."""
    if capture.groups("sample"):
        return build_imported(capture, Selection(), 0).profile.matched
    with GpuModuleLoader() as modules:
        return build(capture, modules).profile.matched


def rows_of(kind: str, table: pa.Table) -> Iterator[pa.StructArray]:
    """Yields a table's rows as struct arrays of limited size. Members with WHOLE lose their dictionary encoding."""
    columns = {name: combined(table[name]) for name in table.column_names}
    whole = [
        name
        for name in columns
        if FIELDS[f"{kind}.{name}"].flags & WHOLE and pa.types.is_dictionary(columns[name].type)
    ]
    ranges: Iterable[slice] = bounded_slices(columns[whole[0]]) if whole else [slice(0, len(table))]
    for some in ranges:
        members = {name: column[some] for name, column in columns.items()}
        members |= {name: members[name].dictionary.take(members[name].indices) for name in whole}
        ordered = [members[field.name] for field in KINDS[kind]]
        fields = [field.with_type(member.type) for field, member in zip(KINDS[kind], ordered, strict=True)]
        yield pa.StructArray.from_arrays(ordered, fields=fields)
