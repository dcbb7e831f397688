"""Adds shared options to a verb, in a way that typer understands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def add_options(
    verb: Callable[..., None],
    options: Callable[..., Any],
    call: Callable[[Any, dict[str, Any]], None],
    left_out: str = "",
) -> Callable[..., None]:
    """Returns the verb with additional options.

    Args:
        verb: its parameters are its own options.
        options: its parameters are the additional options; its result goes to `call`.
        call: calls the verb with the result of `options` and the verb's own options.
        left_out: name of a parameter of the verb that is not an option.
    """
    own = inspect.signature(verb, eval_str=True)
    added = inspect.signature(options, eval_str=True).parameters

    def with_options(**given: Any) -> None:
        call(
            options(**{name: value for name, value in given.items() if name in added}),
            {name: value for name, value in given.items() if name not in added},
        )

    # Not functools.wraps: typer would follow __wrapped__ to the verb's own parameters.
    kept = [parameter for name, parameter in own.parameters.items() if name != left_out]
    made: Any = with_options
    made.__name__, made.__doc__ = verb.__name__, verb.__doc__
    made.__signature__ = own.replace(parameters=[*kept, *added.values()])
    made.__annotations__ = {parameter.name: parameter.annotation for parameter in (*kept, *added.values())}
    return with_options
