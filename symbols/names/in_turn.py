"""Several sources of names as one: each is asked for what those before it did not name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from iaprof.symbols.names.modules import Module
from iaprof.symbols.names.names import NO_NAMES, Named, Names, Naming


class InTurn:
    """A Naming made of others."""

    def __init__(self, namings: Sequence[Naming]) -> None:
        """The first goes first."""
        self._namings = namings

    def name(self, module: Module, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Named:
        """See Naming; the problems of a source are told only where names are missing in the end."""
        parts: list[Names] = []
        sources: dict[str, None] = {}
        problems: dict[str, None] = {}
        frame_pointers = None
        outermost: NDArray[np.uint64] | None = None
        no_calls: NDArray[np.uint64] | None = None
        for naming in self._namings:
            if not len(addresses):
                break
            named = naming.name(module, addresses, times)
            if named is None:
                continue
            found = named.names.find(addresses) >= 0
            if len(named.names):
                parts.append(named.names)
            if found.any() and named.source:
                sources[named.source] = None
            if named.problem:
                problems[named.problem] = None
            frame_pointers = named.frame_pointers if frame_pointers is None else frame_pointers
            outermost = _joined(outermost, named.outermost)
            no_calls = _joined(no_calls, named.no_calls)
            addresses, times = addresses[~found], times[~found]
        names = Names.joined(parts) if parts else NO_NAMES
        problem = "; ".join(problems) if len(addresses) else ""
        return Named(names, "; ".join(sources), problem, frame_pointers, outermost, no_calls)


def _joined(some: NDArray[np.uint64] | None, more: NDArray[np.uint64] | None) -> NDArray[np.uint64] | None:
    if some is None or more is None:
        return more if some is None else some
    return np.union1d(some, more)
