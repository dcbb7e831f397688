"""The profile as a Parquet table, for DuckDB, pandas, Polars and the like."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.writer import Writer

if TYPE_CHECKING:
    import pyarrow as pa


class Parquet(Writer):
    """A row per stack, instruction and reason."""

    binary = True
    readable = False
    has_stacks = False

    def write(self, export: Export, options: StackOptions, out: IO[bytes]) -> None:
        """Writes the table."""
        # Imported here, so that the registry of formats loads without Arrow.
        from iaprof.formats.writers.profile_table import export_table

        write_table(export_table(export, options), out)


def write_table(table: pa.Table, out: IO[bytes]) -> None:
    """Writes a table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(table, pa.PythonFile(out, "w"), compression="zstd")
