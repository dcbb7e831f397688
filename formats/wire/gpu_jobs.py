"""Records of the tracepoints of the kernel's GPU scheduler, as perf writes them: jobs that are queued, run, and done.

xe and most other GPU drivers hand what a process submits to this scheduler (drivers/gpu/drm/scheduler), which gives the
jobs of each queue to the GPU in their order. Linux 6.17 made its tracepoints stable, with other names and fields than
before; so each has a format that the kernel tells (`/sys/kernel/tracing/events/gpu_scheduler/*/format`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.sideband import LOST, lost_of, records_of

SAMPLE = 9  # PERF_RECORD_SAMPLE
TEXT_BYTES = 40  # longer names of queues and devices are cut
_PID, _TIME, _RAW = 8, 16, 36  # offsets in a record with TID, TIME, CPU and RAW
_ID, _FLAGS, _LEAST, _MOST_BYTES = 0, 2, 8, 1 << 16  # offsets in the raw data, its least and largest sizes
_INTERRUPTS_OFF = 0x01  # TRACE_FLAG_IRQS_OFF


class JobStep(IntEnum):
    """What happened to a job."""

    QUEUED = 0  # its process submitted it
    RUN = 1  # the scheduler gave it to the GPU
    DONE = 2  # the scheduler heard that it has ended


JOB_EVENT = np.dtype(
    [
        ("time", "<u8"),  # CLOCK_MONOTONIC, ns
        ("key", "<u8", (2,)),  # names the job until it is done: its fence's context and number, or address and 0
        ("pid", "<u4"),  # of the process that was running: it submitted the job only if it is QUEUED
        ("step", "u1"),
        ("at_once", "?"),  # DONE without a callback of the driver's fence: the scheduler itself ended it
        ("queue", f"S{TEXT_BYTES}"),
        ("device", f"S{TEXT_BYTES}"),
    ]
)


@dataclass(frozen=True)
class JobFormat:
    """Where the fields of a tracepoint are in its raw data: offsets in bytes, -1 for none."""

    id: int
    step: int
    key: int
    second_key: int
    queue: int
    device: int


def formats_to_json(formats: Sequence[JobFormat]) -> bytes:
    """Encodes the formats as a line of JSON, which precedes records in the spool."""
    return json.dumps([astuple(each) for each in formats]).encode() + b"\n"


def formats_from_json(line: bytes) -> list[JobFormat]:
    """Decodes `formats_to_json`; raises ValueError or TypeError if it is something else."""
    formats = [JobFormat(*map(int, each)) for each in json.loads(line)]
    if not formats or any(each.step not in tuple(JobStep) for each in formats):
        raise ValueError("a tracepoint is of an unknown step")
    offsets = [(each.key, each.second_key, each.queue, each.device) for each in formats]
    if any(not -1 <= offset < _MOST_BYTES for each in offsets for offset in each) or any(
        each[0] < 0 for each in offsets
    ):
        raise ValueError("a tracepoint has impossible fields")
    return formats


def format_of(step: JobStep, text: str) -> JobFormat | None:
    """Parses a tracepoint's `format`; returns None if it lacks what names a job."""
    fields: dict[str, int] = {}
    number = -1
    for line in text.splitlines():
        if line.startswith("ID:"):
            number = int(line[3:])
        members = dict(part.strip().split(":", 1) for part in line.split(";") if ":" in part)
        if "field" in members and "offset" in members:
            fields[members["field"].removesuffix("[]").split()[-1].lstrip("*")] = int(members["offset"])
    key, second = ("fence_context", "fence_seqno") if "fence_context" in fields else ("fence", "")
    if number < 0 or key not in fields:
        return None
    return JobFormat(number, step, fields[key], *(fields.get(name, -1) for name in (second, "name", "dev")))


def decode(formats: Sequence[JobFormat], data: bytes) -> tuple[NDArray[np.void], int]:
    """Decodes records.

    Args:
        formats: of the tracepoints.
        data: whole records in the order of one CPU's buffer.

    Returns:
        JOB_EVENT[n], and how many records the kernel dropped for lack of space.

    Raises:
        ValueError: `data` is not records of these tracepoints.
    """
    found, whole = records_of(data)
    if whole != len(data):
        raise ValueError(f"{len(data) - whole} of its bytes are not records")
    lost = sum(lost_of(data, start) for kind, _, start, end in found if kind == LOST and end >= start + 16)
    begins = np.array([start - 8 for kind, _, start, _ in found if kind == SAMPLE], np.int64)
    ends = np.array([end for kind, _, _, end in found if kind == SAMPLE], np.int64)
    if (ends - begins < _RAW + _LEAST).any():
        raise ValueError("a sample has no raw data")
    source = np.frombuffer(data, np.uint8)
    numbers = _gather(source, begins + _RAW + _ID, 2).view("<u2").ravel()
    events = []
    for each in formats:
        rows = np.flatnonzero(numbers == each.id)
        events.append(_events(source, begins[rows], ends[rows], each))
    if sum(map(len, events)) != len(begins):
        raise ValueError("a sample is of an unknown tracepoint")
    return np.concatenate(events) if events else np.empty(0, JOB_EVENT), lost


def _events(
    source: NDArray[np.uint8], begins: NDArray[np.int64], ends: NDArray[np.int64], of: JobFormat
) -> NDArray[np.void]:
    events = np.zeros(len(begins), JOB_EVENT)
    raw = begins + _RAW
    widths: Mapping[int, int] = {of.key: 8, of.second_key: 8, of.queue: 4, of.device: 4}
    needed = max(offset + width for offset, width in widths.items())
    if len(begins) and int((ends - raw).min()) < needed:
        raise ValueError("a sample is shorter than its tracepoint's fields")
    events["time"] = _gather(source, begins + _TIME, 8).view("<u8").ravel()
    events["pid"] = _gather(source, begins + _PID, 4).view("<u4").ravel()
    events["step"] = of.step
    for number, offset in enumerate((of.key, of.second_key)):
        if offset >= 0:
            events["key"][:, number] = _gather(source, raw + offset, 8).view("<u8").ravel()
    if of.step == JobStep.DONE and len(begins):
        events["at_once"] = source[raw + _FLAGS] & _INTERRUPTS_OFF == 0
    for name, offset in (("queue", of.queue), ("device", of.device)):
        if offset >= 0:
            events[name] = _texts(source, raw, ends, _gather(source, raw + offset, 4).view("<u4").ravel())
    return events


def _texts(
    source: NDArray[np.uint8], raw: NDArray[np.int64], ends: NDArray[np.int64], where: NDArray[np.uint32]
) -> NDArray[np.bytes_]:
    """Returns the texts that `__data_loc` fields name: offset in the raw data, and length << 16."""
    begin = raw + (where & 0xFFFF)
    length = np.minimum(np.maximum(np.minimum(begin + (where >> 16), ends) - begin, 0), TEXT_BYTES)
    steps = np.arange(TEXT_BYTES)
    inside = steps < length[:, None]
    characters = (
        source[np.where(inside, begin[:, None] + steps, 0)] if len(source) else np.zeros((0, TEXT_BYTES), np.uint8)
    )
    inside &= np.logical_and.accumulate(characters != 0, axis=1)
    return np.where(inside, characters, 0).astype(np.uint8).view(f"S{TEXT_BYTES}").ravel()


def _gather(source: NDArray[np.uint8], at: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """Returns the bytes at these places: uint8[n, width]."""
    return source[at[:, None] + np.arange(width)] if len(at) else np.empty((0, width), np.uint8)
