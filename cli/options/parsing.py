"""The classes of commands: their help under headings, sentences of their errors, and verbs that are imported late."""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from iaprof.basics.errors import UsageError
from iaprof.cli.options.declared import with_options
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


_UNKNOWN = object()
_NUMBERS: dict[Any, re.Pattern[str]] = {
    int: re.compile("[0-9]{1,15}"),
    float: re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?"),
}
"""Numbers that all parsers read alike."""


class _Quick:
    """A command whose parameters convert values without pydantic, where these need no more than a constructor.

    typer imports it since 0.29 for any value, which takes 60 ms.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the parameters."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if hasattr(each, "type_descriptor") and "process_value" not in vars(each):
                each.process_value = functools.partial(_process_value, each, each.process_value)
        return found


def _process_value(parameter: Any, by_typer: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """Does with a parameter's value what `by_typer` does, which comes in where it may be refused."""
    made = _made(parameter.type_descriptor.annotation, parameter.type_descriptor.parameter_info, value)
    if value is None and (parameter.multiple or parameter.nargs == -1):
        made = ()
    if made is _UNKNOWN or (parameter.required and parameter.value_is_missing(made)):
        return by_typer(ctx, value)
    return made if parameter.callback is None else parameter.callback(ctx, parameter, made)


def _made(annotation: Any, limits: Any, value: Any) -> Any:
    """Makes what an annotation says, of a text or of a default; returns _UNKNOWN if that takes more.

    Args:
        annotation: of a parameter, or of a value that it may have several of.
        limits: has the least and the greatest number, if there are any, as `min` and `max`.
        value: the text, or the default.
    """
    if get_origin(annotation) is list and isinstance(value, list | tuple):
        made = [_made(get_args(annotation)[0], limits, each) for each in value]
        return _UNKNOWN if any(each is _UNKNOWN for each in made) else made
    if annotation is Path and isinstance(value, str | Path):
        return _UNKNOWN if os.path.exists(value) and not os.access(value, os.R_OK) else Path(value)
    if annotation in _NUMBERS and _NUMBERS[annotation].fullmatch(str(value)):
        value = annotation(value)
        is_allowed = (limits.min is None or limits.min <= value) and (limits.max is None or value <= limits.max)
        return value if is_allowed else _UNKNOWN
    return value if value is None or type(value) is annotation else _UNKNOWN


class Verb(_Quick, TyperCommand):
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


@dataclass(frozen=True)
class Known:
    """What is known of a verb before its module is imported.

    Attributes:
        function: "module:function" of the verb. The module's EXAMPLES end its help.
        help: the first sentence of the verb's docstring, which the list of verbs shows, cut to the terminal's width.
        short_help: what the list shows in its place.
        applied: "module:class" of options that apply before the verb runs.
        command: whether words after the first that is no option belong to a command that the verb runs.
    """

    function: str
    help: str = ""
    short_help: str = ""
    applied: str = ""
    command: bool = False

    def listed(self, name: str) -> Verb:
        """Returns a command that has nothing but what the list of verbs shows."""
        return Verb(name=name, help=self.help, short_help=self.short_help)

    def imported(self, name: str) -> Any:
        """Imports the verb, and returns it as a command."""
        module, function = _imported(self.function)
        function = with_options(function, _imported(self.applied)[1] if self.applied else None)
        # For typer it is a program of its own: a group would need all verbs.
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        settings = {"allow_interspersed_args": False} if self.command else None
        one.command(
            name, cls=Verb, epilog=module.EXAMPLES, short_help=self.short_help or None, context_settings=settings
        )(function)
        return get_command(one)


def _imported(name: str) -> tuple[Any, Any]:
    """Imports a module; returns it and its object, of "module:object"."""
    module, _, found = name.partition(":")
    imported = importlib.import_module(module)
    return imported, getattr(imported, found)


class _Imported(Mapping[str, Any]):
    """Verbs by name, each imported when it is asked for."""

    def __init__(self, known: Mapping[str, Known]) -> None:
        self._known = known
        self._imported: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._imported:
            self._imported[name] = self._known[name].imported(name)
        return self._imported[name]

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class Verbs(_Quick, TyperGroup):
    """The command that has the verbs; it imports only the one that is run."""

    KNOWN: ClassVar[Mapping[str, Known]] = {}

    def __init__(self, **settings: Any) -> None:
        """Args: what typer gives a group, which has no commands of its own."""
        super().__init__(**settings)
        self.commands: Any = _Imported(self.KNOWN)

    def list_commands(self, _ctx: Any) -> list[str]:
        """Returns the names of the verbs, in the order of the help."""
        return list(self.KNOWN)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the list of verbs."""
        listed = TyperGroup(commands={name: known.listed(name) for name, known in self.KNOWN.items()})
        listed.format_commands(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the verb that the first word names.

        Raises:
            UsageError: there is none.
        """
        if not args[0].startswith("-") and args[0] not in self.commands:
            cure = meant(args[0], self.commands) or ": 'iaprof --help' lists the commands"
            raise UsageError(f"there is no command '{args[0]}'{cure}")
        return super().resolve_command(ctx, args)
