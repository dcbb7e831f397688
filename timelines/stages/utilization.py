"""The activity of the device's PT array: the ideal time of kernels as a fraction of the time that they take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.basics.quantities import counted
from iaprof.timelines.compiler_logs import OTHER, UNKNOWN_PHASE, CompilerLog, IdealTable, read
from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.grouped import Groups
from iaprof.timelines.intervals import FARTHEST, ends
from iaprof.timelines.made_events import Spans, Track, add_sums
from iaprof.timelines.options import Options
from iaprof.timelines.trace import ABSENT, NO_TEXT, Slices, Trace
from iaprof.timelines.utilization_tables import Job, Names, Work, by_cycles, by_time, choose

STAGE = "UTL"
TRACK = Track("PT Active", "Percent")
TOO_MUCH = 101.0  # percent, shown for a kernel that is above 100, as the reference does
SUFFIX = " Cmpt Exec$"  # ends the names of a kernel's slices, not its line in a log


@dataclass
class _Kernels:
    """The kernels of a trace, in n rows."""

    rows: NDArray[np.int64]  # in Trace.slices
    slices: Slices
    job: Groups
    table: NDArray[np.int64]  # of each kernel's job: index into `tables`, which starts with one for none
    ideal: NDArray[np.int64]  # cycles at the core's frequency
    category: NDArray[np.int64]  # index into `categories`
    tables: list[IdealTable]
    categories: list[str]
    by_autopilot: NDArray[np.bool_]  # of each table: its log has only totals, not single kernels


def compute_utilization(trace: Trace, options: Options) -> None:
    """Adds counters, `pt_active` and the tables of categories, if a compiler's log has ideal cycles."""
    logs = [read(path) for path in options.compiler_logs]
    for log in logs:
        for problem in log.problems:
            trace.messages.warn(STAGE, problem)
    rows = np.flatnonzero(find(trace, Kind.KERNEL) & find(trace, Kind.DEVICE))
    if not len(rows) or not any(log.tables for log in logs):
        return
    kernels = _with_ideals(trace, rows, logs, options)
    ratios = _ratios(kernels, options)
    _add_members(trace, kernels, ratios)
    _add_counters(trace, kernels, ratios, options)
    _make_tables(trace, kernels, ratios, options)


def _with_ideals(trace: Trace, rows: NDArray[np.int64], logs: list[CompilerLog], options: Options) -> _Kernels:
    """Finds the table of each job and the ideal cycles of each kernel."""
    rows = rows[np.argsort(trace.slices.start[rows], kind="stable")]
    slices = trace.slices.take(rows)
    job = Groups(slices.file, slices.pid, np.where(slices.correlation == ABSENT, 0, slices.correlation))
    codes, places = np.unique(slices.name, return_inverse=True)
    names = pc.replace_substring_regex(trace.texts.taken(codes.astype(np.int32)), SUFFIX, "")

    tables, by_autopilot, of_log = [IdealTable()], [False], []
    for log in logs:
        of_log.append(range(len(tables), len(tables) + len(log.tables)))
        tables += log.tables
        by_autopilot += [log.is_autopilot] * len(log.tables)
    jobs = Job(job, places, names, job.sum(np.maximum(slices.duration, 0)))
    pids = job.key(slices.pid)
    chosen = np.zeros(len(job), np.int64)
    uncertain = np.zeros(len(job), bool)
    for rank, numbers in enumerate(of_log):
        mine = pids == rank if len(logs) > 1 else np.ones(len(job), bool)
        for_rank = [tables[number] for number in numbers]
        best, doubtful = choose(jobs, mine, for_rank, logs[rank].is_autopilot, options.core_mhz)
        chosen[mine] = np.where(best >= 0, best + numbers.start, 0)[mine]
        uncertain |= doubtful & mine
    _warn(trace, chosen, uncertain)

    table = chosen[job.numbers]
    categories = [OTHER]
    ideal, category = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    for number in np.unique(chosen[chosen > 0]).tolist():
        if by_autopilot[number]:
            continue
        of_table = np.flatnonzero(table == number)
        cycles, kinds = _looked_up(tables[number], names, categories)
        ideal[of_table] = cycles[places[of_table]]
        category[of_table] = kinds[places[of_table]]
    return _Kernels(rows, slices, job, table, ideal, category, tables, categories, np.array(by_autopilot))


def _looked_up(
    table: IdealTable, names: pa.LargeStringArray, categories: list[str]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the cycles and categories of kernels by name, and adds new categories to the list."""
    known = list(table.categories)
    found = pc.fill_null(pc.index_in(names, value_set=pa.array(known, pa.large_string())), len(known))
    place = found.to_numpy(zero_copy_only=False)
    for each in table.categories.values():
        if each not in categories:
            categories.append(each)
    index = {name: number for number, name in enumerate(categories)}
    cycles = np.array([*(table.cycles.get(each, 0) for each in known), 0], np.int64)
    kinds = np.array([*(index[table.categories[each]] for each in known), index[OTHER]], np.int64)
    return cycles[place], kinds[place]


def _warn(trace: Trace, chosen: NDArray[np.int64], uncertain: NDArray[np.bool_]) -> None:
    if missing := int((chosen == 0).sum()):
        trace.messages.warn(STAGE, f"{missing} of {len(chosen)} jobs run no kernel of any table of ideal cycles")
    if doubtful := int((uncertain & (chosen > 0)).sum()):
        trace.messages.warn(STAGE, f"{doubtful} of {len(chosen)} jobs do not clearly fit one table of ideal cycles")


def _ratios(kernels: _Kernels, options: Options) -> NDArray[np.float64]:
    """Returns the ideal time over the duration of each kernel; 0 without a duration."""
    duration = kernels.slices.duration
    some = duration > 0
    return np.where(some, kernels.ideal.astype(float) * 1000 / options.core_mhz / np.where(some, duration, 1), 0.0)


def _add_members(trace: Trace, kernels: _Kernels, ratios: NDArray[np.float64]) -> None:
    active = ratios > 0
    extra, count = trace.slices.extra, len(trace.slices)
    extra["pt_active"] = np.full(count, np.nan)
    extra["pt_active"][kernels.rows[active]] = ratios[active]
    extra["core used"] = np.zeros(count, bool)
    extra["core used"][kernels.rows[active]] = True
    extra["user_cat"] = np.full(count, NO_TEXT, np.int32)
    extra["user_cat"][kernels.rows] = trace.texts.codes(kernels.categories)[kernels.category]


def _add_counters(trace: Trace, kernels: _Kernels, ratios: NDArray[np.float64], options: Options) -> None:
    slices, job = kernels.slices, kernels.job
    percent = np.where(ratios > 1, TOO_MUCH, ratios * 100)
    active = np.flatnonzero(ratios > 0)
    # If only a total is known, it applies from the first kernel of a job to its last.
    until, worked = ends(slices), np.maximum(slices.duration, 0)
    table = job.key(kernels.table)
    totals = np.array([each.total for each in kernels.tables], float)[table] * 1000 / options.core_mhz
    first, last = job.min(slices.start), job.max(until)
    busy = np.minimum(job.sum(worked), np.maximum(last - first, 0))
    of_total = np.flatnonzero(kernels.by_autopilot[table] & (totals > 0) & (busy > 0))
    share = totals[of_total] / busy[of_total] * 100
    above = int((ratios > 1).sum() + (share > 100).sum())
    if above:
        trace.messages.warn(
            STAGE, f"{above} kernels or jobs are faster than ideal, shown as {TOO_MUCH:.0f} %: is a frequency wrong?"
        )
    spans = Spans(
        np.append(slices.file[active], job.key(slices.file)[of_total]),
        np.append(slices.pid[active], job.key(slices.pid)[of_total]),
        np.append(slices.start[active], first[of_total]),
        np.append(until[active], last[of_total]),
        np.append(percent[active], np.where(share > 100, TOO_MUCH, share)),
    )
    if at_once := add_sums(trace, TRACK, spans, most=TOO_MUCH):
        trace.messages.warn(
            STAGE,
            f"{TRACK.name} adds up to more than 100 % {counted(at_once, 'time')}, where kernels overlap: shown as 100",
        )


def _make_tables(trace: Trace, kernels: _Kernels, ratios: NDArray[np.float64], options: Options) -> None:
    slices, tables = kernels.slices, kernels.tables
    phases = sorted({table.phase for table in tables} | {UNKNOWN_PHASE})
    phase_of_table = np.array([phases.index(table.phase) for table in tables])
    names = Names(phases, kernels.categories, {})
    totals: dict[tuple[int, int], int] = {}
    used = Groups(kernels.job.key(slices.pid), kernels.job.key(kernels.table))
    pids, numbers = used.key(kernels.job.key(slices.pid)), used.key(kernels.job.key(kernels.table))
    for pid, number, jobs in zip(pids.tolist(), numbers.tolist(), used.counts.tolist(), strict=True):
        section = (pid, int(phase_of_table[number]))
        if kernels.by_autopilot[number]:
            totals[section] = totals.get(section, 0) + jobs * tables[number].total
            continue
        categories = tables[number].categories.values()
        names.of_section.setdefault(section, set()).update(kernels.categories.index(each) for each in categories)
    counted = (slices.counters[:, 2:4] != ABSENT).all(axis=1)
    by_time_ = np.clip(np.maximum(slices.duration, 0) * options.soc_mhz / 1000, 0, FARTHEST)
    cycles = np.where(counted, slices.counters[:, 3] - slices.counters[:, 2], np.rint(by_time_).astype(np.int64))
    work = Work(
        slices.pid,
        phase_of_table[kernels.table],
        kernels.category,
        np.maximum(slices.duration, 0),
        np.maximum(cycles, 0),
        np.where(ratios > 1, 0, kernels.ideal),
    )
    trace.tables["categories"] = by_time(work, names, totals, options.core_mhz)
    trace.tables["categories_cycles"] = by_cycles(work, names, totals, options.soc_mhz, options.core_mhz)
    _make_summary(trace, slices, ratios)


def _make_summary(trace: Trace, slices: Slices, ratios: NDArray[np.float64]) -> None:
    """Makes and reports the table `utilization`: how well each rank's kernels use the PT array, on average."""
    groups = Groups(slices.pid)
    duration = np.maximum(slices.duration, 0) / 1000
    with_it = groups.sum(np.where(ratios > 0, duration, 0.0))
    all_time = groups.sum(duration)
    ratios = np.where(ratios > 1, 0.0, ratios)  # kernels that are faster than ideal count as in the other tables
    measured = groups.sum(np.where(ratios > 0, duration, 0.0))
    weighted = groups.sum(ratios * duration) * 100
    columns = {
        "pid": groups.key(slices.pid),
        "avg_mm_util": np.divide(weighted, measured, out=np.zeros(len(groups)), where=measured > 0),
        "avg_util": np.divide(weighted, all_time, out=np.zeros(len(groups)), where=all_time > 0),
        "t_mm": with_it,
        "t_sf": all_time - with_it,
    }
    table = pa.table(columns)
    trace.tables["utilization"] = table
    for row in table.to_pylist():
        total = row["t_mm"] + row["t_sf"] or 1.0
        trace.messages.note(
            STAGE,
            f"pid={row['pid']}: avg_mm_util={row['avg_mm_util']:.3f}, avg_util={row['avg_util']:.3f},"
            f" t_mm={row['t_mm']:.3f}, t_sf={row['t_sf']:.3f},"
            f" ratio_mm/sf={row['t_mm'] / total * 100:.2f}:{row['t_sf'] / total * 100:.2f}",
        )
