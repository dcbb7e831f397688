"""Stacks of launches for the capture: each distinct one once, and finished ones in place of what BPF sent."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.wire.launches import KEPT_SHIFT, MAX_DEPTH
from iaprof.formats.wire.unwind_rules import Mark, Walked
from iaprof.record.stacks.ends import NO_GUESS, StackEnds
from iaprof.record.stacks.python_stacks import PythonStacks
from iaprof.record.stacks.stack_ids import StackIds
from iaprof.record.stacks.walks import Walked as Stacks, Walks

ENDED = {
    Walked.WHOLE: "whole",
    Walked.DEEP: "deep",
    Walked.MISSED: "unfinished",
    Walked.NOWHERE: "nowhere",
    Walked.MEMORY: "memory",
    Walked.DAMAGED: "damaged",
    Walked.STUCK: "stuck",
}
"""How a stack ended, as the capture says it."""
_NAMES = np.array([ENDED[each] for each in Walked])


class LaunchStacks:
    """Makes rows of stacks, and remembers under which id each was kept."""

    def __init__(
        self, walks: Walks, ends: StackEnds, python: PythonStacks, follows_frame_pointers: bool = False
    ) -> None:
        """Begins with none.

        Args:
            walks: knows where addresses lie.
            ends: is told where stacks end.
            python: has frames of Python.
            follows_frame_pointers: whether all were walked by these: nobody finishes them, and they may lead astray.
        """
        self._walks, self._ends, self._python, self._are_cut = walks, ends, python, follows_frame_pointers
        self._kept: dict[int, int] = {}  # by the id that a stack came with: that of the first one like it
        self._first: dict[int, int] = {}  # that id by what is in the stack
        self._content = StackIds()
        self._unfinished: dict[int, tuple[NDArray[np.void], int]] = {}  # what BPF sent, and its depth; by id
        self._early: dict[int, np.void] = {}  # finished ones of which BPF's part did not come yet; by id
        self._late: list[int] = []  # ids of those that were finished when the recording had ended

    def rows(self, records: NDArray[np.void], depth: int, late: bool = False) -> pa.StructArray:
        """Rows of kind `stack` for the stacks that are new and finished.

        Args:
            records: of stack_dtype(depth).
            depth: addresses that a stack can have at most.
            late: whether they were finished when the recording had ended.
        """
        if self._are_cut:
            return self._rows(records, depth)
        is_missed = records["walked"] == Walked.MISSED
        early = []
        for record in records[is_missed]:
            if int(record["id"]) not in self._kept:
                self._unfinished[int(record["id"])] = record, depth
            if int(record["id"]) in self._early:
                early.append(self._early.pop(int(record["id"])))
        finished = self._without_early(records[~is_missed])
        if early:
            finished = np.concatenate([np.array(early), finished])
        if late:
            self._late += (number for number in finished["id"].tolist() if number not in self._kept)
        return self._rows(self._joined(finished, depth), depth)

    def rows_of_unfinished(self) -> pa.StructArray:
        """Rows of those that nobody finished, once all others were added."""
        left, self._unfinished = self._unfinished, {}
        parts = [pa.array([], KINDS["stack"])]
        early, self._early = self._early, {}
        for record in early.values():  # what BPF sent came into the file before this one, or was lost
            record["depth"], record["walked"] = 0, Walked.MISSED
            parts.append(self._rows(np.array([record]), len(record["ips"])))
        for depth in sorted({depth for _, depth in left.values()}):
            parts.append(self._rows(np.array([record for record, of in left.values() if of == depth]), depth))
        return pa.concat_arrays(parts)

    def unfinished(self) -> set[int]:
        """The ids of stacks that are not finished."""
        return set(self._unfinished)

    def _without_early(self, records: NDArray[np.void]) -> NDArray[np.void]:
        """Without those that were finished from where BPF's walk ended, of which BPF's part may come later."""
        kept = (records["walked"] >> np.uint64(KEPT_SHIFT)) > 0
        is_known = [number in self._unfinished or number in self._kept for number in records["id"].tolist()]
        is_early: NDArray[np.bool_] = kept & ~np.array(is_known, bool)
        self._early |= {int(record["id"]): record for record in records[is_early].copy()}
        others: NDArray[np.void] = records[~is_early]
        return others

    def _joined(self, records: NDArray[np.void], depth: int) -> NDArray[np.void]:
        """With the addresses that BPF sent before, for those that were finished from where its walk ended."""
        kept = records["walked"] >> np.uint64(KEPT_SHIFT)
        if kept.any():
            records = records.copy()
        for index in np.flatnonzero(kept).tolist():
            record, before = records[index], self._unfinished.get(int(records[index]["id"]))
            if before is None:  # it was finished already
                continue
            first = before[0]["ips"][: int(kept[index])]
            ips = np.concatenate([first, record["ips"][: int(record["depth"])]])[:depth]
            record["ips"][: len(ips)], record["depth"] = ips, len(ips)
            for name in ("guessed", "interrupted"):
                known, behind = _bits(before[0][name]), _bits(record[name])[: MAX_DEPTH - len(first)]
                # How the address was found from which it was finished, only BPF knows.
                behind[:1] |= known[len(first) : len(first) + 1]
                joined = np.concatenate([known[: len(first)], behind])
                record[name] = np.packbits(joined, bitorder="little").view(np.uint64)
            record["walked"] &= np.uint64((1 << KEPT_SHIFT) - 1)
        for number in records["id"].tolist():
            self._unfinished.pop(number, None)
        return records

    def _rows(self, records: NDArray[np.void], depth: int) -> pa.StructArray:
        # The BPF program sends a stack again if it has forgotten its id: it is kept once.
        records = records[np.sort(np.unique(records["id"], return_index=True)[1])]
        records = records[np.fromiter((int(i) not in self._kept for i in records["id"]), bool, len(records))]
        depths = np.minimum(records["depth"], depth).astype(np.int64)
        inside = np.arange(depth) < depths[:, None]
        stacks = Stacks(records["pid"], records["time"], depths, records["ips"][inside])
        walked = np.minimum(records["walked"], Walked.MISSED + np.uint64(len(Walked))).astype(np.uint8)
        walked[walked >= len(Walked)] = Walked.MISSED
        marks = _bits(records["guessed"])[:, :depth] * np.uint8(Mark.GUESSED)
        marks |= _bits(records["interrupted"])[:, :depth] * np.uint8(Mark.INTERRUPTED)
        marks[:, 0] &= ~np.uint8(Mark.INTERRUPTED)  # the innermost is never a return address
        marks = marks[inside[:, : marks.shape[1]]]
        if self._are_cut:
            stacks, ends = self._walks.cut(stacks)
            walked[(walked != Walked.DEEP) | (stacks.depths < depths)] = Walked.MISSED
            marks = np.zeros(len(stacks.ips), np.uint8)
        # Stacks of the same addresses differ if they ended differently.
        owners = stacks.pids.astype(np.uint64) | walked.astype(np.uint64) << np.uint64(32)
        owners ^= self._python.contents(records["id"])
        new = np.zeros(len(records), bool)
        contents = self._content.of(stacks.depths, stacks.ips, owners)
        for index, (id_, content) in enumerate(zip(records["id"].tolist(), contents.tolist(), strict=True)):
            first = self._kept[id_] = self._first.setdefault(content, id_)
            new[index] = first == id_
        chosen = np.flatnonzero(new)
        kept, how = stacks.of(chosen), walked[new]
        truncated = how == Walked.DEEP
        guessed = _bits(records["guessed"][new]) * np.uint8(not self._are_cut)
        ends = ends.of(new) if self._are_cut else self._walks.ends(kept, how)
        self._ends.stacks(records["id"][new], kept.pids, ends, truncated, self._guessed_in(kept, guessed))
        columns = [
            *map(pa.array, (records["id"][new], kept.times, kept.pids, truncated)),
            kept.lists(),
            pa.nulls(len(how), pa.string()) if self._are_cut else pa.array(_NAMES[how].tolist(), pa.string()),
            _marks_of(np.repeat(new, stacks.depths), marks, kept.depths),
            *self._python.columns(records["id"][new]),
        ]
        return pa.StructArray.from_arrays(columns, fields=list(KINDS["stack"]))

    def _guessed_in(self, stacks: Stacks, guessed: NDArray[np.uint8]) -> NDArray[np.int32]:
        """In which module the caller of each stack was guessed first: int32[n], NO_GUESS if none was."""
        found = np.full(len(stacks.pids), NO_GUESS, np.int32)
        has = np.flatnonzero(guessed.any(axis=1) & (stacks.depths > 0))
        if len(has):
            frames = np.clip(
                guessed[has].argmax(axis=1) - 1, 0, stacks.depths[has] - 1
            )  # that of which it is the caller
            starts = (np.cumsum(stacks.depths) - stacks.depths)[has]
            places = stacks.ips[starts + frames] - (frames > 0).astype(np.uint64)  # of a return address the call
            found[has] = self._walks.modules_of(stacks.pids[has], places, stacks.times[has])
        return found

    def late(self, sent: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Of ids in launch records, whether each stack was finished when the recording had ended."""
        return np.isin(sent, np.array(self._late, np.uint64))

    def ids(self, sent: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The ids in the capture for the ids in launch records; that of an unknown stack stays as it is."""
        distinct, which = np.unique(sent, return_inverse=True)
        return np.array([self._kept.get(id_, id_) for id_ in distinct.tolist()], np.uint64)[which]


def _bits(words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The bits of words, along the last axis."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")


def _marks_of(chosen: NDArray[np.bool_], marks: NDArray[np.uint8], depths: NDArray[np.int64]) -> pa.Array:
    """The column `marks`; null for a stack without any."""
    marks = marks[chosen]
    rows = np.repeat(np.arange(len(depths)), depths)
    without = np.bincount(rows, marks > 0, len(depths)) == 0
    lengths = np.where(without, 0, depths)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    type_ = KINDS["stack"].field("marks").type
    values = pa.array(marks[~without[rows]] if len(rows) else marks, pa.uint8())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=type_, mask=pa.array(without))
