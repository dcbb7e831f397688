"""Says that a capture has no rows of a kind, or that filters select nothing and what there is to select."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError
from iaprof.basics.quantities import in_time
from iaprof.cli.terminal.entry_names import entry_titles
from iaprof.cli.terminal.facts import no_waits
from iaprof.formats.header.launch_warnings import unrecorded

if TYPE_CHECKING:
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.formats.export import CpuSamples
    from iaprof.formats.profile import Profile
    from iaprof.report.join.selection import Selection

_MOST_NAMED = 8  # in a message, of each kind
_LONGEST = 60  # characters of a name

Names = Mapping[str, Callable[[], Iterable[str]]]
"""By the noun for what a filter selects (_NOUNS), a function that lists the names; empty if nothing is selected."""

_NOUNS = {
    "kernel": "kernels",
    "function": "functions",
    "process": "processes",
    "thread": "threads",
    "reason": "reasons",
    "cgroup": "cgroups",
    "Python function": "Python functions",
    "GPU": "GPUs",
}


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
    names_of: Callable[[Selection], Names] | None = None,
) -> IaprofError:
    """The error that no stalls, or the like, are selected.

    Args:
        what: what was to be selected, in the singular.
        selection: the filters, of which there is one.
        capture: the open capture; None: there are several.
        names_of: lists the names of what other filters select; None: there are several captures.
    """
    time_only = replace(selection, pids=frozenset(), tids=frozenset(), comms=frozenset(), kernel=None, devices=(),
                        reasons=frozenset(), cgroups=(), python=None)  # fmt: skip
    there: list[str] = []
    if names_of is not None and time_only != selection:
        there = list(_there(selection, names_of(time_only)))
    if not there and capture is not None and selection.time_range is not None:
        there = [_length(capture)]
    filters = filters_of(selection)
    cure = "; ".join(there) or f"leave {'it' if len(filters) == 1 else 'them'} out to see what there is"
    return IaprofError(f"no {what} matches {' and '.join(filters)}: {cure}")


def names_of_profile(profile: Profile, capture: CaptureReader) -> Names:
    """What there is in a profile of stalls."""
    if not len(profile):
        return {}
    return {
        "kernel": lambda: _most(profile, "kernel"),
        "process": lambda: _most(profile, "process"),
        "thread": lambda: map(str, sorted(_distinct(capture, "launch", "tid"))),
        "reason": lambda: _most(profile, "reason"),
        "cgroup": lambda: _cgroups(capture),
        "Python function": lambda: _python(launch.stack for launch in profile.launches if launch),
        "GPU": lambda: profile.devices,
    }


def names_of_samples(samples: CpuSamples, capture: CaptureReader, kind: str) -> Names:
    """What there is in CPU samples, or in waits; `kind` is that of their rows."""
    if not len(samples.count):
        return {}

    def processes() -> list[str]:
        counts: Counter[str] = Counter()
        for launch, count in zip(samples.launch.tolist(), samples.count.tolist(), strict=True):
            one = samples.launches[launch]
            counts[clean(f"{one.comm} {one.pid}".strip())] += count
        return [title for title, _ in counts.most_common()]

    return {
        "process": processes,
        "thread": lambda: map(str, sorted(_distinct(capture, kind, "tid"))),
        "cgroup": lambda: _cgroups(capture),
        "Python function": lambda: _python(launch.stack for launch in samples.launches),
    }


def names_of_transfers(functions: Sequence[str], capture: CaptureReader) -> Names:
    """What there is in copies and fills by these functions."""
    if not functions:
        return {}

    def processes() -> list[str]:
        counts: Counter[str] = Counter()
        for part in capture.parts:
            for rows in part.tables("transfer", ("comm", "pid")):
                pairs = zip(rows["comm"].to_pylist(), rows["pid"].to_pylist(), strict=True)
                counts.update(clean(f"{comm or ''} {pid}".strip()) for comm, pid in pairs)
        return [title for title, _ in counts.most_common()]

    return {
        "function": lambda: functions,
        "process": processes,
        "thread": lambda: map(str, sorted(_distinct(capture, "transfer", "tid"))),
        "cgroup": lambda: _cgroups(capture),
    }


def check_has_rows(capture: CaptureReader, kind: str) -> None:
    """Checks that a capture has `wait`, `cpu_sample` or `transfer` rows.

    Raises:
        IaprofError: it has none; the text says how to record some.
    """
    if any(part.count(kind) for part in capture.parts):
        return
    if kind == "wait":
        raise IaprofError(no_waits(capture))
    if kind == "cpu_sample":
        raise IaprofError("this capture has no CPU samples: record with 'iaprof record --cpu-freq 49'")
    whys = "".join(f"; {text}" for text in unrecorded(capture))
    raise IaprofError(
        "this capture has no copies and fills: record a program that makes some; 'iaprof check' lists the drivers "
        f"whose copies and fills cannot be recorded{whys}"
    )


def _there(selection: Selection, names: Names) -> Iterator[str]:
    wanted = {
        "kernel": selection.kernel,
        "function": selection.kernel,
        "process": selection.pids or selection.comms,
        "thread": selection.tids,
        "reason": selection.reasons,
        "cgroup": selection.cgroups,
        "Python function": selection.python,
        "GPU": selection.devices,
    }
    for noun, filter_ in wanted.items():
        if filter_ and noun in names:
            yield _listed(noun, _NOUNS[noun], names[noun]())


def _most(profile: Profile, by: str) -> list[str]:
    """The names of entries, those with most samples first."""
    from iaprof.report.views.ranking import Ranker

    keys = [entry.key for entry in Ranker(profile, by).table(0).entries]
    return [title for title in entry_titles(by, keys, short=True) if not title.startswith("[")]  # a label


def _cgroups(capture: CaptureReader) -> list[str]:
    return sorted(filter(None, _distinct(capture, "process", "cgroup")))


def _python(stacks: Iterable[Sequence[str]]) -> list[str]:
    from iaprof.symbols.python.frames import python_function

    frames = dict.fromkeys(frame for stack in stacks for frame in stack)
    return list(dict.fromkeys(filter(None, map(python_function, frames))))


def _distinct(capture: CaptureReader, kind: str, column: str) -> list[Any]:
    import pyarrow.compute as pc

    found: dict[Any, None] = {}
    for part in capture.parts:
        for rows in part.tables(kind, (column,)):
            found |= dict.fromkeys(pc.unique(rows[column]).to_pylist())
    return list(found)


def _listed(one: str, many: str, names: Iterable[str]) -> str:
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
