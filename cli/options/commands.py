"""The classes of commands: verbs with options grouped under headings, and the command that has the verbs."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from typer.core import TyperCommand, TyperGroup

from iaprof.basics.errors import UsageError
from iaprof.cli.options.choices import meant
from iaprof.cli.options.usage_errors import Refused

_REQUIRED = re.compile(r"^\{(.*?)(?:\.\.\.)?\}")
"""A required argument as typer writes it, in braces."""


class Verb(TyperCommand):
    """A command that prints `rich_help_panel` as headings in plain help, too, and whose errors know it."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments, then options, those without a heading first."""
        for heading, parameters in grouped(self.get_params(ctx)).items():
            records = [record for each in parameters if (record := help_record(each, ctx)) is not None]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns the words of the usage line, as manuals write them: CAPTURE, [CAPTURE], CAPTURE..., [CAPTURE]...."""
        return [_REQUIRED.sub(r"\1", piece).replace("...]...", "]...") for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the command line."""
        try:
            return super().parse_args(ctx, args)
        except Refused as error:
            error.ctx = getattr(error, "ctx", None) or ctx  # type: ignore[attr-defined]
            raise


def grouped(parameters: list[Any]) -> dict[str, list[Any]]:
    """Returns a verb's parameters by heading, arguments first."""
    groups: dict[str, list[Any]] = defaultdict(list)
    for parameter in parameters:
        usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
        groups[getattr(parameter, "rich_help_panel", None) or usual].append(parameter)
    return {heading: groups[heading] for heading in sorted(groups, key=lambda heading: heading != "Arguments")}


def help_record(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """Returns what help says of a parameter: its names and a sentence; of an argument without its type in Python."""
    record: tuple[str, str] | None = parameter.get_help_record(ctx)
    if record is None or parameter.param_type_name != "argument":
        return record
    return record[0].partition(" <")[0], record[1]


class Verbs(TyperGroup):
    """The command that has the verbs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the verb that the first word names.

        Raises:
            UsageError: there is none.
        """
        if not args[0].startswith("-") and args[0] not in self.commands:
            cure = meant(args[0], self.commands) or ": 'iaprof --help' lists the commands"
            raise UsageError(f"there is no command '{args[0]}'{cure}")
        return super().resolve_command(ctx, args)
