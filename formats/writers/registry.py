"""The registry of output formats, from which `--format`, file extensions and help are made.

Writers are imported on first use: importing NumPy, Arrow and protobuf takes longer than printing help.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module

from iaprof.formats.writers.writer import Writer


@dataclass(frozen=True)
class Format:
    """An output format.

    Attributes:
        name: for `--format`.
        description: for help, at most 60 characters.
        extensions: of output files in this format; the first is the default.
        writer: the writer's class, relative to iaprof.formats.
    """

    name: str
    description: str
    extensions: tuple[str, ...]
    writer: str


FORMATS = {
    format_.name: format_
    for format_ in (
        Format(
            "folded",
            "a line per stack and its count, for flamegraph.pl, others",
            (".folded", ".collapsed"),
            "writers.folded.Folded",
        ),
        Format("html", "a page: flame graph, heat maps, time line, kernels", (".html",), "page.html.HtmlPage"),
        Format("svg", "a flame graph to zoom and search in", (".svg",), "writers.flame_svg.FlameSvg"),
        Format(
            "iaprof",
            "the text of Intel's own tool, by intervals",
            (".iaprof.txt", ".iaprof"),
            "writers.iaprof_text.IaprofText",
        ),
        Format("json", "everything, for other programs", (".json",), "writers.json_stacks.JsonStacks"),
        Format(
            "perfetto",
            "launches, samples, metrics over time, for ui.perfetto.dev",
            (".perfetto-trace", ".pftrace"),
            "writers.perfetto.Perfetto",
        ),
        Format("chrome", "the same as JSON, for chrome://tracing", (".trace.json",), "writers.chrome.Chrome"),
        Format(
            "firefox",
            "call trees of any range of time, for the Firefox Profiler",
            (".firefox.json",),
            "writers.firefox.Firefox",
        ),
        Format(
            "flamescope",
            "perf script text, for FlameScope's heat maps",
            (".perf.txt",),
            "writers.flamescope.Flamescope",
        ),
        Format(
            "speedscope",
            "flame graphs and functions, for speedscope",
            (".speedscope.json",),
            "writers.speedscope.Speedscope",
        ),
        Format("pprof", "profile.proto with lines and labels, for pprof", (".pb.gz", ".pprof"), "writers.pprof.Pprof"),
        Format("otlp", "OpenTelemetry's profiles, for collectors", (".otlp",), "writers.otlp.Otlp"),
        Format("csv", "a row per stack, instruction, reason, for spreadsheets", (".csv",), "writers.table_csv.Csv"),
        Format("parquet", "the same rows, for DuckDB and data frames", (".parquet",), "writers.table_parquet.Parquet"),
    )
}


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
EXTENSIONS = {extension: format_.name for format_ in FORMATS.values() for extension in format_.extensions}
"""The names of the formats, by extension of output files: the longest that matches counts."""
