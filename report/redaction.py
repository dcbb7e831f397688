"""Taking out of a capture what tells whose it is: names become short hashes, the same name always the same one.

What stays: GPU, times, counts, addresses of processes, names of the operating system's kernel and of what everybody has
(the C library, Python, Level Zero). Who guesses a name can check the guess by its hash.
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

from iaprof.formats.capture.dictionaries import in_one, mapped
from iaprof.formats.capture.limits import MAX_TEXT_BYTES
from iaprof.formats.capture.schema import DROPPED, ROWS
from iaprof.formats.header.slow_launches import MEMBER as SINGLE_STEPPED
from iaprof.formats.imports.iaprof_lines import cut_text
from iaprof.formats.writers.iaprof_text import UNKNOWN_FILE
from iaprof.symbols.names.address_space import NOWHERE, AddressSpaces
from iaprof.symbols.names.modules import Module, ModuleKind
from iaprof.symbols.names.names import Named
from iaprof.symbols.python.without_interpreter import PYTHON_FUNCTION
from iaprof.symbols.unwind.stack_ends import BEGINNINGS

_DIGITS = 8
# Files that everybody has; without their names nobody could say where stacks end or what Python is.
_PUBLIC = re.compile(
    r"(lib(c|m|dl|pthread|stdc\+\+|gcc_s|ze_[a-z_]+|sycl|igdrcl|python3\.\d+)|ld-linux-x86-64)\.so[0-9.]*|python3(\.\d+)?"
)
# What says that something is not known, where names can stand, and bare addresses. Others in brackets may be names.
_LABEL = re.compile(
    r"\[(unknown (process|kernel)|ambiguous: [0-9,]+ processes|ambiguous kernel|any launch|"
    r"launched before recording|launch not recorded|other process|not recorded|no stack|stack lost|truncated|"
    r"called functions|unnamed function|anon|vdso|Python cut: (too many functions|what follows is no function))\]|"
    r"(py::)?\[unknown\]|0x[0-9a-f]{1,16}"
)
_KERNEL_FRAME = "_[k]"  # behind the frames of the operating system's kernel
_UNNAMED_KERNEL_FRAME = "[kernel]_[k]"  # in place of their addresses
_NO_NAME = re.compile(r"|//anon|\[[a-z_]+\]|/dev/(zero|dri/\w+).*|/proc/kallsyms")
_MEMBERS = {kind.name: {each.name: each.says for each in kind.members if each.says} for kind in ROWS}
"""Texts that are replaced, by kind of row, and what they are."""
_DROPPED = {kind.name: [each.name for each in kind.members if each.how & DROPPED] for kind in ROWS}
_HEADER = {
    "format", "iaprof", "python", "host", "clock", "clock_end", "part", "end_ns", "stack_depth", "cpu_hz",
    "follows_frame_pointers", "metric_interval_ns", "streams", "paused", "scope", "probes", "totals", "losses", "cost",
    "symbols", "recovered", "matched", "imported", "launches_by", "no_launches", "stack_ends",
    "python_stacks", "unprobed", "waits", "waits_wanted",
}  # fmt: skip
"""Members of the header that stay: what a later recorder may add could tell anything."""
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
"""Where in them texts stay: the names of members, or the empty one for the value itself."""
_HIGHEST = 1 << 63  # kernel addresses are above


class Redaction:
    """The replacements of one capture."""

    def __init__(self, spaces: AddressSpaces, kernel_addresses: NDArray[np.uint64], keep_kernels: bool) -> None:
        """Begins.

        Args:
            spaces: of the capture.
            kernel_addresses: uint64[n], sorted and distinct, those to name in the operating system's kernel.
            keep_kernels: GPU kernels' debug ELFs stay, and all that they tell.
        """
        self._spaces = spaces
        self._kernel_addresses = kernel_addresses
        self._keep_kernels = keep_kernels

    def rows(self, kind: str, table: pa.Table) -> pa.Table:
        """The rows of a kind, redacted."""
        for name, what in _MEMBERS.get(kind, {}).items():
            table = _mapped(table, name, _CHANGES.get(what) or partial(hashed, what))
        for name in _DROPPED.get(kind, ()):
            table = _set(table, name, pa.nulls(len(table), table.schema.field(name).type))
        if kind == "mapping":
            table = _mapped(table, "build_id", redacted_build_id)
        elif kind == "loss":
            table = _mapped(table, "detail", lambda _: "redacted")
        elif kind == "kernel" and not self._keep_kernels:
            table = _mapped(table, "digest", redacted_build_id)  # whoever has the file could tell that it is this one
            table = _set(table, "elf", pa.nulls(len(table), table.schema.field("elf").type))
        elif kind == "stack":
            table = self._stacks(table)
        return table

    def _stacks(self, table: pa.Table) -> pa.Table:
        """Without addresses of the kernel, and without what a walk found behind the last frame: data of the process."""
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
        """Numbers in the place of kernel addresses, in their order; apart, as a call's is one before its return."""
        return np.searchsorted(self._kernel_addresses, addresses).astype(np.uint64) * np.uint64(16) + np.uint64(
            _HIGHEST
        )

    def module(self, module: Module, named: Named) -> tuple[Module, Named]:
        """What goes into a `module` row, and the names that go with it."""
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
        return redacted, Named(names, source, problem, named.frame_pointers, named.outermost, named.no_calls)


def redacted_header(header: dict[str, Any]) -> dict[str, Any]:
    """A header that tells the GPU and the recording, and not the machine, the command and the files."""
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
    if isinstance(header.get("file"), str):  # of a part
        kept["file"] = hashed("file", header["file"])
    return {**kept, "redacted": True}


def _without_texts(value: Any, kept: frozenset[str], name: str = "") -> Any:
    """JSON with null for every text that is not of one of these members."""
    match value:
        case dict():
            return {key: _without_texts(each, kept, key) for key, each in value.items()}
        case list():
            return [_without_texts(each, kept, name) for each in value]
        case str() if name not in kept:
            return None
    return value


def hashed(what: str, text: str) -> str:
    """A short name for a name: `process-1f3a90c2`; nothing for nothing, and what was hashed stays as it is."""
    return f"{what}-{hashlib.sha256(f'{what}:{text}'.encode()).hexdigest()[:_DIGITS]}" if text else ""


def redacted_path(path: str) -> str:
    """The path of a file as one hash, and its name when it is one that everybody has."""
    if _NO_NAME.fullmatch(path) or path == UNKNOWN_FILE:
        return path
    folder, name = os.path.split(path)
    if _PUBLIC.fullmatch(name):
        return f"/{hashed('folder', folder)}/{name}"
    return "/" + hashed("file", path)


def redacted_function(name: str) -> str:
    """A function's name as a hash; where threads begin stays, and that it is Python's."""
    if name in BEGINNINGS or not name:
        return name
    if name.startswith(PYTHON_FUNCTION):
        return PYTHON_FUNCTION + hashed("function", name)
    return hashed("function", name)


def _redacted_stack(stack: str) -> str:
    """The frames of a sample: those of the operating system's kernel, which are the innermost, keep their names."""
    frames = stack.split(";")
    users = len(frames)
    while users and frames[users - 1].endswith(_KERNEL_FRAME):
        users -= 1
    kernel = (_UNNAMED_KERNEL_FRAME if "0x" in frame else frame for frame in frames[users:])
    redacted = ";".join([*(_unless_label(frame, redacted_function) for frame in frames[:users]), *kernel]).encode()
    if len(redacted) > MAX_TEXT_BYTES:  # hashes may be longer than names
        return cut_text(redacted)
    return redacted.decode()


def _unless_label(text: str, change: Callable[[str], str]) -> str:
    return text if _LABEL.fullmatch(text) else change(text)


def redacted_build_id(build_id: bytes) -> bytes:
    """Another build-id, as the real one can be looked up."""
    return hashlib.sha256(b"build-id:" + build_id).digest()[:20]


_CHANGES: dict[str, Callable[[str], str]] = {
    "path": redacted_path,
    "stack": _redacted_stack,
    "sampled process": lambda name: _unless_label(name, partial(hashed, "process")),
    "sampled kernel": lambda name: _unless_label(name, partial(hashed, "kernel")),
}
"""How texts are replaced that are no single names."""


def _mapped(table: pa.Table, name: str, change: Callable[[Any], Any]) -> pa.Table:
    """The table with each distinct value of a dictionary column replaced."""
    return _set(table, name, mapped(in_one(table[name]), change))


def _set(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    index = table.schema.get_field_index(name)
    return table.set_column(index, pa.field(name, column.type), column)
