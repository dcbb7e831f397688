"""Turns kernels appended to closed command lists into launches: one for each execution of their list.

A capture stores appended kernels and executions separately, as a list of ten thousand kernels may be executed a million
times. This module combines them. A *filling* is what a list holds from one reset to the next; each execution of the
list runs all of it. docs/launches.md says what counts as a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.quantities import counted
from iaprof.formats.capture.dictionaries import number_texts, rows_equal
from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.ranges import ranges
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.report.join.lifetimes import NEVER, TimesByPid
from iaprof.report.join.timed import has_executions, with_executions

MAX_ROWS = 1 << 21  # for appended launches; beyond it, a row stands for several executions
RUNS_AT_ONCE, NEVER_EXECUTED = -1, -2
"""Instead of a filling: the launch is not in a closed list; the launch is in a closed list that was never executed."""
_MOST_LEVELS = 4  # of lists in lists
_MOST_TIMES = 1 << 40  # that an execution counts
_EVENT_COLUMNS = ("time_ns", "pid", "tid", "comm", "event", "list", "queue", "stack", "flags")
_FIRST_STEP_NS = 1 << 20  # executions within a step share a row; the step doubles until the rows are few enough
_LAST_STEP_NS = 1 << 63
_APPEND, _EXECUTE, _CLOSE, _RESET, _DESTROY, _BEGIN, _OTHER, _INCLUDE = range(8)
_EVENTS = {"execute": _EXECUTE, "close": _CLOSE, "reset": _RESET, "destroy": _DESTROY, "include": _INCLUDE}
_STACK_FLAGS = LaunchFlags.NO_STACK | LaunchFlags.OTHER | LaunchFlags.PRESUMED
_Ints = NDArray[np.int64]


class StackOf(Enum):
    """Which call a launch of a closed list takes its stack, thread and process name from."""

    APPEND = "append"
    EXECUTE = "execute"


@dataclass(frozen=True)
class Fillings:
    """The filling of each launch, and the executions of each filling."""

    filling: _Ints  # [launches]; or RUNS_AT_ONCE or NEVER_EXECUTED
    first: _Ints  # [fillings + 1]: the index of each filling's first execution
    time: NDArray[np.uint64]  # [executions], ns; ascending within a filling
    last: NDArray[np.uint64]  # [executions], ns: the last of those that an execution stands for
    count: _Ints  # [executions]: for how many it stands, see `with_included`
    event: _Ints  # [executions]: the row among the events
    unknown: _Ints  # events that execute lists whose kernels were appended before the recording


@dataclass(frozen=True)
class LaunchTotals:
    """Numbers of launches and executions in a capture, without those carried over from the previous output file."""

    launches: int  # of kernels; those in a list count once for each execution
    executions: int  # of lists
    unknown: int  # executions of lists whose kernels were appended before the recording


def describe_unknown_executions(number: int) -> str:
    """Returns the warning about executions of lists with unknown kernels; "" if there are none."""
    if not number:
        return ""
    executions = counted(number, "execution")
    return f"{executions} of command lists that were filled before the recording: which kernels these are is not known"


def find_fillings(launches: pa.Table, events: pa.Table, processes: pa.Table) -> Fillings:
    """Finds the filling of each launch.

    A list that was executed or closed before it was destroyed is a regular list. Launches in any other list are taken
    to run at once.

    Args:
        launches: columns time_ns, pid and list of `launch` rows.
        events: columns time_ns, pid, event and list of `command_list` rows; and those that `with_included` adds.
        processes: columns time_ns, pid, tid and event of `process` rows: a list's handle is only valid within one
            program of its process.
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
    rows_of_events, last, count = rows - len(own), time[rows], np.ones(len(rows), np.int64)
    if "many" in events.column_names:
        last, count = (events[name].to_numpy()[rows_of_events] for name in ("last_ns", "many"))
    return Fillings(filling_of, first, time[rows], last, count, rows_of_events, unknown - len(own))


def queues(launches: pa.Table, known: Fillings | None = None, events: pa.Table | None = None) -> NDArray[np.uint64]:
    """Returns the handle of the queue of each launch: uint64[launches]; 0: unknown, or there were several.

    That of a closed list is the queue that executes it; an immediate list is its own queue.

    Args:
        launches: `launch` rows with `list`.
        known: the fillings of these rows; None: no launch is in a closed list.
        events: the `command_list` rows from which `known` was made.
    """
    found: NDArray[np.uint64] = launches["list"].fill_null(0).to_numpy().copy()
    if known is None or events is None:
        return found
    of_filling = only_one(np.repeat(np.arange(len(known.first) - 1), np.diff(known.first)),
                          events["queue"].fill_null(0).to_numpy()[known.event], len(known.first) - 1)  # fmt: skip
    closed = known.filling != RUNS_AT_ONCE
    found[closed] = 0
    executed = known.filling >= 0
    found[executed] = of_filling[known.filling[executed]]
    return found


def only_one(group: _Ints, value: NDArray[np.uint64], groups: int) -> NDArray[np.uint64]:
    """Returns the value that all members of a group have: uint64[groups]; 0 where they differ or there are none."""
    least, most = np.full(groups, NEVER, np.uint64), np.zeros(groups, np.uint64)
    np.minimum.at(least, group, value)
    np.maximum.at(most, group, value)
    most[least != most] = 0
    return most


def count_launches(capture: CaptureReader) -> LaunchTotals | None:
    """Counts launches and executions of a capture or a part of one; None if it has no `command_list` rows."""
    launches = capture.table("launch", ("time_ns", "pid", "list", "flags"))
    found = read_fillings(capture, launches)
    if found is None:
        return None
    known, events = found
    own = (launches["flags"].to_numpy() & LaunchFlags.CARRIED) == 0
    own_events = (events["flags"].to_numpy() & LaunchFlags.CARRIED) == 0
    filling = np.repeat(np.arange(len(known.first) - 1), np.diff(known.first))
    runs = np.zeros(len(known.first) - 1, np.int64)
    np.add.at(runs, filling, known.count * own_events[known.event])
    many = events["many"].to_numpy() if "many" in events.column_names else np.ones(len(events), np.int64)
    many = many * own_events
    return LaunchTotals(
        int((own & (known.filling == RUNS_AT_ONCE)).sum()) + int(runs[known.filling[known.filling >= 0]].sum()),
        int(many[rows_equal(events["event"], "execute")].sum()),
        int(many[known.unknown].sum()),
    )


def read_launches(
    capture: CaptureReader,
    columns: tuple[str, ...],
    stack_of: StackOf = StackOf.APPEND,
    max_rows: int = MAX_ROWS,
    mark: Callable[[pa.Table], pa.Table] = lambda launches: launches,
) -> pa.Table:
    """Reads the `launch` rows of a capture and expands executions.

    Args:
        capture: an open capture, or a part of a merged one.
        columns: the columns to read.
        stack_of: see `expand_executions`.
        max_rows: see `expand_executions`.
        mark: adds columns to launches, of the call that `stack_of` says.

    Returns:
        What `expand_executions` returns, without its extra columns if the capture has no `command_list` rows; or what
        `with_executions` returns, if it has executions with times; and a column `queue`, as `queues` has it, if `list`
        is among the columns.
    """
    timed = has_executions(capture)
    launches = capture.table("launch", (*columns, "correlation") if timed else columns)
    found = read_fillings(capture, launches)
    if "list" in columns:
        launches = launches.append_column("queue", pa.array(queues(launches, *(found or ()))))
    if timed:
        return mark(with_executions(capture, launches))
    if found is not None and stack_of is StackOf.EXECUTE:
        return mark(expand_executions(launches, *found, stack_of, max_rows))
    launches = mark(launches)
    return launches if found is None else expand_executions(launches, *found, stack_of, max_rows)


def read_fillings(capture: CaptureReader, launches: pa.Table) -> tuple[Fillings, pa.Table] | None:
    """Reads the `command_list` rows of a capture and finds the fillings; None if it has no such rows.

    Args:
        capture: an open capture, or a part of a merged one.
        launches: all of its `launch` rows, with the columns that `find_fillings` needs.

    Returns:
        The fillings, and the `command_list` rows, as `with_included` returns them.
    """
    if not capture.count("command_list"):
        return None
    events = with_included(capture.table("command_list", _EVENT_COLUMNS))
    processes = capture.table("process", ("time_ns", "pid", "tid", "event"))
    return find_fillings(launches, events, processes), events


def with_included(events: pa.Table) -> pa.Table:
    """Adds an execution of each list that another one includes, for each execution of that one.

    Args:
        events: `command_list` rows with _EVENT_COLUMNS.

    Returns:
        The rows. If a list includes another one, they have two more columns: `many`, for how many executions a row
        stands, and `last_ns`, the time of the last of these. A row stands for several where there would be more than
        MAX_ROWS: executions of one list by another one that follow one another.
    """
    code = _event_codes(events["event"])
    if not (code == _INCLUDE).any():
        return events
    events = events.append_column("many", pa.array(np.ones(len(events), np.int64)))
    events = events.append_column("last_ns", events["time_ns"])
    tables, added = [events], events.filter(pa.array(code == _EXECUTE))
    # An execution only leads to those of the next level, so that lists that include themselves end.
    rest = events.filter(pa.array(code != _EXECUTE))
    for level in range(_MOST_LEVELS):
        added = _executions_of_included(pa.concat_tables([rest, added]), MAX_ROWS >> 2 * level)
        if not len(added):
            break
        tables.append(added)
    return pa.concat_tables(tables)


def _executions_of_included(events: pa.Table, max_rows: int) -> pa.Table:
    """Returns executions of the lists that others include, for the executions of these, as `with_included` does."""
    code = _event_codes(events["event"])
    pid, list_, queue, time = (events[name].fill_null(0).to_numpy() for name in ("pid", "list", "queue", "time_ns"))
    outer = np.where(code == _INCLUDE, queue, list_)
    order = np.lexsort((time, outer, pid))
    sorted_code = code[order]
    ends = _changes(pid[order], outer[order]) | (sorted_code == _RESET) | (sorted_code == _DESTROY)
    bounds = np.append(np.flatnonzero(ends), len(order))
    places = np.flatnonzero(sorted_code == _INCLUDE)
    is_execution = sorted_code == _EXECUTE
    execution = order[is_execution]
    before = np.concatenate([[0], np.cumsum(is_execution)])
    first = before[places]
    count = before[bounds[np.searchsorted(bounds, places, "right")]] - first
    rows = np.minimum(count, _most_rows_of_each(count, max_rows))
    which, number = np.repeat(np.arange(len(places)), rows), ranges(0, rows)
    start, end = (first[which] + (number + more) * count[which] // rows[which] for more in (0, 1))
    # As floating-point numbers: lists that include themselves very often would lead to any number.
    times = np.concatenate([[0.0], np.cumsum(events["many"].to_numpy()[execution].astype(np.float64))])
    many = np.minimum(times[end] - times[start], _MOST_TIMES).astype(np.int64)
    more = events.take(pa.array(execution[start]))
    more = _with_column(more, "list", pa.array(list_[order[places]][which], events["list"].type))
    more = _with_column(more, "many", pa.array(many))
    return _with_column(more, "last_ns", events["last_ns"].take(pa.array(execution[end - 1])))


def _most_rows_of_each(count: _Ints, max_rows: int) -> int:
    """Returns the largest number of rows that each of these may have, 1 or more, that all have at most `max_rows`."""
    ascending = np.sort(count)
    so_far = np.concatenate([[0], np.cumsum(ascending)])
    if int(so_far[-1]) <= max_rows:
        return max(1, int(ascending[-1]) if len(ascending) else 1)
    # The smallest ones are whole, and the others share the rest.
    shares = (max_rows - so_far[:-1]) // np.arange(len(count), 0, -1)
    return max(1, int(shares[np.argmax(shares < ascending)]))


def expand_executions(
    launches: pa.Table, known: Fillings, events: pa.Table, stack_of: StackOf = StackOf.APPEND, max_rows: int = MAX_ROWS
) -> pa.Table:
    """Gives launches in closed lists a row for each execution, with its time.

    Adds two columns: `count`, the number of launches that a row stands for, and `last_ns`, the time of the last of
    these. A row stands for several launches if a list holds equal ones and, where there would be more than `max_rows`,
    if executions follow one another closely.

    Args:
        launches: any columns of `launch` rows, time_ns among them.
        known: the fillings of these rows.
        events: the `command_list` rows from which `known` was made.
        stack_of: which call tid, comm, stack and flags are taken from.
        max_rows: for launches in closed lists; each distinct launch of a filling has at least one row.

    Raises:
        CaptureError: with `StackOf.EXECUTE`, distinct stacks of executions need more than `max_rows` rows.
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
    """Combines each member of a filling with each execution, or with groups of executions if that is too many rows.

    Args:
        known: the fillings.
        filling: int64[members], each member's filling.
        places: int64[executions], the place in the program that executes; a group has only one. None: do not care.
        max_rows: when to group executions.

    Returns:
        For each row: the member, the first execution, the time of the last execution, and their number.
    """
    size = np.diff(known.first)
    execution, count = np.arange(len(known.time)), known.count
    first, last, step = known.first, known.last, _FIRST_STEP_NS
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
        execution = order[start]
        count, last = np.add.reduceat(count[order], start), np.maximum.reduceat(last[order], start)
        first = np.concatenate([[0], np.cumsum(size)])
    repeat = size[filling]
    member = np.repeat(np.arange(len(filling)), repeat)
    row = ranges(first[filling], repeat)
    return member, execution[row], last[row], count[row]


def _program_starts(processes: pa.Table) -> TimesByPid:
    """Returns the times at which processes were forked or executed another program."""
    pids, tids, times = (processes[name].to_numpy() for name in ("pid", "tid", "time_ns"))
    begins = (rows_equal(processes["event"], "exec") | rows_equal(processes["event"], "fork")) & (pids == tids)
    return TimesByPid(pids[begins], times[begins])


def _event_codes(events: pa.ChunkedArray) -> _Ints:
    """Returns the events as codes: int64[n]. Unknown events are _OTHER, which has no effect."""
    names: dict[str | None, int] = {}
    number = number_texts(events, names)
    codes = np.array([_EVENTS.get(name or "", _OTHER) for name in names], np.int64)
    return codes[number] if len(codes) else np.empty(0, np.int64)


def _changes(*columns: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each row differs from the one before: bool[n]."""
    new = np.ones(len(columns[0]), bool)
    new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return new


def _any_in_group(group: _Ints, which: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each group has a selected row: bool[groups]."""
    found = np.zeros(int(group.max()) + 1 if len(group) else 0, bool)
    found[group[which]] = True
    return found


def _distinct(table: pa.Table, *more: NDArray[Any]) -> tuple[_Ints, _Ints]:
    """Groups equal rows: returns the first row of each group, and each row's group."""
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
