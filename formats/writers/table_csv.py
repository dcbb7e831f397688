"""The profile as a CSV table (RFC 4180), for spreadsheets and data frames."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.writer import Writer

if TYPE_CHECKING:
    import pyarrow as pa

_FORMULAS = ("=", "+", "-", "@")
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
    guarded = pa.table([_guarded(column) for column in table.columns], table.schema)
    with pyarrow.csv.CSVWriter(pa.PythonFile(out, "w"), plain) as writer:
        for batch in guarded.to_batches(_ROWS_AT_ONCE):
            writer.write_batch(batch.cast(plain))


def _guarded(column: pa.ChunkedArray) -> pa.Array:
    import pyarrow as pa

    array = column.combine_chunks()
    if not pa.types.is_dictionary(array.type):
        return array
    texts = [f"'{text}" if text.startswith(_FORMULAS) else text for text in array.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(array.indices, pa.array(texts, pa.string()))
