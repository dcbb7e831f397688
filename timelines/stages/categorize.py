"""What each slice is for: its class, and the bandwidth of those that move data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.classes import CLASSES, HOST_MEMORY_PATTERNS, NUMBERS, TRANSFERS, EventClass
from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.grouped import Groups
from iaprof.timelines.intervals import ends
from iaprof.timelines.options import Options
from iaprof.timelines.trace import Dialect, Trace
from iaprof.timelines.tracks import Spans, Track, add_sums

TRACK = Track("TransferBW", "GB/s")
SIGNAL_BYTES = 128  # a transfer of so many is a signal


def categorize(trace: Trace, options: Options) -> None:
    """Adds `class` to all slices, and a counter of the bandwidth that copies name."""
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
    """Tells copies that start while a FLEX job computes from those before and after it."""
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
