"""The commands as data, for man pages and completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from typer.main import get_command

from iaprof.cli.options.parsing import grouped, help_record


class Kind(Enum):
    """What a value is, as far as shells can complete it."""

    NOTHING = auto()  # a number, a name or the like
    CHOICE = auto()
    FILE = auto()
    FOLDER = auto()
    CAPTURE = auto()
    SPOOL = auto()
    PID = auto()
    COMMAND = auto()


_KINDS = {
    "FILE": Kind.FILE, "FOLDER": Kind.FOLDER, "DIR": Kind.FOLDER, "DIR|URL": Kind.FOLDER, "CAPTURE": Kind.CAPTURE,
    "BEFORE": Kind.CAPTURE, "AFTER": Kind.CAPTURE, "SPOOL": Kind.SPOOL, "LIBRARY": Kind.FILE, "PID,...": Kind.PID,
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """An option or an argument."""

    names: Sequence[str]  # of an option, as they are typed; of an argument none
    shown: str  # `-o, --output FILE`
    about: str  # a sentence
    kind: Kind | None  # of the value; None for options without one
    choices: Sequence[str] = ()
    is_list: bool = False  # of comma-separated values
    is_repeated: bool = False  # may be given several times


@dataclass(frozen=True)
class Command:
    """A verb, or the command itself."""

    name: str  # "" for the command itself
    usage: str  # without the program's name
    about: Sequence[str]  # paragraphs, the first of which is one sentence
    groups: Mapping[str, Sequence[Parameter]]  # by heading
    endings: Sequence[tuple[str, Sequence[str]]]  # headings and lines, such as those of examples

    @property
    def options(self) -> list[Parameter]:
        """All options."""
        return [each for group in self.groups.values() for each in group if each.names]

    @property
    def arguments(self) -> list[Parameter]:
        """All arguments."""
        return [each for group in self.groups.values() for each in group if not each.names]


def commands(app: Any) -> list[Command]:
    """Returns the command itself, and then its verbs."""
    top = get_command(app)
    context = top.make_context("iaprof", [], resilient_parsing=True)
    found = [_command("", top, context)]
    for name, verb in top.commands.items():  # type: ignore[attr-defined]
        if not verb.hidden:
            found.append(_command(name, verb, verb.make_context(name, [], parent=context, resilient_parsing=True)))
    return found


def _command(name: str, command: Any, context: Any) -> Command:
    usage = " ".join(command.collect_usage_pieces(context))
    groups = {
        heading: [_parameter(each, context) for each in parameters if _is_shown(each, context)]
        for heading, parameters in grouped(command.get_params(context)).items()
    }
    paragraphs = [" ".join(each.split()) for each in (command.help or "").split("\n\n")]
    return Command(name, usage, paragraphs, groups, _endings(command.epilog or ""))


def _is_shown(parameter: Any, context: Any) -> bool:
    return parameter.name == "command" or parameter.get_help_record(context) is not None


def _parameter(parameter: Any, context: Any) -> Parameter:
    shown, about = help_record(parameter, context) or ("COMMAND", "The command to record, and its arguments.")
    is_option = parameter.param_type_name == "option"
    metavar = (parameter.metavar or "").removesuffix("...") if not is_option else parameter.metavar or ""
    choices = [item.value for item in parameter.shell_complete(context, "") if item.type == "plain" and item.value]
    kind: Kind | None = Kind.CHOICE if choices else _KINDS.get(metavar, Kind.NOTHING)
    if parameter.name == "command":
        kind = Kind.COMMAND
    if is_option and parameter.is_flag:
        kind = None
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else []
    names.sort(key=lambda name: not name.startswith("--"))  # those of --help come in any order
    is_repeated = bool(getattr(parameter, "multiple", False) or parameter.nargs == -1)
    return Parameter(names, shown, " ".join(about.split()), kind, choices, metavar.endswith(",..."), is_repeated)


def _endings(epilog: str) -> list[tuple[str, Sequence[str]]]:
    """The headings and lines of an epilog, whose paragraphs begin with click's mark that they are not to be wrapped."""
    found: list[tuple[str, Sequence[str]]] = []
    for paragraph in epilog.split("\b\n")[1:]:
        heading, *lines = paragraph.rstrip().split("\n")
        found.append((heading.rstrip(":"), lines))
    return found
