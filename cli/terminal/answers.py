"""Where the answers of `iaprof top`, `diff` and others go: a table on the terminal, JSON, or a file of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from iaprof.cli.options.captures import check_report
from iaprof.cli.options.declared import ALL, For, Of
from iaprof.cli.options.output_format import output_format
from iaprof.cli.terminal.stdout import open_output, refuse_terminal, utf8_stdout
from iaprof.formats.writers.registry import Of as Shows, extensions

if TYPE_CHECKING:
    from iaprof.formats.profile import Profile

FORMATS = extensions(Shows.TABLES)
"""By extension: the formats of all answers."""
OF_DIFFERENCES = FORMATS | extensions(Shows.DIFFERENCES)
OF_STACKS = extensions(Shows.STACKS_OF_DIFFERENCES)
"""By extension: the formats of the stacks of differences."""
TABLE = "table"
"""The format of answers that no option names, which is for people."""
_BUT_TREES = For(ALL & ~Of.TREE)
Output: TypeAlias = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write to a .json, .csv or .parquet file.", show_default=False),
    _BUT_TREES,
]
Force: TypeAlias = Annotated[bool, typer.Option("--force", "-f", help="Replace an existing output."), _BUT_TREES]
_UNREADABLE = ("parquet", "html")
_USUAL_ROWS = {"csv": 0, "parquet": 0, "html": 500}  # where no limit is given; of other formats:
_FEW_ROWS = 20


def limit_option(defaults: str) -> Any:
    """Returns the option `--limit`, whose help names the defaults of `Answers.rows`."""
    return typer.Option(
        "--limit",
        "-n",
        metavar="ROWS",
        min=0,
        show_default=False,
        help=f"How many rows; 0 for all.  [default: {defaults}]",
    )


@dataclass(frozen=True)
class Answers:
    """Takes documents, which are what `--json` prints, unless a table for people is wanted."""

    format: str = ""  # of OF_DIFFERENCES, or of stacks; "": a table, which the verb prints itself
    output: Path | None = None  # None: stdout
    mode: int = 0o600  # of the output

    @classmethod
    def chosen(
        cls,
        output: Path | None,
        as_json: bool,
        force: bool,
        inputs: Sequence[str],
        formats: Mapping[str, str] = FORMATS,
        named: str | None = None,
    ) -> Answers:
        """Returns what the options say.

        Args:
            output: the value of -o.
            as_json: whether --json is given.
            force: whether an existing file may be replaced.
            inputs: the captures, which are never replaced.
            formats: by extension: which there are.
            named: the value of --format, of verbs that have it.

        Raises:
            UsageError: as output_format does.
            IaprofError: the output cannot be written.
        """
        chosen = output_format(formats, TABLE, named=named, as_json=as_json, output=output)
        format_ = "" if chosen == TABLE else chosen
        if output is None:
            if format_ in _UNREADABLE:
                refuse_terminal(format_)
            return cls(format_)
        return cls(format_, output, check_report(inputs, output, force))

    @property
    def is_text(self) -> bool:
        """Whether the verb prints the answer itself."""
        return not self.format

    def rows(self, limit: int | None) -> int:
        """Returns how many rows an answer has, 0 for all: as many as the user says, or what suits the format."""
        return _USUAL_ROWS.get(self.format, _FEW_ROWS) if limit is None else limit

    def write(self, document: Mapping[str, Any], both: Profile | None = None) -> None:
        """Writes an answer.

        Args:
            document: as `--json` prints it.
            both: the stacks of both sides of a difference, for a page.

        Raises:
            IaprofError: it cannot be written.
        """
        if self.format == "json":
            if self.output is None:
                with utf8_stdout():
                    print(json.dumps(document, indent=2))
                return
            with open_output(self.output, mode=self.mode) as out:
                out.write(json.dumps(document, indent=2) + "\n")
            return
        if self.format == "html":
            from iaprof.formats.page.html import write_difference

            with open_output(self.output, mode=self.mode) as out:
                write_difference(document, out, both)
            return
        from iaprof.formats.writers import table_csv, table_parquet

        table = _table(list(rows_of(document)))
        with open_output(self.output, binary=True, mode=self.mode) as out:
            (table_csv if self.format == "csv" else table_parquet).write_table(table, out)


def rows_of(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a document: its entries, with what they are of, such as their group, in front."""
    for each in document.get("groups", ()):
        about = {"group_captures": each["captures"], "group_share": each["share"]}
        yield from ({**each["group"], **about, **row} for row in rows_of(each))
    for each in document.get("intervals", ()):
        yield from ({"start_s": each["start_s"], **row} for row in rows_of(each))
    for each in document.get("outliers", ()):
        rest = {name: value for name, value in each.items() if name not in ("groups", "shares")}
        for group, share in zip(each["groups"], each["shares"], strict=True):
            yield {**group, "share": share, **_flat(rest, "")}
    prefix = "change_" if "unit" in document else "samples_"
    yield from (_flat(each, prefix) for each in document.get("entries", ()))


def _flat(entry: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            found |= {f"{prefix}{key}": each for key, each in value.items()}
        elif isinstance(value, list | tuple):
            found[name] = ";".join(map(str, reversed(value)))  # frames, outermost first as in other tables
        else:
            found[name] = value
    return found


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Makes an Arrow table whose texts are clean, and dictionary columns."""
    import pyarrow as pa

    from iaprof.formats.texts import clean_texts

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: pa.array([row.get(name) for row in rows]) for name in names}
    return pa.table(
        {
            name: clean_texts(column.dictionary_encode()) if pa.types.is_string(column.type) else column
            for name, column in columns.items()
        }
    )
