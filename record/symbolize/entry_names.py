"""Names of probed driver functions: distributions' drivers have no symbols for them, but driver layouts do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.driver_layout import Layout, LayoutError, find_layout
from iaprof.symbols.names.names import Frame, Names, Symbolized
from iaprof.symbols.symbolizers.binaries import Binaries, BinaryError


def with_entry_names(
    named: Symbolized, binaries: Binaries, file: int, build_id: bytes | None, addresses: NDArray[np.uint64]
) -> Symbolized:
    """Adds the names of entry points to a file's names, for addresses without a name.

    Args:
        named: the names from the file's symbols.
        binaries: reads the file, which can be anyone's.
        file: the file's descriptor.
        build_id: the file's; without one there is no layout.
        addresses: uint64[n], the offsets in the file to name.
    """
    layout = _layout(build_id)
    if layout is None:
        return named
    missing = addresses[named.names.find(addresses) < 0]
    entry_names = _entries(layout, binaries, file, missing)
    if not entry_names:
        return named
    entries = Names.of((offset, 1, [Frame(name)]) for offset, name in entry_names.items())
    source = f"iaprof's layout of this driver ({layout.version})"
    return replace(
        named,
        names=Names.joined([entries, named.names]),
        source=f"{named.source} and {source}" if named.source else source,
        problem="" if len(entry_names) == len(missing) else named.problem,
    )


def _layout(build_id: bytes | None) -> Layout | None:
    try:
        return find_layout(build_id.hex()) if build_id else None
    except LayoutError:
        return None  # the source of libraries reports it


def _entries(layout: Layout, binaries: Binaries, file: int, offsets: NDArray[np.uint64]) -> dict[int, str]:
    """Returns the entry points at these file offsets, by offset; none if the file is damaged."""
    names = {entry.address: entry.name for entry in layout.entries}
    try:
        addresses = binaries.addresses(file, offsets)
    except BinaryError:
        return {}
    return {offset: names[address] for offset, address in addresses.items() if address in names}
