"""Removes what identifies people, machines and programs from a capture: names become short, stable hashes.

GPUs, times, counts, addresses in processes, and names of the Linux kernel and of common libraries (C library, Python,
Level Zero) stay. The hashes are not salted: someone who guesses a name can verify the guess.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import combined, map_texts
from iaprof.formats.capture.limits import MAX_TEXT_BYTES
from iaprof.formats.capture.schema import DROPPED, ROW_KINDS
from iaprof.formats.header.slow_launches import MEMBER as SINGLE_STEPPED
from iaprof.formats.header.trace_clocks import KEY as CLOCK, trace_clock
from iaprof.formats.header.traces import MEMBER as TRACES
from iaprof.formats.imports.iaprof_lines import truncated_text
from iaprof.formats.writers.iaprof_text import UNKNOWN_FILE
from iaprof.report.traces.redaction import (
    redacted_category,
    redacted_members,
    redacted_name,
    redacted_peers,
    redacted_phase,
    redacted_series,
    redacted_type,
)
from iaprof.symbols.names.address_space import NOWHERE, AddressSpaces
from iaprof.symbols.names.modules import Module, ModuleKind
from iaprof.symbols.names.names import Symbolized
from iaprof.symbols.python.without_interpreter import PYTHON_FUNCTION
from iaprof.symbols.unwind.stack_ends import BEGINNINGS

_DIGITS = 8
# Common files: reports need their names to say where stacks end and which frames are Python's.
_PUBLIC = re.compile(
    r"(lib(c|m|dl|pthread|stdc\+\+|gcc_s|ze_[a-z_]+|sycl|igdrcl|python3\.\d+)|ld-linux-x86-64)\.so[0-9.]*|python3(\.\d+)?"
)
# Labels that stand for unknown names, and bare addresses. Other text in brackets may be a name.
_LABEL = re.compile(
    r"\[(unknown (process|kernel)|ambiguous: [0-9,]+ processes|ambiguous kernel|any launch|"
    r"launched before recording|launch not recorded|other process|not recorded|no stack|stack lost|truncated|"
    r"called functions|unnamed function|anon|vdso|Python cut: (too many functions|what follows is no function))\]|"
    r"(py::)?\[unknown\]|0x[0-9a-f]{1,16}"
)
_KERNEL_FRAME = "_[k]"  # the suffix of the Linux kernel's frames
_UNNAMED_KERNEL_FRAME = "[kernel]_[k]"  # replaces the Linux kernel's bare addresses
_NO_NAME = re.compile(r"|//anon|\[[a-z_]+\]|/dev/(zero|dri/\w+).*|/proc/kallsyms")
_MEMBERS = {kind.name: {each.name: each.identifies for each in kind.fields if each.identifies} for kind in ROW_KINDS}
"""By kind of row: the members with texts to replace, and what these texts are."""
_DROPPED = {kind.name: [each.name for each in kind.fields if each.flags & DROPPED] for kind in ROW_KINDS}
_HEADER = {
    "format", "iaprof", "python", "host", "clock", "clock_end", "part", "end_ns", "stack_depth", "cpu_hz",
    "follows_frame_pointers", "metric_interval_ns", "streams", "paused", "scope", "probes", "totals", "losses", "cost",
    "symbols", "recovered", "matched", "imported", "launches_by", "no_launches", "stack_ends",
    "python_stacks", "removed_files", "max_cpu_percent", "thinned", "unprobed", "waits", "waits_wanted",
}  # fmt: skip
"""Members of the header that stay. It is an allowlist, as members of later recorders could identify someone."""
_HEADER_TEXTS = {
    "iaprof": frozenset({""}),
    "python": frozenset({""}),
    "host": frozenset({"kernel", "machine"}),
    "streams": frozenset({"device", "card", "name", "pci_address", "layout"}),
    "losses": frozenset({"source", "what"}),
    "symbols": frozenset({"which"}),
    "imported": frozenset({"format"}),
    "launches_by": frozenset({""}),
    "no_launches": frozenset({"driver", "by", "way"}),
}
"""By member of the header: the names of members within it whose texts stay; "" is the member itself."""
_HIGHEST = 1 << 63  # the Linux kernel's addresses are at or above


class Redaction:
    """Redacts the rows of one capture."""

    def __init__(self, spaces: AddressSpaces, kernel_addresses: NDArray[np.uint64], keep_kernels: bool) -> None:
        """Prepares redaction.

        Args:
            spaces: the capture's address spaces.
            kernel_addresses: uint64[n], the Linux kernel's addresses to symbolize, sorted and distinct.
            keep_kernels: keep the debug ELFs of GPU kernels, with everything that they reveal.
        """
        self._spaces = spaces
        self._kernel_addresses = kernel_addresses
        self._keep_kernels = keep_kernels

    def rows(self, kind: str, table: pa.Table) -> pa.Table:
        """Redacts rows of a kind."""
        for name, what in _MEMBERS.get(kind, {}).items():
            table = _mapped(table, name, _CHANGES.get(what) or partial(hashed, what))
        for name in _DROPPED.get(kind, ()):
            table = _set(table, name, pa.nulls(len(table), table.schema.field(name).type))
        if kind == "mapping":
            table = _mapped(table, "build_id", redacted_build_id)
        elif kind == "loss":
            table = _mapped(table, "detail", lambda _: "redacted")
        elif kind == "kernel" and not self._keep_kernels:
            table = _mapped(table, "digest", redacted_build_id)  # else someone who has the file could identify it
            table = _set(table, "elf", pa.nulls(len(table), table.schema.field("elf").type))
        elif kind == "stack":
            table = self._stacks(table)
        return table

    def _stacks(self, table: pa.Table) -> pa.Table:
        """Replaces the Linux kernel's addresses, and values in no mapping: these are data of the process, not code."""
        ips = table["ips"].combine_chunks()
        ips = ips if isinstance(ips, pa.Array) else pa.concat_arrays(ips.chunks)
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
        return _set(table, "ips", pa.ListArray.from_arrays(offsets, pa.array(values), type=ips.type))

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
            names = replace(names, addresses=self._ordinals(names.addresses))
        else:
            files = set(names.files.tolist()) - set(names.functions.tolist())
            is_public = _PUBLIC.fullmatch(os.path.basename(module.path)) is not None
            strings = [
                redacted_path(text) if number in files else text if is_public else redacted_function(text)
                for number, text in enumerate(names.strings)
            ]
            names = replace(names, strings=strings)
        build_id = redacted_build_id(module.build_id) if module.build_id is not None else None
        redacted = Module(module.kind, redacted_path(module.path), build_id, 0, module.pid)
        problem = "redacted" if named.problem else ""
        source = "redacted" if named.source else ""
        return redacted, Symbolized(names, source, problem, named.frame_pointers, named.outermost, named.no_calls)


def redacted_header(header: dict[str, Any]) -> dict[str, Any]:
    """Redacts a header: facts about the GPU and the recording stay, those about machine, command and files do not."""
    kept = {
        name: _without_texts(value, _HEADER_TEXTS.get(name, frozenset()))
        for name, value in header.items()
        if name in _HEADER
    }
    host = header.get("host")
    if isinstance(host, dict):
        kept["host"] |= {"name": hashed("host", str(host.get("name"))), "boot_id": ""}
    for name in ("command", "arguments"):
        words = header.get(name)
        kept[name] = [hashed("word", str(word)) for word in words] if isinstance(words, list) else []
    libraries = header.get("libraries")
    kept["libraries"] = [
        {**_without_texts(library, frozenset({"way", SINGLE_STEPPED})), "path": redacted_path(str(library.get("path")))}
        for library in (libraries if isinstance(libraries, list) else ())
        if isinstance(library, dict)
    ]
    if isinstance(traces := header.get(TRACES), list):
        kept[TRACES] = [_redacted_trace(each) for each in traces if isinstance(each, dict)]
    if isinstance(header.get("file"), str):  # of a part
        kept["file"] = hashed("file", header["file"])
    return {**kept, "redacted": True}


def _redacted_trace(trace: dict[str, Any]) -> dict[str, Any]:
    """Keeps the counts of an imported file, and of its members what tells devices and ranks."""
    clock = trace_clock(trace)
    return {
        **({} if clock is None else {CLOCK: clock.as_dict()}),
        **_without_texts(
            {name: trace.get(name) for name in ("dialect", "rank", "ranks", "counts")}, frozenset({"dialect"})
        ),
        "name": hashed("file", str(trace.get("name"))),
        "members": redacted_members(trace.get("members")),
    }


def _without_texts(value: Any, kept: frozenset[str], name: str = "") -> Any:
    """Replaces every text in JSON by null, unless it is the value of one of these members."""
    match value:
        case dict():
            return {key: _without_texts(each, kept, key) for key, each in value.items()}
        case list():
            return [_without_texts(each, kept, name) for each in value]
        case str() if name not in kept:
            return None
    return value


def hashed(what: str, text: str) -> str:
    """Returns a hash as a name, such as `process-1f3a90c2`; "" for ""."""
    return f"{what}-{hashlib.sha256(f'{what}:{text}'.encode()).hexdigest()[:_DIGITS]}" if text else ""


def redacted_path(path: str) -> str:
    """Redacts a path: one hash, or for common files a hash of the folder, and the name."""
    if _NO_NAME.fullmatch(path) or path == UNKNOWN_FILE:
        return path
    folder, name = os.path.split(path)
    if _PUBLIC.fullmatch(name):
        return f"/{hashed('folder', folder)}/{name}"
    return "/" + hashed("file", path)


def redacted_function(name: str) -> str:
    """Redacts a function's name. Functions in which threads begin, and the prefix of Python functions, stay."""
    if name in BEGINNINGS or not name:
        return name
    if name.startswith(PYTHON_FUNCTION):
        return PYTHON_FUNCTION + hashed("function", name)
    return hashed("function", name)


def _redacted_stack(stack: str) -> str:
    """Redacts the frames of a `sample` row. The Linux kernel's frames, which are the innermost, keep their names."""
    frames = stack.split(";")
    users = len(frames)
    while users and frames[users - 1].endswith(_KERNEL_FRAME):
        users -= 1
    kernel = (_UNNAMED_KERNEL_FRAME if "0x" in frame else frame for frame in frames[users:])
    redacted = ";".join([*(_unless_label(frame, redacted_function) for frame in frames[:users]), *kernel]).encode()
    if len(redacted) > MAX_TEXT_BYTES:  # hashes can be longer than the names
        return truncated_text(redacted)
    return redacted.decode()


def _unless_label(text: str, change: Callable[[str], str]) -> str:
    return text if _LABEL.fullmatch(text) else change(text)


def redacted_build_id(build_id: bytes) -> bytes:
    """Returns a hash in place of a build-id, which could be looked up."""
    return hashlib.sha256(b"build-id:" + build_id).digest()[:20]


_CHANGES: dict[str, Callable[[str], str]] = {
    "path": redacted_path,
    "stack": _redacted_stack,
    "slice": redacted_name,
    "group": redacted_name,
    "category": redacted_category,
    "series": redacted_series,
    "type": redacted_type,
    "peers": redacted_peers,
    "phase": redacted_phase,
    "sampled process": lambda name: _unless_label(name, partial(hashed, "process")),
    "sampled kernel": lambda name: _unless_label(name, partial(hashed, "kernel")),
}
"""By what the text is: the function that redacts it, for texts that are not just one name."""


def _mapped(table: pa.Table, name: str, change: Callable[[Any], Any]) -> pa.Table:
    """Replaces each distinct value of a dictionary column."""
    return _set(table, name, map_texts(combined(table[name]), change))


def _set(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, pa.field(name, column.type), column)
