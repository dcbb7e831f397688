"""The rows of a capture, made of what the BPF programs and the recorder wrote to the spool."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS, NULLABLE, WORDS, make_rows
from iaprof.formats.distinct import distinct_texts
from iaprof.formats.header.left_out import OTHER, RECORDER, TOTALS
from iaprof.formats.header.waits import FUNCTIONS, UNKNOWN_FUNCTION, WaitFlags
from iaprof.formats.wire.launches import (
    CHUNK_BYTES,
    LAUNCH,
    LISTS_A_RECORD,
    MOST_MORE,
    TRANSFER_FUNCTIONS,
    UNKNOWN_BYTES,
    ChunkOf,
    LaunchFlags,
    ListEvent,
)
from iaprof.formats.wire.sideband import SideBand
from iaprof.gpu.samples import SampleRows
from iaprof.record.kernels.dumped import HEAD, DumpedModules, chunk_head
from iaprof.record.kernels.kernel_names import KernelNames
from iaprof.record.left_out import Whose
from iaprof.record.spool import Frame, SpoolReader


def json_object(data: bytes) -> dict[str, Any]:
    """Parses a JSON object; raises ValueError if `data` is none."""
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def _single_row(kind: str, row: dict[str, Any]) -> pa.StructArray:
    """Makes one row; raises ValueError, TypeError or OverflowError if a value does not have its member's type."""
    missing = [name for name, value in row.items() if value is None and f"{kind}.{name}" not in NULLABLE]
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    return pa.array([row], KINDS[kind])


_FLAGS = int(sum(WaitFlags))


def until_exits(waits: NDArray[np.void], processes: pa.Table) -> NDArray[np.void]:
    """Returns WAIT[n] in which waits that have not ended last until their thread's exit, if it has exited.

    Args:
        waits: WAIT[n]; it is not changed.
        processes: all `process` rows.
    """
    unended = np.flatnonzero(waits["flags"] & WaitFlags.NOT_ENDED)
    if not len(unended):
        return waits
    exits = processes.filter(pc.equal(processes["event"], "exit"))
    order = np.lexsort((exits["time_ns"].to_numpy(), exits["tid"].to_numpy()))
    times, tids = (exits[name].to_numpy()[order] for name in ("time_ns", "tid"))
    waits = waits.copy()
    for at in unended.tolist():
        first, last = np.searchsorted(tids, waits["tid"][at], "left"), np.searchsorted(tids, waits["tid"][at], "right")
        own = times[first:last]
        later = own[own >= waits["begin"][at]]
        if len(later) and later[0] < waits["end"][at]:
            waits["end"][at] = later[0]
            waits["waited"][at] = later[0] - waits["begin"][at]
    return waits


def wait_rows(waits: NDArray[np.void], stacks: NDArray[np.uint64]) -> pa.StructArray:
    """Rows of kind `wait`.

    Args:
        waits: WAIT[n].
        stacks: uint64[n], the ids of their stacks in the capture.
    """
    numbers, which = np.unique(waits["function"], return_inverse=True)
    functions = pa.array([FUNCTIONS.get(number, UNKNOWN_FUNCTION) for number in numbers.tolist()], pa.string())
    own = {"time_ns": "begin", "end_ns": "end", "waited_ns": "waited"}
    own |= {name: name for name in ("count", "pid", "tid", "handle")}
    columns = {
        **{name: np.ascontiguousarray(waits[member]) for name, member in own.items()},
        "comm": _decoded_texts(waits["comm"]),
        "function": functions.take(pa.array(which)),
        "stack": stacks,
        "flags": waits["flags"] & np.uint32(_FLAGS),
    }
    return make_rows("wait", columns)


def check_launches(records: NDArray[np.void]) -> None:
    """Raises ValueError if LAUNCH[n] stand for more launches than records do: rows would take all memory."""
    if (records["more"] > MOST_MORE).any():
        raise ValueError("a record of it stands for too many launches")


def check_transfers(records: NDArray[np.void]) -> None:
    """Raises ValueError if LAUNCH[n] are not copies and fills by known functions."""
    if len(records) and not ((records["iba"] > 0) & (records["iba"] <= len(TRANSFER_FUNCTIONS))).all():
        raise ValueError("it has copies by an unknown function")


def transfer_rows(records: NDArray[np.void], stacks: NDArray[np.uint64]) -> pa.StructArray:
    """Makes `transfer` rows.

    Args:
        records: LAUNCH[n], checked.
        stacks: uint64[n], the ids of their stacks in the capture.
    """
    functions = pa.array(TRANSFER_FUNCTIONS, pa.string()).take(pa.array(records["iba"].astype(np.int64) - 1))
    columns = {
        "time_ns": records["time"],
        **{name: records[name] for name in ("pid", "tid", "cpu")},
        "comm": _decoded_texts(records["comm"]),
        "stack": stacks,
        "function": functions,
        "bytes": pa.array(records["size"], mask=records["size"] == np.uint64(UNKNOWN_BYTES)),
        "flags": records["flags"] & np.uint32(~LaunchFlags.TRANSFER & 0xFFFFFFFF),
    }
    return make_rows("transfer", columns)


NAME_BYTES_PER_GROUP = 32 << 20  # whole names can be long


def launch_rows(launches: NDArray[np.void], names: KernelNames) -> Iterator[pa.StructArray]:
    """Makes `launch` rows, in groups that need little memory: a record that stands for several launches has as many.

    Args:
        launches: LAUNCH[n].
        names: of the kernels of all modules of the recording.
    """
    if not len(launches):
        return
    launch_names = names.for_launches(launches)
    lengths = np.array([len(text.encode()) for text in launch_names.texts], np.int64)[launch_names.indices]
    more = launches["more"].astype(np.int64)
    group = np.cumsum(lengths + more * (lengths + LAUNCH.itemsize)) // NAME_BYTES_PER_GROUP
    bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(launches)]
    whole = pa.array(launch_names.texts, pa.string())
    for start, end in pairwise(bounds):
        times = 1 + more[start:end]
        group_launches = np.repeat(launches[start:end], times) if times.max() > 1 else launches[start:end]
        own = "pid", "tid", "cpu", "iba", "address", "size", "stack", "flags", "list"
        columns = {
            "time_ns": group_launches["time"],
            "comm": _decoded_texts(group_launches["comm"]),
            "name": _texts(whole, np.repeat(launch_names.indices[start:end], times)),
            **{name: group_launches[name] for name in own},
            "correlation": pa.array(group_launches["correlation"], mask=group_launches["correlation"] == 0),
        }
        yield make_rows("launch", columns)


def execution_rows(executions: NDArray[np.void]) -> pa.StructArray:
    """Makes `execution` rows of EXECUTION[n]."""
    own = "pid", "correlation", "address", "queue"
    columns = {
        "time_ns": executions["begin"],
        "end_ns": executions["end"],
        "stream": executions["stream"].astype(np.uint16),
        **{name: executions[name] for name in own},
    }
    return make_rows("execution", {name: np.ascontiguousarray(column) for name, column in columns.items()})


def _decoded_texts(names: NDArray[np.bytes_]) -> pa.DictionaryArray:
    """Decodes fixed-size names; each distinct one once."""
    distinct, indices = distinct_texts(names)
    decoded = [name.decode("utf-8", "backslashreplace") for name in distinct]
    return _texts(pa.array(decoded, pa.string()), indices)


def _texts(distinct: pa.StringArray, indices: NDArray[np.int64]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(indices.astype(np.int32)), distinct)


_EVENTS = pa.array([event.name.lower() for event in ListEvent], pa.string())


def check_lists(records: NDArray[np.void]) -> None:
    """Raises ValueError if BPF cannot have sent these LIST_EVENT[n]."""
    if len(records) and (records["event"].max() >= len(ListEvent) or records["count"].max() > LISTS_A_RECORD):
        raise ValueError("it has unknown events of command lists")


def list_rows(records: NDArray[np.void], stacks: NDArray[np.uint64]) -> pa.StructArray:
    """Makes `command_list` rows.

    Args:
        records: LIST_EVENT[n], checked.
        stacks: uint64[n], the ids of their stacks in the capture.
    """
    record_numbers = np.repeat(np.arange(len(records)), records["count"])
    lists = records["lists"][np.arange(LISTS_A_RECORD) < records["count"][:, None]]
    events = records[record_numbers]
    columns = {
        "time_ns": events["time"],
        **{name: events[name] for name in ("pid", "tid", "cpu", "queue", "flags")},
        "comm": _decoded_texts(events["comm"]),
        "event": _EVENTS.take(pa.array(events["event"])),
        "list": lists,
        "stack": stacks[record_numbers],
    }
    return make_rows("command_list", columns)


_WHY = {Whose.RECORDER: RECORDER, Whose.OTHER: OTHER}
_LEFT_OUT = pa.array([_WHY.get(each) for each in Whose], pa.string())


def counts_left_out(whose: NDArray[np.uint8]) -> Counter[str]:
    """Returns the members of the header's `totals` that count samples left out; `whose`: uint8[n] of Whose."""
    numbers = ((TOTALS[why], int(np.count_nonzero(whose == each))) for each, why in _WHY.items())
    return Counter({name: number for name, number in numbers if number})


def cpu_sample_rows(
    samples: NDArray[np.void],
    stacks: NDArray[np.uint64],
    kernel_stacks: NDArray[np.uint64],
    whose: NDArray[np.uint8],
) -> pa.StructArray:
    """Rows of kind `cpu_sample`.

    Args:
        samples: CPU_SAMPLE[n].
        stacks: uint64[n], the ids of their stacks in the capture.
        kernel_stacks: uint64[n], likewise of their stacks in the Linux kernel.
        whose: uint8[n] of Whose.
    """
    columns = {
        "time_ns": samples["time"],
        **{name: samples[name] for name in ("pid", "tid", "cpu")},
        "stack": stacks,
        "kernel_stack": kernel_stacks,
    }
    arrays = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return make_rows("cpu_sample", {**arrays, "left_out": _LEFT_OUT.take(pa.array(whose))})


_RECORD_BYTES_PER_GROUP = 16 << 20  # a million records of Xe2; writing a group takes several times as much memory
_READS_PER_GROUP = 1 << 18


class StallRows:
    """Collects reads of one vendor's samples until they fill a row group."""

    def __init__(self, sample_rows: SampleRows) -> None:
        """Begins without reads."""
        self.kind, self._columns, self._required = sample_rows.kind, sample_rows.columns, sample_rows.required
        self._reads: list[Frame] = []
        self._bytes = 0
        self.records = 0

    @property
    def reads(self) -> int:
        """The number of reads."""
        return len(self._reads)

    @property
    def is_full(self) -> bool:
        """Whether the reads fill a row group."""
        return self._bytes >= _RECORD_BYTES_PER_GROUP or len(self._reads) >= _READS_PER_GROUP

    def add(self, read: Frame) -> None:
        """Adds a read: its payload is columns of words, uint64[shape, records].

        Raises:
            ValueError: the length is not that of whole records.
        """
        if not self._required <= read.shape <= len(self._columns) or len(read.payload) % (8 * read.shape):
            raise ValueError("its length is not that of records")
        self._reads.append(read)
        self._bytes += len(read.payload)
        self.records += len(read.payload) // (8 * read.shape)

    def rows(self) -> pa.StructArray:
        """Makes a row for each read."""
        columns = [list(np.frombuffer(read.payload, np.uint64).reshape(read.shape, -1)) for read in self._reads]
        lengths = np.array([len(words[0]) for words in columns], np.int64)
        lists = {}
        for word, name in enumerate(self._columns):
            has = np.array([len(words) > word for words in columns])
            parts = [words[word] for words in columns if len(words) > word]
            values = np.concatenate(parts) if parts else np.empty(0, np.uint64)
            lists[name] = _lists(np.where(has, lengths, 0), values, ~has)
        return make_rows(
            self.kind,
            {
                "time_ns": np.array([read.time for read in self._reads], np.uint64),
                "begin_ns": np.array([read.begin for read in self._reads], np.uint64),
                "stream": np.array([read.source for read in self._reads], np.uint16),
                **lists,
            },
        )


def _lists(lengths: NDArray[np.int64], values: NDArray[np.uint64], null: NDArray[np.bool_]) -> pa.Array:
    """Makes a list array with `lengths[i]` values in row i, null where `null` says so."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, pa.uint64()), type=WORDS, mask=pa.array(null))


def sideband_rows(sideband: SideBand) -> Iterator[tuple[str, pa.StructArray]]:
    """Yields the `mapping` and the `process` rows, each with their kind."""
    for kind, rows in (("mapping", sideband.mappings), ("process", sideband.processes)):
        columns = vars(rows)
        renamed = {"time_ns": "time"}
        arrays = [
            pa.array(columns[column], field.type)
            if (column := renamed.get(field.name, field.name)) in columns
            else pa.nulls(len(rows.time), field.type)
            for field in KINDS[kind]
        ]
        yield kind, pa.StructArray.from_arrays(arrays, fields=list(KINDS[kind]))


@dataclass(frozen=True)
class Described:
    """What the recorder knows of a process."""

    pid: int
    root: str | None  # its root folder if it is not ours
    account: str | None  # who is answerable for it: see bpf.accounts
    row: pa.StructArray


def described_process(frame: Frame) -> Described:
    """Returns what the recorder knows of a process.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: the frame is damaged.
    """
    about = json_object(frame.payload)
    row = dict.fromkeys(field.name for field in KINDS["process"])
    row |= {"time_ns": frame.time, "pid": about["pid"], "tid": about["pid"], "event": "described"}
    row |= {name: about.get(name) for name in ("ns_pid", "cgroup", "container", "uid", "gid")}
    root, account = (about[name] if isinstance(about.get(name), str) else None for name in ("root", "account"))
    if root is not None:
        os.fsencode(root)  # raises if it is not a path: JSON strings can hold what no path can
    return Described(about["pid"], root, account, _single_row("process", row))


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
        """Whether the rows fill a row group: one that is half full is written before another large one is read."""
        return self._bytes >= _BYTES_PER_GROUP // 2

    def is_full_with(self, more: int) -> bool:
        """Whether they and so many bytes would fill one, or would have to be copied into one; never without rows."""
        is_large = more >= _BYTES_PER_GROUP // 2
        return bool(self._rows) and (is_large or self._bytes + more >= _BYTES_PER_GROUP)

    def add_elf(self, frame: Frame) -> None:
        """Adds a debug ELF; raises ValueError, KeyError, TypeError or OverflowError if the frame is damaged."""
        about = json_object(frame.payload[: frame.shape])
        content = memoryview(frame.payload)[frame.shape :] if about["content"] else None
        self._add(frame.time, about["pid"], about["path"], about["digest"], about["size"], content, about.get("base"))

    def add_name(self, frame: Frame) -> None:
        """Adds the whole name of a kernel; raises as `add_elf` does."""
        about = json_object(frame.payload)
        self.names.add(about["pid"], frame.time, about["address"], about["name"].encode())

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
            self._add(module.time_ns, module.pid, IN_MEMORY, digest, len(module.elf), memoryview(module.elf))
            for shader in module.shaders:
                self.names.add_shader(module.pid, module.time_ns, shader.address, shader.name.encode())
            yield

    def unfinished(self) -> Iterator[tuple[str, int, str]]:
        """Describes what was dumped in part only: source, count and detail of a loss."""
        counts = {"kernels": self._dumped.kernels_unfinished, "modules": self._dumped.modules_unfinished}
        for source, detail in _UNFINISHED.items():
            if counts[source]:
                yield source, counts[source], detail

    def _add(
        self, time: int, pid: int, path: str, digest: str, size: int, elf: memoryview | None, base: int | None = None
    ) -> None:
        self.names.add_module(pid, time, digest, None if elf is None else bytes(elf), base or 0)
        # The same content may come twice: with the rotation state, and again from the process.
        content = elf if digest not in self._digests else None
        row = {"time_ns": time, "pid": pid, "path": path, "digest": bytes.fromhex(digest), "size": size, "base": base}
        rows = _single_row("kernel", {**row, "elf": None})
        if content is not None:
            members = dict(zip(rows.type.names, rows.flatten(), strict=True)) | {"elf": _shared(content)}
            rows = pa.StructArray.from_arrays(list(members.values()), fields=list(rows.type))
            self._digests.add(digest)
            self._bytes += len(content)
        self._rows.append(rows)

    def take(self) -> list[pa.StructArray]:
        """Returns the rows collected since the last call; they share the memory of the frames."""
        rows, self._rows, self._bytes = self._rows, [], 0
        return rows


def _shared(content: memoryview) -> pa.BinaryArray:
    """Returns an array whose one value is this content, which is not copied: PyTorch has cubins of 60 MB."""
    ends = pa.py_buffer(np.array([0, len(content)], np.int32))
    return pa.BinaryArray.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(content)])


_TOGETHER = 1 << 10  # rows that become one array: an array of one row takes kilobytes


class LossRows:
    """Collects losses until they fill a row group, and sums them up.

    Attributes:
        sums: by source and kind of loss: how much was lost (None if unknown), and in how many events.
    """

    def __init__(self) -> None:
        """Begins without losses."""
        self.sums: dict[tuple[str, str], dict[str, Any]] = {}
        self._arrays: list[pa.StructArray] = []
        self._single: list[pa.StructArray] = []

    def __len__(self) -> int:
        """The number of rows that `take` would return."""
        return len(self._arrays) * _TOGETHER + len(self._single)

    def add(self, begin: int, time: int, source: str, what: str, count: int | None, detail: str) -> None:
        """Adds a loss that happened between two times, CLOCK_MONOTONIC ns.

        Raises:
            ValueError, TypeError, OverflowError: a value does not have its member's type.
        """
        row = {"begin_ns": begin, "time_ns": time, "source": source, "what": what, "count": count, "detail": detail}
        self._single.append(_single_row("loss", row))
        if len(self._single) == _TOGETHER:
            self._arrays.append(pa.concat_arrays(self._single))
            self._single = []
        total = self.sums.setdefault((source, what), {"source": source, "what": what, "count": None, "events": 0})
        total["events"] += 1
        if count is not None:
            total["count"] = (total["count"] or 0) + count

    def take(self) -> list[pa.StructArray]:
        """Returns the rows collected since the last call."""
        rows = [*self._arrays, *self._single]
        self._arrays, self._single = [], []
        return rows
