"""What was appended to closed command lists, and when it ran: a launch for each execution of its list.

A capture keeps appended launches and executions apart, as a list of ten thousand kernels may be executed a million
times. Here they are put together by whole columns: what a list holds from one reset to the next is a *filling*, all of
which each execution of the list runs. docs/launches.md says what counts as a launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.quantities import counted
from iaprof.formats.capture.dictionaries import equal, numbered
from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.ranges import ranges
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.report.join.lifetimes import TimesByPid

MAX_ROWS = 1 << 22  # that appended launches become; executions that follow closely are then one row
RUNS_AT_ONCE, NEVER_EXECUTED = -1, -2
"""In place of a filling: not appended to a list that is executed later; appended to one that never was."""
_EVENT_COLUMNS = ("time_ns", "pid", "tid", "comm", "event", "list", "stack", "flags")
_FIRST_STEP_NS = 1 << 20
_LAST_STEP_NS = 1 << 63
_APPEND, _EXECUTE, _CLOSE, _RESET, _DESTROY, _BEGIN, _OTHER = range(7)
_EVENTS = {"execute": _EXECUTE, "close": _CLOSE, "reset": _RESET, "destroy": _DESTROY}
_STACK_FLAGS = LaunchFlags.NO_STACK | LaunchFlags.OTHER | LaunchFlags.PRESUMED
_Ints = NDArray[np.int64]


class StackOf(Enum):
    """Whose stack, thread and process's name a launch of a closed list has."""

    APPEND = "append"
    EXECUTE = "execute"


@dataclass(frozen=True)
class Fillings:
    """Which filling each launch is in, and when each filling was executed."""

    filling: _Ints  # [launches], AT_ONCE or NEVER for none
    first: _Ints  # [fillings + 1], of each filling its first execution; they follow one another
    time: NDArray[np.uint64]  # of each execution, ns; ascending within a filling
    event: _Ints  # of each execution: its row among the events
    unknown: _Ints  # rows of executions of lists whose kernels were appended before the recording


@dataclass(frozen=True)
class LaunchTotals:
    """How many there are in a capture; those of the file before it are not counted."""

    launches: int  # of kernels: those of a list as often as it was executed
    executions: int  # of lists
    unknown: int  # of these, those of lists whose kernels were appended before the recording


def describe_unknown_executions(number: int) -> str:
    """What is to be said of so many executions that are not known; nothing of none."""
    if not number:
        return ""
    executions = counted(number, "execution")
    return f"{executions} of command lists that were filled before the recording: which kernels these are is not known"


def find_fillings(launches: pa.Table, events: pa.Table, processes: pa.Table) -> Fillings:
    """Puts launches into the fillings of their lists.

    A list is one that is executed if it was executed, or closed, before it was destroyed; of all others, launches are
    taken to run at once.

    Args:
        launches: columns time_ns, pid and list of `launch` rows.
        events: columns time_ns, pid, event and list of `command_list` rows.
        processes: columns time_ns, pid, tid and event of `process` rows: handles mean nothing in another program.
    """
    lists = launches["list"].fill_null(0).to_numpy()
    own = np.flatnonzero(lists)
    event_code = np.concatenate([np.full(len(own), _APPEND), _event_codes(events["event"])])
    time, pid = (
        np.concatenate([launches[name].to_numpy()[own], events[name].to_numpy()]) for name in ("time_ns", "pid")
    )
    list_ = np.concatenate([lists[own], events["list"].to_numpy()])
    process = _program_starts(processes).at(pid.astype(np.uint64), time)
    order = np.lexsort((time, list_, process, pid))
    event_code, new = event_code[order], _changes(pid[order], process[order], list_[order])
    before = np.where(new, _BEGIN, np.concatenate([[_BEGIN], event_code[:-1]])) if len(event_code) else event_code
    new_life = new | (before == _DESTROY)
    reopened = (event_code == _APPEND) & ((before == _CLOSE) | (before == _EXECUTE))  # its reset was lost
    new_filling = new_life | (before == _RESET) | reopened
    life, filling = np.cumsum(new_life) - 1, np.cumsum(new_filling) - 1

    is_regular = _any_in_group(life, event_code == _EXECUTE)
    is_regular |= _any_in_group(life, event_code == _CLOSE) & ~_any_in_group(life, reopened)
    runs = np.bincount(filling[event_code == _EXECUTE], minlength=int(new_filling.sum()))
    has_kernels = _any_in_group(filling, event_code == _APPEND)
    begins = before[new_filling]
    is_known = has_kernels | _any_in_group(filling, event_code == _CLOSE) | (begins == _RESET) | (begins == _DESTROY)
    used = has_kernels & (runs > 0)
    number = np.where(used, np.cumsum(used) - 1, NEVER_EXECUTED)

    filling_of = np.full(len(launches), RUNS_AT_ONCE)
    appended = np.flatnonzero(event_code == _APPEND)
    filling_of[own[order[appended]]] = np.where(is_regular[life[appended]], number[filling[appended]], RUNS_AT_ONCE)
    executed = np.flatnonzero((event_code == _EXECUTE) & used[filling]) if len(event_code) else np.empty(0, np.int64)
    first = np.searchsorted(number[filling[executed]], np.arange(int(used.sum()) + 1))
    rows = order[executed]
    unknown = order[np.flatnonzero((event_code == _EXECUTE) & ~is_known[filling])] if len(event_code) else rows
    return Fillings(filling_of, first, time[rows], rows - len(own), unknown - len(own))


def count_launches(capture: CaptureReader) -> LaunchTotals | None:
    """How much was executed in a capture, or a part of one; None where nothing is known of command lists."""
    launches = capture.table("launch", ("time_ns", "pid", "list", "flags"))
    found = read_fillings(capture, launches)
    if found is None:
        return None
    known, events = found
    own = (launches["flags"].to_numpy() & LaunchFlags.CARRIED) == 0
    own_events = (events["flags"].to_numpy() & LaunchFlags.CARRIED) == 0
    filling = np.repeat(np.arange(len(known.first) - 1), np.diff(known.first))
    runs = np.bincount(filling[own_events[known.event]], minlength=len(known.first) - 1)
    return LaunchTotals(
        int((own & (known.filling == RUNS_AT_ONCE)).sum()) + int(runs[known.filling[known.filling >= 0]].sum()),
        int((own_events & equal(events["event"], "execute")).sum()),
        int(own_events[known.unknown].sum()),
    )


def read_launches(
    capture: CaptureReader, columns: tuple[str, ...], stack_of: StackOf = StackOf.APPEND, max_rows: int = MAX_ROWS
) -> pa.Table:
    """All `launch` rows of a capture, as `ran` has them; without more columns where no list was executed."""
    launches = capture.table("launch", columns)
    found = read_fillings(capture, launches)
    return launches if found is None else expand_executions(launches, *found, stack_of, max_rows)


def read_fillings(capture: CaptureReader, launches: pa.Table) -> tuple[Fillings, pa.Table] | None:
    """The fillings of a capture and its `command_list` rows; None where it has none of these.

    Args:
        capture: it, or a part of a merged one.
        launches: all of its `launch` rows, of which `fillings` tells the columns.
    """
    if not capture.count("command_list"):
        return None
    events = capture.table("command_list", _EVENT_COLUMNS)
    processes = capture.table("process", ("time_ns", "pid", "tid", "event"))
    return find_fillings(launches, events, processes), events


def expand_executions(
    launches: pa.Table, known: Fillings, events: pa.Table, stack_of: StackOf = StackOf.APPEND, max_rows: int = MAX_ROWS
) -> pa.Table:
    """Launches with the times at which they ran: what was appended to a closed list has a row for each execution of it.

    Two columns come to them: `count`, how many launches a row stands for, and `last_ns`, when the last of these was. A
    row stands for several where a list holds alike launches; and where there would be more than `most` rows, for those
    of executions that follow closely.

    Args:
        launches: any columns of `launch` rows, time_ns among them.
        known: of these rows.
        events: the `command_list` rows, from which `known` was made.
        stack_of: whose tid, comm, stack and flags they have.
        most: rows that come of appended launches; distinct launches of a filling have at least one each.

    Raises:
        CaptureError: too many for their memory have distinct stacks of their executions.
    """
    at_once = np.flatnonzero(known.filling == RUNS_AT_ONCE)
    appended = np.flatnonzero(known.filling >= 0)
    key_columns = [name for name in launches.column_names if name not in ("time_ns", "cpu", "list")]
    if stack_of is StackOf.EXECUTE:
        key_columns = [name for name in key_columns if name not in ("tid", "comm", "stack")]
    first, which = _distinct(launches.select(key_columns).take(pa.array(appended)), known.filling[appended])
    multiple = np.bincount(which, minlength=len(first))
    member = appended[first]
    places = None
    if stack_of is StackOf.EXECUTE:
        own = [name for name in ("tid", "comm", "stack", "flags") if name in launches.column_names]
        places = _distinct(events.select(own).take(pa.array(known.event)))[1]
    row_member, execution, last, count = _executions_of_members(known, known.filling[member], places, max_rows)
    rows = np.concatenate([at_once, member[row_member]])
    table = launches.take(pa.array(rows))
    times = np.concatenate([launches["time_ns"].to_numpy()[at_once], known.time[execution]])
    table = _with_column(table, "time_ns", pa.array(times))
    event = known.event[execution]
    if stack_of is StackOf.EXECUTE:
        for name in ("tid", "comm", "stack"):
            if name in table.column_names:
                theirs = events[name].take(pa.array(event))
                ours = table[name].slice(0, len(at_once))
                both = pa.chunked_array([*ours.chunks, *theirs.chunks], ours.type)
                table = _with_column(
                    table, name, both.unify_dictionaries() if pa.types.is_dictionary(ours.type) else both
                )
    if "flags" in table.column_names:
        flags, theirs = table["flags"].to_numpy().copy(), events["flags"].to_numpy()[event]
        of_execution = np.uint32(LaunchFlags.CARRIED | (_STACK_FLAGS if stack_of is StackOf.EXECUTE else 0))
        flags[len(at_once) :] = flags[len(at_once) :] & ~of_execution | theirs & of_execution
        table = _with_column(table, "flags", pa.array(flags))
    ones = np.ones(len(at_once), np.uint64)
    table = table.append_column(
        "count", pa.array(np.concatenate([ones, (count * multiple[row_member]).astype(np.uint64)]))
    )
    return table.append_column("last_ns", pa.array(np.concatenate([times[: len(at_once)], last])))


def _executions_of_members(
    known: Fillings, filling: _Ints, places: _Ints | None, max_rows: int
) -> tuple[_Ints, _Ints, NDArray[np.uint64], _Ints]:
    """A row for each member of a filling and execution of it; with `places`, those of each apart.

    Returns:
        Of each row: the member, the execution, the time of the last one that it stands for, and how many these are.
    """
    size = np.diff(known.first)
    execution, count = np.arange(len(known.time)), np.ones(len(known.time), np.int64)
    first, last, step = known.first, known.time, _FIRST_STEP_NS
    if int(size[filling].sum()) > max_rows:
        filling_of = np.repeat(np.arange(len(size)), size)
        place = np.zeros(len(filling_of), np.int64) if places is None else places
        order = np.lexsort((known.time, place, filling_of))
        filling_of, place, time = filling_of[order], place[order], known.time[order]
        while True:
            start = np.flatnonzero(_changes(filling_of, place, time // np.uint64(step)))
            size = np.bincount(filling_of[start], minlength=len(size))
            if int(size[filling].sum()) <= max_rows or step == _LAST_STEP_NS:
                break
            step <<= 1
        if places is not None and int(size[filling].sum()) > max(max_rows, len(filling)):
            raise CaptureError(
                "command lists with very many kernels were executed from very many places: choose --stack-of=append"
            )
        end = np.append(start[1:], len(filling_of))
        execution, count, last = order[start], end - start, time[end - 1]
        first = np.concatenate([[0], np.cumsum(size)])
    repeat = size[filling]
    member = np.repeat(np.arange(len(filling)), repeat)
    row = ranges(first[filling], repeat)
    return member, execution[row], last[row], count[row]


def _program_starts(processes: pa.Table) -> TimesByPid:
    """When processes began, and became other programs."""
    pids, tids, times = (processes[name].to_numpy() for name in ("pid", "tid", "time_ns"))
    begins = (equal(processes["event"], "exec") | equal(processes["event"], "fork")) & (pids == tids)
    return TimesByPid(pids[begins], times[begins])


def _event_codes(events: pa.ChunkedArray) -> _Ints:
    """What happened, as a number; _OTHER for what is not known here, which changes nothing."""
    names: dict[str | None, int] = {}
    number = numbered(events, names)
    codes = np.array([_EVENTS.get(name or "", _OTHER) for name in names], np.int64)
    return codes[number] if len(codes) else np.empty(0, np.int64)


def _changes(*columns: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each row differs from the one before."""
    new = np.ones(len(columns[0]), bool)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return new


def _any_in_group(group: _Ints, which: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of each group, whether it has such a row."""
    found = np.zeros(int(group.max()) + 1 if len(group) else 0, bool)
    found[group[which]] = True
    return found


def _distinct(table: pa.Table, *more: NDArray[Any]) -> tuple[_Ints, _Ints]:
    """The first of the rows of each kind, and of each row which kind it is."""
    number = np.zeros(len(table), np.int64)
    for column in (*table.columns, *(pa.chunked_array([pa.array(each)]) for each in more)):
        encoded = column.unify_dictionaries().combine_chunks()
        if not pa.types.is_dictionary(encoded.type):
            encoded = encoded.dictionary_encode()
        key = number * max(len(encoded.dictionary), 1) + encoded.indices.to_numpy()
        number = np.unique(key, return_inverse=True)[1]
    return np.unique(number, return_index=True)[1], number


def _with_column(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, column)
