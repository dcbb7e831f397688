"""Captures of any length without a recorder: many kernels with real code, launched all along and executed in order.

What makes them like real ones: launches come at a steady rate, a few kernels far more often than the others (Zipf's
law); a read's records are of the few kernels that execute while it is sampled, some time after their launches; a kernel
stalls at a third of its instructions, at some far more often than at others, and each has a few reasons of its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.gpu.intel.reasons import REASONS
from iaprof.gpu.intel.records import XE2
from iaprof.gpu.intel.zebin import read_zebin
from standin.runtime import ZEBINS, debug_elf
from unit.elfwriter import kernel as kernel_section, zebin

RECORDS_PER_SECOND = 1_000_000
KERNELS, MODULES = 2_000, 20
PROCESSES, STACKS, STACK_FRAMES = 4, 64, 20
LAUNCHES_PER_RECORD = 0.01
SECOND_PLACE = 0.1  # of a kernel's launches; the others come from one place
RECORDS_PER_READ = 4_096
RECORDS_PER_GROUP = 1 << 20
KERNEL_ZIPF, INSTRUCTION_ZIPF = 1.1, 1.3
QUEUED, RUNNING = 50, 4  # launches that wait for their turn, and that execute at a time
STALLING = 80  # of a kernel's 231 instructions
KINDS_OF_INSTRUCTIONS, VARIANTS = 1 << 12, 1 << 4  # which reasons they have; with which counts
FIRST_ADDRESS, ADDRESS_STEP = 0x8000_0000, 0x1_0000
# The first bits of Xe2's counters, as gpu/intel/records.py has them.
FIRST_BITS = {"tdr": 29, "other": 37, "control": 45, "pipestall": 53, "send": 61, "dist_acc": 69, "sbid": 77,
              "sync": 85, "inst_fetch": 93, "active": 101}  # fmt: skip


def write_capture(path: Path, records: int, launches: int = 0, seed: int = 1) -> None:
    """Writes a capture with `records` stall records and so many launches, or as many as there usually are."""
    rng = np.random.default_rng(seed)
    launches = launches or max(int(records * LAUNCHES_PER_RECORD), 10 * KERNELS)
    seconds = max(records / RECORDS_PER_SECOND, 1.0)
    code = read_zebin(debug_elf("bmg", "attention").read_bytes()).kernels[0].code
    asm = (ZEBINS / "bmg" / "attention.attention_scores.asm").read_text()
    offsets = np.array([int(word, 16) for word in re.findall(r"^/\* \[([0-9A-F]+)\]", asm, re.MULTILINE)], np.uint64)
    which = _zipf(rng, KERNELS, KERNEL_ZIPF, launches)
    which[:KERNELS] = np.arange(KERNELS)  # each one at least once
    with path.open("wb") as file:
        writer = CaptureWriter(file)
        writer.write("kernel", _modules(code))
        writer.write("launch", _launches(rng, which, seconds, len(code)))
        writer.write("stack", _stacks(rng))
        writer.write("mapping", _mappings())
        patterns = _patterns(rng)
        for first in range(0, records, RECORDS_PER_GROUP):
            here = min(RECORDS_PER_GROUP, records - first)
            running = (np.arange(first, first + here) * (launches / records)).astype(np.int64)
            kernel = which[np.maximum(running - QUEUED - rng.integers(0, RUNNING, here), 0)]
            rank = _zipf(rng, STALLING, INSTRUCTION_ZIPF, here)
            instruction = (rank * 97 + kernel * 31) % len(offsets)  # the hottest one is another in each kernel
            pattern = (kernel * 1009 + instruction * 7) % KINDS_OF_INSTRUCTIONS * VARIANTS
            pattern += rng.integers(0, VARIANTS, here)
            address = _kernel_addresses()[kernel] + offsets[instruction]
            low = (address & np.uint64(0xFFFF_FFFF)) >> np.uint64(3)
            words = low | patterns[0][pattern], patterns[1][pattern]
            writer.write("stall", _stalls(*words, first / records, records, seconds))
        writer.close(
            {
                "clock": {"monotonic_ns": 0, "realtime_ns": 0},
                "end_ns": int(seconds * 1e9),
                "streams": [{"layout": XE2.name, "ip_version": [20, 1, 0]}],
                "totals": {"stalls": records, "launches": launches},
                "losses": [],
            }
        )


def _zipf(rng: np.random.Generator, kinds: int, power: float, count: int) -> NDArray[np.int64]:
    """Ranks by Zipf's law, of so many kinds."""
    weights = 1.0 / np.arange(1, kinds + 1) ** power
    until = np.cumsum(weights) / weights.sum()
    return np.minimum(np.searchsorted(until, rng.random(count)), kinds - 1)


def _kernel_addresses() -> NDArray[np.uint64]:
    return (FIRST_ADDRESS + ADDRESS_STEP * np.arange(KERNELS)).astype(np.uint64)


def _modules(code: bytes) -> pa.StructArray:
    rows = []
    addresses = _kernel_addresses().tolist()
    for number in range(MODULES):
        mine = range(number * KERNELS // MODULES, (number + 1) * KERNELS // MODULES)
        elf = zebin([kernel_section(f"kernel_{index}", code, addresses[index]) for index in mine])
        about = {"time_ns": 0, "pid": 100 + number % PROCESSES, "path": f"/tmp/module_{number}.elf"}
        rows.append(about | {"digest": number.to_bytes(32, "little"), "size": len(elf), "elf": elf})
    return pa.array(rows, KINDS["kernel"])


def _launches(rng: np.random.Generator, which: NDArray[np.int64], seconds: float, code_bytes: int) -> pa.StructArray:
    count = len(which)
    pids = 100 + which // (KERNELS // MODULES) % PROCESSES
    columns: dict[str, Any] = {
        "time_ns": (np.arange(count) * (seconds * 1e9 / count)).astype(np.uint64),
        "pid": pids.astype(np.uint32),
        "tid": pids.astype(np.uint32),
        "cpu": np.zeros(count, np.uint32),
        "comm": np.full(count, "app"),
        "iba": np.zeros(count, np.uint64),
        "address": _kernel_addresses()[which],
        "size": np.full(count, code_bytes, np.uint64),
        "stack": 1 + (which + (rng.random(count) < SECOND_PLACE)).astype(np.uint64) % np.uint64(STACKS),
        "name": np.full(count, ""),
        "flags": np.zeros(count, np.uint32),
    }
    fields = list(KINDS["launch"])
    arrays = [pa.array(columns[each.name]) if each.name in columns else pa.nulls(count, each.type) for each in fields]
    return pa.StructArray.from_arrays(arrays, fields=fields)


def _stacks(rng: np.random.Generator) -> pa.StructArray:
    start, length = _libc()[:2]
    rows = [
        {
            "id": 1 + number,
            "time_ns": 0,
            "pid": 100 + number % PROCESSES,
            "truncated": False,
            "ips": (start + rng.integers(0, length, STACK_FRAMES)).tolist(),
        }
        for number in range(STACKS)
    ]
    return pa.array(rows, KINDS["stack"])


def _mappings() -> pa.StructArray:
    start, length, offset, path = _libc()
    where = {"time_ns": 0, "start": start, "length": length, "offset": offset, "path": path, "build_id": None}
    return pa.array([{"pid": 100 + number, **where} for number in range(PROCESSES)], KINDS["mapping"])


def _libc() -> tuple[int, int, int, str]:
    """Where this process has the code of its C library: start, length, offset in the file, path."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libc.so" in line and " r-xp " in line:
            span, _, offset, _, _, path = line.split(maxsplit=5)
            start, end = (int(word, 16) for word in span.split("-"))
            return start, end - start, int(offset, 16), path
    raise RuntimeError("this process has no libc.so")


def _patterns(rng: np.random.Generator) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The counters' bits in both words: each kind of instruction has 1 to 4 reasons, with 1 to 7 samples each."""
    words = np.zeros((2, KINDS_OF_INSTRUCTIONS, VARIANTS), np.uint64)
    order = rng.random((KINDS_OF_INSTRUCTIONS, len(REASONS))).argsort(axis=1)
    has = order < rng.integers(1, 5, KINDS_OF_INSTRUCTIONS)[:, None]
    for column, reason in enumerate(REASONS):
        word, shift = divmod(FIRST_BITS[reason], 64)
        count = (rng.integers(1, 8, words.shape[1:]) * has[:, column, None]).astype(np.uint64)
        words[word] |= count << np.uint64(shift)
        if shift > 56:
            words[word + 1] |= count >> np.uint64(64 - shift)
    return words[0].ravel(), words[1].ravel()


def _stalls(
    first_words: NDArray[np.uint64], second_words: NDArray[np.uint64], begun: float, records: int, seconds: float
) -> pa.StructArray:
    """One row group; it begins after the part `begun` of the whole recording."""
    offsets = np.append(np.arange(0, len(first_words), RECORDS_PER_READ), len(first_words)).astype(np.int32)
    reads = len(offsets) - 1
    times = ((begun + offsets[1:] / records) * seconds * 1e9).astype(np.uint64)
    type_ = KINDS["stall"].field("w0").type
    lists = [
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(words), type=type_)
        for words in (first_words, second_words)
    ]
    begins = np.append(times[:1], times[:-1])
    columns = [pa.array(times), pa.array(begins), pa.array(np.zeros(reads, np.uint16)), *lists, pa.nulls(reads, type_)]
    return pa.StructArray.from_arrays(columns, fields=list(KINDS["stall"]))
