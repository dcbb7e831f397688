"""Names of a driver's entry points that are probed without its help: files have none for them, layouts do."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.driver_layout import Layout, LayoutError, find_layout
from iaprof.bpf.library_file import LibraryFile, ProbeError
from iaprof.symbols.names import Frame, Named, Names


def with_entry_names(named: Named, file: int, build_id: bytes | None, addresses: NDArray[np.uint64]) -> Named:
    """What was found of a file, and the names of entry points among the addresses that have none.

    Args:
        named: what its symbols say.
        file: open descriptor.
        build_id: the file's; without one there is no layout.
        addresses: [n] offsets in the file that were asked for.
    """
    layout = _layout(build_id)
    if layout is None:
        return named
    missing = set(addresses[named.names.find(addresses) < 0].tolist())
    found = {offset: name for offset, name in _entries(layout, file).items() if offset in missing}
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


def _entries(layout: Layout, file: int) -> dict[int, str]:
    """The names of entry points by their offsets in the file, where they are probed; nothing where it is damaged."""
    try:
        with open(os.dup(file), "rb") as stream:
            library = LibraryFile(stream)
            return {library.offset(entry.address, executable=True): entry.name for entry in layout.entries}
    except (ProbeError, OSError):
        return {}
