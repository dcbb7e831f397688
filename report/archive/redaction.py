"""Removes what identifies people, machines and programs from the rows of a capture: names become short hashes.

GPUs, durations, counts, addresses in processes, and names of the Linux kernel and of common libraries (C library,
Python, Level Zero) stay. Hashes need a key (`report/archive/pseudonyms.py`), so that nobody can verify a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import combined, map_texts
from iaprof.formats.capture.schema import DROPPED, ROW_KINDS, TIME
from iaprof.formats.header.trace_clocks import trace_clocks
from iaprof.formats.ranges import batches
from iaprof.report.archive.pseudonyms import Pseudonyms
from iaprof.report.archive.redacted_texts import (
    is_public_file,
    is_public_module,
    redacted_function,
    redacted_kernel_function,
    redacted_kernel_module,
    redacted_path,
    redacted_stack,
    unless_label,
)
from iaprof.report.archive.traces import (
    redacted_category,
    redacted_name,
    redacted_peers,
    redacted_phase,
    redacted_series,
    redacted_type,
)
from iaprof.symbols.names.address_space import NOWHERE, AddressSpaces
from iaprof.symbols.names.names import Module, ModuleKind, Names, Symbolized

_MEMBERS = {kind.name: {each.name: each.identifies for each in kind.fields if each.identifies} for kind in ROW_KINDS}
"""By kind of row: the members with texts to replace, and what these texts are."""
_DROPPED = {kind.name: [each.name for each in kind.fields if each.flags & DROPPED] for kind in ROW_KINDS}
_TIMES = {kind.name: [each.name for each in kind.fields if each.flags & TIME] for kind in ROW_KINDS}
_FRAMES_AT_ONCE = 1 << 20
_HIGHEST = 1 << 63  # the Linux kernel's addresses are at or above


class Redaction:
    """Redacts the rows of one capture."""

    def __init__(
        self,
        names: Pseudonyms,
        header: dict[str, Any],
        spaces: AddressSpaces,
        kernel_addresses: NDArray[np.uint64],
        keep_kernels: bool,
    ) -> None:
        """Prepares redaction.

        Args:
            names: the hashes in place of names.
            header: the capture's own.
            spaces: the capture's address spaces.
            kernel_addresses: uint64[n], the Linux kernel's addresses to symbolize, sorted and distinct.
            keep_kernels: keep the debug ELFs of GPU kernels, with everything that they reveal.
        """
        self._names = names
        self._clocks = names.clocks(header)
        # A trace that is joined has the recording's clock, and all others, also those that do not exist, their own.
        self._of_traces = np.array(
            [self._clocks.trace_ns if clock is None else self._clocks.monotonic_ns for clock in trace_clocks(header)]
            + [self._clocks.trace_ns],
            np.int64,
        )
        self._spaces = spaces
        self._kernel_addresses = kernel_addresses
        self._keep_kernels = keep_kernels

    def rows(self, kind: str, table: pa.Table) -> pa.Table:
        """Redacts rows of a kind."""
        for name, what in _MEMBERS.get(kind, {}).items():
            change = _CHANGES.get(what)
            table = _mapped(table, name, partial(change or partial(_hashed, what), self._names))
        for name in _DROPPED.get(kind, ()):
            table = _set(table, name, pa.nulls(len(table), table.schema.field(name).type))
        for name in _TIMES.get(kind, ()):
            table = _set(table, name, self._moved(table, name))
        if kind == "mapping":
            table = _mapped(table, "build_id", self._names.content)
        elif kind == "loss":
            table = _mapped(table, "detail", lambda _: "redacted")
        elif kind == "kernel" and not self._keep_kernels:
            table = _mapped(table, "digest", self._names.content)  # else someone who has the file could identify it
            table = _set(table, "elf", pa.nulls(len(table), table.schema.field("elf").type))
        elif kind == "stack":
            ips = combined(table["ips"])
            depths = np.diff(ips.offsets.to_numpy())
            parts = [self._ips(table[some], ips[some]) for some in batches(depths, _FRAMES_AT_ONCE)]
            table = _set(table, "ips", pa.chunked_array(parts, ips.type))
        return table

    def _moved(self, table: pa.Table, name: str) -> pa.Array:
        """Moves the times of a column; 0 stays, as it is none, and would tell the distance."""
        column = combined(table[name])
        times = column.fill_null(0).to_numpy(zero_copy_only=False)
        if times.dtype == np.uint64:
            moved = times + np.uint64(self._clocks.monotonic_ns)
        else:
            files = np.minimum(combined(table["file"]).to_numpy(zero_copy_only=False), len(self._of_traces) - 1)
            moved = times + self._of_traces[files]
        return pa.array(np.where(times == 0, times, moved), column.type)

    def _ips(self, table: pa.Table, ips: pa.ListArray) -> pa.ListArray:
        """Replaces the Linux kernel's addresses, and values in no mapping: these are data of the process, not code."""
        starts = ips.offsets.to_numpy().astype(np.int64)
        depths = np.diff(starts)
        values = ips.flatten().to_numpy().copy()
        innermost = np.zeros(len(values), bool)
        innermost[(starts[:-1] - starts[0])[depths > 0]] = True
        pids, times = (np.repeat(table[name].to_numpy(), depths) for name in ("pid", "time_ns"))
        kernels = pids == 0
        modules, _ = self._spaces.locate(pids, values - (~innermost).astype(np.uint64), times)
        nowhere = np.array([module.path == NOWHERE for module in self._spaces.modules], bool)
        values[nowhere[modules] & ~kernels] = 1
        returns = kernels & ~innermost
        values[returns] = self._ordinals(values[returns] - np.uint64(1)) + np.uint64(1)
        values[kernels & innermost] = self._ordinals(values[kernels & innermost])
        offsets = pa.array((starts - starts[0]).astype(np.int32))
        return pa.ListArray.from_arrays(offsets, pa.array(values), type=ips.type)

    def _ordinals(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Replaces kernel addresses by ascending numbers, 16 apart, as return addresses are looked up minus 1."""
        return np.searchsorted(self._kernel_addresses, addresses).astype(np.uint64) * np.uint64(16) + np.uint64(
            _HIGHEST
        )

    def module(self, module: Module, named: Symbolized) -> tuple[Module, Symbolized]:
        """Redacts a module and its names, for `module` and `symbol` rows."""
        names = named.names
        if module.kind is ModuleKind.KERNEL:
            names = names.outermost().at(self._kernel_addresses)
            names = self._kernel_names(replace(names, addresses=self._ordinals(names.addresses)))
        else:
            files = set(names.files.tolist()) - set(names.functions.tolist())
            is_public = is_public_file(module.path)
            strings = [
                redacted_path(self._names, text)
                if number in files
                else text
                if is_public
                else redacted_function(self._names, text)
                for number, text in enumerate(names.strings)
            ]
            names = replace(names, strings=strings)
        build_id = self._names.content(module.build_id) if module.build_id is not None else None
        redacted = Module(module.kind, redacted_path(self._names, module.path), build_id, 0, module.pid)
        problem = "redacted" if named.problem else ""
        source = "redacted" if named.source else ""
        return redacted, Symbolized(names, source, problem, named.frame_pointers, named.outermost, named.no_calls)

    def _kernel_names(self, names: Names) -> Names:
        """Redacts the Linux kernel's names: those of modules that not everybody has, and of BPF programs."""
        files, file_of = np.unique(names.files, return_inverse=True)
        pairs, pair_of = np.unique(names.functions.astype(np.int64) * max(len(files), 1) + file_of, return_inverse=True)
        modules = [names.strings[number] for number in files.tolist()]
        strings = [redacted_kernel_module(self._names, module) for module in modules]
        for pair in pairs.tolist():
            function, file = divmod(pair, max(len(files), 1))
            change = redacted_kernel_function if is_public_module(modules[file]) else redacted_function
            strings.append(change(self._names, names.strings[function]))
        functions = (pair_of + len(files)).astype(np.int32)
        return replace(names, functions=functions, files=file_of.astype(np.int32), strings=strings)


def _hashed(what: str, names: Pseudonyms, text: str) -> str:
    return names.name(what, text)


def _unless_label(what: str, names: Pseudonyms, text: str) -> str:
    return unless_label(text, partial(names.name, what))


_CHANGES: dict[str, Callable[[Pseudonyms, str], str]] = {
    "path": redacted_path,
    "stack": redacted_stack,
    "slice": redacted_name,
    "group": redacted_name,
    "category": redacted_category,
    "series": redacted_series,
    "type": redacted_type,
    "peers": redacted_peers,
    "phase": redacted_phase,
    "sampled process": partial(_unless_label, "process"),
    "sampled kernel": partial(_unless_label, "kernel"),
}
"""By what the text is: the function that redacts it, for texts that are not just one name."""


def _mapped(table: pa.Table, name: str, change: Callable[[Any], Any]) -> pa.Table:
    """Replaces each distinct value of a dictionary column."""
    return _set(table, name, map_texts(combined(table[name]), change))


def _set(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, pa.field(name, column.type), column)
