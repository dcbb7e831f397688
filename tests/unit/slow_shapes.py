"""More small captures that declare much, as unit/slow_captures.py: of almost 10 million values each, and below 10 MB.

Columns that count up, or repeat a pattern, are encoded as differences or dictionaries, so they take almost no bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from iaprof.formats.capture.limits import HEADER_KEY
from iaprof.formats.capture.schema import FORMAT, KINDS, SCHEMA
from unit.bombs import row_group
from unit.capturing import HEADER
from unit.elfwriter import COMPILE_UNIT, HIGH_PC, LOW_PC, NAME, STMT_LIST, Addr, Die, dwarf, kernel, zebin

_SECOND = 10**9
_Columns = dict[str, pa.Array]
_Group = tuple[str, _Columns]
_WORDS = KINDS["stack"].field("ips").type
_HEADER = HEADER | {"clock": {"monotonic_ns": 6, "realtime_ns": 78}}


def pack(path: Path, groups: Sequence[_Group], header: dict[str, Any] | None = None, part: int | None = None) -> Path:
    """Writes a capture of such row groups, each of a kind of its own, as small as Parquet can; absent members are 0.

    All rows are of one part, if one is given.
    """
    given = dict(groups)
    schema = pa.schema([SCHEMA.field("kind"), SCHEMA.field("part"), *(_field(kind, given) for kind in given)])
    encodings, dictionaries = {}, ["kind"]
    for kind, columns in given.items():
        for name, column in columns.items():
            if pa.types.is_list(column.type) and pa.types.is_integer(column.type.value_type):
                encodings[f"{kind}.{name}.list.element"] = "DELTA_BINARY_PACKED"
            elif pa.types.is_dictionary(column.type):
                dictionaries.append(f"{kind}.{name}")
            elif pa.types.is_integer(column.type) and column.type.bit_width >= 32:
                encodings[f"{kind}.{name}"] = "DELTA_BINARY_PACKED"
    with pq.ParquetWriter(
        path, schema, compression="zstd", compression_level=9, dictionary_pagesize_limit=1 << 30,
        write_statistics=False, use_dictionary=dictionaries, column_encoding=encodings,
    ) as writer:  # fmt: skip
        for kind, columns in given.items():
            table = row_group(kind, columns, schema)
            if part is not None:
                table = table.set_column(1, "part", pa.array(np.full(len(table), part, np.uint16)))
            writer.write_table(table, row_group_size=len(table))
        members_ = {**_HEADER, **(header or {}), "format": FORMAT}
        writer.add_key_value_metadata({HEADER_KEY: json.dumps(members_).encode()})
    return path


def _field(kind: str, given: dict[str, _Columns]) -> pa.Field:
    columns = given[kind]
    return pa.field(
        kind, pa.struct([f.with_type(columns[f.name].type) if f.name in columns else f for f in KINDS[kind]])
    )


def _u64(values: NDArray[Any] | int, rows: int = 0) -> pa.Array:
    return pa.array(np.full(rows, values, np.uint64) if isinstance(values, int) else values.astype(np.uint64))


def _u32(values: NDArray[Any] | int, rows: int = 0) -> pa.Array:
    return pa.array(np.full(rows, values, np.uint32) if isinstance(values, int) else values.astype(np.uint32))


def i64(values: NDArray[Any]) -> pa.Array:
    return pa.array(values.astype(np.int64))


def _u16(values: NDArray[Any]) -> pa.Array:
    return pa.array(values.astype(np.uint16))


def texts_of(prefix: str, rows: int, distinct: int) -> pa.DictionaryArray:
    numbers = np.arange(rows) * distinct // max(rows, 1)
    names = pa.array([f"{prefix}{n}" for n in range(distinct)])
    return pa.DictionaryArray.from_arrays(pa.array(numbers.astype(np.int32)), names)


def same_text(text: str, rows: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([text]))


def _lists(values: NDArray[Any], each: int, type_: pa.DataType = _WORDS) -> pa.ListArray:
    offsets = np.arange(len(values) // each + 1, dtype=np.int32) * each
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=type_)


def launched() -> list[_Group]:
    """A launch of one kernel with a stall."""
    launch = {"time_ns": _u64(_SECOND, 1), "pid": _u32(7, 1), "size": _u64(4096, 1), "stack": _u64(1, 1),
              "name": same_text("k", 1)}  # fmt: skip
    stall = {"time_ns": _u64(3 * _SECOND, 1), "begin_ns": _u64(2 * _SECOND, 1),
             "w0": _lists(np.array([1 << 37], np.uint64), 1), "w1": _lists(np.zeros(1, np.uint64), 1)}  # fmt: skip
    stack = {"id": _u64(1, 1), "pid": _u32(7, 1), "time_ns": _u64(3 * _SECOND, 1),
             "ips": _lists(np.array([16], np.uint64), 1)}  # fmt: skip
    return [("launch", launch), ("stall", stall), ("stack", stack)]


def _waits(rows: int, distinct: int) -> _Columns:
    number = np.arange(rows)
    own = number * distinct // max(rows, 1)
    return {"time_ns": _u64(2 * _SECOND + number * 1000), "end_ns": _u64(2 * _SECOND + number * 1000 + 900),
            "waited_ns": _u64(900, rows), "count": _u64(1, rows), "pid": _u32(7, rows), "tid": _u32(own),
            "comm": texts_of("c", rows, min(distinct, 300_000)), "function": same_text("zeEventHostSynchronize", rows),
            "handle": _u64(own), "stack": _u64(own + 1)}  # fmt: skip


def waits(path: Path, values: int = 9_900_000) -> Path:
    """Waits of few threads, at few places."""
    return pack(path, [("wait", _waits(values // 11, 16)), *launched()])


def distinct_waits(path: Path, values: int = 9_900_000) -> Path:
    """Waits, each of a thread, a stack and an event of its own."""
    return pack(path, [("wait", _waits(values // 11, values // 11)), *launched()])


def wait_functions(path: Path, values: int = 9_900_000) -> Path:
    """Waits, each in a function of its own."""
    rows = min(values // 11, 700_000)
    return pack(path, [("wait", _waits(rows, 1) | {"function": texts_of("f", rows, rows)}), *launched()])


def _transfers(rows: int, distinct: int) -> _Columns:
    number = np.arange(rows)
    own = number * distinct // max(rows, 1)
    return {"time_ns": _u64(2 * _SECOND + number * 1000), "pid": _u32(own + 7), "tid": _u32(own + 7),
            "comm": texts_of("c", rows, min(distinct, 300_000)), "stack": _u64(own + 1),
            "function": texts_of("copy", rows, min(distinct, 300_000)), "bytes": _u64(64 + own)}  # fmt: skip


def transfers(path: Path, values: int = 9_900_000) -> Path:
    """Copies of few threads."""
    return pack(path, [("transfer", _transfers(values // 9, 16)), *launched()])


def distinct_transfers(path: Path, values: int = 9_900_000) -> Path:
    """Copies, each of a process, a stack and a function of its own."""
    return pack(path, [("transfer", _transfers(values // 9, values // 9)), *launched()])


def launches(path: Path, values: int = 9_900_000) -> Path:
    """Launches of one kernel from one place, and a stall."""
    rows = values // 12
    number = np.arange(rows)
    launch = {"time_ns": _u64(_SECOND + number * 1000), "pid": _u32(7, rows), "tid": _u32(7, rows),
              "size": _u64(4096, rows), "stack": _u64(1, rows), "name": same_text("k", rows),
              "comm": same_text("c", rows)}  # fmt: skip
    return pack(path, [("launch", launch), *launched()[1:]])


def launched_stacks(path: Path, values: int = 9_900_000) -> Path:
    """Launches of one kernel, each with a stack and a thread of its own, and a stall."""
    rows = values // 12
    number = np.arange(rows)
    launch = {"time_ns": _u64(_SECOND + number * 1000), "pid": _u32(7, rows), "tid": _u32(number),
              "size": _u64(4096, rows), "stack": _u64(number + 1), "name": same_text("k", rows),
              "comm": same_text("c", rows)}  # fmt: skip
    return pack(path, [("launch", launch), *launched()[1:]])


def _listed(kernels: int, executions: int, lists: int = 1) -> list[_Group]:
    """Lists of so many kernels each, and executions, evenly of all lists; stalls of the first kernels."""
    number, each, appended = np.arange(kernels * lists), np.arange(executions), kernels * lists
    launch = {"time_ns": _u64(_SECOND + number), "pid": _u32(7, appended), "tid": _u32(7, appended),
              "size": _u64(64, appended), "address": _u64((1 << 28) + number % kernels * 64),
              "stack": _u64(1 + number), "name": texts_of("n", appended, min(appended, 1000)),
              "list": _u64(1 + number // kernels)}  # fmt: skip
    times = np.concatenate([2 * _SECOND - lists + np.arange(lists), 2 * _SECOND + each * 1000])
    rows = len(times)
    events = pa.DictionaryArray.from_arrays(pa.array((np.arange(rows) >= lists).astype(np.int32)),
                                            pa.array(["close", "execute"]))  # fmt: skip
    numbers = np.concatenate([np.arange(lists), each % lists]) + 1
    event = {"time_ns": _u64(times), "pid": _u32(7, rows), "tid": _u32(7, rows), "event": events,
             "list": _u64(numbers), "queue": _u64(1 + np.arange(rows)), "stack": _u64(5 + np.arange(rows))}  # fmt: skip
    addresses = (1 << 28) + np.arange(min(kernels, 1000), dtype=np.uint64) * np.uint64(64)
    stall = {"time_ns": _u64(3 * _SECOND, 1), "begin_ns": _u64(2 * _SECOND, 1),
             "w0": _lists(addresses >> np.uint64(3) | np.uint64(1 << 37), len(addresses)),
             "w1": _lists(np.zeros(len(addresses), np.uint64), len(addresses))}  # fmt: skip
    return [("launch", launch), ("command_list", event), ("stall", stall)]


def one_list(path: Path, values: int = 9_900_000) -> Path:
    """A closed list of very many kernels that is executed very often: so many launches as their product."""
    return pack(path, _listed(values // 24, values // 24))


def many_lists(path: Path, values: int = 9_900_000) -> Path:
    """Very many closed lists, each of one kernel, executed once."""
    return pack(path, _listed(1, values // 32, values // 32))


def long_list(path: Path, values: int = 9_900_000) -> Path:
    """One list of 1,000 kernels, all of which stall, that is executed very often."""
    return pack(path, _listed(1000, values // 10 - 1200))


def cpu_frames(path: Path, values: int = 9_900_000) -> Path:
    """CPU samples, each with a stack of 127 frames of its own, of few addresses."""
    stacks = values // 140
    return pack(path, [*_framed(stacks, 127), _sampled(stacks)])


def deep_cpu_frames(path: Path, values: int = 9_900_000) -> Path:
    """The same with 1,024 frames each."""
    stacks = values // 1040
    return pack(path, [*_framed(stacks, 1024), _sampled(stacks)])


def deep_launches(path: Path, values: int = 9_900_000) -> Path:
    """Kernels side by side, each with a stall, and a stack of 1,024 frames of few addresses."""
    stacks = min(values // 1040, 65_000)
    return pack(path, [*_framed(stacks, 1024), *_stalling(stacks)])


def _framed(stacks: int, depth: int) -> list[_Group]:
    row, at = np.divmod(np.arange(stacks * depth), depth)
    ips = ((at * 7 + (row >> at % 17)) % 509 << 4).astype(np.uint64) + np.uint64(1 << 20)
    stack = {"id": _u64(np.arange(stacks) + 1), "pid": _u32(7, stacks), "time_ns": _u64(_SECOND, stacks),
             "ips": _lists(ips, depth)}  # fmt: skip
    mapping = {"pid": _u32(7, 1), "start": _u64(1 << 20, 1), "length": _u64(1 << 20, 1), "path": same_text("/x", 1)}
    return [("mapping", mapping), ("stack", stack)]


def _sampled(samples: int) -> _Group:
    number = np.arange(samples)
    return "cpu_sample", {"time_ns": _u64(2 * _SECOND + number * 1000), "pid": _u32(7, samples),
                          "tid": _u32(7, samples), "stack": _u64(number + 1)}  # fmt: skip


def _stalling(kernels: int) -> list[_Group]:
    number = np.arange(kernels)
    address = (1 << 28) + number * 64
    launch = {"time_ns": _u64(_SECOND + number), "pid": _u32(7, kernels), "tid": _u32(7, kernels),
              "stack": _u64(number + 1), "size": _u64(64, kernels), "address": _u64(address),
              "name": texts_of("n", kernels, kernels)}  # fmt: skip
    stall = {"time_ns": _u64(3 * _SECOND, 1), "begin_ns": _u64(2 * _SECOND, 1),
             "w0": _lists(address.astype(np.uint64) >> np.uint64(3) | np.uint64(1 << 37), kernels),
             "w1": _lists(np.zeros(kernels, np.uint64), kernels)}  # fmt: skip
    return [("launch", launch), ("stall", stall)]


def python_frames(path: Path, values: int = 9_900_000, lines: int = 2) -> Path:
    """Kernels with stalls, each with a stack of 64 frames of Python: 60,000 code objects, of so many lines."""
    depth, codes = 64, 60_000
    stacks = min(values // (3 * depth), 60_000)
    at = np.arange(stacks * depth)
    frames = pa.StructArray.from_arrays(
        [_u32((at * 31) % codes), _u32(at % lines), _u16(np.zeros(len(at)))],
        fields=list(KINDS["stack"].field("python").type.value_type),
    )
    type_ = KINDS["stack"].field("python").type
    python = pa.ListArray.from_arrays(pa.array(np.arange(stacks + 1, dtype=np.int32) * depth), frames, type=type_)
    number = np.arange(stacks)
    stack = {"id": _u64(number + 1), "pid": _u32(7, stacks), "python": python,
             "ips": _lists(np.full(stacks, 1 << 20, np.uint64), 1)}  # fmt: skip
    code = {"id": _u32(np.arange(codes)), "name": texts_of("f", codes, codes), "file": texts_of("/p", codes, codes),
            "first_line": _u32(3, codes)}  # fmt: skip
    return pack(path, [("stack", stack), ("python_code", code), *_stalling(stacks), _sampled(stacks)])


def python_codes(path: Path, values: int = 9_900_000) -> Path:
    """Code objects without end, and a stack of 1,024 of them."""
    codes = min(values // 8, 900_000)
    frames = pa.StructArray.from_arrays([_u32(np.arange(1024)), _u32(1, 1024), _u16(np.zeros(1024))],
                                        fields=list(KINDS["stack"].field("python").type.value_type))  # fmt: skip
    python = pa.ListArray.from_arrays(pa.array([0, 1024], pa.int32()), frames, type=KINDS["stack"].field("python").type)
    launch, stall, (_, stack) = launched()
    code = {"id": _u32(np.arange(codes)), "name": texts_of("f", codes, codes), "file": texts_of("/p", codes, 10),
            "first_line": _u32(3, codes)}  # fmt: skip
    return pack(path, [launch, stall, ("stack", stack | {"python": python}), ("python_code", code)])


def imported(path: Path, values: int = 9_900_000) -> Path:
    """Samples of an import, each of a stack of its own."""
    rows = values // 17
    return pack(path, [("sample", _imported(rows) | {"stack": texts_of("main;work;f", rows, rows)})], {"imported": {}})


def imported_frames(path: Path, values: int = 9_900_000) -> Path:
    """Samples of an import with stacks of 2,000 frames, each of a stack of its own."""
    rows = values // 4000
    stacks = [";".join([f"f{n}", *("b" + str(each % 7) for each in range(2000))]) for n in range(rows)]
    texts = pa.DictionaryArray.from_arrays(pa.array(np.arange(rows, dtype=np.int32)), pa.array(stacks))
    return pack(path, [("sample", _imported(rows) | {"stack": texts})], {"imported": {}})


def imported_rows(path: Path, values: int = 9_900_000) -> Path:
    """Samples of an import, all alike but for the offset."""
    rows = values // 20
    return pack(path, [("sample", _imported(rows) | {"stack": same_text("main;work", rows)})], {"imported": {}})


def _imported(rows: int) -> _Columns:
    number = np.arange(rows)
    return {"time_ns": _u64(2 * _SECOND + number * 1000), "comm": same_text("c", rows), "pid": _u32(7, rows),
            "kernel": texts_of("k", rows, min(rows, 1000)), "address": _u64(1 << 28, rows),
            "file": same_text("a.cl", rows), "offset": _u64(number * 16), "mnemonic": same_text("mad", rows),
            "sbid": _u64(1, rows)}  # fmt: skip


def traced(rows: int, names: int, nested: bool = False) -> _Columns:
    number = np.arange(rows)
    longest = 2 * rows
    times, lengths = (number, longest - 2 * number) if nested else (number * 1000, np.full(rows, 900))
    return {"time_ns": i64(_SECOND + times), "duration_ns": i64(lengths), "file": _u16(np.zeros(rows)),
            "pid": i64(np.full(rows, 7)), "tid": i64(np.full(rows, 7)), "name": texts_of("n", rows, names)}  # fmt: skip


TRACES = {"traces": [{"name": "t.json", "dialect": "flex"}]}


def slices(path: Path, values: int = 9_900_000) -> Path:
    """Slices of one thread with few names."""
    return pack(path, [("slice", traced(values // 10, 16))], TRACES)


def slice_names(path: Path, values: int = 9_900_000) -> Path:
    """Slices, each of a name of its own."""
    rows = min(values // 10, 700_000)
    return pack(path, [("slice", traced(rows, rows))], TRACES)


def nested_slices(path: Path, values: int = 9_900_000) -> Path:
    """Slices, each within the one before."""
    return pack(path, [("slice", traced(values // 10, 16, nested=True))], TRACES)


def overlapping_slices(path: Path, values: int = 9_900_000) -> Path:
    """Slices that all overlap one another, none within another."""
    rows = values // 10
    lengths = i64(np.full(rows, 1000 * rows))
    return pack(path, [("slice", traced(rows, 16) | {"duration_ns": lengths})], TRACES)


def slice_threads(path: Path, values: int = 9_900_000) -> Path:
    """Slices, each of a process and thread of its own, none of which ran on a device."""
    rows = values // 10
    number = i64(np.arange(rows))
    return pack(path, [("slice", on_host(rows) | {"pid": number, "tid": number})], TRACES)


def on_host(rows: int) -> _Columns:
    """Slices that did not run on a device."""
    absent = {f"ts{n}": pa.nulls(rows, pa.int64()) for n in range(1, 6)} | {"group": pa.nulls(rows, pa.string())}
    return traced(rows, 16) | absent


def slice_args(path: Path, values: int = 9_900_000) -> Path:
    """Slices with args, groups, types and peers of their own."""
    rows = min(values // 14, 250_000)
    texts = {name: texts_of(name[0], rows, rows) for name in ("category", "group", "type", "peers")}
    args = pa.array([f'{{"a":{n}}}' for n in range(rows)])
    device = {"device": i64(np.arange(rows)), "correlation": i64(np.arange(rows)),
              "external_id": i64(np.arange(rows))}  # fmt: skip
    return pack(path, [("slice", traced(rows, 16) | texts | device | {"args": args})], TRACES)


def counters(path: Path, values: int = 9_900_000) -> Path:
    """Values of one counter."""
    return pack(path, [("counter", _counters(values // 8, 1)), ("slice", traced(10, 1))], TRACES)


def counter_names(path: Path, values: int = 9_900_000) -> Path:
    """Counters of as many names, a value each."""
    return pack(path, [("counter", _counters(min(values // 8, 500_000), 0)), ("slice", traced(10, 1))], TRACES)


def _counters(rows: int, names: int) -> _Columns:
    number = np.arange(rows)
    return {"time_ns": i64(_SECOND + number * 1000), "file": _u16(np.zeros(rows)), "pid": i64(np.full(rows, 7)),
            "tid": i64(np.full(rows, 7)), "name": texts_of("n", rows, names or rows),
            "series": texts_of("s", rows, names or rows),
            "value": pa.array((number % 3).astype(np.float64))}  # fmt: skip


def flows(path: Path, values: int = 9_900_000) -> Path:
    """Flows, each of an id of its own, half of them without an end; all ends are at one slice."""
    rows = values // 8
    number = np.arange(rows)
    phase = pa.DictionaryArray.from_arrays(pa.array((number % 2).astype(np.int32)), pa.array(["s", "f"]))
    return pack(path, [("slice", traced(10, 1)), ("flow", _events(rows) | {"phase": phase, "id": i64(number // 2)})],
                TRACES)  # fmt: skip


def one_flow(path: Path, values: int = 9_900_000) -> Path:
    """Starts and ends of flows of one id."""
    rows = values // 8
    phase = pa.DictionaryArray.from_arrays(pa.array((np.arange(rows) % 2).astype(np.int32)), pa.array(["s", "f"]))
    return pack(path, [("slice", traced(10, 1)), ("flow", _events(rows) | {"phase": phase,
                                                   "id": i64(np.zeros(rows))})], TRACES)  # fmt: skip


def instants(path: Path, values: int = 9_900_000) -> Path:
    """Other events, each of a name and args of its own."""
    rows = min(values // 9, 400_000)
    args = pa.array([f'{{"a":{n}}}' for n in range(rows)])
    event = _events(rows) | {"phase": same_text("i", rows), "name": texts_of("n", rows, rows), "args": args}
    return pack(path, [("slice", traced(10, 1)), ("instant", event)], TRACES)


def _events(rows: int) -> _Columns:
    number = np.arange(rows)
    return {"time_ns": i64(_SECOND + number * 1000), "file": _u16(np.zeros(rows)), "pid": i64(np.full(rows, 7)),
            "tid": i64(np.full(rows, 7)), "name": same_text("n", rows), "category": same_text("c", rows)}  # fmt: skip


def metrics(path: Path, values: int = 9_900_000) -> Path:
    """Values of few metrics of one GPU, energy among them."""
    rows = values // 5
    number = np.arange(rows)
    texts = pa.array(["energy-card-J", "power-card-W", "act-freq-gt0-MHz", "x"])
    names = pa.DictionaryArray.from_arrays(pa.array((number % 4).astype(np.int32)), texts)
    metric = {"time_ns": _u64(_SECOND + number // 4 * 1000), "name": names, "stream": _u16(np.zeros(rows)),
              "pid": pa.nulls(rows, pa.uint32()), "value": pa.array(number // 4 % 1000.0)}  # fmt: skip
    return pack(path, [("metric", metric), *launched()])


def metric_processes(path: Path, values: int = 9_900_000) -> Path:
    """CPU use of as many processes, a value each."""
    rows = values // 5
    number = np.arange(rows)
    metric = {"time_ns": _u64(_SECOND + number), "name": same_text("cpu-percent", rows),
              "stream": pa.nulls(rows, pa.uint16()), "pid": _u32(number), "value": pa.array(np.ones(rows))}  # fmt: skip
    return pack(path, [("metric", metric), *launched()])


def losses(path: Path, values: int = 9_900_000) -> Path:
    """Losses, each of a source and a detail of its own."""
    rows = min(values // 6, 500_000)
    number = np.arange(rows)
    loss = {"begin_ns": _u64(_SECOND + number), "time_ns": _u64(_SECOND + number), "source": texts_of("s", rows, rows),
            "what": texts_of("w", rows, rows), "count": _u64(1, rows), "detail": texts_of("d", rows, rows)}  # fmt: skip
    return pack(path, [("loss", loss), *launched()])


def same_losses(path: Path, values: int = 9_900_000) -> Path:
    """Losses that are all alike but for the time."""
    rows = values // 6
    number = np.arange(rows)
    loss = {"begin_ns": _u64(_SECOND + number), "time_ns": _u64(_SECOND + number), "source": same_text("launch", rows),
            "what": same_text("lost", rows), "count": _u64(1, rows), "detail": same_text("d", rows)}  # fmt: skip
    return pack(path, [("loss", loss), *launched()])


def header_members(path: Path, values: int = 9_900_000) -> Path:
    """A header of megabytes: losses, devices, problems, labels, options, each a list or object of many."""
    number = values // 400
    many = [f"x{n}" for n in range(number)]
    rows = [{"source": f"s{n}", "what": f"w{n}", "count": n, "detail": f"d{n}"} for n in range(number)]
    objects = {f"k{n}": n for n in range(number)}
    members: dict[str, Any] = {
        "losses": rows, "labels": {f"k{n}": "v" for n in range(number)}, "problems": many, "options": objects,
        "command": many, "devices": [{"card": each, "driver": each, "pci": each} for each in many],
        "totals": objects | {"stalls": 5}, "stack_ends": objects, "host": objects, "pods": objects,
        "unprobed": rows, "removed_files": many, "traces": {}, "transfers": objects, "waits": objects,
    }  # fmt: skip
    return pack(path, launched(), members)


def header_texts(path: Path, values: int = 9_900_000) -> Path:
    """A header with texts of megabytes wherever it has texts."""
    text = "x\x1b" * (values // 60)
    members: dict[str, Any] = {"command": [text], "host": {"hostname": text, "kernel": text}, "labels": {"a": text},
                               "devices": [{"card": text, "driver": text}], "version": text}  # fmt: skip
    return pack(path, launched(), members)


def stalls(path: Path, values: int = 9_900_000) -> Path:
    """Stalls of one kernel in reads of 1,000, of 512 instructions."""
    return pack(path, [_reads(values // 2 // 1000, 1000), launched()[0], launched()[2]])


def stall_reads(path: Path, values: int = 9_900_000) -> Path:
    """The same in reads of one each."""
    return pack(path, [_reads(values // 5, 1), launched()[0], launched()[2]])


def stall_addresses(path: Path, values: int = 9_900_000) -> Path:
    """Stalls, each at an address of its own, within one kernel."""
    launch = launched()[0][1] | {"size": _u64(1 << 28, 1)}
    rows = values // 2 // 1000
    name, reads = _reads(rows, 1000)
    first = np.arange(rows * 1000, dtype=np.uint64) | np.uint64(1 << 37)
    return pack(path, [(name, reads | {"w0": _lists(first, 1000)}), ("launch", launch), launched()[2]])


def stalls_nowhere(path: Path, values: int = 9_900_000) -> Path:
    """Stalls, each at an address of its own, where no kernel was launched."""
    name, reads = _reads(values // 2 // 1000, 1000)
    first = np.arange(values // 2 // 1000 * 1000, dtype=np.uint64) + np.uint64(1 << 20) | np.uint64(1 << 37)
    return pack(path, [(name, reads | {"w0": _lists(first, 1000)}), launched()[0], launched()[2]])


def _reads(reads: int, each: int) -> _Group:
    first = np.arange(reads * each, dtype=np.uint64) % np.uint64(512) | np.uint64(1 << 37)
    times = 2 * _SECOND + np.arange(reads) * 1000
    return "stall", {"time_ns": _u64(times + 1000), "begin_ns": _u64(times), "stream": _u16(np.zeros(reads)),
                     "w0": _lists(first, each), "w1": _lists(np.zeros(reads * each, np.uint64), each)}  # fmt: skip


def threads(path: Path, values: int = 9_900_000) -> Path:
    """Names of threads, given again and again."""
    rows = min(values // 11, 500_000)
    number = np.arange(rows)
    process = {"time_ns": _u64(number), "pid": _u32(7, rows), "tid": _u32(number), "ppid": pa.nulls(rows, pa.uint32()),
               "event": same_text("comm", rows), "comm": texts_of("c", rows, rows)}  # fmt: skip
    return pack(path, [("process", process), *launched()])


def described(path: Path, values: int = 9_900_000) -> Path:
    """Processes, each of a container and cgroup of its own."""
    rows = min(values // 11, 300_000)
    number = np.arange(rows)
    process = {"time_ns": _u64(number), "pid": _u32(number), "tid": _u32(number), "ppid": _u32(1, rows),
               "event": same_text("described", rows), "comm": same_text("c", rows), "ns_pid": _u32(number),
               "cgroup": texts_of("/docker/", rows, rows), "container": texts_of("c", rows, rows)}  # fmt: skip
    return pack(path, [("process", process), *launched()])


def named(path: Path, values: int = 9_900_000) -> Path:
    """Functions of 50,000 addresses, each with inlined ones, and stacks of these."""
    rows, addresses = min(values // 7, 800_000), 50_000
    number = np.arange(rows)
    module = {"id": _u32(0, 1), "what": same_text("file", 1), "path": same_text("/x", 1)}
    symbol = {"module": _u32(0, rows), "address": _u64(number * addresses // rows * 16), "size": _u64(16, rows),
              "depth": _u16(np.arange(rows) % (rows // addresses or 1)), "function": texts_of("f", rows, rows),
              "file": same_text("a.c", rows), "line": _u32(number % 1000)}  # fmt: skip
    stacks = addresses // 100
    ips = np.arange(stacks * 100, dtype=np.uint64) * np.uint64(16) + np.uint64((1 << 20) + 8)
    stack = {"id": _u64(np.arange(stacks) + 1), "pid": _u32(7, stacks), "ips": _lists(ips, 100)}
    mapping = {"pid": _u32(7, 1), "start": _u64(1 << 20, 1), "length": _u64(1 << 30, 1), "path": same_text("/x", 1)}
    return pack(path, [("module", module), ("symbol", symbol), ("mapping", mapping), ("stack", stack),
                       *_stalling(stacks), _sampled(stacks)])  # fmt: skip


def named_modules(path: Path, values: int = 9_900_000) -> Path:
    """Mapped files of a process without end, a row of what is known of each."""
    rows = min(values // 11, 250_000)
    paths = texts_of("/f", rows, rows)
    module = {
        "id": _u32(np.arange(rows)),
        "what": same_text("file", rows),
        "path": paths,
        "problem": texts_of("p", rows, rows),
    }
    return pack(path, [("module", module), *launched()])


def gpu_modules(path: Path, values: int = 9_900_000) -> Path:
    """GPU modules of one kernel each, all compiled by one process at one address, and a stall."""
    rows = values // 500
    elfs = [zebin([kernel(f"k{n}", bytes(64), 1 << 28)]) for n in range(rows)]
    return pack(path, [_modules(elfs), *_stalling(1)])


def gpu_module_processes(path: Path, values: int = 9_900_000) -> Path:
    """GPU modules of one kernel each, each compiled by a process of its own."""
    rows = values // 500
    name, columns = _modules([zebin([kernel(f"k{n}", bytes(64), 1 << 28)]) for n in range(rows)])
    return pack(path, [(name, columns | {"pid": _u32(np.arange(rows) + 7)}), *_stalling(1)])


def same_modules(path: Path, values: int = 9_900_000) -> Path:
    """Rows of one GPU module of 100 kernels, compiled again and again."""
    rows = values // 60
    elf = zebin([kernel(f"k{n}", bytes(64), (1 << 28) + 64 * n) for n in range(100)])
    elfs = pa.DictionaryArray.from_arrays(pa.array([0, *[None] * (rows - 1)], pa.int32()), pa.array([elf]))
    number = np.arange(rows)
    columns = {"time_ns": _u64(number), "pid": _u32(7 + number % 100), "path": same_text("/m", rows),
               "digest": pa.array([b"d"] * rows), "size": _u64(len(elf), rows), "elf": elfs}  # fmt: skip
    return pack(path, [("kernel", columns), *_stalling(100)])


def gpu_kernels(path: Path, values: int = 9_900_000) -> Path:
    """One GPU module of very many kernels, each with a stall."""
    kernels = min(values // 200, 60_000)
    elf = zebin([kernel(f"k{n}", bytes(64), (1 << 28) + 64 * n) for n in range(kernels)])
    return pack(path, [_modules([elf]), *_stalling(kernels)])


def gpu_instructions(path: Path, values: int = 9_900_000) -> Path:
    """One GPU kernel of millions of instructions, a stall at its first one."""
    code = (b"\x01" + bytes(15)) * (values // 16)
    return pack(path, [_modules([zebin([kernel("n0", code, 1 << 28)])]), *_stalling(1)])


def gpu_lines(path: Path, values: int = 9_900_000) -> Path:
    """One GPU kernel with a line table of very many rows, a stall in it."""
    rows = values // 40
    table: list[tuple[int, int, int | None]] = [((1 << 28) + n % 4096 * 16, 1, n % 900 + 1) for n in range(rows)]
    unit = Die(COMPILE_UNIT, {NAME: "a.cl", STMT_LIST: 0, LOW_PC: Addr(1 << 28), HIGH_PC: 1 << 16})
    debug = dwarf(unit, [*table, ((1 << 28) + (1 << 16), 1, None)])
    return pack(path, [_modules([zebin([kernel("n0", bytes(1 << 16), 1 << 28), *debug])]), *_stalling(1)])


def _modules(elfs: list[bytes]) -> _Group:
    rows = len(elfs)
    digests = pa.array([b"%08d" % n for n in range(rows)])
    return "kernel", {"time_ns": _u64(np.arange(rows)), "pid": _u32(7, rows), "path": same_text("/m", rows),
                      "digest": digests, "size": _u64(64, rows), "elf": pa.array(elfs)}  # fmt: skip
