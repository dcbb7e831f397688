"""The source of samples of NVIDIA's GPUs, from the library that the driver loads into the recorded command.

The library (record/kernels/inject_cuda.c) sends samples, cubins and executions as messages, which a BPF program copies:
formats/wire/launches.py has MESSAGE. What is in a message is its process's claim, and is checked; its pid is not.
Samples are not decoded here, as a process sends them as rows of a capture.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError, UsageError
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
MAX_MODULES_BYTES = 1 << 30  # of all cubins together
MAX_PROBLEMS = 16  # that are reported
MAX_STREAMS, MAX_CONTEXTS = 1 << 10, 1 << 16
RANGE_BITS, RANGES = 30, 1 << 18
"""As in inject_cuda.c: the addresses of a process are the range with the number pid % RANGES."""

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
        ("is_sampled", "<u4"),
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


@dataclass
class _Module:
    """A cubin that comes in pieces."""

    total: int
    pieces: dict[int, bytes] = field(default_factory=dict)
    size: int = 0

    def add(self, offset: int, data: bytes) -> bool:
        """Adds a piece; whether it was the last one."""
        if offset not in self.pieces and offset + len(data) <= self.total:
            self.pieces[offset] = data
            self.size += len(data)
        return self.size >= self.total

    def content(self) -> bytes:
        return b"".join(self.pieces[offset] for offset in sorted(self.pieces))


class CudaSamples(Sampler):
    """The library's messages."""

    has_library = True

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
        self._paused = True
        self._streams: list[dict[str, Any]] = []
        self._by_bus: dict[str, int] = {}  # the stream of each GPU
        self._of_context: dict[tuple[int, int], int] = {}  # the stream of each process's contexts, -1: not chosen
        self._of_ordinal: dict[tuple[int, int], int] = {}  # likewise of the numbers that it has for GPUs
        self._sequence: dict[int, int] = {}  # the last message of each process
        self._modules: dict[tuple[int, int], _Module] = {}  # by process and CRC
        self._module_bytes = 0
        self._names: dict[tuple[int, int], tuple[int, bytes]] = {}  # time and name, by process and address
        self._written: set[bytes] = set()  # digests of cubins in this output file
        self._sums: Counter[tuple[int, str]] = Counter()  # by stream
        self._problems: set[str] = set()
        self._lost = 0
        self._losses_ns = time.monotonic_ns()
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
        self._journal = journal
        if not self._has_command:
            journal.warn(
                "NVIDIA's GPUs are sampled only in a command that iaprof starts: 'iaprof record -- COMMAND' records "
                "why kernels stall; this recording has no samples"
            )

    def environment(self, environment: dict[str, str]) -> dict[str, str]:
        """See Source."""
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
        self._count_lost(messages)
        messages = messages[messages["bytes"] <= MESSAGE_BYTES]
        what = messages["what"]
        for kind, method in (
            (MessageOf.CONTEXT, self._add_context),
            (MessageOf.KERNEL, self._add_kernel),
            (MessageOf.MODULE, self._add_module),
            (MessageOf.PROBLEM, self._add_problem),
            (MessageOf.SUMS, self._add_sums),
        ):
            for message in messages[what == kind]:
                method(message, now)
        self._write_samples(messages[what == MessageOf.SAMPLES], now)
        self._write_executions(messages[what == MessageOf.EXECUTIONS], now)

    def _count_lost(self, messages: NDArray[np.void]) -> None:
        for pid in np.unique(messages["pid"]).tolist():
            numbers = messages["sequence"][messages["pid"] == pid]
            last, before = int(numbers.max()), self._sequence.get(pid, 0)
            if last <= before:  # another program in this process
                before = 0
            lost = last - before - len(numbers)
            self._lost += lost if 0 < lost < 1 << 32 else 0
            self._sequence[pid] = last
        if len(self._sequence) > MAX_CONTEXTS:
            self._sequence.clear()

    # Messages of which there are few

    def _add_context(self, message: np.void, now: int) -> None:
        data = _data(message)
        if len(data) != _DEVICE.itemsize or len(self._of_context) >= MAX_CONTEXTS:
            return
        device = np.frombuffer(data, _DEVICE)[0]
        bus = _text(device["bus"]).lower()
        bus = bus if _BUS.fullmatch(bus) else ""
        gpu = self._gpus.get(bus) or self._gpus.get(_long_bus(bus))
        if gpu is None:
            self._report(f"process {message['pid']} names a GPU that the driver does not have", now)
            return
        if not device["is_sampled"]:  # its own message says why
            return
        stream = -1 if self._chosen is not None and gpu not in self._chosen else self._stream_of(gpu, device)
        pid = int(message["pid"])
        self._of_context[pid, int(message["id"])] = self._of_ordinal[pid, int(device["ordinal"])] = stream

    def _stream_of(self, gpu: Gpu, device: np.void) -> int:
        if gpu.bus not in self._by_bus:
            self._by_bus[gpu.bus] = len(self._streams)
            self._streams.append(
                {
                    "device": f"/dev/nvidia{gpu.minor}",
                    "card": f"nvidia{gpu.minor}",
                    "name": gpu.name or _text(device["name"]),
                    "pci_address": gpu.bus,
                    "ip_version": [int(device["major"]), int(device["minor"])],
                    "multiprocessors": int(device["multiprocessors"]),
                    "layout": PC_SAMPLES.name,
                    "layout_guessed": False,
                    "rate_cycles": 1 << (int(device["period"]) & 31),
                    "subsample": 1,
                }
            )
            self._journal.append("streams", self._streams[-1])
        return self._by_bus[gpu.bus]

    def _add_kernel(self, message: np.void, now: int) -> None:
        pid, address = int(message["pid"]), int(message["id"])
        if _is_own(pid, address) and len(self._names) < MAX_CONTEXTS:
            self._names[pid, address] = min(int(message["begin"]), now), _data(message)
            self._write_name(pid, address)

    def _write_name(self, pid: int, address: int) -> None:
        since, name = self._names[pid, address]
        about = {"pid": pid, "address": address, "name": name.decode("utf-8", "backslashreplace")}
        self._journal.json(FrameKind.KERNEL_NAME, about, time_ns=since)

    def _add_module(self, message: np.void, now: int) -> None:
        key, data = (int(message["pid"]), int(message["id"])), _data(message)
        total, base = int(message["total"]), int(message["end"])
        if total > MAX_MODULE_BYTES or not _is_own(key[0], base) or not data:
            return
        if self._module_bytes + total > MAX_MODULES_BYTES:
            taken = f"{MAX_MODULES_BYTES >> 30} GiB of cubins were taken already"
            self._report(f"{taken}: the others have no instructions", now)
            return
        module = self._modules.setdefault(key, _Module(total))
        if not module.add(int(message["offset"]), data):
            return
        content = module.content()
        del self._modules[key]
        self._module_bytes += total
        digest = hashlib.sha256(content).digest()
        about = {"pid": key[0], "path": "[in memory]", "digest": digest.hex(), "size": total, "base": base}
        about["content"] = is_new = digest not in self._written
        self._written.add(digest)
        meta = json.dumps(about).encode()
        since = min(int(message["begin"]), now)
        self._journal.write(FrameKind.KERNEL, meta, content if is_new else b"", time=since, shape=len(meta))
        self._journal.totals.modules += 1

    def _add_problem(self, message: np.void, now: int) -> None:
        text = "".join(each if each.isprintable() else "?" for each in _data(message).decode("utf-8", "replace"))
        self._report(text, now)

    def _report(self, text: str, now: int) -> None:
        if text in self._problems or len(self._problems) >= MAX_PROBLEMS:
            return
        self._problems.add(text)
        self._journal.loss("samples", "not recorded", None, text, now, now)
        self._journal.warn(text)

    def _add_sums(self, message: np.void, now: int) -> None:
        data = _data(message)
        stream = self._of_context.get((int(message["pid"]), int(message["id"])), -1)
        if len(data) != _SUMS.itemsize or stream < 0 or self._paused:
            return
        sums = np.frombuffer(data, _SUMS)[0]
        for name in _SUMS.names or ():
            self._sums[stream, name] += min(int(sums[name]), 1 << 40)

    # Messages of which there are many

    def _write_samples(self, messages: NDArray[np.void], now: int) -> None:
        if not len(messages) or self._paused:
            return
        rows = messages["bytes"] // _ROW_BYTES
        words = _table(messages, np.dtype(("<u8", _ROW_WORDS)))
        which = np.unique(messages[["pid", "id", "begin", "end"]], return_index=True, return_inverse=True)
        for number, first in enumerate(which[1].tolist()):
            drain = messages[first]
            stream = self._of_context.get((int(drain["pid"]), int(drain["id"])), -1)
            if stream < 0:
                continue
            own = np.flatnonzero(which[2] == number)
            records = words[own][np.arange(_ROWS) < rows[own, None]]
            inside = records[:, 0] >> np.uint64(RANGE_BITS) == int(drain["pid"]) % RANGES
            if not inside.all():
                self._sums[stream, "unknown"] += int(np.count_nonzero(~inside))
                records = records[inside]
            end = min(int(drain["end"]), now)
            columns = np.ascontiguousarray(records.T)
            self._journal.write(
                FrameKind.STALLS,
                columns.view("u1").data.cast("B") if len(records) else b"",
                time=end,
                begin=min(int(drain["begin"]), end),
                source=stream,
                shape=_ROW_WORDS,
            )
            self._journal.totals.records += len(records)

    def _write_executions(self, messages: NDArray[np.void], now: int) -> None:
        if not len(messages):
            return
        dropped = int(np.minimum(messages["id"], 1 << 32).sum())
        if dropped:
            self._journal.loss("executions", "dropped", dropped, "CUPTI had no room for them", self._losses_ns, now)
        most = MESSAGE_BYTES // _EXECUTION.itemsize
        rows = _table(messages, _EXECUTION)
        valid = np.arange(most) < (messages["bytes"] // _EXECUTION.itemsize)[:, None]
        pids = np.broadcast_to(messages["pid"][:, None], valid.shape)[valid]
        rows = rows[valid]
        known = self._of_ordinal
        pairs, pair_of = np.unique(np.stack([pids, rows["ordinal"]], axis=1), axis=0, return_inverse=True)
        streams = np.array([known.get((pid, ordinal), -1) for pid, ordinal in pairs.tolist()], np.int64)
        stream = streams[pair_of.reshape(-1)] if len(pairs) else np.empty(0, np.int64)
        keep = (stream >= 0) & (rows["begin"] <= rows["end"])
        found = np.zeros(int(keep.sum()), EXECUTION)
        for name in ("correlation", "address", "begin", "end", "queue"):
            found[name] = rows[name][keep]
        found["pid"], found["stream"] = pids[keep], stream[keep]
        if len(found):
            self._journal.write(FrameKind.EXECUTIONS, found.view("u1").data, time=now)

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
        if self._lost:
            detail = "no room in the ring buffer: samples, cubins or executions are missing"
            self._journal.loss("messages", "lost", self._lost, detail, since, now)
        self._sums.clear()
        self._lost, self._losses_ns = 0, now

    def begin_part(self, since_ns: int) -> None:
        """See Source: names are written again; rotation carries cubins over."""
        self._written.clear()
        for pid, address in self._names:
            self._write_name(pid, address)

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
    by_name = {
        name: gpu for gpu in gpus for name in (gpu.bus, f"nvidia{gpu.minor}", f"/dev/nvidia{gpu.minor}") if gpu.minor
    }
    for name in names:
        if name not in by_name:
            raise UsageError(f"there is no device {name}; NVIDIA's are: {', '.join(sorted(by_name))}")
    return [by_name[name] for name in names]


def _table(messages: NDArray[np.void], row: np.dtype[Any]) -> NDArray[Any]:
    """Returns as many rows of each message as there is room for: row[messages, rows]."""
    many = MESSAGE_BYTES // row.itemsize
    data = np.ascontiguousarray(messages["data"]).view("u1").reshape(len(messages), -1)
    return np.ascontiguousarray(data[:, : many * row.itemsize]).view(row.base).reshape(len(messages), many, *row.shape)


def _is_own(pid: int, address: int) -> bool:
    return address >> RANGE_BITS == pid % RANGES


def _data(message: np.void) -> bytes:
    return bytes(message["data"])[: int(message["bytes"])]


def _text(value: bytes) -> str:
    return bytes(value).split(b"\0", 1)[0].decode("ascii", "replace")


def _long_bus(bus: str) -> str:
    """The name in /proc of a GPU, whose domain may have four digits in one place and eight in the other."""
    domain, _, rest = bus.partition(":")
    return f"{domain[-4:].zfill(4)}:{rest}"
