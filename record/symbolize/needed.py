"""What naming a recording's stacks needs, gathered while its capture is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS
from iaprof.record.stacks.ends import StackEnds
from iaprof.record.symbolize.mapped_files import MappedFiles
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.calls import StackAddresses
from iaprof.symbols.names.modules import Module
from iaprof.symbols.names.names import Symbolized


class SymbolInputs:
    """What naming the stacks of one recording needs."""

    def __init__(self) -> None:
        self.needed = StackAddresses()
        self.header: dict[str, Any] = {}
        self.files = MappedFiles()
        self.roots: dict[int, str] = {}  # by process, of those whose root is not ours: see Roots
        self.ends = StackEnds()
        self.spaces: AddressSpaces  # set once all mappings are known
        self._rows: dict[str, list[pa.StructArray]] = {"mapping": [], "process": []}

    def add(self, kind: str, rows: pa.StructArray) -> None:
        """Adds rows that were written to the capture."""
        if kind == "stack":
            self.needed.add(rows)
        elif kind in self._rows:
            self._rows[kind].append(rows)

    def add_names(self, module: Module, named: Symbolized) -> tuple[Module, Symbolized]:
        """Adds the names found in a module; returns the module and its names as they are written."""
        return module, self.ends.add_names(module, named)

    def table(self, kind: str) -> pa.Table:
        """Returns all `mapping` or all `process` rows."""
        schema = pa.schema(list(KINDS[kind]))
        return pa.concat_tables([schema.empty_table(), *map(pa.Table.from_struct_array, self._rows[kind])])


FinishStacks = Callable[[SymbolInputs, Iterator[NDArray[np.void]], int], Iterator[bytes]]
"""Finishes stacks, of COPY records, grouped by stack, and the most addresses of a stack; yields records."""
