"""Chooses the subject of what the user named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from iaprof.basics.errors import UsageError
from iaprof.cli.options.captures import FleetOptions, existing, is_several
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.subjects.stalls import Stalls
from iaprof.cli.subjects.subject import Recorded
from iaprof.cli.subjects.time_lines import TimeLines, first_holds_time_lines
from iaprof.cli.terminal.ranking_tables import ENERGY
from iaprof.cli.timelines.options import DeviceOptions


def subject_of(
    verb: str, captures: Sequence[str], choice: SelectionOptions, fleet: FleetOptions, device: DeviceOptions
) -> Recorded:
    """Returns what captures hold.

    Args:
        verb: the verb's name.
        captures: paths, patterns, folders and URLs.
        choice: the selection of stalls, and where to look for symbols.
        fleet: the options for several captures.
        device: what is known of the devices of time lines.

    Raises:
        IaprofError: a single capture does not exist, or is damaged.
    """
    if is_several(captures):
        return _several(verb, captures, choice, fleet)
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.timelines.presence import shows_time_lines

    reader = CaptureReader(existing(Path(captures[0])))
    if shows_time_lines(reader):
        return TimeLines(verb, captures, device)
    return Stalls(verb, Path(captures[0]), choice, reader)


def subject_of_table(
    verb: str, captures: Sequence[str], by: str, choice: SelectionOptions, fleet: FleetOptions, device: DeviceOptions
) -> Recorded:
    """Returns what captures hold, for a table: only their energy is also shown of time lines, one or several.

    Raises:
        IaprofError: captures cannot be found, or a single one does not exist or is damaged.
    """
    if by == ENERGY and is_several(captures) and first_holds_time_lines(captures):
        return TimeLines(verb, captures, device)
    if by == ENERGY or is_several(captures):
        return subject_of(verb, captures, choice, fleet, device)
    return Stalls(verb, existing(Path(captures[0])), choice)


def sides_of(
    verb: str, sides: tuple[str, str], choice: SelectionOptions, fleet: FleetOptions, device: DeviceOptions
) -> tuple[Recorded, Recorded]:
    """Returns the two sides of a difference, which are of one class.

    Raises:
        IaprofError: a single capture does not exist, or is damaged.
        UsageError: one side holds time lines, and the other one stalls.
    """
    if any(is_several([side]) for side in sides):
        return _several(verb, sides[:1], choice, fleet), _several(verb, sides[1:], choice, fleet)
    before, after = (subject_of(verb, [side], choice, fleet, device) for side in sides)
    if type(before) is not type(after):
        one, other = sides if isinstance(before, TimeLines) else sides[::-1]
        names = f"{Path(one).name} holds time lines and {Path(other).name} stalls"
        raise UsageError(f"{names}: compare two captures of the same kind")
    return before, after


def _several(verb: str, captures: Sequence[str], choice: SelectionOptions, fleet: FleetOptions) -> Recorded:
    from iaprof.cli.subjects.several import Several  # here, as most reports are of one capture

    return Several(verb, captures, choice, fleet)
