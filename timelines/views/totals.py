"""The table of what the time went to: a row for each rank, row of the trace, category and name."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from iaprof.formats.texts import clean_texts
from iaprof.timelines.grouped import Groups
from iaprof.timelines.stages.energy import OF_SLICES
from iaprof.timelines.texts import Texts
from iaprof.timelines.trace import Trace
from iaprof.timelines.views import labels, nesting

_SIDES = ("host", "device")
_text = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [("rank", pa.int64()), ("side", _text), ("pid", pa.int64()), ("tid", pa.int64()), ("category", _text),
     ("name", _text), ("calls", pa.int64()), ("total_us", pa.float64()), ("self_us", pa.float64()),
     ("mean_us", pa.float64()), ("min_us", pa.float64()), ("max_us", pa.float64())]
)  # fmt: skip
"""`side` is `device` or `host`. `self_us` is without the slices inside of them. Texts can be null."""
ENERGY = "energy_uj"
"""A further column where power is known: microjoules, null for what has none."""


def totals(trace: Trace) -> pa.Table:
    """Returns the totals of a trace's slices, by rank and falling time: SCHEMA, and ENERGY where power is known."""
    slices = trace.slices
    device, ranks, names = labels.on_devices(trace), labels.ranks(trace), labels.names(trace)
    inside = nesting.parents(nesting.tracks(slices, ranks, device).numbers, *nesting.times(slices))
    own = nesting.self_times(slices, inside) / 1000
    whole = nesting.lengths(slices) / 1000
    groups = Groups(ranks, slices.pid, slices.tid, device, slices.category, names)
    total = groups.sum(whole)
    order = np.lexsort((-total, groups.key(ranks)))
    sides = pa.DictionaryArray.from_arrays(pa.array(groups.key(device)[order].astype(np.int32)), pa.array(_SIDES))
    columns = [
        pa.array(groups.key(ranks)[order]), sides, pa.array(groups.key(slices.pid)[order]),
        pa.array(groups.key(slices.tid)[order]), _texts(trace.texts, groups.key(slices.category)[order]),
        _texts(trace.texts, groups.key(names)[order]), pa.array(groups.counts[order]),
        *(pa.array(each[order]) for each in (total, groups.sum(own), total / groups.counts,
                                             groups.min(whole), groups.max(whole))),
    ]  # fmt: skip
    table = pa.Table.from_arrays(columns, schema=SCHEMA)
    energy = slices.extra.get(OF_SLICES)
    if energy is None:
        return table
    known = np.isfinite(energy)
    sums = groups.sum(np.where(known, energy, 0))[order]
    unknown = (groups.sum(known.astype(np.float64)) == 0)[order]
    return table.append_column(ENERGY, pa.array(sums, pa.float64(), mask=unknown))


def _texts(texts: Texts, codes: np.ndarray) -> pa.Array:
    return clean_texts(texts.taken(codes).cast(pa.string()).dictionary_encode())
