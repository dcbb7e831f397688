"""The formats in which `iaprof report` writes time lines.

formats.writers.registry has their functions, which are imported when they are used. The formats that show
stacks have the same writers as for stalls: flame graphs of where a trace's time went.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any

from iaprof.basics.errors import UsageError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.export import About, Export
from iaprof.formats.profile import StackOptions, empty_profile
from iaprof.formats.writers.registry import FORMATS as REGISTRY, WRITERS, OfTimeLines
from iaprof.timelines.arguments import Arguments
from iaprof.timelines.load import arguments, load
from iaprof.timelines.options import Options
from iaprof.timelines.registry import STAGES, run
from iaprof.timelines.stage_profiles import enabled
from iaprof.timelines.trace import Trace
from iaprof.timelines.views.stacks import stacks


@dataclass(frozen=True)
class TimeLine:
    """The input of a writer: a trace after all its stages, and the capture with the arguments of its events."""

    trace: Trace
    capture: CaptureReader
    about: Callable[[CaptureReader], About]  # returns what reports say about a capture
    command: str = ""  # the command line

    @contextmanager
    def arguments(self) -> Iterator[Mapping[str, Arguments]]:
        """Yields the arguments of imported events, by kind of row: slice, flow and instant."""
        with ExitStack() as opened:
            kinds = ("slice", "flow", "instant")
            yield {kind: opened.enter_context(arguments(self.capture, kind)) for kind in kinds}


Write = Callable[[TimeLine, StackOptions, IO[Any]], None]


FORMATS = {name: format_.time_lines for name, format_ in REGISTRY.items() if format_.time_lines is not None}
"""The formats that show time lines, by the names of formats.writers.registry."""


def format_of(name: str) -> OfTimeLines:
    """Returns a format; UsageError if time lines cannot be written in it."""
    if name not in FORMATS:
        raise UsageError(f"--format={name} shows stalls, and this capture has time lines: choose {', '.join(FORMATS)}")
    return FORMATS[name]


def writer_of(name: str) -> Write:
    """Imports the function of a format, which writes a report."""
    module, _, function = format_of(name).function.partition(":")
    write: Write = getattr(importlib.import_module(f"iaprof.timelines.{module}"), function)
    return write


def finished(capture: CaptureReader, options: Options = Options(), profile: str = "everything") -> Trace:  # noqa: B008
    """Reads a capture's time lines, and runs the stages."""
    trace = load(capture)
    run(trace, options, enabled([(stage.name, *stage.others) for stage in STAGES], profile, ()), lambda *_: None)
    return trace


def write_folded(shown: TimeLine, options: StackOptions, out: IO[str]) -> None:
    """Writes folded stacks: a line for each, with its ns."""
    _write("folded", shown, options, out)


def write_svg(shown: TimeLine, options: StackOptions, out: IO[str]) -> None:
    """Writes a flame graph."""
    _write("svg", shown, options, out)


def write_speedscope(shown: TimeLine, options: StackOptions, out: IO[str]) -> None:
    """Writes a profile for speedscope."""
    _write("speedscope", shown, options, out)


def _write(name: str, shown: TimeLine, options: StackOptions, out: IO[str]) -> None:
    export = Export(empty_profile(), shown.about(shown.capture), cpu=stacks(shown.trace))
    shape = replace(options, components=("process", "cpu"), cpu_samples=True, slices=True)
    WRITERS[name].write(export, shape, out)
