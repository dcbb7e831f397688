"""Stacks of launches for the capture: cut where they end, and each distinct stack once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture import KINDS
from iaprof.formats.launches import LOOKED_AT
from iaprof.record.ends import StackEnds
from iaprof.record.stack_ids import StackIds
from iaprof.record.walks import Walked, Walks
from iaprof.symbols.return_addresses import codes


class LaunchStacks:
    """Makes rows of stacks, and remembers under which id each was kept."""

    def __init__(self, walks: Walks, ends: StackEnds) -> None:
        """Begins with none.

        Args:
            walks: cuts them.
            ends: is told where they end.
        """
        self._walks, self._ends = walks, ends
        self._kept: dict[int, int] = {}  # by the id that a stack came with: that of the first one like it
        self._first: dict[int, int] = {}  # that id by what is in the stack
        self._content = StackIds()

    def rows(self, records: NDArray[np.void], depth: int) -> pa.StructArray:
        """Rows of kind `stack` for the stacks that are new.

        Args:
            records: of stack_dtype(depth), or unchecked_stack_dtype(depth).
            depth: addresses that a stack can have at most.
        """
        # The BPF program sends a stack again if it has forgotten its id: it is kept once.
        records = records[np.sort(np.unique(records["id"], return_index=True)[1])]
        records = records[np.fromiter((int(i) not in self._kept for i in records["id"]), bool, len(records))]
        depths = np.minimum(records["depth"], depth).astype(np.int64)
        inside = np.arange(depth) < depths[:, None]
        around = None
        if "around" in (records.dtype.names or ()):
            most = min(depth, LOOKED_AT)
            around = np.zeros((*inside.shape, 2), np.uint64)
            around[:, :most] = records["around"][:, :most]
            around = around[inside]
        walked = Walked(
            records["pid"],
            records["time"],
            depths,
            records["ips"][inside],
            None if around is None else codes(around[:, 0], around[:, 1]),
        )
        cut, ends = self._walks.cut(walked)
        truncated = cut.depths == depth
        # A truncated stack differs from a whole one with the same addresses.
        owners = walked.pids.astype(np.uint64) | truncated.astype(np.uint64) << np.uint64(32)
        new = np.zeros(len(records), bool)
        contents = self._content.of(cut.depths, cut.ips, owners)
        for index, (id_, content) in enumerate(zip(records["id"].tolist(), contents.tolist(), strict=True)):
            first = self._kept[id_] = self._first.setdefault(content, id_)
            new[index] = first == id_
        self._ends.stacks(records["id"][new], ends.of(new), truncated[new])
        kept = cut.of(np.flatnonzero(new))
        columns = [*map(pa.array, (records["id"][new], kept.times, kept.pids, truncated[new])), kept.lists()]
        return pa.StructArray.from_arrays(columns, fields=list(KINDS["stack"]))

    def ids(self, sent: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The ids in the capture for the ids in launch records; that of an unknown stack stays as it is."""
        distinct, which = np.unique(sent, return_inverse=True)
        return np.array([self._kept.get(id_, id_) for id_ in distinct.tolist()], np.uint64)[which]
