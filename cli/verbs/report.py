"""`iaprof report`: writes a capture's profile in any output format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from iaprof.basics.errors import UsageError
from iaprof.cli.options.captures import ONE, Captures, FleetOptions, is_several
from iaprof.cli.options.declared import For, Given, Of
from iaprof.cli.options.output_format import output_format
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.options.shown import Interactive, Quiet, StackShape
from iaprof.cli.options.values import one_of
from iaprof.cli.subjects.choosing import subject_of
from iaprof.cli.subjects.subject import check_tree
from iaprof.cli.terminal.destination import Destination
from iaprof.cli.terminal.stdout import is_terminal, refuse_terminal
from iaprof.cli.timelines.options import DeviceOptions
from iaprof.formats.writers.registry import EXTENSIONS, FORMATS, WRITERS, Format

_WRITTEN = For(Of.STALLS | Of.SEVERAL | Of.TIME_LINES)
_SHOWN = [name for name, format_ in FORMATS.items() if format_.content_type]
"""The formats that browsers show."""
_FORMATS = "\n".join(f"  {format_.name:11} {format_.description}" for format_ in FORMATS.values())
EXAMPLES = f"""\b
Formats:
{_FORMATS}

\b
Examples:
  iaprof report                                          a table of kernels
  iaprof report cap.parquet -i                           browse it in the terminal
  iaprof report cap.parquet | flamegraph.pl > cap.svg    folded stacks
  iaprof report cap.parquet -o cap.html                  a page for a browser
  iaprof report cap.parquet -o cap.svg                   a flame graph
  iaprof report cap.parquet -o cap.iaprof.txt            Intel's iaprof text
  iaprof report cap.parquet --time 10%-20% --pid 4711    a part of it
  iaprof report cap.parquet --frames function,reason     why functions wait
  iaprof report cap.parquet --json | jq .matched         shares that were matched
  iaprof report 'captures/*.parquet' -o fleet.html       many captures, added up
"""


@dataclass(frozen=True)
class ReportOutput:
    """The options that say in which format a report is written, and where."""

    FOR: ClassVar[For] = _WRITTEN
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="One of the formats below. By default, -o's extension chooses; else a terminal shows a table, and a "
            "pipe gets folded stacks.",
            show_default=False,
            autocompletion=one_of(FORMATS),
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to FILE instead of stdout.", show_default=False),
    ] = None
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing output.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format=json.")] = False

    @property
    def is_chosen(self) -> bool:
        """Whether an option names a format or a file."""
        return bool(self.format_ or self.as_json or self.output)

    def format(self, usual: str) -> Format:
        """Returns the format; without an option, the usual one. UsageError if there is none, or options disagree."""
        named = output_format(EXTENSIONS, usual, named=self.format_, as_json=self.as_json, output=self.output)
        return FORMATS[named]


@dataclass(frozen=True)
class Browsers:
    """The options that show a report in a browser, and the one for the interactive view, which is between them."""

    open_: Annotated[bool, typer.Option("--open", help="Show the page or picture in a browser."), _WRITTEN] = False
    interactive: Interactive = False
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page to browsers of this machine until Ctrl-C."), _WRITTEN
    ] = False

    def destination(self, captures: list[str], output: Path | None, format_: Format) -> Destination:
        """Returns where a report goes, of the mode that nobody else may read.

        Raises:
            UsageError: browsers do not show the format, a report for browsers goes to no file, or one that is not text
                would go to a terminal.
        """
        is_shown = self.open_ or self.serve
        if is_shown and not format_.content_type:
            raise UsageError(f"--open and --serve show {' and '.join(_SHOWN)}: {format_.name} is for other programs")
        if self.serve and output is not None:
            raise UsageError("--serve writes no file: leave out -o")
        if not WRITERS[format_.name].readable and output is None and not is_shown:
            refuse_terminal(format_.name)
        name = f"{'captures' if is_several(captures) else Path(captures[0]).stem}{format_.extensions[0]}"
        return Destination(output, self.open_, self.serve, format_.content_type, name)


def report(
    given: Given,
    *,
    captures: Captures = ONE,
    output: ReportOutput,
    shape: StackShape,
    browsers: Browsers,
    device: DeviceOptions,
    quiet: Quiet = False,
    choice: SelectionOptions,
    fleet: FleetOptions,
) -> None:
    """Print where the GPU stalled, or where the time of an imported trace went.

    Joins the stalls of a capture to kernels, source lines and the stacks that launched them. Runs on any machine,
    without a GPU and without root.
    """
    if browsers.interactive:
        check_tree(given)
        subject = subject_of("report", captures, choice, fleet, device)
        subject.check(given)
        subject.tree("stack", shape, quiet)
        return
    in_browser = browsers.open_ or browsers.serve
    format_ = output.format("html" if in_browser else "folded")
    destination = browsers.destination(captures, output.output, format_)
    shape.check(format_, WRITERS[format_.name], choice)
    subject = subject_of("report", captures, choice, fleet, device)
    subject.check(given)
    if output.output is not None:
        destination.mode = subject.output_mode(output.output, output.force)
    if is_terminal() and not output.is_chosen and not in_browser and not given.has_any_of(StackShape):
        subject.view(quiet)
        return
    subject.export(format_, shape, destination, quiet)
    destination.show()
