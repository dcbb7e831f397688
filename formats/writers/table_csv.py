"""The profile as a CSV table (RFC 4180), for spreadsheets and data frames."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from iaprof.formats.export import Export
from iaprof.formats.formulas import without_formulas
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.writer import Writer

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_ONCE = 1 << 16


class Csv(Writer):
    """A line per stack, instruction and reason."""

    binary = True
    has_stacks = False

    def write(self, export: Export, options: StackOptions, out: IO[bytes]) -> None:
        """Writes the table with a header line.

        Prefixes an apostrophe to texts that a spreadsheet would evaluate as formulas, as names are untrusted.
        """
        # Imported here, so that the registry of formats loads without Arrow.
        from iaprof.formats.writers.profile_table import export_table

        write_table(export_table(export, options), out)


def write_table(table: pa.Table, out: IO[bytes]) -> None:
    """Writes a table in which all texts are dictionary columns, as `Csv.write` does."""
    import pyarrow as pa
    import pyarrow.csv

    plain = pa.schema([f.with_type(pa.string()) if pa.types.is_dictionary(f.type) else f for f in table.schema])
    columns = [without_formulas(c) if pa.types.is_dictionary(c.type) else c for c in table.columns]
    guarded = pa.table(columns, table.schema)
    with pyarrow.csv.CSVWriter(pa.PythonFile(out, "w"), plain) as writer:
        for batch in guarded.to_batches(_ROWS_AT_ONCE):
            writer.write_batch(batch.cast(plain))
