"""The registry of output formats, from which `--format`, file extensions and help are made.

Writers are imported on first use: importing NumPy, Arrow and protobuf takes longer than printing help.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from importlib import import_module

from iaprof.formats.writers.writer import Writer


class Of(Flag):
    """What a format shows, besides stalls."""

    NOTHING_ELSE = 0
    WAITS = auto()
    TABLES = auto()  # the answers of `iaprof top`, `query` and `diff`
    DIFFERENCES = auto()  # of two captures, as those of TABLES do
    STACKS_OF_DIFFERENCES = auto()


@dataclass(frozen=True)
class OfTimeLines:
    """How a format shows time lines.

    Attributes:
        function: "module:function" below iaprof.timelines, a `write(shown, options, out)`.
        binary: whether it writes bytes, not text.
    """

    function: str
    binary: bool = False


@dataclass(frozen=True)
class Format:
    """An output format.

    Attributes:
        name: for `--format`.
        description: for help, at most 60 characters.
        extensions: of output files in this format; the first is the default.
        writer: the writer's class, relative to iaprof.formats.
        time_lines: how it shows time lines; None: not at all.
        of: what else it shows.
        content_type: of a format that browsers show.
    """

    name: str
    description: str
    extensions: tuple[str, ...]
    writer: str
    time_lines: OfTimeLines | None = None
    of: Of = Of.NOTHING_ELSE
    content_type: str = ""


_ALL_FORMATS = (
    Format(
        "folded",
        "a line per stack and its count, for flamegraph.pl, others",
        (".folded", ".collapsed"),
        "writers.folded.Folded",
        OfTimeLines("outputs.formats:write_folded"),
        Of.WAITS | Of.STACKS_OF_DIFFERENCES,
    ),
    Format(
        "html",
        "a page: flame graph, heat maps, time line, kernels",
        (".html",),
        "page.html.HtmlPage",
        OfTimeLines("outputs.page:write_html"),
        Of.DIFFERENCES,
        "text/html; charset=utf-8",
    ),
    Format(
        "svg",
        "a flame graph to zoom and search in",
        (".svg",),
        "writers.flame_svg.FlameSvg",
        OfTimeLines("outputs.formats:write_svg"),
        Of.WAITS | Of.STACKS_OF_DIFFERENCES,
        "image/svg+xml; charset=utf-8",
    ),
    Format(
        "iaprof",
        "the text of Intel's own tool, by intervals",
        (".iaprof.txt", ".iaprof"),
        "writers.iaprof_text.IaprofText",
    ),
    Format(
        "json",
        "everything, for other programs",
        (".json",),
        "writers.json_stacks.JsonStacks",
        OfTimeLines("outputs.tables:write_json"),
        Of.TABLES,
    ),
    Format(
        "perfetto",
        "launches, samples, metrics over time, for ui.perfetto.dev",
        (".perfetto-trace", ".pftrace"),
        "writers.perfetto.Perfetto",
        OfTimeLines("outputs.perfetto:write_report", binary=True),
    ),
    Format(
        "chrome",
        "the same as JSON, for chrome://tracing",
        (".trace.json",),
        "writers.chrome.Chrome",
        OfTimeLines("outputs.chrome:write_report", binary=True),
    ),
    Format(
        "firefox",
        "call trees of any range of time, for the Firefox Profiler",
        (".firefox.json",),
        "writers.firefox.Firefox",
    ),
    Format(
        "flamescope", "perf script text, for FlameScope's heat maps", (".perf.txt",), "writers.flamescope.Flamescope"
    ),
    Format(
        "speedscope",
        "flame graphs and functions, for speedscope",
        (".speedscope.json",),
        "writers.speedscope.Speedscope",
        OfTimeLines("outputs.formats:write_speedscope"),
        Of.WAITS,
    ),
    Format("pprof", "profile.proto with lines and labels, for pprof", (".pb.gz", ".pprof"), "writers.pprof.Pprof"),
    Format("otlp", "OpenTelemetry's profiles, for collectors", (".otlp",), "writers.otlp.Otlp"),
    Format(
        "csv",
        "a row per stack, instruction, reason, for spreadsheets",
        (".csv",),
        "writers.table_csv.Csv",
        OfTimeLines("outputs.tables:write_totals_csv", binary=True),
        Of.TABLES,
    ),
    Format(
        "parquet",
        "the same rows, for DuckDB and data frames",
        (".parquet",),
        "writers.table_parquet.Parquet",
        OfTimeLines("outputs.tables:write_totals_parquet", binary=True),
        Of.TABLES,
    ),
)
FORMATS: Mapping[str, Format] = {format_.name: format_ for format_ in _ALL_FORMATS}


class _Writers(Mapping[str, Writer]):
    def __getitem__(self, name: str) -> Writer:
        module, _, class_ = FORMATS[name].writer.rpartition(".")
        writer: Writer = getattr(import_module(f"iaprof.formats.{module}"), class_)()
        return writer

    def __iter__(self) -> Iterator[str]:
        return iter(FORMATS)

    def __len__(self) -> int:
        return len(FORMATS)


WRITERS: Mapping[str, Writer] = _Writers()
"""The writer of each format, by name."""


def extensions(of: Of = Of.NOTHING_ELSE) -> dict[str, str]:
    """Returns the names of the formats that show something, by extension; without an argument, those of all formats."""
    return {each: format_.name for format_ in _ALL_FORMATS if of in format_.of for each in format_.extensions}


EXTENSIONS = extensions()
"""The names of the formats, by extension of output files: the longest that matches counts."""
