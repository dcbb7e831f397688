"""Sentences about command lines that typer refuses, in the style of all other errors."""

from __future__ import annotations

import re
from typing import Any

import typer

from iaprof.cli.options.choices import meant

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
