"""`iaprof help`: prints the help of a command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from iaprof.basics.errors import UsageError
from iaprof.cli.options.values import meant
from iaprof.cli.terminal.pager import show
from iaprof.cli.terminal.stdout import is_terminal, utf8_stdout

EXAMPLES = """\b
Examples:
  iaprof help          the commands
  iaprof help record   the options of one, as iaprof record --help
  man iaprof-record    the same as a man page
"""


def _commands(ctx: typer.Context) -> list[str]:
    top: Any = ctx.parent
    return list(top.command.commands)


def help_(
    context: typer.Context,
    verb: Annotated[
        str | None,
        typer.Argument(metavar="COMMAND", help="A command of iaprof. By default, list all.", autocompletion=_commands),
    ] = None,
) -> None:
    """Print the help of a command."""
    top: Any = context.parent
    command, of_command = top.command, top
    if verb is not None:
        if verb not in top.command.commands:
            cure = meant(verb, top.command.commands) or ": 'iaprof help' lists the commands"
            raise UsageError(f"there is no command '{verb}'{cure}")
        command = top.command.commands[verb]
        of_command = command.make_context(verb, [], parent=top, resilient_parsing=True)
    text = command.get_help(of_command) + "\n"
    if is_terminal():
        show(text)
    else:
        with utf8_stdout():
            print(text, end="")
