"""Says that filters select nothing, and what there is to select."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from iaprof.basics.errors import IaprofError
from iaprof.basics.quantities import in_time
from iaprof.cli.terminal.entry_names import entry_titles

if TYPE_CHECKING:
    from collections.abc import Callable

    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.formats.profile import Profile
    from iaprof.report.join.selection import Selection

_MOST_NAMED = 8  # in a message, of each kind
_LONGEST = 60  # characters of a name


def filters_of(selection: Selection) -> list[str]:
    """The filters that are given, as on the command line."""
    given = (
        ("--time", [selection.time_range.text] if selection.time_range else []),
        ("--pid", map(str, sorted(selection.pids))),
        ("--tid", map(str, sorted(selection.tids))),
        ("--comm", sorted(selection.comms)),
        ("--kernel", [selection.kernel.pattern] if selection.kernel else []),
        ("--python", [selection.python.pattern] if selection.python else []),
        ("--device", selection.devices),
        ("--reason", sorted(selection.reasons)),
        ("--cgroup", selection.cgroups),
    )
    return [f"{option} {text}" for option, values in given if (text := ",".join(values))]


def nothing_matches(
    what: str,
    selection: Selection,
    capture: CaptureReader | None = None,
    profile_of: Callable[[Selection], Profile] | None = None,
) -> IaprofError:
    """The error that no stalls, or the like, are selected.

    Args:
        what: what was to be selected, in the singular.
        selection: the filters, of which there is one.
        capture: the open capture; None: there are several.
        profile_of: makes the profile of other filters; None: there are no stalls.
    """
    time_only = replace(selection, pids=frozenset(), tids=frozenset(), comms=frozenset(), kernel=None, devices=(),
                        reasons=frozenset(), cgroups=(), python=None)  # fmt: skip
    there: list[str] = []
    if capture is not None and profile_of is not None and time_only != selection:
        profile = profile_of(time_only)
        there = list(_there(selection, profile, capture)) if len(profile) else []
    if not there and capture is not None and selection.time_range is not None:
        there = [_length(capture)]
    filters = filters_of(selection)
    cure = "; ".join(there) or f"leave {'it' if len(filters) == 1 else 'them'} out to see what there is"
    return IaprofError(f"no {what} matches {' and '.join(filters)}: {cure}")


def _there(selection: Selection, profile: Profile, capture: CaptureReader) -> Iterator[str]:
    if selection.kernel:
        yield _listed("kernel", "kernels", _most(profile, "kernel"))
    if selection.pids or selection.comms:
        yield _listed("process", "processes", _most(profile, "process"))
    if selection.tids:
        yield _listed("thread", "threads", map(str, sorted(_distinct(capture, "launch", "tid"))))
    if selection.reasons:
        yield _listed("reason", "reasons", _most(profile, "reason"))
    if selection.cgroups:
        yield _listed("cgroup", "cgroups", sorted(filter(None, _distinct(capture, "process", "cgroup"))))
    if selection.python:
        yield _listed("Python function", "Python functions", _python(profile))
    if selection.devices:
        yield _listed("GPU", "GPUs", profile.devices)


def _most(profile: Profile, by: str) -> list[str]:
    """The names of entries, those with most samples first."""
    from iaprof.report.views.ranking import Ranker

    keys = [entry.key for entry in Ranker(profile, by).table(0).entries]
    return [title for title in entry_titles(by, keys, short=True) if not title.startswith("[")]  # a label


def _python(profile: Profile) -> list[str]:
    from iaprof.symbols.python.without_interpreter import python_function

    frames = dict.fromkeys(frame for launch in profile.launches if launch for frame in launch.stack)
    return list(dict.fromkeys(filter(None, map(python_function, frames))))


def _distinct(capture: CaptureReader, kind: str, column: str) -> list[Any]:
    import pyarrow.compute as pc

    found: dict[Any, None] = {}
    for part in capture.parts:
        for rows in part.tables(kind, (column,)):
            found |= dict.fromkeys(pc.unique(rows[column]).to_pylist())
    return list(found)


def _listed(one: str, many: str, names: Iterator[str] | Sequence[str]) -> str:
    several = list(names)
    if not several:
        return f"the capture has no {many}"
    shown = [name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in several[:_MOST_NAMED]]
    if len(shown) == 1:
        return f"the only {one} is {shown[0]}"
    more = f" and {len(several) - _MOST_NAMED:,} more" if len(several) > _MOST_NAMED else ""
    return f"the {many} are {', '.join(shown)}{more}"


def _length(capture: CaptureReader) -> str:
    from iaprof.report.parts import whole_ns

    seconds = whole_ns(capture) / 1e9
    return f"the recording is {in_time(seconds)} long" if seconds else "the capture does not say how long it is"
