"""Formats of stacks, written by the writers of stalls: flame graphs of where a trace's time went."""

from __future__ import annotations

from dataclasses import replace
from typing import IO

from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions, empty_profile
from iaprof.formats.writers.registry import WRITERS
from iaprof.timelines.outputs.formats import TimeLine
from iaprof.timelines.views.stacks import stacks


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
