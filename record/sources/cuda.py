"""The source of samples of NVIDIA's GPUs, from the library that the driver loads into the recorded command.

The library (record/kernels/inject_cuda.c) sends samples, cubins and executions as messages, which a BPF program copies:
formats/wire/launches.py has MESSAGE. What is in a message is its process's claim, and is checked; its pid is not.
Samples are not decoded here, as a process sends them as rows of a capture.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.bpf.probes.libraries import Way
from iaprof.formats.wire.launches import EXECUTION, MESSAGE_BYTES, MessageOf
from iaprof.gpu.nvidia.records import PC_SAMPLES
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.options import Options
from iaprof.record.sources.cupti import cupti_paths, driver_version, fits
from iaprof.record.sources.nvidia import DEFAULT_PERIOD, GPUS, PERIODS, Gpu, find_gpus
from iaprof.record.sources.nvml import Nvml, NvmlGpu
from iaprof.record.sources.source import Sampler
from iaprof.record.spool import FrameKind

NO_GPU = f"there is no GPU of NVIDIA's driver: {GPUS} is missing or empty"
MAX_MODULE_BYTES = 1 << 28
MAX_MODULES_BYTES = 1 << 30  # of all cubins together; of those that come in again and again, once
MAX_UNFINISHED_BYTES = 1 << 29  # of all cubins of which a part has come
MAX_PROCESSES = 1 << 12  # that run at once
MAX_CONTEXTS = 256  # of a process, as in inject_cuda.c; likewise GPUs
MAX_UNFINISHED = 8  # cubins of a process
MAX_WAITING = 1 << 14  # cubins of all processes whose contents have not come
MAX_COMPLETE = 1 << 16  # cubins whose contents are known by their numbers
MAX_NAMES = 1 << 14  # of kernels of a process
MAX_NAMES_BYTES = 1 << 26  # of all processes
MAX_NAME_BYTES = 1 << 12
MAX_PROBLEMS, MAX_PROBLEMS_OF_PROCESS = 64, 4  # that are reported
MAX_PROBLEM_LETTERS = 400
OTHER_SAMPLED = 2  # `sampled` of a context whose GPU samples another process; 1: it is sampled, 0: it is not
RANGE_BITS, RANGES = 30, 1 << 18
"""The addresses of a process are the range with the number pid % RANGES. The library, which may not know its process's
number, says them without the beginning of the range."""

_ROW_WORDS = len(PC_SAMPLES.rows.columns)
_ROW_BYTES = 8 * _ROW_WORDS
_ROWS = MESSAGE_BYTES // _ROW_BYTES
_DEVICE = np.dtype(
    [
        ("bus", "S32"),
        ("name", "S96"),
        ("uuid", "V16"),
        ("major", "<u4"),
        ("minor", "<u4"),
        ("multiprocessors", "<u4"),
        ("period", "<u4"),
        ("ordinal", "<u4"),
        ("sampled", "<u4"),
    ]
)
_SUMS = np.dtype([(name, "<u8") for name in ("samples", "dropped", "of_driver", "unknown", "full", "invalid")])
_EXECUTION = np.dtype(
    [
        ("correlation", "<u8"),
        ("address", "<u8"),
        ("begin", "<u8"),
        ("end", "<u8"),
        ("ordinal", "<u4"),
        ("queue", "<u4"),
    ]
)
_BUS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_LOSSES = {
    "dropped": ("dropped", "the GPU or CUPTI dropped samples"),
    "unknown": ("unplaced", "their function is in no cubin that the process's library has seen"),
    "of_driver": ("driver's own", "they are of kernels of the driver's own"),
}

_COUNTS = {
    "invalid": ("messages", "unreadable", "messages of processes that cannot be right"),
    "names": ("names", "lost", "too many names of kernels: long ones are cut"),
    "large": ("cubins", "too large", f"above {MAX_MODULE_BYTES >> 20} MiB: their kernels have no instructions"),
    "cut": ("cubins", "incomplete", "a part of them has not come: their kernels have no instructions"),
    "contexts": ("samples", "unplaced", "records of contexts whose description has not come"),
    "dropped executions": ("executions", "dropped", "CUPTI had no room for them"),
    "invalid executions": ("executions", "unreadable", "their times or GPUs cannot be right"),
    "unknown executions": ("executions", "unplaced", "on GPUs whose description has not come"),
}
_LEAST_MODULE_BYTES = 1 << 12  # what a cubin counts for at least
_NAMES_AT_ONCE = 200
_CLOCK_NS = 10_000_000  # so much may times of a GPU's clock be wrong


class _Cubin(NamedTuple):
    """A cubin as the processes of a user name it."""

    uid: int
    crc: int
    size: int  # bytes


class _Place(NamedTuple):
    """Where a process has a cubin."""

    base: int
    since: int  # ns


@dataclass
class _Module:
    """A cubin that comes in pieces, in order."""

    total: int
    base: int
    data: bytearray = field(default_factory=bytearray)


@dataclass
class _Process:
    """What a process has sent. Another program in it begins again with the same numbers."""

    contexts: dict[int, int] = field(default_factory=dict)  # the stream of each, -1: its GPU was not chosen
    ordinals: dict[int, int] = field(default_factory=dict)  # likewise of the numbers that it has for GPUs
    names: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # time and name, by address
    modules: dict[int, _Module] = field(default_factory=dict)  # that are not complete, by CRC
    problems: int = 0
    has_ended: bool = False  # when it was looked for last


class CudaSamples(Sampler):
    """The library's messages."""

    def __init__(self, options: Options) -> None:
        """Finds the GPUs.

        Raises:
            IaprofError: there is none.
            UsageError: there is no such device or rate.
        """
        gpus = find_gpus()
        if not gpus:
            raise IaprofError(NO_GPU)
        self._gpus = {gpu.bus: gpu for gpu in gpus}
        self._period = pick_period(options.rate)
        self._chosen = _choose(gpus, options.devices)
        self._has_command = bool(options.command)
        self.has_library = self._has_command and Way.INJECT in options.launches.ways
        self._paused, self._is_over = True, False
        self._streams: list[dict[str, Any]] = []
        self._by_bus: dict[str, int] = {}  # the stream of each GPU
        self._processes: dict[int, _Process] = {}
        self._unfinished_bytes = self._names_bytes = self._module_bytes = 0
        self._waiting: dict[tuple[_Cubin, int], _Place] = {}  # by cubin and pid: those whose contents have not come
        self._complete: dict[_Cubin, bytes] = {}  # digests of contents that the output file has
        self._taken: set[bytes] = set()  # digests of cubins
        self._written: set[bytes] = set()  # of those in this output file
        self._unwritten: list[tuple[int, int]] = []  # processes and addresses of names that this output file lacks
        self._sums: Counter[tuple[int, str]] = Counter()  # by stream
        self._samples: Counter[int] = Counter()  # that CUPTI has counted, by stream; of this output file
        self._counts: Counter[str] = Counter()  # of _COUNTS
        self._problems: set[str] = set()
        self._began_ns = self._losses_ns = time.monotonic_ns()
        self._nvml: Nvml | None = None

    def open_metrics(self) -> None:
        """See Sampler."""
        self._nvml = Nvml()

    def metered(self) -> list[NvmlGpu]:
        """See Sampler: those that a context was made on."""
        if self._nvml is None:
            return []
        return [
            NvmlGpu(self._nvml, stream, bus, self._streams[stream]["device"]) for bus, stream in self._by_bus.items()
        ]

    def header(self) -> dict[str, Any]:
        """See Source."""
        return {"streams": list(self._streams)}

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source."""
        self._journal, self._loop = journal, loop
        what = "this recording has launches with their stacks, without the kernels' names"
        if not self._has_command:
            journal.warn(
                "NVIDIA's GPUs are sampled only in a command that iaprof starts: 'iaprof record -- COMMAND' records "
                f"why kernels stall; {what}"
            )
        elif not self.has_library:
            journal.warn(
                f"with this --launches the command is free to use CUPTI, and NVIDIA's GPUs are not sampled; {what}"
            )

    def environment(self, environment: dict[str, str]) -> dict[str, str]:
        """See Source."""
        if not self.has_library:
            return environment
        driver = driver_version()
        paths = sorted(cupti_paths(), key=lambda path: not fits(path, driver))  # the library takes the first one
        return {**environment, "IAPROF_CUDA_PERIOD": str(self._period), "IAPROF_CUPTI": ":".join(paths)}

    def resume(self) -> None:
        """See Source."""
        self._paused = False

    def pause(self) -> None:
        """See Source: what comes later was sampled in vain."""
        self._paused = True

    def take(self, messages: NDArray[np.void], now: int) -> None:
        """See Sampler."""
        if not len(messages):
            return
        valid = (messages["bytes"] <= MESSAGE_BYTES) & np.isin(messages["what"], [*MessageOf])
        if not valid.all():
            self._counts["invalid"] += int(np.count_nonzero(~valid))
            messages = messages[valid]
        what = messages["what"]
        for kind, method in (
            (MessageOf.CONTEXT, self._add_context),
            (MessageOf.KERNEL, self._add_kernel),
            (MessageOf.MODULE, self._add_module),
            (MessageOf.PROBLEM, self._add_problem),
            (MessageOf.SUMS, self._add_sums),
        ):
            for message in messages[what == kind]:
                pid = int(message["pid"])
                process = self._process(pid, now)
                if process is not None and not method(pid, process, message, now):
                    self._counts["invalid"] += 1
        self._write_samples(messages[what == MessageOf.SAMPLES], now)
        self._write_executions(messages[what == MessageOf.EXECUTIONS], now)

    def placed(self, launches: NDArray[np.void]) -> NDArray[np.void]:
        """See Sampler."""
        own = (launches["correlation"] > 0) & (launches["address"] > 0)  # a graph has none
        if not own.any():
            return launches
        launches = launches.copy()
        inside = launches["address"][own] & np.uint64((1 << RANGE_BITS) - 1)
        launches["address"][own] = inside + _ranges_of(launches["pid"][own])
        return launches

    def _process(self, pid: int, now: int) -> _Process | None:
        if (process := self._processes.get(pid)) is None:
            if len(self._processes) >= MAX_PROCESSES:
                self._report(f"more than {MAX_PROCESSES:,} processes use GPUs: those beyond are not recorded", now)
                return None
            process = self._processes[pid] = _Process()
        process.has_ended = False
        return process

    def _forget_ended(self) -> None:
        """Forgets processes that had ended when this was called before: what they sent has been read since."""
        for pid, process in list(self._processes.items()):
            has_ended = not os.path.exists(f"/proc/{pid}")
            if has_ended and process.has_ended:
                del self._processes[pid]
                self._names_bytes -= sum(len(name) for _, name in process.names.values())
                for crc in list(process.modules):
                    self._end_module(process, crc)
            process.has_ended = has_ended

    # Messages of which there are few. The methods return whether a message can be right.

    def _add_context(self, pid: int, process: _Process, message: np.void, now: int) -> bool:
        data, number = _data(message), int(message["id"])
        if len(data) != _DEVICE.itemsize or number >= MAX_CONTEXTS:
            return False
        device = np.frombuffer(data, _DEVICE)[0]
        if device["ordinal"] >= MAX_CONTEXTS or device["period"] != self._period:
            return False
        bus = _text(device["bus"]).lower()
        bus = bus if _BUS.fullmatch(bus) else ""
        gpu = self._gpus.get(bus) or self._gpus.get(_long_bus(bus))
        if gpu is None:
            self._report_of(pid, process, "it names a GPU that the driver does not have", now)
            return True
        stream = -1
        if device["sampled"] and (self._chosen is None or gpu in self._chosen):  # else its own message says why
            stream = self._stream_of(gpu, device)
            if device["sampled"] == OTHER_SAMPLED:
                self._report(
                    f"{gpu.card} samples one process at a time: until that one ends, the others have launches and "
                    "executions, but no samples",
                    now,
                )
        process.contexts[number] = stream
        if stream >= 0 or int(device["ordinal"]) not in process.ordinals:
            process.ordinals[int(device["ordinal"])] = stream
        return True

    def _stream_of(self, gpu: Gpu, device: np.void) -> int:
        if gpu.bus not in self._by_bus:
            self._by_bus[gpu.bus] = len(self._streams)
            self._streams.append(
                {
                    "device": gpu.path,
                    "card": gpu.card,
                    "name": gpu.name or _printable(_text(device["name"])),
                    "pci_address": gpu.bus,
                    "ip_version": [int(device["major"]), int(device["minor"])],
                    "multiprocessors": int(device["multiprocessors"]),
                    "layout": PC_SAMPLES.name,
                    "layout_guessed": False,
                    "rate_cycles": 1 << self._period,
                    "subsample": 1,
                }
            )
            self._journal.append("streams", self._streams[-1])
        return self._by_bus[gpu.bus]

    def _add_kernel(self, pid: int, process: _Process, message: np.void, now: int) -> bool:
        address, name = int(message["id"]), _data(message)[:MAX_NAME_BYTES]
        if address >> RANGE_BITS:
            return False
        address += _range_of(pid)
        before = process.names.get(address, (0, b""))[1]
        if name == before:
            return True
        if len(process.names) >= MAX_NAMES or self._names_bytes + len(name) > MAX_NAMES_BYTES:
            self._counts["names"] += 1
            return True
        self._names_bytes += len(name) - len(before)
        process.names[address] = self._within(message["begin"], now), name
        self._write_name(pid, address)
        return True

    def _write_name(self, pid: int, address: int) -> None:
        since, name = self._processes[pid].names[address]
        about = {"pid": pid, "address": address, "name": name.decode("utf-8", "backslashreplace")}
        self._journal.json(FrameKind.KERNEL_NAME, about, time_ns=since)

    def _add_module(self, pid: int, process: _Process, message: np.void, now: int) -> bool:
        crc, data, offset = int(message["id"]), _data(message), int(message["offset"])
        total, base = int(message["total"]), int(message["end"])
        if not total or offset + len(data) > total or (base + total) >> RANGE_BITS:
            return False
        base += _range_of(pid)
        if total > MAX_MODULE_BYTES:
            if not offset:
                self._counts["large"] += 1
            return True
        cubin, place = _Cubin(int(message["uid"]), crc, total), _Place(base, self._within(message["begin"], now))
        if not offset:
            if (digest := self._complete.get(cubin)) is not None:
                self._write_module(pid, cubin, digest, b"", place)
                return True
            self._wait_for(cubin, pid, place)
            if not data:
                return True  # the process could send nothing of it; another one may
            self._begin_module(process, crc, _Module(total, base))
        module = process.modules.get(crc)
        if module is None:
            return True  # an earlier piece is missing, or another process has sent it all
        is_own = (module.total, module.base) == (total, base)
        if is_own and offset + len(data) <= len(module.data):
            return True  # it comes again, as the process could not know that it was taken
        if not is_own or offset != len(module.data) or self._unfinished_bytes + len(data) > MAX_UNFINISHED_BYTES:
            self._end_module(process, crc)
            return True
        module.data += data
        self._unfinished_bytes += len(data)
        if len(module.data) == total:
            self._end_module(process, crc)
            self._complete_module(cubin, module.data, now)
        return True

    def _wait_for(self, cubin: _Cubin, pid: int, place: _Place) -> None:
        key = cubin, pid
        if key in self._waiting or len(self._waiting) >= MAX_WAITING:  # what it sent before has not become complete
            self._counts["cut"] += 1
        if key in self._waiting or len(self._waiting) < MAX_WAITING:
            self._waiting[key] = place

    def _begin_module(self, process: _Process, crc: int, module: _Module) -> None:
        if crc in process.modules:
            self._end_module(process, crc)
        if len(process.modules) >= MAX_UNFINISHED:
            self._end_module(process, next(iter(process.modules)))
        process.modules[crc] = module

    def _end_module(self, process: _Process, crc: int) -> None:
        self._unfinished_bytes -= len(process.modules.pop(crc).data)

    def _complete_module(self, cubin: _Cubin, content: bytearray, now: int) -> None:
        """Writes a cubin for all processes that wait for it: of a user's, only one sends it (bpf/c/messages.c)."""
        places = {pid: self._waiting.pop((each, pid)) for each, pid in list(self._waiting) if each == cubin}
        digest = hashlib.sha256(content).digest()
        if digest not in self._taken:
            size = max(len(content), _LEAST_MODULE_BYTES)
            if self._module_bytes + size > MAX_MODULES_BYTES:
                taken = f"{MAX_MODULES_BYTES >> 30} GiB of cubins were taken already"
                self._report(f"{taken}: the others have no instructions", now)
                return
            self._module_bytes += size
            self._taken.add(digest)
        if len(self._complete) >= MAX_COMPLETE:
            self._complete.clear()
        self._complete[cubin] = digest
        for pid, place in places.items():
            self._write_module(pid, cubin, digest, content, place)

    def _write_module(self, pid: int, cubin: _Cubin, digest: bytes, content: bytes | bytearray, place: _Place) -> None:
        about = {"pid": pid, "path": "[in memory]", "digest": digest.hex(), "size": cubin.size, "base": place.base}
        about["content"] = is_new = digest not in self._written
        self._written.add(digest)
        meta = json.dumps(about).encode()
        data = memoryview(content) if is_new else b""
        self._journal.write(FrameKind.KERNEL, meta, data, time=place.since, shape=len(meta))
        self._journal.totals.modules += 1

    def _add_problem(self, pid: int, process: _Process, message: np.void, now: int) -> bool:
        self._report_of(pid, process, _printable(_data(message).decode("utf-8", "replace")), now)
        return True

    def _report_of(self, pid: int, process: _Process, text: str, now: int) -> None:
        """Reports what a process says, or that it is wrong; not more of it than a process has to say."""
        text = text[:MAX_PROBLEM_LETTERS]
        if text not in self._problems and process.problems < MAX_PROBLEMS_OF_PROCESS:
            process.problems += 1
            self._report(text, now, f"process {pid}: ")

    def _report(self, text: str, now: int, whose: str = "") -> None:
        if text in self._problems or len(self._problems) >= MAX_PROBLEMS:
            return
        self._problems.add(text)
        self._journal.loss("samples", "not recorded", None, whose + text, now, now)
        self._journal.warn(whose + text)

    def _add_sums(self, pid: int, process: _Process, message: np.void, now: int) -> bool:
        data = _data(message)
        if len(data) != _SUMS.itemsize:
            return False
        stream = process.contexts.get(int(message["id"]), -1)
        if stream >= 0 and not self._paused:
            sums = np.frombuffer(data, _SUMS)[0]
            for name in _SUMS.names or ():
                self._sums[stream, name] += min(int(sums[name]), 1 << 40)
            self._samples[stream] += min(int(sums["samples"]), 1 << 40)
        return True

    # Messages of which there are many

    def _write_samples(self, messages: NDArray[np.void], now: int) -> None:
        if not len(messages) or self._paused:
            return
        rows, rest = np.divmod(messages["bytes"], _ROW_BYTES)
        self._counts["invalid"] += int(np.count_nonzero(rest))
        words = _table(messages, np.dtype(("<u8", _ROW_WORDS)))
        drains = np.stack([messages[name].astype(np.uint64) for name in ("pid", "id", "begin", "end")], axis=1)
        drains, which = np.unique(drains, axis=0, return_inverse=True)
        order = np.argsort(which.reshape(-1), kind="stable")
        bounds = np.searchsorted(which.reshape(-1)[order], np.arange(len(drains) + 1)).tolist()
        for number, (pid, context, begin, end) in enumerate(drains.tolist()):
            process = self._processes.get(pid)
            stream = process.contexts.get(context) if process is not None else None
            own = order[bounds[number] : bounds[number + 1]]
            if stream is None:
                self._counts["contexts"] += int(rows[own].sum())
            if process is None or stream is None or stream < 0:
                continue
            process.has_ended = False
            records = words[own][np.arange(_ROWS) < rows[own, None]]
            inside = records[:, 0] >> np.uint64(RANGE_BITS) == 0
            if not inside.all():
                self._sums[stream, "unknown"] += int(np.count_nonzero(~inside))
                records = records[inside]
            records[:, 0] += np.uint64(_range_of(pid))
            end = self._within(end, now)
            columns = np.ascontiguousarray(records.T)
            self._journal.write(
                FrameKind.STALLS,
                columns.view("u1").data.cast("B") if len(records) else b"",
                time=end,
                begin=min(self._within(begin, now), end),
                source=stream,
                shape=_ROW_WORDS,
            )
            self._journal.totals.records += len(records)

    def _write_executions(self, messages: NDArray[np.void], now: int) -> None:
        if not len(messages):
            return
        self._counts["dropped executions"] += sum(min(number, 1 << 32) for number in messages["id"].tolist())
        count, rest = np.divmod(messages["bytes"], _EXECUTION.itemsize)
        self._counts["invalid"] += int(np.count_nonzero(rest))
        table = _table(messages, _EXECUTION)
        is_there = np.arange(table.shape[1]) < count[:, None]
        pids = np.broadcast_to(messages["pid"][:, None], is_there.shape)[is_there]
        rows = table[is_there]
        own = rows["address"] >> np.uint64(RANGE_BITS) == 0
        valid = (
            (rows["ordinal"] < MAX_CONTEXTS) & (rows["begin"] <= rows["end"]) & (rows["begin"] <= now + _CLOCK_NS) & own
        )
        valid &= rows["begin"] >= self._began_ns
        self._counts["invalid executions"] += int(np.count_nonzero(~valid))
        pids, rows = pids[valid], rows[valid]
        if not len(rows):
            return
        gpus, gpu_of = np.unique(pids.astype(np.uint64) << np.uint64(32) | rows["ordinal"], return_inverse=True)
        nothing: dict[int, int] = {}
        processes = [self._processes.get(gpu >> 32) for gpu in gpus.tolist()]
        ordinals = [process.ordinals if process else nothing for process in processes]
        streams = np.array(
            [of.get(gpu & 0xFFFFFFFF, -2) for of, gpu in zip(ordinals, gpus.tolist(), strict=True)], np.int64
        )
        stream = streams[gpu_of.reshape(-1)]
        self._counts["unknown executions"] += int(np.count_nonzero(stream == -2))
        keep = stream >= 0
        found = np.zeros(int(keep.sum()), EXECUTION)
        for name in ("correlation", "address", "begin", "end", "queue"):
            found[name] = rows[name][keep]
        of_graph = found["address"] > 0
        found["address"][of_graph] += _ranges_of(pids[keep][of_graph])
        found["end"] = np.minimum(found["end"], now + _CLOCK_NS)
        found["pid"], found["stream"] = pids[keep], stream[keep]
        if len(found):
            self._journal.write(FrameKind.EXECUTIONS, found.view("u1").data, time=now)

    def _within(self, moment: int, now: int) -> int:
        """Returns a time that a process claims, between the recording's begin and now."""
        return min(max(int(moment), self._began_ns), now)

    def losses(self) -> None:
        """See Source."""
        now, since = time.monotonic_ns(), self._losses_ns
        sums: dict[int, dict[str, int]] = defaultdict(dict)
        for (stream, name), number in self._sums.items():
            sums[stream][name] = number
        for stream, of_stream in sums.items():
            source = f"samples of {self._streams[stream]['device']}"
            for name, (what, detail) in _LOSSES.items():
                if number := of_stream.get(name, 0):
                    self._journal.loss(source, what, number, detail, since, now)
            if of_stream.get("full"):
                detail = "the GPU's buffer was full: choose a slower --rate"
                self._journal.loss(source, "overflow", None, detail, since, now)
            if number := of_stream.get("invalid", 0):
                self._journal.loss(source, "unreadable", number, "answers of CUPTI that cannot be right", since, now)
        if self._is_over:
            self._counts["cut"] += len(self._waiting)
            self._waiting.clear()
        for name, (source, what, detail) in _COUNTS.items():
            if number := self._counts[name]:
                self._journal.loss(source, what, number, detail, since, now)
        self._sums.clear()
        self._counts.clear()
        self._losses_ns = now
        self._forget_ended()

    def finish(self) -> None:
        """See Source."""
        self._is_over = True

    def footer(self) -> dict[str, Any]:
        """See Source: the streams again, with how many samples CUPTI has counted."""
        return {"streams": [{**each, "samples": self._samples[stream]} for stream, each in enumerate(self._streams)]}

    def begin_part(self, since_ns: int) -> None:
        """See Source: names are written again; rotation carries cubins over."""
        self._samples.clear()
        self._written.clear()
        self._complete.clear()
        self._unwritten = [(pid, address) for pid, process in self._processes.items() for address in process.names]
        self._loop.keep_calling(self, self._write_names)

    def _write_names(self) -> None:
        some, self._unwritten = self._unwritten[:_NAMES_AT_ONCE], self._unwritten[_NAMES_AT_ONCE:]
        for pid, address in some:
            if (process := self._processes.get(pid)) and address in process.names:
                self._write_name(pid, address)
        if not self._unwritten:
            self._loop.stop_calling(self)

    def close(self) -> None:
        """See Source."""
        if self._nvml is not None:
            self._nvml.close()


def pick_period(rate: str | None) -> int:
    """Returns the sampling period as a power of 2, GPU cycles; UsageError if that is no rate."""
    if rate is None:
        return DEFAULT_PERIOD
    if rate.isdigit() and (cycles := int(rate)) in (1 << bits for bits in PERIODS):
        return cycles.bit_length() - 1
    raise UsageError(f"--rate {rate}: NVIDIA's GPUs sample every 2^5 to 2^31 cycles, such as {1 << DEFAULT_PERIOD}")


def _choose(gpus: Iterable[Gpu], names: tuple[str, ...]) -> list[Gpu] | None:
    """Returns the GPUs that the user names; None for all; UsageError if there is no such GPU."""
    if not names:
        return None
    by_name = {name: gpu for gpu in gpus for name in (gpu.bus, gpu.card, gpu.path) if gpu.minor}
    for name in names:
        if name not in by_name:
            raise UsageError(f"there is no device {name}; NVIDIA's are: {', '.join(sorted(by_name))}")
    return [by_name[name] for name in names]


def _table(messages: NDArray[np.void], row: np.dtype[Any]) -> NDArray[Any]:
    """Returns as many rows of each message as there is room for: row[messages, rows]."""
    many = MESSAGE_BYTES // row.itemsize
    data = np.ascontiguousarray(messages["data"]).view("u1").reshape(len(messages), -1)
    return np.ascontiguousarray(data[:, : many * row.itemsize]).view(row.base).reshape(len(messages), many, *row.shape)


def _range_of(pid: int) -> int:
    return pid % RANGES << RANGE_BITS


def _ranges_of(pids: NDArray[np.uint32]) -> NDArray[np.uint64]:
    found: NDArray[np.uint64] = pids.astype(np.uint64) % np.uint64(RANGES) << np.uint64(RANGE_BITS)
    return found


def _data(message: np.void) -> bytes:
    return bytes(message["data"])[: int(message["bytes"])]


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)


def _text(value: bytes) -> str:
    return bytes(value).split(b"\0", 1)[0].decode("ascii", "replace")


def _long_bus(bus: str) -> str:
    """The name in /proc of a GPU, whose domain may have four digits in one place and eight in the other."""
    domain, _, rest = bus.partition(":")
    return f"{domain[-4:].zfill(4)}:{rest}"
