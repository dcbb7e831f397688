"""The rule by which --format, --json and the extension of -o choose the format of an output, in all verbs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from iaprof.basics.errors import UsageError
from iaprof.cli.options.values import checked_choice

_WELL_KNOWN = frozenset((".csv", ".html", ".json", ".parquet", ".svg"))  # of one format whatever the verb


def output_format(
    formats: Mapping[str, str], usual: str, *, named: str | None, as_json: bool, output: Path | None
) -> str:
    """Returns the name of a format.

    Args:
        formats: the names of the formats, by extension; several extensions may have one name.
        usual: the format if no option names one.
        named: the value of --format.
        as_json: whether --json is given.
        output: the value of -o.

    Raises:
        UsageError: there is no such format, the output's name does not tell it, or options contradict each other.
    """
    if as_json and named not in (None, "json"):
        raise UsageError(f"--json and --format={named} contradict each other: leave one of them out")
    option = "--json" if as_json else f"--format={named}"
    chosen = "json" if as_json else named
    if chosen is not None:
        checked_choice(chosen, dict.fromkeys((usual, *formats.values())), "--format")
    if output is None:
        return chosen or usual
    by_name = _by_extension(formats, output)
    if chosen is None:
        if by_name is None:
            *others, last = formats
            extensions = f"{', '.join(others)} or {last}" if others else last
            raise UsageError(f"the name {output} does not determine the format: end it in {extensions}")
        return by_name
    is_of_another = by_name != chosen if by_name else output.suffix in _WELL_KNOWN
    if is_of_another and not _may_be_called(formats, chosen, output):
        raise UsageError(f"{option} and -o {output} contradict each other: leave one of them out")
    return chosen


def _by_extension(formats: Mapping[str, str], output: Path) -> str | None:
    found = [extension for extension in formats if output.name.endswith(extension)]
    return formats[max(found, key=len)] if found else None


def _may_be_called(formats: Mapping[str, str], chosen: str, output: Path) -> bool:
    """Whether an extension of the format ends as the output's does, as .json does for .trace.json."""
    ends = {os.path.splitext(extension)[1] or extension for extension, name in formats.items() if name == chosen}
    return output.suffix in ends
