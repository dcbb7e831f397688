"""Completion for bash 4.4 or later."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from iaprof.cli.manual.commands import Command, Kind, Parameter

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
