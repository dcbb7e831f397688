"""Completion for fish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from iaprof.cli.manual.commands import Command, Kind, Parameter

_VALUES = {
    Kind.NOTHING: "-x",
    Kind.FILE: "-r -F",
    Kind.FOLDER: "-x -a '(__fish_complete_directories)'",
    Kind.CAPTURE: "-k -x -a '(__fish_complete_suffix .parquet)'",
    Kind.SPOOL: "-k -x -a '(__fish_complete_suffix .spool)'",
    Kind.PID: "-x -a '(__fish_complete_list , __fish_complete_pids)'",
}


def fish_completion(verbs: Sequence[Command], top: Command) -> str:
    """Returns the script."""
    return "".join(f"{line}\n" for line in _lines(verbs, top))


def _lines(verbs: Sequence[Command], top: Command) -> Iterator[str]:
    yield "# fish completion for iaprof"
    yield "complete -c iaprof -f"
    for option in top.options:
        yield f"complete -c iaprof -n __fish_use_subcommand {_names(option)} -d {_quoted(option.about)}"
    for verb in verbs:
        yield f"complete -c iaprof -n __fish_use_subcommand -a {verb.name} -d {_quoted(verb.about[0])}"
    for verb in verbs:
        begin = f"complete -c iaprof -n '__fish_seen_subcommand_from {verb.name}'"
        for option in verb.options:
            value = "" if option.kind is None else f" {_value(option)}"
            yield f"{begin} {_names(option)}{value} -d {_quoted(option.about)}"
        for value in dict.fromkeys(_of_argument(each, verb) for each in verb.arguments):
            if value:
                yield f"{begin} {value}"


def _names(option: Parameter) -> str:
    return " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)


def _value(parameter: Parameter) -> str:
    if parameter.kind is Kind.CHOICE:
        words = _quoted(" ".join(parameter.choices))
        if not parameter.is_list:
            return f"-x -a {words}"
        lines = "\\n".join(parameter.choices)
        return f"-x -a '(__fish_append , (printf \"{lines}\\\\n\"))'"
    return _VALUES[parameter.kind or Kind.NOTHING]


def _of_argument(argument: Parameter, verb: Command) -> str:
    match argument.kind:
        case Kind.NOTHING:
            return ""
        case Kind.FILE:
            return "-F"
        case Kind.COMMAND:
            valued = [name for option in verb.options if option.kind is not None for name in option.names]
            return f"-x -a '(__fish_complete_subcommand --fcs-skip=2 {' '.join(valued)})'"
        case _:
            return _value(argument)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
