"""The profile as a CSV table (RFC 4180), for spreadsheets and data frames."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions
from iaprof.formats.texts import csv_text, csv_texts
from iaprof.formats.writers.writer import Writer

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 1 << 16


class Csv(Writer):
    """A line per stack, instruction and reason."""

    binary = True
    has_stacks = False

    def write(self, export: Export, options: StackOptions, out: IO[bytes]) -> None:
        """Writes the table with a header line."""
        # Imported here, so that the registry of formats loads without Arrow.
        from iaprof.formats.writers.profile_table import export_table

        write_table(export_table(export, options), out)


def write_table(table: pa.Table, out: IO[bytes]) -> None:
    """Writes a table with a header line; all its texts are dictionary columns."""
    import pyarrow as pa
    import pyarrow.csv

    columns = [csv_texts(c) if pa.types.is_dictionary(c.type) else c for c in table.columns]
    cleaned = pa.table(columns, list(map(csv_text, table.column_names)))
    plain = pa.schema([f.with_type(pa.string()) if pa.types.is_dictionary(f.type) else f for f in cleaned.schema])
    with pyarrow.csv.CSVWriter(pa.PythonFile(out, "w"), plain) as writer:
        for batch in cleaned.to_batches(_ROWS_AT_ONCE):
            writer.write_batch(batch.cast(plain))
