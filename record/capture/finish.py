"""Makes a capture of a spool: frames become columns, streamed, so that memory does not grow with the recording.

The same code runs at the end of a recording, in a process of its own (`main`, which rotation.py starts), so that the
recorder stays small, and in `iaprof recover`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import thread_time
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import replace_file, use_folder
from iaprof.formats.capture import metric_values
from iaprof.formats.capture.schema import RECORDED, ROW_KINDS, SAMPLE_KINDS, sorted_kinds
from iaprof.formats.capture.writer import CaptureWriter, RowWriter, Written
from iaprof.formats.header.gpu_jobs import SOURCE as GPU_JOBS
from iaprof.formats.header.launch_warnings import NO_LAUNCHES, add_drivers, no_launches
from iaprof.formats.header.left_out import TOTALS as LEFT_OUT
from iaprof.formats.header.stack_counts import PYTHON_STACKS
from iaprof.formats.header.waits import MEMBER as WAITS, WAIT, WaitTotals
from iaprof.formats.wire.launches import (
    CODE,
    COPY,
    CPU_SAMPLE,
    EXECUTION,
    LAUNCH,
    LIST_EVENT,
    LISTS_A_RECORD,
    MAX_DEPTH,
    PYTHON_STACK,
    UNKNOWN_BYTES,
    LaunchFlags,
    ListEvent,
    stack_dtype,
)
from iaprof.formats.wire.sideband import SideBand, decode
from iaprof.gpu.vendors import of_layout
from iaprof.record.budget import children_cpu_seconds, cpu_seconds, peak_bytes
from iaprof.record.capture.gpu_jobs import GpuJobRows
from iaprof.record.capture.rotation_state import RotationState
from iaprof.record.capture.rows import (
    CodeObjectRows,
    LossRows,
    StallRows,
    check_launches,
    check_lists,
    check_transfers,
    counts_left_out,
    cpu_sample_rows,
    described_process,
    execution_rows,
    json_object,
    launch_rows,
    list_rows,
    sideband_rows,
    transfer_rows,
    until_exits,
    wait_rows,
)
from iaprof.record.capture.writing import WritingThread, run_in
from iaprof.record.left_out import LeftOut, Whose
from iaprof.record.spool import Frame, FrameKind, SpoolReader
from iaprof.record.stacks.launch_stacks import LaunchStacks
from iaprof.record.stacks.python_stacks import Interpreter, PythonCounting, PythonStacks
from iaprof.record.stacks.walks import Walks
from iaprof.record.symbolize.needed import NO_ROOM, FinishStacks, SymbolInputs, needed_by
from iaprof.sandbox.memory import half_of_available, limit_memory
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.rows import Cancellation, Progress, write_names
from iaprof.symbols.names.which import Symbols
from iaprof.symbols.python.layout import Layout

if TYPE_CHECKING:
    from iaprof.record.symbolize.symbolizer import RecordingSymbolizer
    from iaprof.symbols.symbolizers.binaries import Binaries
ROWS_PER_GROUP = 1 << 16
STACK_BYTES_PER_GROUP = 8 << 20
DESCRIBED_PER_GROUP = 1 << 12  # an array of one row takes kilobytes
LISTS = ("streams", "libraries", "paused", "scope", "thinned", "command_pid")  # of the header: they grow
_MOST = (1 << 64) - 1
_NO_TIME = "there was no time for them after the recording, or what they need could not be read: those stacks are cut"
_DAMAGE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)  # what reading a damaged frame raises


WriteSymbols = Callable[[SymbolInputs, RowWriter], dict[str, Any]]
"""Writes `module` and `symbol` rows, and returns what the header says of them."""


def finish(
    spool: SpoolReader,
    output: Path,
    on_frame: Callable[[Frame], None] | None = None,
    write_symbols: WriteSymbols | None = None,
    finish_stacks: FinishStacks | None = None,
) -> Written:
    """Writes the capture of a spool.

    Args:
        spool: whole, or cut off by the recorder's death.
        output: path of the capture; an existing file is replaced.
        on_frame: is called with each frame.
        write_symbols: names the addresses of stacks; without it nothing is named.
        finish_stacks: finishes stacks that were not finished while recording; without it they stay cut.

    Raises:
        IaprofError: the capture cannot be written; no part of it is left, and the spool stays.
    """
    with replace_file(output) as file:
        writer = CaptureWriter(file, RECORDED)
        with WritingThread(writer) as thread:
            finishing = _Finishing(thread, spool, write_symbols)
            for kinds in _FIRST_KINDS:
                for frame in spool.frames(kinds):
                    finishing.add_first(frame)
            finishing.all_first_known()
            for frame in spool.frames():
                finishing.add(frame)
                if on_frame is not None:
                    on_frame(frame)
            finishing.add_dumped(spool)
            finishing.write_late_stacks(spool, finish_stacks)
            header = finishing.end(spool)
        writer.close(header)
        file.flush()
        os.fsync(file.fileno())  # the spool is removed next: after a power failure there must be one of both
        return Written(header, file.tell())


_TOTALS_ORDER = (
    "launch", "execution", "gpu_job", "command_list", "transfer", "python_code", "stack", "mapping", "process",
    "kernel", "loss", "cpu_sample", "wait", "metric",
)  # fmt: skip
_NO_TOTALS = (*SAMPLE_KINDS, "module", "symbol", "sample", "slice", "counter", "flow", "instant")
"""Samples are counted by record; the others come from no frame."""
COUNTED = {
    kind.name: kind.count or kind.view for kind in sorted_kinds(ROW_KINDS, _TOTALS_ORDER) if kind.name not in _NO_TOTALS
}
"""The header's name for the number of rows of each kind."""
TOTALS = (
    "stalls", "stall_reads", *COUNTED.values(), "carried_launches", "executions", "transferred_bytes",
    *LEFT_OUT.values(),
)  # fmt: skip
"""The members of `totals`, which are there even if 0."""


class _Finishing:
    """The state of making one capture: rows until they fill a row group, and what other rows depend on."""

    def __init__(self, writer: WritingThread, spool: SpoolReader, write_symbols: WriteSymbols | None) -> None:
        self._writer = writer
        self._write_symbols = write_symbols
        self._symbol_inputs = SymbolInputs(needed_by(spool))
        self._python = PythonStacks(lambda position: spool.frame_at(position).payload)
        self._python_counts = PythonCounting(self._python)
        self._header: dict[str, Any] = {}
        self._footer: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()
        self._losses = LossRows()
        self._stalls: dict[str, StallRows] = {}  # by kind of rows
        self._stack_rows: list[pa.StructArray] = []
        self._stack_bytes = 0
        self._copy_frames = array("Q")  # positions in the spool,
        self._copied = array("Q")  # the ids of the stacks that these are copies of,
        self._copied_of_samples = array("B")  # and whether these are of CPU samples
        self._deferred = {kind: array("Q") for kind in _DEFERRED}  # likewise
        self._wait_totals = WaitTotals()
        self._sideband = SideBand()
        self._left_out = LeftOut()
        self._drivers: dict[str, int] = {}  # by driver: the first process that mapped it
        self._sideband_reads: dict[int, tuple[int, int]] = {}  # by CPU: times of the last two reads of its buffer
        self._lost_sideband = False
        self._stacks: LaunchStacks
        self._code_objects = CodeObjectRows()
        self._executions: list[NDArray[np.void]] = []
        self._execution_count = 0
        self._jobs = GpuJobRows()
        self._metrics: dict[bytes, list[bytes]] = {}  # rows by their description
        self._metric_rows = 0
        self._process_rows: list[pa.StructArray] = []
        self._first_ns = self._last_ns = 0
        self._is_stopped = False  # whether the rest need not be written, as there will be no capture

    def add(self, frame: Frame) -> None:
        """Adds a frame; one that is not of its kind's form is counted as damaged."""
        self._first_ns = self._first_ns or frame.time
        self._last_ns = max(self._last_ns, frame.time)
        try:
            if reader := _READERS.get(frame.kind):
                reader(self, frame)
        except _DAMAGE as error:
            self._damaged(frame, error)

    def add_first(self, frame: Frame) -> None:
        """Adds a frame of the kinds that are read first: stacks depend on mappings and on frames of Python."""
        self._first_ns = self._first_ns or frame.time
        try:
            _FIRST[frame.kind](self, frame)
        except _DAMAGE as error:
            self._lost_sideband |= frame.kind is FrameKind.SIDEBAND
            if frame.kind is not FrameKind.HEADER:  # the header is read again
                self._damaged(frame, error)

    def all_first_known(self) -> None:
        """Ends `add_first`: mappings and processes are complete."""
        self._flush_sideband()
        inputs = self._symbol_inputs
        inputs.spaces = AddressSpaces(inputs.rows.table("mapping"), inputs.rows.table("process"))
        walks = Walks(inputs.spaces, not self._lost_sideband)
        follows_frame_pointers = bool(self._header.get("follows_frame_pointers"))
        self._stacks = LaunchStacks(walks, inputs.ends, self._python, follows_frame_pointers)

    def _add_python(self, frame: Frame) -> None:
        self._python.add(np.frombuffer(frame.payload, PYTHON_STACK), frame.position)

    def _add_codes(self, frame: Frame) -> None:
        self._python.add_codes(np.frombuffer(frame.payload, CODE))

    def _add_interpreter(self, frame: Frame) -> None:
        members = json_object(frame.payload)
        text_type, bytes_type = map(int, members["types"])
        interpreter = Interpreter((text_type, bytes_type), Layout(**members["layout"]))
        self._python.add_interpreter(int(members["pid"]), interpreter)

    def _damaged(self, frame: Frame, error: Exception) -> None:
        self._lost(frame.time, frame.time, "spool", "damaged", 1, f"a frame of {frame.kind.name}: {error}"[:200])

    def end(self, spool: SpoolReader) -> dict[str, Any]:
        """Writes the remaining rows, and returns the header.

        Names need only stacks, of which all are known now. So they are found while a thread writes the other rows;
        this one finds them, as it is the one that signals interrupt.

        Args:
            spool: all frames of which have been read.
        """
        self._symbol_inputs.header = self._header
        if self._write_symbols is None:
            self._write_rest(spool)
            self._writer.wait()
            return self._whole_header(None)
        with ThreadPoolExecutor(1) as pool:
            rest, _ = run_in(pool, self._write_rest, spool)
            try:
                symbols = self._write_symbols(self._symbol_inputs, _WriterAfter(rest, self._writer))
                rest.result()
                self._writer.wait()
            except BaseException:
                self._is_stopped = True
                raise
        return self._whole_header(symbols)

    def _write_rest(self, spool: SpoolReader) -> None:
        self._write_deferred(spool)
        for begin, time, what, count, detail in spool.losses(self._last_ns):
            self._lost(begin, time, "spool", what, count, detail)
        if not self._footer:
            detail = "the recorder died: at most what it had not yet read is missing"
            self._lost(self._last_ns, self._last_ns, "recorder", "died", None, detail)
        self._write_rows("python_code", self._python.code_rows())
        for count, detail in self._python.losses():
            self._lost(self._first_ns, self._last_ns, "stacks", "without Python", count, detail)
        if count := self._symbol_inputs.rows.dropped:
            self._lost(self._first_ns, self._last_ns, "names", "no room", count, NO_ROOM)
        self._flush_stalls()
        self._flush_kernels()
        self._flush_metrics()
        self._flush_executions()
        self._flush_jobs(self._first_ns)
        if self._jobs.lost:
            detail = "records of jobs that the kernel had no room for"
            self._lost(self._first_ns, self._last_ns, GPU_JOBS, "lost", min(self._jobs.lost, _MOST), detail)
        self._flush_losses()

    def _whole_header(self, symbols: dict[str, Any] | None) -> dict[str, Any]:
        is_blind = self._counts["stalls"] and not self._saw_launches()
        unseen = no_launches(self._header, self._drivers) if is_blind else None
        return {
            **self._header,
            **self._footer,
            "symbols": symbols,
            "stack_ends": self._symbol_inputs.ends.header(self._symbol_inputs.spaces.modules),
            PYTHON_STACKS: self._python_counts.header(),
            "recovered": not self._footer,
            "end_ns": self._footer.get("end_ns", self._last_ns),
            "cost": cost_of(self._footer.get("cost")),
            "totals": {**dict.fromkeys(TOTALS, 0), **self._counts},
            "losses": list(self._losses.sums.values()),
            **({NO_LAUNCHES: unseen} if unseen else {}),
            **({WAITS: self._wait_totals.to_json()} if self._wait_totals.waits else {}),
        }

    def _saw_launches(self) -> bool:
        """Whether there are launches, or some were lost."""
        probes = self._footer.get("probes")
        fired = probes.get("launches") if isinstance(probes, dict) else 0
        return bool(fired or self._counts["launches"] or self._counts["carried_launches"])

    # Frames

    def _add_header(self, frame: Frame) -> None:
        self._header = json_object(frame.payload)

    def _add_to_header(self, frame: Frame) -> None:
        for name, items in json_object(frame.payload).items():
            known = self._header.setdefault(name, [])
            if name not in LISTS or not isinstance(known, list) or not isinstance(items, list):
                raise ValueError("it adds to what is not a list")
            known += items

    def _add_end(self, frame: Frame) -> None:
        self._footer = json_object(frame.payload)

    def _add_stalls(self, frame: Frame) -> None:
        streams = self._header.get("streams")
        stream = streams[frame.source] if isinstance(streams, list) and frame.source < len(streams) else {}
        rows = of_layout(stream.get("layout") if isinstance(stream, dict) else None).rows
        if rows.kind not in self._stalls:
            self._stalls[rows.kind] = StallRows(rows)
        stalls = self._stalls[rows.kind]
        stalls.add(frame)
        if stalls.is_full:
            self._flush_stalls()

    def _add_deferred(self, frame: Frame) -> None:
        deferred = _DEFERRED[frame.kind]
        deferred.check(np.frombuffer(frame.payload, deferred.dtype))  # raises if the frame is damaged
        self._deferred[frame.kind].append(frame.position)

    def _add_stacks(self, frame: Frame) -> None:
        for rows in self._stacks.gather(frame.payload, frame.shape):
            self._keep_stacks(rows)

    def _keep_stacks(self, rows: pa.StructArray) -> None:
        if len(rows):  # the learner sends stacks one by one, and may send a known one
            self._stack_rows.append(rows)
            self._stack_bytes += rows.nbytes
        if self._stack_bytes >= STACK_BYTES_PER_GROUP:
            self._flush_stacks()

    def _add_copy(self, frame: Frame) -> None:
        records = np.frombuffer(frame.payload, COPY)  # which raises if the frame is damaged
        if not len(records):
            raise ValueError("it has no stack")
        self._copy_frames.append(frame.position)
        self._copied.append(int(records["id"][0]))
        self._copied_of_samples.append(int(records["is_sample"][0] != 0))

    def _add_kernel(self, frame: Frame) -> None:
        if self._code_objects.is_full_with(len(frame.payload)):
            self._flush_kernels()
        self._code_objects.add_elf(frame)
        self._flush_full_kernels()

    def add_dumped(self, spool: SpoolReader) -> None:
        """Adds the modules whose kernels were dumped at their launches, once all frames were added."""
        for _ in self._code_objects.add_dumped(spool):
            self._flush_full_kernels()
        for source, count, detail in self._code_objects.unfinished():
            self._lost(self._last_ns, self._last_ns, source, "unfinished", count, detail)

    def write_late_stacks(self, spool: SpoolReader, finish_stacks: FinishStacks | None) -> None:
        """Finishes and writes the stacks that were not finished while recording, as far as possible."""
        for rows in self._stacks.gathered():
            self._keep_stacks(rows)
        self._flush_process_rows()  # they say with whose rights the stacks' files are opened
        depth = self._header.get("stack_depth")
        if len(self._copy_frames) and finish_stacks is not None and isinstance(depth, int) and 1 <= depth <= MAX_DEPTH:
            self._symbol_inputs.header = self._header
            missing = self._stacks.unfinished()
            # Those of launches come first: there may be no time for all.
            order = np.argsort(np.array(self._copied_of_samples), kind="stable").tolist()
            positions = (self._copy_frames[at] for at in order if self._copied[at] in missing)
            copies = (np.frombuffer(spool.frame_at(position).payload, COPY) for position in positions)
            for record in finish_stacks(self._symbol_inputs, copies, depth):
                if len(record) == PYTHON_STACK.itemsize:
                    self._python.add(np.frombuffer(record, PYTHON_STACK))
                else:
                    self._keep_stacks(self._stacks.rows(np.frombuffer(record, stack_dtype(depth)), depth, True))
            if left := len(self._stacks.unfinished().intersection(self._copied)):
                self._lost(self._last_ns, self._last_ns, "stacks", "not finished", left, _NO_TIME)
        self._keep_stacks(self._stacks.rows_of_unfinished())
        self._flush_stacks()

    def _write_deferred(self, spool: SpoolReader) -> None:
        """Writes the records whose rows need all stacks and all modules, which have the whole names of kernels."""
        for kind, deferred in _DEFERRED.items():
            records: list[NDArray[np.void]] = []
            rows = 0
            for position in self._deferred[kind]:
                if self._is_stopped:
                    return
                records.append(np.frombuffer(spool.frame_at(position).payload, deferred.dtype))
                rows += len(records[-1]) * deferred.rows_a_record
                if rows >= ROWS_PER_GROUP:
                    deferred.write(self, _joined(records))
                    rows = 0
            if records:
                deferred.write(self, _joined(records))

    def _write_transfers(self, records: NDArray[np.void]) -> None:
        sizes = records["size"][records["size"] != np.uint64(UNKNOWN_BYTES)]
        self._counts["transferred_bytes"] += sum(sizes.tolist())
        self._write_rows("transfer", transfer_rows(records, self._stacks.ids(records["stack"])))

    def _write_lists(self, records: NDArray[np.void]) -> None:
        own = (records["event"] == ListEvent.EXECUTE) & (records["flags"] & LaunchFlags.CARRIED == 0)
        self._counts["executions"] += int(records["count"][own].sum())
        self._write_rows("command_list", list_rows(records, self._stacks.ids(records["stack"])))

    def _write_samples(self, samples: NDArray[np.void]) -> None:
        stacks, kernel_stacks = (self._stacks.ids(samples[name]) for name in ("stack", "kernel_stack"))
        late, presumed = self._stacks.late(samples["stack"]), samples["flags"] & LaunchFlags.PRESUMED > 0
        whose = self._left_out.whose(self._header, samples["pid"], samples["time"])
        self._counts.update(counts_left_out(whose))
        shown = whose == Whose.SCOPE
        self._symbol_inputs.ends.cpu_samples.add(stacks[shown], samples["pid"][shown], presumed[shown], late[shown])
        self._python_counts.add("cpu_samples", stacks[shown], samples["pid"][shown])
        self._write_rows("cpu_sample", cpu_sample_rows(samples, stacks, kernel_stacks, whose))

    def _write_waits(self, waits: NDArray[np.void]) -> None:
        waits = until_exits(waits, self._symbol_inputs.rows.table("process"))
        self._wait_totals += WaitTotals.from_rows(waits)
        self._write_rows("wait", wait_rows(waits, self._stacks.ids(waits["stack"])))

    def _add_sideband(self, frame: Frame) -> None:
        # The kernel reports a loss when its buffer has room again: it happened between the last two reads.
        before, last = self._sideband_reads.get(frame.source, (self._first_ns, self._first_ns))
        self._sideband_reads[frame.source] = last, frame.time
        try:
            decode(frame.payload, self._sideband)
        finally:
            if self._sideband.lost:
                detail = "mappings, names, forks or exits that the kernel had no room for"
                lost, self._sideband.lost = min(self._sideband.lost, _MOST), 0
                self._lost_sideband = True
                self._lost(min(before, frame.time), frame.time, "side-band", "lost", lost, detail)
            if max(len(self._sideband.mappings.time), len(self._sideband.processes.time)) >= ROWS_PER_GROUP:
                self._flush_sideband()

    def _add_metrics(self, frame: Frame) -> None:
        meta, rows = frame.payload[: frame.shape], frame.payload[frame.shape :]
        self._metric_rows += max(metric_values.check(meta, rows), 1)
        self._metrics.setdefault(meta, []).append(rows)
        if self._metric_rows >= ROWS_PER_GROUP:
            self._flush_metrics()

    def _add_piece(self, frame: Frame) -> None:
        self._code_objects.add_chunk(frame)

    def _add_kernel_name(self, frame: Frame) -> None:
        self._code_objects.add_name(frame)

    def _add_executions(self, frame: Frame) -> None:
        self._executions.append(np.frombuffer(frame.payload, EXECUTION))
        self._execution_count += len(self._executions[-1])
        if self._execution_count >= ROWS_PER_GROUP:
            self._flush_executions()

    def _add_gpu_jobs(self, frame: Frame) -> None:
        self._jobs.add(frame)
        if self._jobs.is_full:
            self._flush_jobs()

    def _add_described_process(self, frame: Frame) -> None:
        described = described_process(frame)
        self._process_rows.append(described.row)
        self._symbol_inputs.describe(described.pid, described.root, described.account)
        if len(self._process_rows) >= DESCRIBED_PER_GROUP:
            self._flush_process_rows()

    def _add_loss(self, frame: Frame) -> None:
        row = json_object(frame.payload)
        self._lost(frame.begin, frame.time, row["source"], row["what"], row["count"], row["detail"])

    def _lost(self, begin: int, time: int, source: str, what: str, count: int | None, detail: str) -> None:
        self._losses.add(begin, time, source, what, count, detail)
        if len(self._losses) >= ROWS_PER_GROUP:
            self._flush_losses()

    # Row groups

    def _flush_stalls(self) -> None:
        every, self._stalls = self._stalls, {}
        for stalls in every.values():
            if stalls.reads:
                self._counts["stalls"] += stalls.records
                self._counts["stall_reads"] += stalls.reads
                self._writer.write(stalls.kind, stalls.rows())

    def _flush_stacks(self) -> None:
        self._write_all("stack", self._stack_rows)
        self._stack_rows, self._stack_bytes = [], 0

    def _write_launches(self, launches: NDArray[np.void]) -> None:
        stacks, late = self._stacks.ids(launches["stack"]), self._stacks.late(launches["stack"])
        # Launches of the previous file are counted there.
        is_carried = launches["flags"] & LaunchFlags.CARRIED > 0
        presumed = launches["flags"] & LaunchFlags.PRESUMED > 0
        times = 1 + launches["more"].astype(np.int64)
        own = np.repeat(np.arange(len(launches)), np.where(is_carried, 0, times))
        self._symbol_inputs.ends.launches.add(stacks[own], launches["pid"][own], presumed[own], late[own])
        self._python_counts.add("launches", stacks[own], launches["pid"][own])
        carried = int(times[is_carried].sum())
        self._counts["launches"] -= carried
        self._counts["carried_launches"] += carried
        launches["stack"] = stacks
        for rows in launch_rows(launches, self._code_objects.names):
            self._write_rows("launch", rows)

    def _flush_sideband(self) -> None:
        self._symbol_inputs.add_files(self._sideband.mappings)
        self._left_out.add(self._sideband.processes)
        for kind, rows in sideband_rows(self._sideband):
            self._write_rows(kind, rows)
        add_drivers(self._drivers, self._sideband.mappings)
        self._sideband = SideBand()

    def _flush_full_kernels(self) -> None:
        if self._code_objects.is_full:
            self._flush_kernels()

    def _flush_kernels(self) -> None:
        self._write_all("kernel", self._code_objects.take())
        pa.default_memory_pool().release_unused()  # writing one of 100 MB makes several copies of it

    def _flush_metrics(self) -> None:
        batches, self._metrics, self._metric_rows = self._metrics, {}, 0
        if batches:
            decoded = [metric_values.decode(meta, *rows) for meta, rows in batches.items()]
            self._write_rows("metric", pa.concat_arrays(decoded))

    def _flush_executions(self) -> None:
        executions, self._executions, self._execution_count = self._executions, [], 0
        if executions:
            self._write_rows("execution", execution_rows(np.concatenate(executions)))

    def _flush_jobs(self, first_ns: int | None = None) -> None:
        if len(rows := self._jobs.take(first_ns)):
            self._write_rows("gpu_job", rows)

    def _flush_process_rows(self) -> None:
        self._write_all("process", self._process_rows)
        self._process_rows = []

    def _flush_losses(self) -> None:
        self._write_all("loss", self._losses.take())

    def _write_all(self, kind: str, rows: list[pa.StructArray]) -> None:
        if rows:
            self._write_rows(kind, rows[0] if len(rows) == 1 else pa.concat_arrays(rows))

    def _write_rows(self, kind: str, rows: pa.StructArray) -> None:
        self._counts[COUNTED[kind]] += len(rows)
        self._writer.write(kind, rows)
        if kind != "stack" or self._write_symbols is not None:
            self._symbol_inputs.add(kind, rows)


def _joined(records: list[NDArray[np.void]]) -> NDArray[np.void]:
    """Returns the records as one array, and empties the list: those of a row group of launches have 42 MB."""
    joined = np.concatenate(records)
    records.clear()
    return joined


class _WriterAfter:
    """Writes rows into a capture behind those that a thread writes."""

    def __init__(self, thread: Future[None], writer: RowWriter) -> None:
        self._thread, self._writer = thread, writer

    def write(self, kind: str, rows: pa.StructArray) -> None:
        """See CaptureWriter; raises what the thread raises, too."""
        self._thread.result()
        self._writer.write(kind, rows)


@dataclass(frozen=True)
class _Deferred:
    """Records whose rows are written when all stacks and modules are known."""

    dtype: np.dtype[np.void]
    write: Callable[[_Finishing, NDArray[np.void]], None]
    check: Callable[[NDArray[np.void]], None] = lambda _: None  # raises one of _DAMAGE if BPF cannot send these
    rows_a_record: int = 1  # at most


_DEFERRED = {
    FrameKind.LAUNCHES: _Deferred(LAUNCH, _Finishing._write_launches, check_launches),
    FrameKind.LISTS: _Deferred(LIST_EVENT, _Finishing._write_lists, check_lists, LISTS_A_RECORD),
    FrameKind.TRANSFERS: _Deferred(LAUNCH, _Finishing._write_transfers, check_transfers),
    FrameKind.CPU_SAMPLES: _Deferred(CPU_SAMPLE, _Finishing._write_samples),
    FrameKind.WAITS: _Deferred(WAIT, _Finishing._write_waits),
}
"""In the order in which they are written."""

_READERS = {  # of all kinds but those of _FIRST
    **dict.fromkeys(_DEFERRED, _Finishing._add_deferred),
    FrameKind.HEADER: _Finishing._add_header,
    FrameKind.STALLS: _Finishing._add_stalls,
    FrameKind.STACKS: _Finishing._add_stacks,
    FrameKind.KERNEL: _Finishing._add_kernel,
    FrameKind.LOSS: _Finishing._add_loss,
    FrameKind.END: _Finishing._add_end,
    FrameKind.APPEND: _Finishing._add_to_header,
    FrameKind.METRICS: _Finishing._add_metrics,
    FrameKind.PROCESS: _Finishing._add_described_process,
    FrameKind.PIECE: _Finishing._add_piece,
    FrameKind.KERNEL_NAME: _Finishing._add_kernel_name,
    FrameKind.EXECUTIONS: _Finishing._add_executions,
    FrameKind.GPU_JOBS: _Finishing._add_gpu_jobs,
    FrameKind.COPY: _Finishing._add_copy,
}
_FIRST = {
    FrameKind.HEADER: _Finishing._add_header,
    FrameKind.SIDEBAND: _Finishing._add_sideband,
    FrameKind.INTERPRETER: _Finishing._add_interpreter,
    FrameKind.PYTHON: _Finishing._add_python,
    FrameKind.CODES: _Finishing._add_codes,
}
_OF_STACKS = {FrameKind.PYTHON, FrameKind.CODES}
_FIRST_KINDS = (_FIRST.keys() - _OF_STACKS, _OF_STACKS)
"""In this order: reading a code object needs its interpreter."""


def cost_of(recording: object) -> dict[str, Any]:
    """Returns what recording cost, as the recorder says, and what finishing has cost this process."""
    cost = recording if isinstance(recording, dict) else {}
    before = cost.get("cpu_s")
    seconds = cpu_seconds()
    return {
        **cost,
        "finish_cpu_s": round(seconds, 3),
        "finish_peak_bytes": peak_bytes(),
        "total_cpu_s": round(seconds + (before if isinstance(before, int | float) else 0), 3),
    }


_NICE = 10  # a busy program on the same CPU gets ten times as much of it


def stack_finisher(kept_roots: Mapping[int, int] | None = None) -> FinishStacks:
    """Returns the function with which finish() finishes stacks that were not finished while recording.

    Args:
        kept_roots: see symbol_writer.
    """

    def finish_stacks(inputs: SymbolInputs, copies: Iterator[NDArray[np.void]], depth: int) -> Iterator[bytes]:
        from iaprof.record.unwinding.late import LateFinishing

        with _symbolizer(inputs, kept_roots) as symbolizer:
            yield from LateFinishing(symbolizer, inputs.spaces, depth).finish(copies)

    return finish_stacks


def symbol_writer(
    which: Symbols,
    progress: Progress,
    kept_roots: Mapping[int, int] | None = None,
    binaries: Binaries | None = None,
) -> WriteSymbols:
    """Returns the function with which finish() writes names. SIGINT ends that early, with the names found so far.

    Args:
        which: which addresses get names.
        progress: is called with the number of modules named so far, and of all.
        kept_roots: descriptors of roots that were kept open, by process.
        binaries: what reads files with code, if it has begun already.
    """

    def write(inputs: SymbolInputs, writer: RowWriter) -> dict[str, Any]:
        before = thread_time() + children_cpu_seconds()
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)  # of this thread: naming can wait, other programs cannot
        modules = list(inputs.needed.modules(inputs.spaces))
        cancellation = Cancellation()

        def skip(_number: int, _frame: FrameType | None) -> None:
            cancellation.cancel()

        with _symbolizer(inputs, kept_roots, which is Symbols.ALL, binaries) as symbolizer:
            previous = signal.signal(signal.SIGINT, skip)
            try:
                counts = write_names(writer, modules, symbolizer, progress, cancellation, inputs.add_names)
            finally:
                signal.signal(signal.SIGINT, previous)
        return {"which": which.value, **counts, "cpu_s": round(thread_time() + children_cpu_seconds() - before, 3)}

    return write


def _symbolizer(
    inputs: SymbolInputs,
    kept_roots: Mapping[int, int] | None,
    everything: bool = False,
    binaries: Binaries | None = None,
) -> RecordingSymbolizer:
    from iaprof.record.symbolize.symbolizer import RecordingSymbolizer

    mappings, processes = inputs.rows.table("mapping"), inputs.rows.table("process")
    roots: dict[int, int | str] = {**inputs.roots, **(kept_roots or {})}
    return RecordingSymbolizer(
        inputs.header, inputs.spaces, mappings, processes, everything, inputs.files, roots, inputs.accounts, binaries
    )


_CHANNEL = 0  # its descriptor


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    reader = SpoolReader(Path(f"/proc/self/fd/{request['spool']}"))
    use_folder(Path(request["output"]), request["folder"])
    state = RotationState() if request["rotation_state"] is not None else None
    wanted_symbols = Symbols(request["symbols"])
    kept = {int(pid): fd for pid, fd in request["roots"].items()}
    names = None
    try:
        with contextlib.ExitStack() as opened:
            if wanted_symbols is not Symbols.NONE:
                from iaprof.symbols.symbolizers.binaries import Binaries

                binaries = opened.enter_context(Binaries())
                binaries.begin(_NICE)  # it starts while rows are written
                names = symbol_writer(wanted_symbols, _say_naming, kept, binaries)
            on_frame = state.add if state else None
            finished = finish(reader, Path(request["output"]), on_frame, names, stack_finisher(kept))
        if state:
            state.write(reader, request["rotation_state"])
    except (IaprofError, OSError) as error:
        return {"error": str(error)}
    except MemoryError:
        return {
            "error": "finishing the capture needs more memory than it may use: "
            "'iaprof recover --memory-limit' allows more"
        }
    except Exception as error:  # noqa: BLE001 - nobody else could report it
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} ({error}) at {Path(last.filename).name}:{last.lineno}"
        return {"error": f"the capture could not be finished; this is a bug, please report it: {place}"}
    return {"header": finished.header, "size": finished.size}


def _say(line: dict[str, Any]) -> None:
    with open(_CHANNEL, "w", closefd=False) as channel:
        channel.write(json.dumps(line) + "\n")


def _say_naming(done: int, total: int) -> None:
    _say({"naming": [done, total]})


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)  # context managers remove the unfinished file


def main() -> None:
    """Serves one request in a Worker with a stream channel; ends at once if the recorder closes the channel instead.

    A request is a line of JSON: descriptors of the spool, of the file for the rotation state, of the output folder and
    of processes' roots; the output's path; and which names to write. Lines of JSON go back: the progress of naming, and
    at last the answer. SIGINT ends the naming. The recorder starts this process early, so that its imports are done
    when the recording ends.
    """
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpriority(os.PRIO_PROCESS, 0, 0)  # the recorder goes first
    line = sys.stdin.readline()
    if line:
        limit_memory(half_of_available())  # root's process on a production machine; the spool stays if it is reached
        _say(_serve(json.loads(line)))
