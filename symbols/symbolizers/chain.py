"""A symbolizer chain: asks each of its symbolizers for the addresses that those before it did not name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from iaprof.symbols.names.modules import Module
from iaprof.symbols.names.names import NO_NAMES, Names, Symbolized, Symbolizer


class SymbolizerChain:
    """A Symbolizer that asks others in order."""

    def __init__(self, symbolizers: Sequence[Symbolizer]) -> None:
        """Takes the symbolizers, the first to ask first."""
        self._symbolizers = symbolizers

    def name(self, module: Module, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Symbolized:
        """See Symbolizer.

        The result has the problems of those that did not name everything only if names are missing in the end; those of
        the one that named the rest are of what else is missing, such as lines.
        """
        parts: list[Names] = []
        sources: dict[str, None] = {}
        problems: dict[str, None] = {}
        others: dict[str, None] = {}
        frame_pointers = None
        outermost: NDArray[np.uint64] | None = None
        no_calls: NDArray[np.uint64] | None = None
        for symbolizer in self._symbolizers:
            if not len(addresses):
                break
            symbolized = symbolizer.name(module, addresses, times)
            if symbolized is None:
                continue
            has_name = symbolized.names.find(addresses) >= 0
            if len(symbolized.names):
                parts.append(symbolized.names)
            if has_name.any() and symbolized.source:
                sources[symbolized.source] = None
            if symbolized.problem:
                (others if has_name.all() else problems)[symbolized.problem] = None
            frame_pointers = symbolized.frame_pointers if frame_pointers is None else frame_pointers
            outermost = _union(outermost, symbolized.outermost)
            no_calls = _union(no_calls, symbolized.no_calls)
            addresses, times = addresses[~has_name], times[~has_name]
        names = Names.joined(parts) if parts else NO_NAMES
        problem = "; ".join({**problems, **others} if len(addresses) else others)
        return Symbolized(names, "; ".join(sources), problem, frame_pointers, outermost, no_calls)


def _union(first: NDArray[np.uint64] | None, second: NDArray[np.uint64] | None) -> NDArray[np.uint64] | None:
    if first is None or second is None:
        return second if first is None else first
    return np.union1d(first, second)
