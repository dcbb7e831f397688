"""What naming a recording's stacks needs, gathered while its capture is written.

Of `mapping` and `process` rows, only those are kept that stacks and waits need. A machine may start thousands of
processes a minute for days, and few of them have a stack. What is kept is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.header.waits import WAIT, WaitFlags
from iaprof.formats.wire.launches import COPY, MAX_DEPTH, stack_dtype
from iaprof.formats.wire.sideband import Mappings, possible_forks
from iaprof.record.spool import Frame, FrameKind, SpoolReader
from iaprof.record.stacks.ends import StackEnds
from iaprof.record.symbolize.opener import MappedFiles
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.calls import StackAddresses
from iaprof.symbols.names.names import Module, Symbolized


class SymbolInputs:
    """What naming the stacks of one recording needs."""

    def __init__(self, needed: Needed) -> None:
        self.needed = StackAddresses()
        self.header: dict[str, Any] = {}
        self.files = MappedFiles()
        self.roots: dict[int, str] = {}  # by process, of those whose root is not ours: see Roots
        self.accounts: dict[int, str] = {}  # by process: see bpf.accounts
        self.ends = StackEnds()
        self.spaces: AddressSpaces  # set once all mappings are known
        self.rows = SpaceRows(needed)

    def add(self, kind: str, rows: pa.StructArray) -> None:
        """Adds rows that were written to the capture."""
        if kind == "stack":
            self.needed.add(rows)
        elif kind in ("mapping", "process"):
            self.rows.add(kind, rows)

    def add_files(self, mappings: Mappings) -> None:
        """Adds the files without a build-id that processes with stacks mapped."""
        self.files.add(mappings, self.rows.needed.has(np.array(mappings.pid, np.uint32)))

    def describe(self, pid: int, root: str | None, account: str | None) -> None:
        """Adds what is known of a process: its root if it is not ours, and who is answerable for it."""
        if root is not None:
            self.roots[pid] = root
        if account is not None:
            self.accounts[pid] = account

    def add_names(self, module: Module, named: Symbolized) -> tuple[Module, Symbolized]:
        """Adds the names found in a module; returns the module and its names as they are written."""
        return module, self.ends.add_names(module, named)


FinishStacks = Callable[[SymbolInputs, Iterator[NDArray[np.void]], int], Iterator[bytes]]
"""Finishes stacks, of COPY records, grouped by stack, and the most addresses of a stack; yields records."""
MOST_ROWS = 1 << 22  # that are kept, of both kinds; some 80 bytes each
NO_ROOM = "too many mappings: processes with the most lose the oldest ones, and their stacks have no names"
_PIDS = 1 << 22  # Linux gives no pid from here on (PID_MAX_LIMIT)
_REMEMBERED_FORKS = 1 << 16  # buffers of CPUs are read one after the other: a child's fork may come before its parent's
_HAVE_PIDS = (FrameKind.STACKS, FrameKind.COPY, FrameKind.WAITS)


@dataclass
class Needed:
    """The processes whose rows are needed: those with stacks or waits, and their ancestors."""

    pids: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(_PIDS, bool))  # by pid
    waiting: set[int] = field(default_factory=set)  # threads with waits that have not ended

    def has(self, pids: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Tells for each process whether it is needed."""
        return self.pids[np.minimum(pids, _PIDS - 1)]


def needed_by(spool: SpoolReader) -> Needed:
    """Finds the processes whose rows are needed to finish a spool's stacks and waits, and to name them."""
    needed, sideband = Needed(), []
    for frame in spool.frames({*_HAVE_PIDS, FrameKind.SIDEBAND}):
        if frame.kind is FrameKind.SIDEBAND:
            sideband.append(frame.position)
        else:
            _add_processes(needed, frame)
    # From the latest fork to the first: a process that is needed makes its parent needed.
    _add_ancestors(needed.pids, (spool.frame_at(position).payload for position in reversed(sideband)))
    return needed


def _add_processes(needed: Needed, frame: Frame) -> None:
    try:
        if frame.kind is FrameKind.STACKS:
            records = np.frombuffer(frame.payload, stack_dtype(min(max(frame.shape, 1), MAX_DEPTH)))
        else:
            records = np.frombuffer(frame.payload, COPY if frame.kind is FrameKind.COPY else WAIT)
    except ValueError:
        return  # the frame is damaged, which is counted where it is read
    needed.pids[np.minimum(records["pid"], _PIDS - 1)] = True
    if frame.kind is FrameKind.WAITS:
        needed.waiting.update(records["tid"][records["flags"] & WaitFlags.NOT_ENDED > 0].tolist())


def _add_ancestors(needed: NDArray[np.bool_], latest_first: Iterable[bytes]) -> None:
    forks: OrderedDict[int, int] = OrderedDict()  # of processes that are not needed: the parent's pid
    for data in latest_first:
        for pid, parent in reversed(possible_forks(data).tolist()):
            if pid >= _PIDS or parent >= _PIDS:
                continue
            if not needed[pid]:
                forks[pid] = parent
                forks.move_to_end(pid)
                if len(forks) > _REMEMBERED_FORKS:
                    forks.popitem(last=False)
                continue
            ancestor: int | None = parent
            while ancestor is not None and not needed[ancestor]:
                needed[ancestor] = True
                ancestor = forks.pop(ancestor, None)


class SpaceRows:
    """The rows that are kept."""

    def __init__(self, needed: Needed) -> None:
        """Begins without rows.

        Args:
            needed: the processes whose rows are kept; it is changed when there are too many rows.
        """
        self.dropped = 0  # rows that were not kept for lack of room
        self.needed = needed
        self._rows: dict[str, list[pa.StructArray]] = {"mapping": [], "process": []}
        self._count = 0

    def add(self, kind: str, rows: pa.StructArray) -> None:
        """Adds rows of one of the two kinds; keeps those that are needed."""
        chosen = self.needed.has(rows.field("pid").to_numpy())
        if kind == "process":
            chosen &= self._is_of_use(rows)
        kept = rows.filter(pa.array(chosen))
        if len(kept):
            self._rows[kind].append(_compact(kept))
            self._count += len(kept)
        if self._count > MOST_ROWS:
            self._drop_half()

    def _is_of_use(self, rows: pa.StructArray) -> NDArray[np.bool_]:
        """Whether a `process` row says where mappings come from, who a process was, or when an unended wait ended."""
        event, pid, tid = (rows.field(name) for name in ("event", "pid", "tid"))
        says_where = pc.is_in(event, pa.array(["exec", "described"]))
        begins = pc.and_(pc.equal(event, "fork"), pc.equal(pid, tid))
        ends = pc.and_(pc.equal(event, "exit"), pc.is_in(tid, pa.array(self.needed.waiting, pa.uint32())))
        of_use: NDArray[np.bool_] = pc.or_(says_where, pc.or_(begins, ends)).to_numpy(zero_copy_only=False)
        return of_use

    def _drop_half(self) -> None:
        """Drops the rows of the processes that have most, and of those that have as many, the oldest."""
        pids = np.concatenate([rows.field("pid").to_numpy() for rows in self._all()])
        found, last, counts = np.unique(pids[::-1], return_index=True, return_counts=True)
        order = np.lexsort((-last, -counts))  # `last` counts from the end
        gone = found[order[: int(np.searchsorted(np.cumsum(counts[order]), MOST_ROWS // 2)) + 1]]
        self.needed.pids[np.minimum(gone, _PIDS - 1)] = False
        for kind, arrays in self._rows.items():
            kept = [rows.filter(pa.array(self.needed.has(rows.field("pid").to_numpy()))) for rows in arrays]
            self._rows[kind] = [rows for rows in kept if len(rows)]
        before, self._count = self._count, sum(map(len, self._all()))
        self.dropped += before - self._count

    def _all(self) -> Iterator[pa.StructArray]:
        for arrays in self._rows.values():
            yield from arrays

    def table(self, kind: str) -> pa.Table:
        """Returns the kept `mapping` or `process` rows; texts are dictionaries."""
        empty = pa.StructArray.from_arrays([pa.array([], each.type) for each in KINDS[kind]], fields=list(KINDS[kind]))
        return pa.concat_tables(map(pa.Table.from_struct_array, self._rows[kind] or [_compact(empty)]))


def _compact(rows: pa.StructArray) -> pa.StructArray:
    """Returns rows whose texts and build-ids are dictionaries."""
    columns = [
        column.dictionary_encode() if pa.types.is_string(column.type) or pa.types.is_binary(column.type) else column
        for column in rows.flatten()
    ]
    return pa.StructArray.from_arrays(columns, names=[each.name for each in rows.type])
