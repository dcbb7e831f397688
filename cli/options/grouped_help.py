"""Help with options grouped under headings, for verbs with many options."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from typer.core import TyperCommand


class Grouped(TyperCommand):
    """A command that prints `rich_help_panel` as headings in plain help, too."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes arguments, then options, those without a heading first."""
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for parameter in self.get_params(ctx):
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if (record := parameter.get_help_record(ctx)) is not None:
                groups[getattr(parameter, "rich_help_panel", None) or usual].append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
