"""Captures of some kilobytes that would take gigabytes: what a stranger could make to exhaust a reader's memory.

They are sound Parquet files: nothing in them is damaged, everything is only repeated, or compresses well.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from iaprof.formats.capture.limits import HEADER_KEY, MAX_TEXT_BYTES
from iaprof.formats.capture.schema import FORMAT, KINDS, SCHEMA
from unit.capturing import HEADER

LONGEST = "k" * MAX_TEXT_BYTES
_TEXTS = (pa.string(), pa.binary())
_Group = tuple[str, dict[str, pa.Array]]


def write(path: Path, groups: Iterable[_Group], header: dict[str, Any] | None = None) -> Path:
    """A capture of such row groups; members that a group leaves out are 0, empty or null.

    What is given as a dictionary is written as one, however large. Row groups of one kind have columns of one type.
    """
    ahead = list(itertools.islice(groups := iter(groups), len(KINDS)))
    kinds = [kind for kind in KINDS if any(kind == given for given, _ in ahead)]
    schema = pa.schema([SCHEMA.field("kind"), SCHEMA.field("part"), *(_field(kind, ahead) for kind in kinds)])
    dictionaries = [f"{kind}.{f.name}" for kind in kinds for f in schema.field(kind).type
                    if pa.types.is_dictionary(f.type) or f.type == pa.uint64()]  # fmt: skip
    with pq.ParquetWriter(
        path, schema, compression="zstd", dictionary_pagesize_limit=1 << 30, write_statistics=False,
        use_dictionary=["kind", *dictionaries],
    ) as writer:  # fmt: skip
        for kind, given in itertools.chain(ahead, groups):
            table = row_group(kind, given, schema)
            writer.write_table(table, row_group_size=len(table))
        writer.add_key_value_metadata({HEADER_KEY: json.dumps({**HEADER, **(header or {}), "format": FORMAT}).encode()})
    return path


def _field(kind: str, groups: list[_Group]) -> pa.Field:
    given = next(columns for name, columns in groups if name == kind)
    return pa.field(kind, pa.struct([f.with_type(given[f.name].type) if f.name in given else f for f in KINDS[kind]]))


def row_group(kind: str, given: dict[str, pa.Array], schema: pa.Schema) -> pa.Table:
    """The rows of a kind, by a schema of some kinds; members that are not given are 0, empty or null."""
    rows = max(map(len, given.values()))
    members = [given[f.name] if f.name in given else nothing(f.type, rows) for f in KINDS[kind]]
    own = pa.StructArray.from_arrays(members, fields=list(schema.field(kind).type))
    columns = [pa.repeat(kind, rows), pa.nulls(rows, pa.uint16())]
    columns += [own if each == kind else pa.nulls(rows, schema.field(each).type) for each in schema.names[2:]]
    return pa.Table.from_arrays(columns, schema=schema)


def nothing(type_: pa.DataType, rows: int) -> pa.Array:
    """So many rows of 0, or of empty texts or lists."""
    if pa.types.is_list(type_):
        return pa.ListArray.from_arrays(
            pa.array(np.zeros(rows + 1, np.int32)), pa.nulls(0, type_.value_type), type=type_
        )
    value = "" if type_ == pa.string() else b"" if type_ == pa.binary() else False if type_ == pa.bool_() else 0
    return pa.repeat(pa.scalar(value, type_), rows)


def _again(texts: list[Any], rows: int) -> pa.DictionaryArray:
    """So many rows of few texts."""
    return pa.DictionaryArray.from_arrays(pa.array(np.arange(rows, dtype=np.int32) % len(texts)), pa.array(texts))


def _zeros(values: int) -> pa.Array:
    """One row: a list of so many zeros."""
    type_ = KINDS["stack"].field("ips").type
    return pa.ListArray.from_arrays(
        pa.array([0, values], pa.int32()), pa.array(np.zeros(values, np.uint64)), type=type_
    )


def one_text(path: Path) -> Path:
    """Launches that all have the longest of names: 8 GB of names."""
    return write(path, [("launch", {"name": _again([LONGEST], 1 << 19)})])


def texts_everywhere(path: Path) -> Path:
    """The longest texts in every column of texts, 2 GB each, and a stall."""
    return write(path, [*_texts_of(KINDS), ("stall", {"w0": pa.array([[0]], KINDS["stall"].field("w0").type)})])


def texts_of_time_lines(path: Path) -> Path:
    """The longest texts in every column of texts of time lines: 2 GB each."""
    return write(path, _texts_of(("slice", "counter", "flow", "instant")))


def _texts_of(kinds: Iterable[str]) -> list[_Group]:
    groups: list[_Group] = []
    for kind in kinds:
        members = KINDS[kind]
        texts = {f.name: _again([LONGEST if f.type == pa.string() else LONGEST.encode()], 1 << 17)
                 for f in members if f.type in _TEXTS and f.name != "elf"}  # fmt: skip
        groups += [(kind, texts)] if texts else []
    return groups


def imported_stacks(path: Path) -> Path:
    """Samples with stacks of many short frames, whose hashes are nine times as long: 29 GB of them."""
    rows = 200_000
    stacks = [";".join(["a", *("b" * (MAX_TEXT_BYTES // 2 - 3)), str(number)]) for number in range(50)]
    return write(path, [("sample", {"stack": _again(stacks, rows)})])


def many_texts(path: Path) -> Path:
    """Row groups whose dictionaries have nothing in common: 800 MB."""
    names = ([f"{LONGEST[8:]}{group:04}{number:04}" for number in range(2048)] for group in range(24))
    return write(path, (("launch", {"name": _again(each, 2048)}) for each in names))


def long_stack(path: Path) -> Path:
    """One stack of 50 million addresses: 400 MB."""
    return write(path, [("stack", {"ips": _zeros(50_000_000)})])


def long_read(path: Path) -> Path:
    """One read of 16 million records: 380 MB."""
    words = _zeros(16_000_000)
    return write(path, [("stall", {"w0": words, "w1": words, "w2": words})])


def one_module(path: Path) -> Path:
    """One module of 384 MB of zeros, in one page."""
    return write(path, [("kernel", {"elf": pa.array([b"\x7fELF" + bytes(384 << 20)])})])


def the_same_module(path: Path) -> Path:
    """A module of 16 MB that comes 512 times: 8 GB."""
    return write(path, [("kernel", {"elf": _again([b"\x7fELF" + bytes(16 << 20)], 512)})])


def many_modules(path: Path) -> Path:
    """36 modules of 12 MB, each in a row group of its own: 430 MB."""
    return write(path, (("kernel", {"elf": pa.array([b"\x7fELF%06d" % n + bytes(12 << 20)])}) for n in range(36)))


def one_name(path: Path) -> Path:
    """One name of 384 MB."""
    return write(path, [("launch", {"name": pa.array(["k" * (384 << 20)])})])


def symbols(path: Path) -> Path:
    """Functions and files with the longest of names, at as many addresses: 8 GB."""
    rows = 1 << 18
    module = {"id": pa.array([0], pa.uint32()), "what": pa.array(["file"]), "path": pa.array(["/x"])}
    names = {"function": _again([LONGEST], rows), "file": _again([LONGEST], rows),
             "address": pa.array(np.arange(rows, dtype=np.uint64)),
             "size": pa.array(np.ones(rows, np.uint64))}  # fmt: skip
    stack = {"ips": pa.array([[0x1000 + n for n in range(1000)]], KINDS["stack"].field("ips").type),
             "pid": pa.array([7], pa.uint32())}  # fmt: skip
    mapping = {"pid": pa.array([7], pa.uint32()), "start": pa.array([0x1000], pa.uint64()),
               "length": pa.array([rows], pa.uint64()), "path": pa.array(["/x"])}  # fmt: skip
    return write(path, [("module", module), ("symbol", names), ("stack", stack), ("mapping", mapping)])


def deep_header(path: Path) -> Path:
    """A header of lists in lists, more than any parser goes down."""
    return _with_header(path, b"[" * (1 << 20) + b"]" * (1 << 20))


def wide_header(path: Path) -> Path:
    """A header of five million empty lists: 320 MB of objects."""
    return _with_header(path, b'{"format": 4, "streams": [' + b"[]," * 5_000_000 + b"[]]}")


def _with_header(path: Path, header: bytes) -> Path:
    with pq.ParquetWriter(path, SCHEMA) as writer:
        writer.add_key_value_metadata({HEADER_KEY: header})
    return path


BOMBS: dict[str, Callable[[Path], Path]] = {
    make.__name__: make
    for make in (one_text, texts_everywhere, imported_stacks, many_texts, long_stack, long_read,
                 one_module, the_same_module, many_modules, one_name, symbols, deep_header, wide_header)
}  # fmt: skip
"""What makes each, by name."""
