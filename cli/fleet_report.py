"""`iaprof report` of several captures, added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any

from iaprof.basics.errors import UsageError
from iaprof.cli.fleet import about_fleet, ask_fleet, say_fleet
from iaprof.cli.options.fleet_options import FleetOptions
from iaprof.cli.options.selection import SelectionOptions
from iaprof.formats.profile import DEFAULT_COMPONENTS, StackOptions
from iaprof.formats.writers.writer import Writer

_OF_TIMES = ("chrome", "perfetto", "flamescope")
_COLUMNS = {
    "launch": {"host", "process", "operator", "cpu"},
    "kernel": {"file", "function"},
    "code": {"function", "line", "instruction"},
    "offset": {"offset"},
}
"""By column of fleet.rows.KEYS: the components of a stack that need it."""


def write_fleet(
    captures: Sequence[str],
    choice: SelectionOptions,
    fleet: FleetOptions,
    format_: str,
    writer: Writer,
    options: StackOptions,
    interval_s: float | None,
    out: IO[Any],
    *,
    lines: bool,
    interpreter: bool,
    quiet: bool,
) -> None:
    """Writes the sum of several captures in an output format."""
    from iaprof.formats.export import Export
    from iaprof.report.fleet.partial import profile_of

    if format_ in _OF_TIMES:
        raise UsageError(f"{format_} is for one capture: it shows times, which several captures do not have in common")
    if options.cpu_samples:
        raise UsageError("--cpu-samples and --waits are for one capture")
    components = _components(options, bool(fleet.group_by))
    needed = {column for column, of in _COLUMNS.items() if not writer.has_stacks or of & set(components)}
    interval = (interval_s or 0.0) if "interval" in components else 0.0
    kept = frozenset(needed | {"kernel", "device"})
    report = ask_fleet(
        captures,
        choice,
        fleet,
        kept,
        interval,
        options.percent_limit,
        lines=lines,
        interpreter=interpreter,
    )
    profile, hosts = profile_of(report.total, report.interval_ns), report.total.totals.host_times()
    export = Export(profile, about_fleet(report), interval, hosts=hosts)
    writer.write(export, replace(options, components=components), out)
    if not quiet:
        say_fleet("report", report)


def _components(options: StackOptions, has_groups: bool) -> tuple[str, ...]:
    """Returns the components of stacks, without pids, and with the group at the root."""
    chosen = options.components
    if "pid" in chosen and chosen != DEFAULT_COMPONENTS:
        raise UsageError("--frames pid is for one capture: in several, a pid stands for many processes")
    without = tuple(each for each in chosen if each != "pid")
    if not has_groups or "host" in without:
        return without
    return (*without, "host") if options.inverted else ("host", *without)
