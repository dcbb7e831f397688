"""Merges the slices of a send into one: a multicast has several."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.timelines.grouped import Groups
from iaprof.timelines.intervals import ends
from iaprof.timelines.options import Options
from iaprof.timelines.placeholders import placed
from iaprof.timelines.stages.collectives.events import SYNC, TO_ONE, peers_of, sync_of
from iaprof.timelines.trace import NO_TEXT, Texts, Trace

MESSAGE = r"^.*?[_-](\d+).*$"  # the number of a message in a name
LONGEST_PREFIX = 256  # bytes


def merge_sends(trace: Trace, options: Options) -> None:
    """Merges the slices of a message of a rank: from the first start to the last end, with all its peers."""
    slices, texts = trace.slices, trace.texts
    is_send = texts.matches(slices.name, "SenRdma") & texts.matches(slices.name, r"[_-]\d")
    rows = np.flatnonzero(is_send & placed(trace))
    if not len(rows):
        return
    rows = rows[np.argsort(slices.start[rows], kind="stable")]
    messages = texts.replaced(slices.name[rows], MESSAGE, r"\1")
    groups = Groups(slices.file[rows], slices.pid[rows], messages)
    several = groups.counts > 1
    firsts = rows[groups.order[groups.firsts]]  # the slice that is kept
    start = groups.min(slices.start[rows])
    end = groups.max(ends(slices)[rows])
    slices.unpack("start", "duration", "bytes", "type", "peers", "name")
    slices.start[firsts] = start
    slices.duration[firsts[several]] = (end - start)[several]
    slices.bytes[firsts] = groups.max(slices.bytes[rows])  # ABSENT is the least integer

    syncs = sync_of(trace, slices)[rows]
    slices.extra[SYNC] = slices.extra.get(SYNC, np.full(len(slices), NO_TEXT, np.int32)).copy()
    slices.extra[SYNC][firsts] = groups.max(syncs)
    to_one = texts.matches(slices.type[rows], TO_ONE)
    type_ = groups.max(np.where(to_one, slices.type[rows], NO_TEXT))
    slices.type[firsts] = np.where(several & (type_ != NO_TEXT), type_, slices.type[firsts])
    slices.peers[firsts] = _joined_peers(trace, rows, groups)
    slices.name[firsts[several]] = _prefixes(texts, slices.name[rows], groups)[several]

    stay = np.ones(len(slices), bool)
    stay[rows] = False
    stay[firsts] = True
    merged = len(rows) - len(firsts)
    if merged:
        trace.merged["slices of a message"] += merged
        trace.slices = slices.take(stay)


def _joined_peers(trace: Trace, rows: NDArray[np.int64], groups: Groups) -> NDArray[np.int32]:
    """Returns the peers of each group's slices, as a text such as "0,1,2"."""
    own, peers = peers_of(trace, trace.slices.peers[rows])
    pairs = Groups(groups.numbers[own], peers)
    group, peer = pairs.key(groups.numbers[own]), pairs.key(peers)
    counts = np.bincount(group, minlength=len(groups))
    lists = pa.LargeListArray.from_arrays(np.append(0, np.cumsum(counts)), pa.array(peer).cast(pa.large_string()))
    codes = trace.texts.codes(pc.binary_join(lists, pa.scalar(",", pa.large_string())))
    return np.where(counts > 0, codes, NO_TEXT).astype(np.int32)


def _prefixes(texts: Texts, names: NDArray[np.int32], groups: Groups) -> NDArray[np.int32]:
    """Returns the longest common prefix of each group's names, without trailing white space."""
    several = groups.counts > 1
    if not several.any():
        return groups.key(names)
    rows = groups.order[np.repeat(several, groups.counts)]
    counts = groups.counts[several]
    firsts = np.cumsum(counts) - counts
    distinct, ordered = np.unique(names[rows], return_inverse=True)
    arrays = pc.cast(texts.taken(distinct.astype(np.int32)), pa.large_binary())
    matrix = _matrix(arrays)
    first = np.repeat(ordered[firsts], counts)
    lengths = np.full(len(ordered), LONGEST_PREFIX)
    for low in range(0, len(ordered), 1 << 16):
        some = slice(low, low + (1 << 16))
        differ = matrix[ordered[some]] != matrix[first[some]]
        lengths[some] = np.where(differ.any(axis=1), differ.argmax(axis=1), matrix.shape[1])
    common = np.minimum.reduceat(lengths, firsts)
    heads = matrix[ordered[firsts]]
    bytes_ = [row[:length].tobytes().rstrip(b"\0") for row, length in zip(heads, common.tolist(), strict=True)]
    cut = [each.decode("utf-8", "ignore").rstrip() for each in bytes_]
    result = groups.key(names)
    result[several] = texts.codes([each or "SenRdma" for each in cut])
    return result


def _matrix(arrays: pa.LargeBinaryArray) -> NDArray[np.uint8]:
    """Returns the first bytes of texts as rows of equal length, filled with zeros."""
    lengths = np.minimum(pc.binary_length(arrays).to_numpy(zero_copy_only=False).astype(np.int64), LONGEST_PREFIX)
    width = int(lengths.max())
    data = np.frombuffer(arrays.buffers()[2], np.uint8)
    offsets = np.frombuffer(arrays.buffers()[1], np.int64)[arrays.offset : arrays.offset + len(arrays)]
    columns = np.arange(width)
    inside = columns < lengths[:, None]
    places = np.minimum(offsets[:, None] + columns, max(len(data) - 1, 0))
    return np.asarray(np.where(inside, data[places], 0), np.uint8)
