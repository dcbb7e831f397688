"""Options as fields of dataclasses, from which typer's parameters are made; each says which subjects take it.

A field is annotated as typer wants it, and with a For: `Annotated[bool, typer.Option("--force"), For(Of.STALLS)]`. A
verb has parameters that are such dataclasses, which check their values when they are made, and `with_options` makes of
it what typer takes.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Flag, auto
from typing import Any, Protocol, get_type_hints

import typer

from iaprof.basics.errors import UsageError


class Of(Flag):
    """What verbs show."""

    STALLS = auto()  # of one capture
    SEVERAL = auto()  # captures, added up
    TIME_LINES = auto()
    LIVE = auto()  # a recording, while it goes on
    TREE = auto()  # any but the last, in the interactive view


ALL = ~Of(0)


@dataclass(frozen=True)
class For:
    """What takes an option. Without one, the option is for what the dataclass says as FOR, else for all.

    Attributes:
        of: the subjects.
        otherwise: the error elsewhere; "": what the subject says of such options.
    """

    of: Of
    otherwise: str = ""


_OF_ALL = For(ALL)
_KIND = inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True)
class Given:
    """What the user gave on the command line.

    Attributes:
        options: by parameter, in the order of the help: the option's longest name, and what takes it.
    """

    options: Mapping[str, tuple[str, For]]

    def has(self, *names: str) -> bool:
        """Whether one of these parameters was given."""
        return not self.options.keys().isdisjoint(names)

    def has_any_of(self, options: type) -> bool:
        """Whether one of the options of a dataclass was given."""
        return self.has(*(each.name for each in fields(options)))

    def refuse(self, taken: Of, sentence: Callable[[str, For], str]) -> None:
        """Refuses the options that something does not take.

        Args:
            taken: what an option has to be for, all of it.
            sentence: makes the error, of an option and what it is for.

        Raises:
            UsageError: there is such an option.
        """
        for option, what in self.options.values():
            if taken not in what.of:
                raise UsageError(sentence(option, what))


class Applied(Protocol):
    """Options that no verb reads: making them checks the values, and `apply` brings them into effect."""

    def apply(self) -> None:
        """Brings the values into effect."""


def with_options(verb: Callable[..., None], applied: type[Applied] | None = None) -> Callable[..., None]:
    """Returns a verb as typer takes it, with a parameter for each field of its parameters that are dataclasses.

    Args:
        verb: called with these dataclasses, with what was given for a parameter of the type Given, and with typer's
            context for one of its type.
        applied: options of the command that apply before the verb runs; they come last in the help.
    """
    hints = get_type_hints(verb, include_extras=True)
    own = inspect.signature(verb).parameters
    passed = {name for name in own if hints[name] in (Given, typer.Context)}
    classes = {name: hints[name] for name in own if name not in passed and is_dataclass(hints[name])}
    parameters = [inspect.Parameter("context", _KIND, annotation=typer.Context)]
    taken: dict[str, For] = {}
    for name, parameter in own.items():
        if name in classes:
            parameters += _parameters(classes[name], taken)
        elif name not in passed:
            parameters.append(parameter.replace(kind=_KIND, annotation=hints[name]))
            taken[name] = _what(hints[name], _OF_ALL)
    if applied is not None:
        parameters += _parameters(applied, taken)

    def with_dataclasses(context: typer.Context, **values: Any) -> None:
        gc.freeze()  # what is imported stays, and need not be looked at
        gc.enable()
        if applied is not None:
            _made(applied, values).apply()
        arguments = {name: values[name] for name in own if name in values}
        arguments |= {name: _made(class_, values) for name, class_ in classes.items()}
        given = Given(dict(_given(context, taken)))
        verb(**arguments, **{name: given if hints[name] is Given else context for name in passed})

    made: Any = with_dataclasses  # not functools.wraps: typer would follow __wrapped__ to the verb's own parameters
    made.__name__, made.__doc__ = verb.__name__, verb.__doc__
    made.__signature__ = inspect.Signature(parameters)
    made.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_dataclasses


def _parameters(class_: Any, taken: dict[str, For]) -> Iterator[inspect.Parameter]:
    """Yields a parameter for each field of a dataclass, and notes in `taken` what takes it."""
    hints = get_type_hints(class_, include_extras=True)
    for each in fields(class_):
        taken[each.name] = _what(hints[each.name], getattr(class_, "FOR", _OF_ALL))
        yield inspect.Parameter(each.name, _KIND, default=each.default, annotation=hints[each.name])


def _what(annotation: Any, usual: For) -> For:
    """What takes an option: what its own annotation says last, else the usual."""
    own = [each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, For)]
    return own[-1] if own else usual


def _made(class_: Any, values: Mapping[str, Any]) -> Any:
    return class_(**{each.name: values[each.name] for each in fields(class_)})


def _given(context: typer.Context, taken: Mapping[str, For]) -> Iterator[tuple[str, tuple[str, For]]]:
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            yield name, (max(parameter.opts, key=len), taken.get(name, _OF_ALL))
