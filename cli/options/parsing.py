"""The classes of commands: their help under headings, and the sentences of their errors."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from iaprof.basics.errors import UsageError
from iaprof.cli.options.values import meant

Refused: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises if a command line makes no sense: click's UsageError, which typer does not export."""


def sentence(error: Any) -> str:
    """Returns what is wrong and what to do, for an error of the class Refused."""
    parameter = getattr(error, "param", None)
    name = _name(parameter) if parameter is not None else getattr(error, "option_name", "")
    match type(error).__name__:
        case "NoSuchOption":
            text = f"there is no option {name}"
            suggestion = meant(name, error.possibilities or ())
            return f"{text}{suggestion}" if suggestion else f"{text}: {_see(error)}"
        case "MissingParameter":
            return f"{name} is missing: {_see(error)}"
        case "BadOptionUsage":
            takes = "takes no value" if "not take a value" in error.message else "needs a value"
            return f"{name} {takes}: {_see(error)}"
        case "BadParameter":
            return f"{name} {_taken(error.message)}: {_see(error)}"
        case _:
            text = error.format_message().rstrip(".")
            if extra := re.search(r"unexpected extra argument.*?\(([^()]*)\)$", text):
                return f"unexpected argument{'s' if ' ' in extra[1] else ''} {extra[1]}: {_see(error)}"
            return f"{text[:1].lower()}{text[1:]}: {_see(error)}"


def _name(parameter: Any) -> str:
    """The longest name of an option, or an argument as the usage line has it."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper()).rstrip(".")
    return str(max(parameter.opts, key=len))


def _taken(message: str) -> str:
    """What an option takes, from the message of the library that parses values."""
    if "integer" in message:
        return "takes a whole number"
    if "valid number" in message or "float" in message:
        return "takes a number"
    return message.replace("Input should be", "has to be")


def _see(error: Any) -> str:
    command = error.ctx.command_path if error.ctx is not None else "iaprof"
    return f"'{command} --help' lists what it takes"


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
