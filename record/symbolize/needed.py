"""What naming a recording's stacks needs, gathered while its capture is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.wire.sideband import Mappings
from iaprof.record.stacks.ends import StackEnds
from iaprof.record.symbolize.mapped_files import MappedFiles
from iaprof.record.symbolize.space_rows import Needed, SpaceRows
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.calls import StackAddresses
from iaprof.symbols.names.names import Module, Symbolized


class SymbolInputs:
    """What naming the stacks of one recording needs."""

    def __init__(self, needed: Needed) -> None:
        self.needed = StackAddresses()
        self.header: dict[str, Any] = {}
        self.files = MappedFiles()
        self.roots: dict[int, str] = {}  # by process, of those whose root is not ours: see Roots
        self.accounts: dict[int, str] = {}  # by process: see bpf.accounts
        self.ends = StackEnds()
        self.spaces: AddressSpaces  # set once all mappings are known
        self.rows = SpaceRows(needed)

    def add(self, kind: str, rows: pa.StructArray) -> None:
        """Adds rows that were written to the capture."""
        if kind == "stack":
            self.needed.add(rows)
        elif kind in ("mapping", "process"):
            self.rows.add(kind, rows)

    def add_files(self, mappings: Mappings) -> None:
        """Adds the files without a build-id that processes with stacks mapped."""
        self.files.add(mappings, self.rows.needed.has(np.array(mappings.pid, np.uint32)))

    def describe(self, pid: int, root: str | None, account: str | None) -> None:
        """Adds what is known of a process: its root if it is not ours, and who is answerable for it."""
        if root is not None:
            self.roots[pid] = root
        if account is not None:
            self.accounts[pid] = account

    def add_names(self, module: Module, named: Symbolized) -> tuple[Module, Symbolized]:
        """Adds the names found in a module; returns the module and its names as they are written."""
        return module, self.ends.add_names(module, named)


FinishStacks = Callable[[SymbolInputs, Iterator[NDArray[np.void]], int], Iterator[bytes]]
"""Finishes stacks, of COPY records, grouped by stack, and the most addresses of a stack; yields records."""
