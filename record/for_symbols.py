"""What naming the stacks of a recording has to know of it, gathered while its capture is written."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from iaprof.formats.capture import KINDS
from iaprof.record.ends import StackEnds
from iaprof.record.mapped_files import MappedFiles
from iaprof.symbols.address_space import AddressSpaces
from iaprof.symbols.calls import Needed
from iaprof.symbols.modules import Module
from iaprof.symbols.names import Named


class ForSymbols:
    """What naming the stacks of a recording needs to know of it."""

    def __init__(self) -> None:
        self.needed = Needed()
        self.header: dict[str, Any] = {}
        self.files = MappedFiles()
        self.roots: dict[int, str] = {}  # of processes whose root is not ours: see Roots
        self.ends = StackEnds()
        self.spaces: AddressSpaces  # once all mappings are known
        self._rows: dict[str, list[pa.StructArray]] = {"mapping": [], "process": []}

    def add(self, kind: str, rows: pa.StructArray) -> None:
        """Takes rows that go into the capture."""
        if kind == "stack":
            self.needed.add(rows)
        elif kind in self._rows:
            self._rows[kind].append(rows)

    def completed(self, module: Module, named: Named) -> tuple[Module, Named]:
        """What is written of a module that was named: with what the stacks themselves told of it."""
        return module, self.ends.completed(self.spaces.modules, module, named)

    def table(self, kind: str) -> pa.Table:
        """All `mapping` or `process` rows."""
        schema = pa.schema(list(KINDS[kind]))
        return pa.concat_tables([schema.empty_table(), *map(pa.Table.from_struct_array, self._rows[kind])])
