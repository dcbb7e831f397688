"""The formats of `iaprof report` for a capture of time lines: a line of FORMATS for each.

A writer is a function `write(shown, options, out)` in a module below iaprof.timelines; it is imported when it is
used. Names, descriptions and extensions of formats are those of formats.writers.registry.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

from iaprof.basics.errors import UsageError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.export import About
from iaprof.formats.profile import StackOptions
from iaprof.timelines.arguments import Arguments
from iaprof.timelines.load import arguments, load
from iaprof.timelines.options import Options
from iaprof.timelines.profiles import enabled
from iaprof.timelines.registry import STAGES, run
from iaprof.timelines.trace import Trace


@dataclass(frozen=True)
class TimeLine:
    """What a writer gets: a trace after all its stages, and the capture that has its arguments."""

    trace: Trace
    capture: CaptureReader
    about: Callable[[CaptureReader], About]  # what reports say about a capture
    command: str = ""  # the words that made it

    @contextmanager
    def arguments(self) -> Iterator[Mapping[str, Arguments]]:
        """Yields the arguments of imported events, by kind of row: slice, flow and instant."""
        with ExitStack() as opened:
            kinds = ("slice", "flow", "instant")
            yield {kind: opened.enter_context(arguments(self.capture, kind)) for kind in kinds}


Write = Callable[[TimeLine, StackOptions, IO[Any]], None]


@dataclass(frozen=True)
class TraceFormat:
    """A format."""

    function: str  # "module:function" below iaprof.timelines
    binary: bool = False  # writes bytes, not text
    has_stacks: bool = False  # follows the options of stacks

    def load(self) -> Write:
        """Imports its function."""
        module, _, name = self.function.partition(":")
        function: Write = getattr(importlib.import_module(f"iaprof.timelines.{module}"), name)
        return function


FORMATS: Mapping[str, TraceFormat] = {
    "folded": TraceFormat("outputs.stack_formats:write_folded", has_stacks=True),
    "html": TraceFormat("outputs.page:write_html"),
    "svg": TraceFormat("outputs.stack_formats:write_svg", has_stacks=True),
    "speedscope": TraceFormat("outputs.stack_formats:write_speedscope", has_stacks=True),
    "json": TraceFormat("outputs.document:write_json"),
    "chrome": TraceFormat("outputs.chrome:write_report", binary=True),
    "perfetto": TraceFormat("outputs.perfetto:write_report", binary=True),
    "csv": TraceFormat("outputs.tables:write_totals_csv", binary=True),
    "parquet": TraceFormat("outputs.tables:write_totals_parquet", binary=True),
}
"""By the names of formats.writers.registry."""


def format_of(name: str) -> TraceFormat:
    """Returns a format; UsageError if time lines cannot be written in it."""
    if name not in FORMATS:
        raise UsageError(f"--format={name} shows stalls, and this capture has time lines: choose {', '.join(FORMATS)}")
    return FORMATS[name]


def finished(capture: CaptureReader, options: Options = Options(), profile: str = "everything") -> Trace:  # noqa: B008
    """Reads a capture's time lines, and runs the stages."""
    trace = load(capture)
    run(trace, options, enabled([(stage.name, *stage.others) for stage in STAGES], profile, ()), lambda *_: None)
    return trace
