"""The class of each slice, which is its purpose, and the bandwidth of slices that move data.

The names of classes are those of the reference, IBM's AIU Trace Analyzer.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.grouped import Groups
from iaprof.timelines.intervals import ends
from iaprof.timelines.made_events import Spans, Track, add_sums
from iaprof.timelines.options import Options
from iaprof.timelines.trace import Dialect, Trace


class EventClass(StrEnum):
    """A class, as in `args.class`."""

    OTHER = "OTHER"
    COMPUTE_PREP = "COMPUTE_PREP"
    COMPUTE_EXEC = "COMPUTE_EXEC"
    DATA_IN = "DATA_IN"
    DATA_OUT = "DATA_OUT"
    SEN_DATA_CONVERT = "SEN_DATA_CONVERT"
    MAIU_WIREUP = "MAIU_WIREUP"
    MAIU_BARRIER = "MAIU_BARRIER"
    ROUNDTRIP_FLEX = "ROUNDTRIP_FLEX"
    ROUNDTRIP_AIU = "ROUNDTRIP_AIU"
    # Through the host's memory
    HDMA_WAIT_DATA = "MAIU_HDMA_PROTOCOL_WAIT_DATA"
    HDMA_WAIT_ACK = "MAIU_HDMA_PROTOCOL_WAIT_ACK"
    HDMA_SIGNAL_ACK = "MAIU_HDMA_PROTOCOL_SIGNAL_ACK"
    HDMA_SIGNAL_DATA = "MAIU_HDMA_PROTOCOL_SIGNAL_DATA"
    HDMA_MONITOR_NOTICE = "MAIU_HDMA_PROTOCOL_MONITOR_NOTICE"
    HDMA_SEND_DATA = "MAIU_HDMA_PROTOCOL_SEND_DATA"
    HDMA_RECV_DATA = "MAIU_HDMA_PROTOCOL_RECV_DATA"
    # From device to device
    PROTOCOL_SERIAL = "MAIU_PROTOCOL_SERIAL"
    P2PRDMA_SEND_DATA = "MAIU_P2PRDMA_PROTOCOL_SEND_DATA"
    P2PRDMA_RECV_DATA = "MAIU_P2PRDMA_PROTOCOL_RECV_DATA"
    # Copies while a job computes
    SEND_DATA = "MAIU_PROTOCOL_SEND_DATA"
    RECV_DATA = "MAIU_PROTOCOL_RECV_DATA"
    SIGNAL_DATA = "MAIU_PROTOCOL_SIGNAL_DATA"
    SIGNAL_ACK = "MAIU_PROTOCOL_SIGNAL_ACK"


CLASSES = tuple(EventClass)
NUMBERS = {each: number for number, each in enumerate(CLASSES)}

TRANSFERS = (EventClass.DATA_IN, EventClass.DATA_OUT, EventClass.SEND_DATA, EventClass.RECV_DATA)
"""The classes of slices whose bandwidth is shown."""

HOST_MEMORY_PATTERNS: tuple[tuple[str, EventClass], ...] = (
    (
        r"Wdone DmaI|Wait for Data Avail Notice|Wait for Notice \(gather notifications\)|R5 Wait DATA",
        EventClass.HDMA_WAIT_DATA,
    ),
    ("Wait for ACK|R5 Wait ACK", EventClass.HDMA_WAIT_ACK),
    ("Send ACK Instruction|R5 Send ACK", EventClass.HDMA_SIGNAL_ACK),
    ("Send Instruction|HCOLL Signal|R5 Send DATA", EventClass.HDMA_SIGNAL_DATA),
    ("Wait for Notice|Wait for Delivery Notice", EventClass.HDMA_MONITOR_NOTICE),
)
"""The classes of collectives' slices through the host's memory, by name; the first pattern that is found counts."""


TRACK = Track("TransferBW", "GB/s")
SIGNAL_BYTES = 128  # bytes: a transfer of so many is a signal


def categorize(trace: Trace, options: Options) -> None:
    """Adds `class` to all slices, and a counter of the bandwidth in the arguments of copies."""
    numbers = classes_of(trace)
    codes = trace.texts.codes([str(each) for each in CLASSES])
    trace.slices.extra["class"] = codes[numbers]
    moves = np.isin(numbers, [NUMBERS[each] for each in TRANSFERS]) & (trace.slices.bandwidth > 0)
    copies = trace.slices.take(moves & np.isfinite(trace.slices.bandwidth))
    add_sums(trace, TRACK, Spans(copies.file, copies.pid, copies.start, ends(copies), copies.bandwidth))


def classes_of(trace: Trace) -> NDArray[np.int8]:
    """Returns the numbers (in CLASSES) of all slices' classes."""
    slices = trace.slices
    numbers = np.full(len(slices), NUMBERS[EventClass.OTHER], np.int8)
    for each, kind in (
        (EventClass.DATA_OUT, Kind.COPY_OUT),
        (EventClass.DATA_IN, Kind.COPY_IN),
        (EventClass.COMPUTE_EXEC, Kind.KERNEL),
        (EventClass.COMPUTE_PREP, Kind.PREPARATION),
        (EventClass.SEN_DATA_CONVERT, Kind.CONVERSION),
        (EventClass.MAIU_WIREUP, Kind.WIRE_UP),
        (EventClass.MAIU_BARRIER, Kind.BARRIER),
        (EventClass.ROUNDTRIP_FLEX, Kind.ROUND_TRIP),
    ):
        numbers[find(trace, kind)] = NUMBERS[each]
    numbers[trace.texts.matches(slices.name, "AIU Roundtrip")] = NUMBERS[EventClass.ROUNDTRIP_AIU]
    _classify_collectives(trace, numbers)
    _classify_inner_copies(trace, numbers)
    return numbers


def _classify_collectives(trace: Trace, numbers: NDArray[np.int8]) -> None:
    rows = np.flatnonzero(find(trace, Kind.COLLECTIVE))
    names, texts = trace.slices.name[rows], trace.texts
    base = numbers[rows]
    sends, receives = base == NUMBERS[EventClass.DATA_OUT], base == NUMBERS[EventClass.DATA_IN]
    by_host = texts.matches(names, "Host DMA|HCOLL")
    waits = ~by_host & texts.matches(names, "DLM Wait")
    serial = ~by_host & ~waits & texts.matches(names, "Set BcList|Xseg to rank")
    direct = ~(by_host | waits | serial)
    conditions = [by_host & texts.matches(names, pattern) for pattern, _ in HOST_MEMORY_PATTERNS]
    results = [each for _, each in HOST_MEMORY_PATTERNS]
    conditions += [by_host & sends, by_host & receives, waits, serial, direct & sends, direct & receives]
    results += [
        EventClass.HDMA_SEND_DATA,
        EventClass.HDMA_RECV_DATA,
        EventClass.HDMA_WAIT_DATA,
        EventClass.PROTOCOL_SERIAL,
        EventClass.P2PRDMA_SEND_DATA,
        EventClass.P2PRDMA_RECV_DATA,
    ]
    numbers[rows] = np.select(conditions, [np.int8(NUMBERS[each]) for each in results], base)


def _classify_inner_copies(trace: Trace, numbers: NDArray[np.int8]) -> None:
    """Gives copies that start while a FLEX job computes other classes than those before and after it."""
    slices = trace.slices
    is_flex = ~trace.is_torch(slices) if len(trace.files) else np.zeros(len(slices), bool)
    if not any(file.dialect is Dialect.FLEX for file in trace.files) or not len(slices):
        return
    device = is_flex & slices.has_counters
    job = Groups(slices.file, slices.pid)
    kernels = device & find(trace, Kind.KERNEL)
    limits = np.iinfo(np.int64)
    first = job.min(np.where(kernels, slices.start, limits.max))[job.numbers]
    last = job.max(np.where(kernels, slices.start, limits.min))[job.numbers]
    inside = device & (slices.start > first) & (slices.start < last)
    signal = slices.bytes == SIGNAL_BYTES
    out = inside & (numbers == NUMBERS[EventClass.DATA_OUT])
    in_ = inside & (numbers == NUMBERS[EventClass.DATA_IN])
    numbers[out] = np.where(signal[out], NUMBERS[EventClass.SIGNAL_DATA], NUMBERS[EventClass.SEND_DATA])
    numbers[in_] = np.where(signal[in_], NUMBERS[EventClass.SIGNAL_ACK], NUMBERS[EventClass.RECV_DATA])
