"""The interface of sources of samples: a vendor's GPUs, read in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iaprof.record.sources.metrics import MeteredGt
from iaprof.record.sources.source import Source


class Sampler(Source):
    """A source of samples, one for each vendor.

    Its header describes its streams in `streams`, each with at least `ip_version`, the vendor's version of the GPU, and
    `layout`, the name of one of the vendor's layouts. It writes a STALLS frame for each read: columns of u64, the first
    `part` of the vendor's SampleRows, one after the other, with `source` as the index of the stream. It adds the number
    of records to `Journal.totals.records`.
    """

    on_new_gt: Callable[[MeteredGt], None]  # called with each GT that appears later

    def gts(self) -> Sequence[MeteredGt]:
        """Returns the GTs that are recorded, for the source of metrics; none if it measures no such GPUs."""
        return ()
