"""GPU render stages: the work of a GPU's queues, as drivers write it (gpu_render_stage_event.proto).

A queue is shown as a thread, and its GPU as a process, with numbers that no pid and no track has. A stage is a slice,
with category `kernel` if the driver says that it computes, otherwise `gpu_render_stage`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.reading.answer import ABSENT, MADE, NO_TEXT
from iaprof.timelines.reading.event_columns import Texts
from iaprof.timelines.reading.perfetto import wire
from iaprof.timelines.reading.perfetto.protos import (
    Dim3,
    ExtraData,
    GpuRenderStageEvent,
    InternedData,
    Launch,
    Specification,
)
from iaprof.timelines.reading.perfetto.sequences import Sequences
from iaprof.timelines.reading.perfetto.tracks import Name
from iaprof.timelines.reading.perfetto.wire import Fields, Places

_FIRST = MADE + (1 << 41)  # above the numbers of tracks
_MOST_QUEUES = 1 << 12
_MOST_LISTED = 1 << 10  # queues and stages in the older form
_MOST_NAME = 1 << 14  # bytes
_LONGEST = 1 << 60  # ns
_COMPUTE, _OTHERS = "kernel", "gpu_render_stage"
_MEMBERS = {
    "event_id": GpuRenderStageEvent.EVENT_ID, "context": GpuRenderStageEvent.CONTEXT,
    "submission_id": GpuRenderStageEvent.SUBMISSION_ID,
    "render_target_handle": GpuRenderStageEvent.RENDER_TARGET_HANDLE,
    "render_pass_handle": GpuRenderStageEvent.RENDER_PASS_HANDLE,
    "render_pass_instance_id": GpuRenderStageEvent.RENDER_PASS_INSTANCE_ID,
    "command_buffer_handle": GpuRenderStageEvent.COMMAND_BUFFER_HANDLE,
}  # fmt: skip


@dataclass
class Queues:
    """The queues of a trace and the lists in its specifications, kept from batch to batch."""

    numbers: dict[tuple[int, str], int] = field(default_factory=dict)  # by GPU and name
    gpus: set[int] = field(default_factory=set)  # that have a name
    listed_queues: list[str] = field(default_factory=list)
    listed_stages: list[str] = field(default_factory=list)

    def specify(self, message: bytes) -> None:
        """Reads the older form: lists of queues and stages, to which events refer by index."""
        lists: dict[int, list[str]] = {Specification.HW_QUEUE: [], Specification.STAGE: []}
        for number, kind, value, place in wire.message_fields(message)[0]:
            if kind == wire.BYTES and number in lists and len(lists[number]) < _MOST_LISTED:
                described = message[place : place + value]
                texts = [
                    described[at : at + length]
                    for inner, form, length, at in wire.message_fields(described)[0]
                    if inner == Specification.NAME and form == wire.BYTES
                ]
                lists[number].append(_text(texts[-1] if texts else b""))
        self.listed_queues = lists[Specification.HW_QUEUE]
        self.listed_stages = lists[Specification.STAGE]

    def place(self, gpu: int, name: str) -> tuple[int, int, list[Name]]:
        """Returns the pid and tid of a queue, and names that are new."""
        pid, names = _FIRST + (gpu & 0xFFFFFFFF), []
        if gpu not in self.gpus and len(self.gpus) < _MOST_QUEUES:
            self.gpus.add(gpu)
            names.append(Name("process_name", pid, 0, f"GPU {gpu}"))
        key = (gpu, name)
        if key not in self.numbers:
            if len(self.numbers) >= _MOST_QUEUES:
                return pid, _FIRST + _MOST_QUEUES, names
            self.numbers[key] = len(self.numbers)
            names.append(Name("thread_name", pid, _FIRST + self.numbers[key], name))
        return pid, _FIRST + self.numbers[key], names


@dataclass
class Stages:
    """The stages of a batch, n of them."""

    slices: dict[str, NDArray[Any]]
    names: list[Name]  # of queues and GPUs that are new
    packets: int  # that are stages, with and without a time


@dataclass
class Reader:
    """Reads the stages of a batch."""

    data: NDArray[np.uint8]
    content: bytes
    sequences: Sequences
    queues: Queues
    texts: Texts
    dropped: Counter[str]

    def read(
        self, spans: tuple[Places, Places, Places], generation: NDArray[np.int64], valid: NDArray[np.bool_],
        times: NDArray[np.int64], has_time: NDArray[np.bool_],
    ) -> Stages:  # fmt: skip
        """Reads stages.

        Args:
            spans: packets with a stage, and where it begins and ends.
            generation: of all packets.
            valid: whether nothing of the generation was lost.
            times: of packets, in ns.
            has_time: which packets have one.
        """
        owner, starts, ends = spans
        if not len(owner):
            return Stages({}, [], 0)
        fields = wire.fields(self.data, starts, ends)
        described, begins, stops = fields.spans(GpuRenderStageEvent.SPECIFICATIONS)
        for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True):
            self.queues.specify(self.content[begin:stop])
        only_described = np.zeros(len(owner), bool)
        only_described[described] = True
        only_described &= ~fields.has(GpuRenderStageEvent.EVENT_ID)
        good, timed = valid[owner] & ~fields.damaged, has_time[owner]
        self.dropped["damaged"] += int((fields.damaged & ~only_described).sum())
        self.dropped["after lost packets"] += int((~valid[owner] & ~fields.damaged & ~only_described).sum())
        self.dropped["without a time"] += int((good & ~timed & ~only_described).sum())
        rows = np.flatnonzero(good & timed & ~only_described)
        count = int((~only_described).sum())
        if not len(rows):
            return Stages({}, [], count)
        generations = generation[owner]
        name, is_compute = self._names(fields, rows, generations)
        pid, tid, names = self._places(fields, rows, generations)
        duration = np.minimum(fields.column(GpuRenderStageEvent.DURATION)[rows], np.uint64(_LONGEST))
        gpu = fields.signed(GpuRenderStageEvent.GPU_ID)[rows]
        slices: dict[str, NDArray[Any]] = {
            "time_ns": times[owner[rows]], "pid": pid, "tid": tid, "name": name,
            "category": np.where(is_compute, self.texts[_COMPUTE], self.texts[_OTHERS]).astype(np.int32),
            "duration_ns": duration.astype(np.int64), "device": gpu,
        }  # fmt: skip
        return Stages(slices | self._args(fields, rows), names, count)

    def _names(
        self, fields: Fields, rows: Places, generations: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Returns the codes of names, and which stages compute."""
        own: dict[int, str] = {}
        owner, starts, ends = fields.spans(GpuRenderStageEvent.NAME)
        for row, start, end in zip(owner.tolist(), starts.tolist(), ends.tolist(), strict=True):
            own[row] = _text(self.content[start:end])
        columns = [
            generations[rows].tolist(), fields.column(GpuRenderStageEvent.NAME_IID)[rows].tolist(),
            fields.column(GpuRenderStageEvent.STAGE_IID)[rows].tolist(),
            fields.signed(GpuRenderStageEvent.STAGE_ID)[rows].tolist(),
        ]  # fmt: skip
        codes, computes = np.empty(len(rows), np.int32), np.zeros(len(rows), bool)
        known: dict[tuple[int, ...], int] = {}
        for place, (row, *key) in enumerate(zip(rows.tolist(), *columns, strict=True)):
            generation, name_iid, stage_iid, stage_id = key
            computes[place] = (generation, stage_iid) in self.sequences.computing
            if row in own:
                codes[place] = self.texts[own[row]]
                continue
            if tuple(key) not in known:
                text = self._interned(InternedData.EVENT_NAMES, generation, name_iid)
                text = text or self._interned(InternedData.GPU_SPECIFICATIONS, generation, stage_iid)
                text = text or _listed(self.queues.listed_stages, stage_id, f"stage {stage_iid or stage_id}")
                known[tuple(key)] = self.texts[text]
            codes[place] = known[tuple(key)]
        return codes, computes

    def _interned(self, kind: int, generation: int, iid: int) -> str:
        text = self.sequences.texts.get((kind, generation), {}).get(iid, b"") if iid else b""
        return _text(text)

    def _places(
        self, fields: Fields, rows: Places, generations: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Name]]:
        """Returns the pids and tids of queues, and names that are new."""
        columns = np.column_stack(
            [
                generations[rows], fields.signed(GpuRenderStageEvent.GPU_ID)[rows],
                fields.signed(GpuRenderStageEvent.HW_QUEUE_IID)[rows],
                fields.signed(GpuRenderStageEvent.HW_QUEUE_ID)[rows],
            ]
        )  # fmt: skip
        distinct, first, of_row = np.unique(columns, axis=0, return_index=True, return_inverse=True)
        places, names = np.zeros((len(distinct), 2), np.int64), []
        for number in np.argsort(first).tolist():  # queues are numbered in the order in which they first occur
            generation, gpu, iid, listed = distinct[number].tolist()
            name = self._interned(InternedData.GPU_SPECIFICATIONS, generation, iid)
            name = name or _listed(self.queues.listed_queues, listed, f"queue {iid or listed}")
            *places[number], new = self.queues.place(gpu, name)
            names += new
        found = places[of_row.reshape(-1)]
        return found[:, 0], found[:, 1], names

    def _args(self, fields: Fields, rows: Places) -> dict[str, NDArray[Any]]:
        """Returns JSON texts of the other facts about stages."""
        members: dict[int, list[str]] = {row: [] for row in rows.tolist()}
        for name, number in _MEMBERS.items():
            at = fields.of(number, wire.VARINT)
            for row, value in zip(fields.owner[at].tolist(), fields.value[at].tolist(), strict=True):
                if row in members:
                    members[row].append(f'"{name}":{value}')
        for row, text in (*self._sizes(fields), *self._extra(fields)):
            if row in members:
                members[row].append(text)
        used = [place for place, row in enumerate(rows.tolist()) if members[row]]
        texts = [f"{{{','.join(members[int(rows[place])])}}}".encode("utf-8", "replace") for place in used]
        return {
            "args_row": np.array(used, np.int64), "args_length": np.array([*map(len, texts)], np.int64),
            "args": np.frombuffer(b"".join(texts), np.uint8),
        }  # fmt: skip

    def _sizes(self, fields: Fields) -> Iterator[tuple[int, str]]:
        """Yields the sizes of launches, with the names that PyTorch's profiler uses."""
        owner, starts, ends = fields.spans(GpuRenderStageEvent.LAUNCH)
        launches = wire.fields(self.data, starts, ends)
        for name, number in (("grid", Launch.GRID_SIZE), ("block", Launch.WORKGROUP_SIZE)):
            of, begins, stops = launches.spans(number)
            sizes = wire.fields(self.data, begins, stops)
            axes = [sizes.column(axis).tolist() for axis in (Dim3.X, Dim3.Y, Dim3.Z)]
            for row, *size in zip(owner[of].tolist(), *axes, strict=True):
                yield row, f'"{name}":{json.dumps(size)}'

    def _extra(self, fields: Fields) -> Iterator[tuple[int, str]]:
        """Yields the names and values that drivers add."""
        owner, starts, ends = fields.spans(GpuRenderStageEvent.EXTRA_DATA)
        for row, start, end in zip(owner.tolist(), starts.tolist(), ends.tolist(), strict=True):
            message = self.content[start:end]
            texts = {
                number: _text(message[place : place + value])
                for number, kind, value, place in wire.message_fields(message)[0]
                if kind == wire.BYTES
            }
            yield row, f"{json.dumps(texts.get(ExtraData.NAME, ''))}:{json.dumps(texts.get(ExtraData.VALUE, ''))}"


def _listed(texts: list[str], place: int, otherwise: str) -> str:
    return (texts[place] if 0 <= place < len(texts) else "") or otherwise


def _text(content: bytes) -> str:
    return content[:_MOST_NAME].decode("utf-8", "replace")


def joined(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Concatenates two tables of slices."""
    if not one or not other:
        return one or other
    counts = len(one["time_ns"]), len(other["time_ns"])
    found = {}
    for name in {**one, **other}:
        like = one[name] if name in one else other[name]
        if name.startswith("args"):
            columns = [one.get(name, like[:0]), other.get(name, like[:0]) + (counts[0] if name == "args_row" else 0)]
        else:
            # Slices without a phase are complete ones (X), which is the phase 0.
            absent = (
                0
                if name == "phase"
                else np.nan
                if like.dtype.kind == "f"
                else NO_TEXT
                if like.itemsize == 4
                else ABSENT
            )
            columns = [
                table.get(name, np.full(count, absent, like.dtype))
                for table, count in zip((one, other), counts, strict=True)
            ]
        found[name] = np.concatenate([column.astype(like.dtype, copy=False) for column in columns])
    return found
