"""Names of the driver functions that the recorder probes: distributions' files have no symbols for them, layouts do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.probes.driver_layout import Layout, LayoutError, find_layout
from iaprof.symbols.names.binaries import Binaries, BinaryError
from iaprof.symbols.names.names import Frame, Names, Symbolized


def with_entry_names(
    named: Symbolized, binaries: Binaries, file: int, build_id: bytes | None, addresses: NDArray[np.uint64]
) -> Symbolized:
    """Adds the names of entry points to what was found in a file, for addresses without a name.

    Args:
        named: what its symbols say.
        binaries: reads the file, which may be anybody's.
        file: open descriptor.
        build_id: the file's; without one there is no layout.
        addresses: [n] offsets in the file that were asked for.
    """
    layout = _layout(build_id)
    if layout is None:
        return named
    missing = addresses[named.names.find(addresses) < 0]
    found = _entries(layout, binaries, file, missing)
    if not found:
        return named
    entries = Names.of((offset, 1, [Frame(name)]) for offset, name in found.items())
    source = f"iaprof's layout of this driver ({layout.version})"
    return replace(
        named,
        names=Names.joined([entries, named.names]),
        source=f"{named.source} and {source}" if named.source else source,
        problem="" if len(found) == len(missing) else named.problem,
    )


def _layout(build_id: bytes | None) -> Layout | None:
    try:
        return find_layout(build_id.hex()) if build_id else None
    except LayoutError:
        return None  # who probes by it says so


def _entries(layout: Layout, binaries: Binaries, file: int, offsets: NDArray[np.uint64]) -> dict[int, str]:
    """The names of those of the offsets in the file where entry points are probed; nothing where it is damaged."""
    names = {entry.address: entry.name for entry in layout.entries}
    try:
        found = binaries.addresses(file, offsets)
    except BinaryError:
        return {}
    return {offset: names[address] for offset, address in found.items() if address in names}
