"""CPU samples on their way into a capture: each distinct stack once, and the samples refer to it.

By whole columns: a busy machine of many CPUs has millions of samples.
"""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture import KINDS
from iaprof.formats.sideband import Samples, Stacks

SAMPLED = 1 << 62
"""In the ids of these stacks. Those that the launch probes gave have it not, or have bit 63."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_OTHER_ODD = np.uint64(0xC4CEB9FE1A85EC53)


class CpuSamples:
    """Makes rows of samples, and remembers which stacks there were."""

    def __init__(self) -> None:
        # A process chooses the addresses of its own stacks: it must not be able to choose another's id by them.
        self._secret = np.frombuffer(os.urandom(8), np.uint64)[0]
        self._known: set[int] = set()

    def rows(self, samples: Samples, depth: int) -> tuple[pa.StructArray, pa.StructArray]:
        """Rows of kind `stack`, for the stacks that are new, and of kind `cpu_sample`.

        Args:
            samples: in any order.
            depth: addresses that a sample can have at most, both stacks together.
        """
        deep = samples.kernel.depths + samples.user.depths >= depth
        user, user_rows = self._stacks(samples.user, samples.pid, samples.time, deep)
        nobody = np.zeros(len(samples.pid), np.uint32)
        kernel, kernel_rows = self._stacks(samples.kernel, nobody, samples.time, samples.kernel.depths >= depth)
        columns = [samples.time, samples.pid, samples.tid, samples.cpu, user, kernel]
        fields = list(KINDS["cpu_sample"])
        rows = pa.StructArray.from_arrays([pa.array(column) for column in columns], fields=fields)
        return pa.concat_arrays([user_rows, kernel_rows]), rows

    def _stacks(
        self, stacks: Stacks, pids: NDArray[np.uint32], times: NDArray[np.uint64], deep: NDArray[np.bool_]
    ) -> tuple[NDArray[np.uint64], pa.StructArray]:
        """The id of each sample's stack, 0 for none, and the rows of those that are new."""
        ids = self._ids(stacks, pids)
        distinct, first = np.unique(ids, return_index=True)
        new = np.array([id_ != 0 and id_ not in self._known for id_ in distinct.tolist()], bool)
        first = first[new] if len(new) else first
        self._known.update(ids[first].tolist())
        starts = np.cumsum(stacks.depths) - stacks.depths
        lengths = stacks.depths[first]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        which = np.repeat(starts[first] - offsets[:-1], lengths) + np.arange(offsets[-1])
        ips = pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()),
            pa.array(stacks.ips[which], pa.uint64()),
            type=KINDS["stack"].field("ips").type,
        )
        columns = [pa.array(ids[first]), pa.array(times[first]), pa.array(pids[first]), pa.array(deep[first]), ips]
        return ids, pa.StructArray.from_arrays(columns, fields=list(KINDS["stack"]))

    def _ids(self, stacks: Stacks, pids: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """A hash of each stack's addresses, in their order, and its process."""
        starts = np.cumsum(stacks.depths) - stacks.depths
        place = (np.arange(len(stacks.ips)) - np.repeat(starts, stacks.depths)).astype(np.uint64)
        mixed = _mixed(stacks.ips ^ _mixed(place + self._secret))
        sums = np.zeros(len(stacks.depths), np.uint64)
        has = stacks.depths > 0
        if has.any():
            sums[has] = np.add.reduceat(mixed, starts[has])
        ids = _mixed(sums ^ _mixed(pids.astype(np.uint64) ^ self._secret))
        ids = ids & np.uint64(SAMPLED - 1) | np.uint64(SAMPLED)
        ids[~has] = 0
        return ids


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ values >> np.uint64(32)) * _ODD
    values = (values ^ values >> np.uint64(29)) * _OTHER_ODD
    return values ^ values >> np.uint64(32)
