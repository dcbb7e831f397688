"""Man pages, in the macros of man(7)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from iaprof.cli.manual.commands import Command, Parameter

_SPECIAL = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}
_NAME = re.compile(r"--?[a-zA-Z][\w-]*")
EXIT_CODES = (
    ("0", "Success."),
    ("1", "An error: one sentence on stderr says what is wrong and what to do."),
    ("2", "The command line is wrong."),
    ("130", "Interrupted by Ctrl-C."),
    ("141", "The reader of stdout closed it, as head does."),
)
"""The exit codes of all verbs, and what they mean."""
_OF_COMMANDS = ("record", "flame")


def man_page(command: Command, version: str, date: str, verbs: Sequence[Command]) -> str:
    """Returns the source of a page.

    Args:
        command: whose page it is.
        version: of iaprof.
        date: of the page, `2026-11-25`.
        verbs: those that the page of the command itself lists.
    """
    return "\n".join(_lines(command, version, date, verbs)) + "\n"


def page_name(command: Command) -> str:
    """Returns the name of a command's page, without its section."""
    return f"iaprof-{command.name}" if command.name else "iaprof"


def _lines(command: Command, version: str, date: str, verbs: Sequence[Command]) -> Iterator[str]:
    name = page_name(command)
    yield f'.TH {_text(name.upper())} 1 "{date}" "iaprof {version}" "iaprof manual"'
    summary, *paragraphs = command.about
    yield from (".SH NAME", f"{_text(name)} \\- {_text(summary[:1].lower() + summary[1:].rstrip('.'))}")
    yield from (".SH SYNOPSIS", f".B {_text(name.replace('-', ' ', 1))}", _text(command.usage))
    if paragraphs:
        yield from (".SH DESCRIPTION", _text(paragraphs[0]))
        yield from (line for paragraph in paragraphs[1:] for line in (".PP", _text(paragraph)))
    for heading, parameters in command.groups.items():
        if parameters:
            yield f'.SH "{_text(heading.upper())}"'
            yield from (line for each in parameters for line in _item(_names(each), each.about))
    if not command.name:
        yield ".SH COMMANDS"
        for verb in verbs:
            yield from _item(f"\\fBiaprof\\-{_text(verb.name)}\\fR(1)", verb.about[0])
    for heading, lines in command.endings:
        yield from (f'.SH "{_text(heading.upper())}"', ".EX", *map(_text, lines), ".EE")
    yield '.SH "EXIT STATUS"'
    for code, meaning in EXIT_CODES:
        yield from _item(f"\\fB{code}\\fR", meaning)
    if command.name in _OF_COMMANDS:
        yield from (".PP", "If COMMAND was recorded, its exit code.")
    yield ".SH SEE ALSO"
    others = [each for each in verbs if each.name != command.name] if not command.name else []
    yield ", ".join(f"\\fB{_text(page_name(each))}\\fR(1)" for each in others) or "\\fBiaprof\\fR(1)"


def _item(tag: str, text: str) -> Iterator[str]:
    yield from (".TP", tag, _text(text))


def _names(parameter: Parameter) -> str:
    """The names of an option in bold, and its value in italics."""
    if not parameter.names:
        return f"\\fI{_text(parameter.shown)}\\fR"
    found, end = "", 0
    for match in _NAME.finditer(parameter.shown):
        found += _value(parameter.shown[end : match.start()]) + f"\\fB{_text(match[0])}\\fR"
        end = match.end()
    return found + _value(parameter.shown[end:])


def _value(text: str) -> str:
    return _text(text) if not text.strip(" ,/") else f" \\fI{_text(text.strip())}\\fR"


def _text(text: str) -> str:
    """A line of text without meaning for roff."""
    escaped = "".join(_SPECIAL.get(character, character) for character in text)
    return f"\\&{escaped}" if escaped.startswith(".") else escaped
