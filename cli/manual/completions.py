"""Completions for bash, fish and zsh."""

from __future__ import annotations

import shlex
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
    return "".join(_zsh_parts(verbs, top))


def _zsh_parts(verbs: Sequence[Command], top: Command) -> Iterator[str]:
    yield "#compdef iaprof\n\n_iaprof() {\n    local curcontext=$curcontext state line verbs\n    typeset -A opt_args\n"
    yield "    verbs=(\n"
    yield from (f"        {_zsh_quoted(f'{verb.name}:{_text(verb.about[0])}')}\n" for verb in verbs)
    yield "    )\n    _arguments -C \\\n"
    yield from (f"        {_zsh_quoted(spec)} \\\n" for option in top.options for spec in _specs(option))
    yield "        '1:command:->verb' '*::argument:->argument'\n"
    yield "    case $state in\n    verb) _describe -t commands 'iaprof command' verbs ;;\n    argument)\n"
    yield "        curcontext=${curcontext%:*}-$line[1]:\n        case $line[1] in\n"
    for verb in verbs:
        yield f"        {verb.name})\n            _arguments -s -S"
        specs = [spec for each in verb.options for spec in _specs(each)]
        specs += [spec for at, each in enumerate(verb.arguments, 1) for spec in _zsh_of_argument(each, at)]
        yield "".join(f" \\\n                {_zsh_quoted(spec)}" for spec in specs)
        yield " ;;\n"
    yield '        esac ;;\n    esac\n}\n\n_iaprof "$@"\n'


def _specs(option: Parameter) -> Iterator[str]:
    others = " ".join(option.names)
    first = "*" if option.is_repeated else f"({others})"
    for name in option.names:
        equals = "" if option.kind is None else "=" if name.startswith("--") else "+"
        yield f"{first}{name}{equals}[{_text(option.about)}]{_zsh_value(option)}"


def _zsh_of_argument(argument: Parameter, at: int) -> list[str]:
    if argument.kind is Kind.COMMAND:
        return ["(-)1:command:_command_names -e", "*::arguments:_normal"]
    place = "*" if argument.is_repeated else str(at)
    return [f"{place}{_zsh_value(argument)}"]


def _zsh_value(parameter: Parameter) -> str:
    if parameter.kind is None:
        return ""
    name = _text(parameter.shown.split()[-1]).lower()
    if parameter.kind is Kind.CHOICE:
        words = " ".join(map(_text, parameter.choices))
        return f":{name}:{f'_values -s , {name} {words}' if parameter.is_list else f'({words})'}"
    return f":{name}:{_ACTIONS[parameter.kind]}"


def _text(text: str) -> str:
    return "".join(f"\\{character}" if character in "\\[]:" else character for character in text)


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


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
        yield f"complete -c iaprof -n __fish_use_subcommand {_fish_names(option)} -d {_quoted(option.about)}"
    for verb in verbs:
        yield f"complete -c iaprof -n __fish_use_subcommand -a {verb.name} -d {_quoted(verb.about[0])}"
    for verb in verbs:
        begin = f"complete -c iaprof -n '__fish_seen_subcommand_from {verb.name}'"
        for option in verb.options:
            value = "" if option.kind is None else f" {_value(option)}"
            yield f"{begin} {_fish_names(option)}{value} -d {_quoted(option.about)}"
        for value in dict.fromkeys(_of_argument(each, verb) for each in verb.arguments):
            if value:
                yield f"{begin} {value}"


def _fish_names(option: Parameter) -> str:
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


_HEAD = """\
# bash completion for iaprof

_iaprof_words() { # completes the last of comma-separated words where $1 is 'list'
    local before=
    [[ $1 == list && $cur == *,* ]] && before=${cur%,*},
    mapfile -t COMPREPLY < <(compgen -P "$before" -W "$2" -- "${cur##*,}")
    [[ $1 == list ]] && compopt -o nospace
}

_iaprof_files() { # completes folders, and files whose names match $1
    compopt -o filenames
    mapfile -t COMPREPLY < <(compgen -d -- "$cur"; compgen -f -X "!$1" -- "$cur" | while IFS= read -r name; do
        [[ -d $name ]] || printf '%s\\n' "$name"
    done)
}

_iaprof() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} verb= options= at
    COMPREPLY=()
    if [[ $cur == = ]]; then # --option=
        cur=
    elif [[ $prev == = ]]; then # --option=value
        prev=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    for ((at = 1; at < COMP_CWORD; at++)); do
        if [[ ${COMP_WORDS[at]} != -* ]]; then
            verb=${COMP_WORDS[at]}
            break
        fi
    done
"""
_COMMAND = """\
    case $verb in
    {verbs})
        for ((at++; at < COMP_CWORD; at++)); do # a recorded command, with its own completion
            if [[ ${{COMP_WORDS[at]}} == -- || ( ${{COMP_WORDS[at]}} != -* && ${{COMP_WORDS[at]}} != = &&
                " {valued} " != *" ${{COMP_WORDS[at - 1]}} "* && ${{COMP_WORDS[at - 1]}} != = ) ]]; then
                [[ ${{COMP_WORDS[at]}} == -- ]] && ((at++))
                if declare -F _comp_command_offset >/dev/null; then
                    _comp_command_offset "$at"
                elif declare -F _command_offset >/dev/null; then
                    _command_offset "$at"
                elif ((at == COMP_CWORD)); then
                    mapfile -t COMPREPLY < <(compgen -c -- "$cur")
                else
                    _iaprof_files '*'
                fi
                return
            fi
        done
        ;;
    esac
"""
_TAIL = """\
    esac
}

complete -F _iaprof iaprof
"""


def bash_completion(verbs: Sequence[Command], top: Command) -> str:
    """Returns the script."""
    return "".join(_parts(verbs, top))


def _parts(verbs: Sequence[Command], top: Command) -> Iterator[str]:
    yield _HEAD
    recording = [verb for verb in verbs if any(each.kind is Kind.COMMAND for each in verb.arguments)]
    valued = [name for verb in recording for each in verb.options if each.kind is not None for name in each.names]
    names = "|".join(verb.name for verb in recording)
    yield _COMMAND.format(verbs=names, valued=" ".join(dict.fromkeys(valued)))
    yield "    case $verb,$prev in\n"
    for verb in verbs:
        for option in verb.options:
            if option.kind is not None:
                keys = "|".join(f"{verb.name},{name}" for name in option.names)
                yield f"    {keys}) {_values(option)}; return ;;\n"
    yield "    esac\n    case $verb in\n"
    yield f"    '') options={shlex.quote(_names(top))}\n"
    yield f"        [[ $cur == -* ]] || _iaprof_words one {shlex.quote(' '.join(verb.name for verb in verbs))} ;;\n"
    for verb in verbs:
        yield f"    {verb.name}) options={shlex.quote(_names(verb))}\n"
        values = next((_values(each) for each in verb.arguments if each.kind is not Kind.NOTHING), ":")
        yield f"        [[ $cur == -* ]] || {values} ;;\n"
    yield "    esac\n"
    yield '    case $cur in\n    -*) _iaprof_words one "$options" ;;\n'
    yield _TAIL


def _names(command: Command) -> str:
    return " ".join(name for option in command.options for name in option.names)


def _values(parameter: Parameter) -> str:
    match parameter.kind:
        case Kind.CHOICE:
            words = shlex.quote(" ".join(parameter.choices))
            return f"_iaprof_words {'list' if parameter.is_list else 'one'} {words}"
        case Kind.FILE:
            return "_iaprof_files '*'"
        case Kind.FOLDER:
            return "_iaprof_files ''"
        case Kind.CAPTURE:
            return "_iaprof_files '*.parquet'"
        case Kind.SPOOL:
            return "_iaprof_files '*.spool'"
        case Kind.PID:
            return '_iaprof_words list "$(ps -axo pid=)"'
        case Kind.COMMAND:
            return 'mapfile -t COMPREPLY < <(compgen -c -- "$cur")'
        case _:
            return ":"
