"""Completion for zsh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from iaprof.cli.manual.commands import Command, Kind, Parameter

_ACTIONS = {
    Kind.NOTHING: " ",
    Kind.FILE: "_files",
    Kind.FOLDER: "_files -/",
    Kind.CAPTURE: '_files -g "*.parquet(-.)"',
    Kind.SPOOL: '_files -g "*.spool(-.)"',
    Kind.PID: "_sequence _pids",
}


def zsh_completion(verbs: Sequence[Command], top: Command) -> str:
    """Returns the script."""
    return "".join(_parts(verbs, top))


def _parts(verbs: Sequence[Command], top: Command) -> Iterator[str]:
    yield "#compdef iaprof\n\n_iaprof() {\n    local curcontext=$curcontext state line verbs\n    typeset -A opt_args\n"
    yield "    verbs=(\n"
    yield from (f"        {_quoted(f'{verb.name}:{_text(verb.about[0])}')}\n" for verb in verbs)
    yield "    )\n    _arguments -C \\\n"
    yield from (f"        {_quoted(spec)} \\\n" for option in top.options for spec in _specs(option))
    yield "        '1:command:->verb' '*::argument:->argument'\n"
    yield "    case $state in\n    verb) _describe -t commands 'iaprof command' verbs ;;\n    argument)\n"
    yield "        curcontext=${curcontext%:*}-$line[1]:\n        case $line[1] in\n"
    for verb in verbs:
        yield f"        {verb.name})\n            _arguments -s -S"
        specs = [spec for each in verb.options for spec in _specs(each)]
        specs += [spec for at, each in enumerate(verb.arguments, 1) for spec in _of_argument(each, at)]
        yield "".join(f" \\\n                {_quoted(spec)}" for spec in specs)
        yield " ;;\n"
    yield '        esac ;;\n    esac\n}\n\n_iaprof "$@"\n'


def _specs(option: Parameter) -> Iterator[str]:
    others = " ".join(option.names)
    first = "*" if option.is_repeated else f"({others})"
    for name in option.names:
        equals = "" if option.kind is None else "=" if name.startswith("--") else "+"
        yield f"{first}{name}{equals}[{_text(option.about)}]{_value(option)}"


def _of_argument(argument: Parameter, at: int) -> list[str]:
    if argument.kind is Kind.COMMAND:
        return ["(-)1:command:_command_names -e", "*::arguments:_normal"]
    place = "*" if argument.is_repeated else str(at)
    return [f"{place}{_value(argument)}"]


def _value(parameter: Parameter) -> str:
    if parameter.kind is None:
        return ""
    name = _text(parameter.shown.split()[-1]).lower()
    if parameter.kind is Kind.CHOICE:
        words = " ".join(map(_text, parameter.choices))
        return f":{name}:{f'_values -s , {name} {words}' if parameter.is_list else f'({words})'}"
    return f":{name}:{_ACTIONS[parameter.kind]}"


def _text(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\[]:" else character for character in text)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
