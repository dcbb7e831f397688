"""CPU samples on their way into a capture: each distinct stack once, and the samples refer to it.

By whole columns: a busy machine of many CPUs has millions of samples.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture import KINDS
from iaprof.formats.sideband import Samples, Stacks
from iaprof.record.ends import StackEnds
from iaprof.record.stack_ids import StackIds
from iaprof.record.walks import Walked, Walks

SAMPLED = 1 << 62
"""In the ids of these stacks. Those that the launch probes gave have it not, or have bit 63."""


class CpuSamples:
    """Makes rows of samples, and remembers which stacks there were."""

    def __init__(self, walks: Walks | None = None, ends: StackEnds | None = None) -> None:
        """Begins with none.

        Args:
            walks: cuts the stacks of processes; None to leave them as they are.
            ends: is told where they end.
        """
        self._content = StackIds()
        self._known: set[int] = set()
        self._kept: dict[int, int] = {}  # the ids of stacks by those that they had before they were cut
        self._walks, self._ends = walks, ends

    def rows(self, samples: Samples, depth: int) -> tuple[pa.StructArray, pa.StructArray]:
        """Rows of kind `stack`, for the stacks that are new, and of kind `cpu_sample`.

        Args:
            samples: in any order.
            depth: addresses that a sample can have at most, both stacks together.
        """
        deep = samples.kernel.depths + samples.user.depths >= depth
        user, user_rows = self._stacks(samples.user, samples.pid, samples.time, deep, self._walks)
        if self._ends is not None:
            self._ends.samples(user)
        nobody = np.zeros(len(samples.pid), np.uint32)
        kernel, kernel_rows = self._stacks(samples.kernel, nobody, samples.time, samples.kernel.depths >= depth, None)
        columns = [samples.time, samples.pid, samples.tid, samples.cpu, user, kernel]
        fields = list(KINDS["cpu_sample"])
        rows = pa.StructArray.from_arrays([pa.array(column) for column in columns], fields=fields)
        return pa.concat_arrays([user_rows, kernel_rows]), rows

    def _stacks(
        self,
        stacks: Stacks,
        pids: NDArray[np.uint32],
        times: NDArray[np.uint64],
        deep: NDArray[np.bool_],
        walks: Walks | None,
    ) -> tuple[NDArray[np.uint64], pa.StructArray]:
        """The id of each sample's stack, 0 for none, and the rows of those that are new."""
        walked = Walked(pids, times, stacks.depths, stacks.ips)
        whole = self._ids(walked)
        distinct, first, which = np.unique(whole, return_index=True, return_inverse=True)
        new = np.array([id_ != 0 and id_ not in self._kept for id_ in distinct.tolist()], bool)
        first = first[new] if len(new) else first
        cut, ends = walked.of(first), None
        if walks is not None:
            cut, ends = walks.cut(cut)
        deep = deep[first] & (cut.depths == stacks.depths[first])
        ids = self._ids(cut)
        self._kept.update(zip(whole[first].tolist(), ids.tolist(), strict=True))
        unmet = np.zeros(len(ids), bool)
        unmet[np.unique(ids, return_index=True)[1]] = True
        unmet &= np.array([id_ not in self._known for id_ in ids.tolist()], bool)
        self._known.update(ids[unmet].tolist())
        rows = cut.of(np.flatnonzero(unmet))
        if self._ends is not None and ends is not None:
            self._ends.stacks(ids[unmet], ends.of(unmet), deep[unmet])
        columns = [pa.array(ids[unmet]), pa.array(rows.times), pa.array(rows.pids), pa.array(deep[unmet]), rows.lists()]
        kept = np.array([self._kept.get(id_, 0) for id_ in distinct.tolist()], np.uint64)[which]
        return kept, pa.StructArray.from_arrays(columns, fields=list(KINDS["stack"]))

    def _ids(self, walked: Walked) -> NDArray[np.uint64]:
        ids = self._content.of(walked.depths, walked.ips, walked.pids.astype(np.uint64))
        return np.where(ids > 0, ids & np.uint64(SAMPLED - 1) | np.uint64(SAMPLED), ids)
