"""The sources of samples, one for each vendor of GPUs, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iaprof.basics.errors import IaprofError
from iaprof.record.options import Options
from iaprof.record.sources.sampler import Sampler
from iaprof.record.sources.stalls import Stalls

SAMPLERS: Sequence[Callable[[Options], Sampler]] = (Stalls,)
"""Each opens the streams of its vendor's GPUs, or raises an IaprofError that says why it has none to record."""


def open_sampler(options: Options) -> Sampler:
    """Opens the source of samples of the first vendor that has GPUs to record.

    Raises:
        IaprofError: there is none; the text is that of the first vendor.
    """
    refusals = []
    for sampler in SAMPLERS:
        try:
            return sampler(options)
        except IaprofError as error:
            refusals.append(error)
    raise refusals[0]
