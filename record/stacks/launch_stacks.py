"""The `stack` rows of a capture: each distinct stack once, and finished stacks in place of what BPF sent."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS, make_rows
from iaprof.formats.distinct import numbered
from iaprof.formats.wire.launches import KEPT_SHIFT, MAX_DEPTH, stack_dtype
from iaprof.formats.wire.unwind_rules import Mark, Walked
from iaprof.record.stacks.ends import NO_GUESS, StackEnds
from iaprof.record.stacks.id_map import IdMap
from iaprof.record.stacks.python_stacks import PythonStacks
from iaprof.record.stacks.walks import StackIds, WalkedStacks, Walks

ENDED = {
    Walked.WHOLE: "whole",
    Walked.DEEP: "deep",
    Walked.MISSED: "unfinished",
    Walked.NOWHERE: "nowhere",
    Walked.MEMORY: "memory",
    Walked.DAMAGED: "damaged",
    Walked.STUCK: "stuck",
}
"""How a stack ended, in the capture's words."""
_NAMES = np.array([ENDED[ending] for ending in Walked])
_GATHERED_BYTES = 4 << 20


class LaunchStacks:
    """Makes `stack` rows, and remembers which row each stack's id stands for."""

    def __init__(
        self, walks: Walks, ends: StackEnds, python: PythonStacks, follows_frame_pointers: bool = False
    ) -> None:
        """Begins without stacks.

        Args:
            walks: locates addresses.
            ends: gets where stacks end.
            python: has the frames of Python.
            follows_frame_pointers: whether BPF walked by frame pointers: then stacks are cut, and none is finished
                later.
        """
        self._walks, self._ends, self._python, self._follows_frame_pointers = (
            walks,
            ends,
            python,
            follows_frame_pointers,
        )
        self._row_ids = IdMap()  # by id: the id of the row, which is that of the first equal stack
        self._first_ids = IdMap()  # by content: the id of the first stack with it
        self._content_ids = StackIds()
        self._unfinished: dict[int, tuple[NDArray[np.void], int]] = {}  # by id: BPF's part, and its depth limit
        self._early: dict[int, np.void] = {}  # by id: stacks finished before BPF's part has come
        self._late: list[int] = []  # ids of stacks finished after the recording had ended
        self._gathered: dict[int, list[NDArray[np.void]]] = {}  # records without rows yet, by their depth limit
        self._gathered_bytes = 0

    def gather(self, payload: bytes, depth: int) -> list[pa.StructArray]:
        """Adds records as they are sent. Makes rows of many at a time, as those of one take as long as those of many.

        Args:
            payload: of stack_dtype(depth)[n].
            depth: the most addresses of a stack.

        Raises:
            ValueError: there can be no such records.
        """
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError("its stacks have an absurd depth")
        if len(records := np.frombuffer(payload, stack_dtype(depth))):
            self._gathered.setdefault(depth, []).append(records)
            self._gathered_bytes += records.nbytes
        return self.gathered() if self._gathered_bytes >= _GATHERED_BYTES else []

    def gathered(self) -> list[pa.StructArray]:
        """Makes `stack` rows of the gathered records, as `rows` does."""
        gathered, self._gathered, self._gathered_bytes = self._gathered, {}, 0
        return [self.rows(np.concatenate(records), depth) for depth, records in gathered.items()]

    def rows(self, records: NDArray[np.void], depth: int, late: bool = False) -> pa.StructArray:
        """Makes `stack` rows of those stacks that are new and finished.

        Args:
            records: stack_dtype(depth)[n].
            depth: the most addresses of a stack.
            late: whether they were finished after the recording had ended.
        """
        if self._follows_frame_pointers:
            return self._rows(records, depth)
        is_missed = records["walked"] == Walked.MISSED
        early = []
        missed = records[is_missed]
        for record, has_row in zip(missed, self._row_ids.has(missed["id"]).tolist(), strict=True):
            if not has_row:
                self._unfinished[int(record["id"])] = record, depth
            rest = self._early.get(int(record["id"]))
            if rest is not None and rest.dtype == records.dtype:  # else somebody has made this spool
                early.append(self._early.pop(int(record["id"])))
        finished = self._without_early(records[~is_missed])
        if early:
            finished = np.concatenate([np.array(early), finished])
        if late:
            self._late += finished["id"][~self._row_ids.has(finished["id"])].tolist()
        return self._rows(self._joined(finished, depth), depth)

    def rows_of_unfinished(self) -> pa.StructArray:
        """Makes `stack` rows of the stacks that were never finished, once all other stacks were added."""
        unfinished, self._unfinished = self._unfinished, {}
        parts = [pa.array([], KINDS["stack"])]
        early, self._early = self._early, {}
        for record in early.values():  # BPF's part came into the previous file, or was lost
            record["depth"], record["walked"] = 0, Walked.MISSED
            parts.append(self._rows(np.array([record]), len(record["ips"])))
        for depth in sorted({depth for _, depth in unfinished.values()}):
            parts.append(
                self._rows(np.array([record for record, own_depth in unfinished.values() if own_depth == depth]), depth)
            )
        return pa.concat_arrays(parts)

    def unfinished(self) -> set[int]:
        """Returns the ids of the stacks that are not finished."""
        return set(self._unfinished)

    def _without_early(self, records: NDArray[np.void]) -> NDArray[np.void]:
        """Sets stacks aside that were finished from the end of BPF's walk before that came; returns the others."""
        kept = (records["walked"] >> np.uint64(KEPT_SHIFT)) > 0
        is_awaited = np.fromiter((number in self._unfinished for number in records["id"].tolist()), bool, len(records))
        is_early: NDArray[np.bool_] = kept & ~is_awaited & ~self._row_ids.has(records["id"])
        self._early |= {int(record["id"]): record for record in records[is_early].copy()}
        others: NDArray[np.void] = records[~is_early]
        return others

    def _joined(self, records: NDArray[np.void], depth: int) -> NDArray[np.void]:
        """Puts the addresses that BPF sent before those of stacks that were finished from the end of BPF's walk."""
        kept = records["walked"] >> np.uint64(KEPT_SHIFT)
        if kept.any():
            records = records.copy()
        for index in np.flatnonzero(kept).tolist():
            record, before = records[index], self._unfinished.get(int(records[index]["id"]))
            if before is None:  # a row has been made of it
                continue
            first = before[0]["ips"][: int(kept[index])]
            ips = np.concatenate([first, record["ips"][: int(record["depth"])]])[:depth]
            record["ips"][: len(ips)], record["depth"] = ips, len(ips)
            for name in ("guessed", "interrupted"):
                from_bpf, from_learner = _bits(before[0][name]), _bits(record[name])[: MAX_DEPTH - len(first)]
                # Only BPF knows how it found the address where the two parts meet.
                from_learner[:1] |= from_bpf[len(first) : len(first) + 1]
                joined = np.concatenate([from_bpf[: len(first)], from_learner])
                record[name] = np.packbits(joined, bitorder="little").view(np.uint64)
            record["walked"] &= np.uint64((1 << KEPT_SHIFT) - 1)
        for number in records["id"].tolist():
            self._unfinished.pop(number, None)
        return records

    def _rows(self, records: NDArray[np.void], depth: int) -> pa.StructArray:
        # BPF sends a stack again if it has forgotten its id.
        records = records[np.sort(np.unique(records["id"], return_index=True)[1])]
        records = records[~self._row_ids.has(records["id"])]
        depths = np.minimum(records["depth"], depth).astype(np.int64)
        inside = np.arange(depth) < depths[:, None]
        stacks = WalkedStacks(records["pid"], records["time"], depths, records["ips"][inside])
        walked = np.minimum(records["walked"], Walked.MISSED + np.uint64(len(Walked))).astype(np.uint8)
        walked[walked >= len(Walked)] = Walked.MISSED
        marks = _bits(records["guessed"])[:, :depth] * np.uint8(Mark.GUESSED)
        marks |= _bits(records["interrupted"])[:, :depth] * np.uint8(Mark.INTERRUPTED)
        marks[:, 0] &= ~np.uint8(Mark.INTERRUPTED)  # the innermost address is never a return address
        marks = marks[inside[:, : marks.shape[1]]]
        if self._follows_frame_pointers:
            stacks, ends = self._walks.cut(stacks)
            walked[(walked != Walked.DEEP) | (stacks.depths < depths)] = Walked.MISSED
            marks = np.zeros(len(stacks.ips), np.uint8)
        # Stacks with the same addresses that ended differently, or were found by other guesses, are different stacks.
        owners = stacks.pids.astype(np.uint64) | walked.astype(np.uint64) << np.uint64(32)
        frames = self._python.frames(records["id"])
        owners ^= self._python.content_hashes(frames)
        guesses = (marks & np.uint8(Mark.GUESSED)).astype(np.uint64) << np.uint64(63)  # where no address has a bit
        contents = self._content_ids.hashes(stacks.depths, stacks.ips ^ guesses, owners)
        self._first_ids.add(contents, records["id"])
        firsts = self._first_ids.get(contents, records["id"])
        self._row_ids.add(records["id"], firsts)
        new = firsts == records["id"]
        chosen = np.flatnonzero(new)
        kept, how = stacks.take(chosen), walked[new]
        truncated = how == Walked.DEEP
        guessed = _bits(records["guessed"][new]) * np.uint8(not self._follows_frame_pointers)
        ends = ends.take(new) if self._follows_frame_pointers else self._walks.last_frames(kept, how)
        self._ends.add(records["id"][new], kept.pids, ends, truncated, self._guessed_in(kept, guessed))
        python, python_ended = self._python.columns(frames, new)
        columns = {
            "id": records["id"][new],
            "time_ns": kept.times,
            "pid": kept.pids,
            "truncated": truncated,
            "ips": kept.lists(),
            "ended": pa.nulls(len(how), pa.string())
            if self._follows_frame_pointers
            else pa.array(_NAMES[how].tolist(), pa.string()),
            "marks": _marks_of(np.repeat(new, stacks.depths), marks, kept.depths),
            "python": python,
            "python_ended": python_ended,
        }
        return make_rows("stack", columns)

    def _guessed_in(self, stacks: WalkedStacks, guessed: NDArray[np.uint8]) -> NDArray[np.int32]:
        """Returns the module in whose code the first guess of each stack was made: int32[n], NO_GUESS without one."""
        modules = np.full(len(stacks.pids), NO_GUESS, np.int32)
        has = np.flatnonzero(guessed.any(axis=1) & (stacks.depths > 0))
        if len(has):
            # The frame whose caller was guessed.
            frames = np.clip(guessed[has].argmax(axis=1) - 1, 0, stacks.depths[has] - 1)
            starts = (np.cumsum(stacks.depths) - stacks.depths)[has]
            places = stacks.ips[starts + frames] - (frames > 0).astype(np.uint64)  # of calls
            modules[has] = self._walks.modules_of(stacks.pids[has], places, stacks.times[has])
        return modules

    def late(self, sent: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Returns whether each stack was finished after the recording had ended, by the ids in launch records."""
        return np.isin(sent, np.array(self._late, np.uint64))

    def ids(self, sent: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns ids in the capture for ids in launch records; an unknown id stays as it is."""
        distinct, which = numbered(sent)
        return self._row_ids.get(distinct, distinct)[which]


def _bits(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Unpacks words to bits, along the last axis."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")


def _marks_of(chosen: NDArray[np.bool_], marks: NDArray[np.uint8], depths: NDArray[np.int64]) -> pa.Array:
    """Makes the column `marks`; null for a stack without marks."""
    marks = marks[chosen]
    rows = np.repeat(np.arange(len(depths)), depths)
    without = np.bincount(rows, marks > 0, len(depths)) == 0
    lengths = np.where(without, 0, depths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    type_ = KINDS["stack"].field("marks").type
    values = pa.array(marks[~without[rows]] if len(rows) else marks, pa.uint8())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=type_, mask=pa.array(without))
