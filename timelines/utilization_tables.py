"""How well kernels use the device: which table of ideal cycles fits which job, and sums by category.

Logs do not say for which run a compiler made a table of ideal cycles. Tables by category are in the layout of the
reference's newest version, and in that of its README.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.timelines.compiler_logs import OTHER, TOTAL, IdealTable
from iaprof.timelines.grouped import Groups

FIRST_KERNELS, FIRST_LINES = 30, 500  # of a job, and of a table: their names are compared
CERTAIN, TIE = 0.8, 0.2  # a score that is certain, and a difference of scores that is a tie


@dataclass(frozen=True)
class Job:
    """Jobs and their kernels, which are rows by time."""

    groups: Groups  # of the kernels
    name: NDArray[np.int64]  # of each kernel: index into `names`
    names: pa.LargeStringArray  # without what slices have besides a kernel's name
    duration: NDArray[np.float64]  # of each job's kernels together, ns


def choose(
    jobs: Job, mine: NDArray[np.bool_], tables: list[IdealTable], is_autopilot: bool, core_mhz: float
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the best table of each job (-1: none has one of its kernels), and whether that is uncertain.

    The score is that of IBM's AIU Trace Analyzer: the order of names, the number of kernels and the time count.

    Args:
        jobs: all jobs.
        mine: the jobs that get one of these tables.
        tables: of a rank's log.
        is_autopilot: the log has only totals, so a table needs none of the kernels.
        core_mhz: the frequency of ideal cycles.
    """
    count = len(jobs.groups)
    best, best_score, best_share = np.full(count, -1, np.int64), np.full(count, -1.0), np.full(count, -1.0)
    second_score = np.full(count, -np.inf)
    pairs = Groups(jobs.groups.numbers, jobs.name)  # distinct names in each job
    pair_job, pair_name = pairs.key(jobs.groups.numbers), pairs.key(jobs.name)
    beginnings = _beginnings(jobs)
    for number, table in enumerate(tables):
        known = pc.is_in(jobs.names, value_set=pa.array(list(table.categories), pa.large_string()))
        has = known.to_numpy(zero_copy_only=False)[pair_name] * pairs.counts
        share = np.bincount(pair_job, weights=has, minlength=count) / jobs.groups.counts
        score = _score(jobs, table, beginnings, core_mhz)
        fits = mine & ((share > 0) | is_autopilot)
        better = fits & ((score > best_score) | ((score == best_score) & (share > best_share)))
        second_score = np.where(better, best_score, np.where(fits, np.maximum(second_score, score), second_score))
        best, best_score, best_share = (
            np.where(better, new, old) for new, old in ((number, best), (score, best_score), (share, best_share))
        )
    uncertain = (best_score < CERTAIN) | ((second_score >= 0) & (best_score - second_score <= TIE))
    return best, uncertain & (best >= 0)


def _score(
    jobs: Job, table: IdealTable, beginnings: tuple[list[bytes], NDArray[np.int64]], core_mhz: float
) -> NDArray[np.float64]:
    """Returns how well a table fits each job: 0, or 0.25 to 1.5."""
    lines = len(table.kernels)
    index = pc.index_in(pa.array(table.kernels[:FIRST_LINES], pa.large_string()), value_set=jobs.names)
    text = pc.fill_null(index, -1).cast(pa.int32()).to_numpy(zero_copy_only=False).tobytes()
    distinct, of_job = beginnings
    occurs = np.array([_occurs_in(each, text) for each in distinct], bool)[of_job]
    counts = jobs.groups.counts
    ideal = table.ideal_cycles * 1000 / core_mhz
    some = jobs.duration > 0
    by_time = np.where(some, ideal / np.where(some, jobs.duration, 1), float(ideal == 0))
    score = np.where(occurs, 0.5, 0.25) + 0.5 * counts / max(lines, 1) + 0.5 * by_time
    return np.where((counts > lines) | (ideal > jobs.duration), 0.0, score)


def _beginnings(jobs: Job) -> tuple[list[bytes], NDArray[np.int64]]:
    """Returns distinct sequences of jobs' first kernels (names, 4 bytes each), and which one each job has."""
    groups = jobs.groups
    width = min(FIRST_KERNELS, int(groups.counts.max()))
    offsets = np.arange(width)
    places = np.minimum(groups.firsts[:, None] + offsets, len(groups.order) - 1)
    firsts = np.where(offsets < groups.counts[:, None], jobs.name[groups.order[places]], -2).astype(np.int32)
    distinct, of_job = np.unique(firsts, axis=0, return_inverse=True)
    return [row[row >= 0].tobytes() for row in distinct], of_job.reshape(-1)


def _occurs_in(sequence: bytes, text: bytes) -> bool:
    """Tells whether a sequence of integers of 4 bytes occurs in another one, without gaps."""
    place = text.find(sequence)
    while place % 4 and place >= 0:
        place = text.find(sequence, place + 1)
    return place >= 0


ALWAYS = ("StcdpHbm", OTHER)  # categories that always have a row, with kernels or without


@dataclass(frozen=True)
class Work:
    """Kernels, in n rows."""

    pid: NDArray[np.int64]
    phase: NDArray[np.int64]  # index into Names.phases
    category: NDArray[np.int64]  # index into Names.categories
    duration: NDArray[np.float64]  # ns
    cycles: NDArray[np.int64]  # at the SoC's frequency
    ideal: NDArray[np.int64]  # cycles at the core's frequency; 0 where they took longer than the kernel


@dataclass
class Names:
    """Phases and categories."""

    phases: list[str]
    categories: list[str]
    of_section: dict[tuple[int, int], set[int]]  # by pid and phase: the categories that the tables used there have


@dataclass
class _Row:
    category: str
    duration: float = 0.0  # ns
    cycles: int = 0
    ideal: int = 0
    calls: int = 0

    def add(self, other: _Row) -> None:
        self.duration += other.duration
        self.cycles += other.cycles
        self.ideal += other.ideal
        self.calls += other.calls


def by_time(work: Work, names: Names, totals: dict[tuple[int, int], int], core_mhz: float) -> pa.Table:
    """Returns the table `categories`, by pid, phase and time.

    Args:
        work: the kernels.
        names: of phases and categories.
        totals: by pid and phase, ideal cycles that are only known for all kernels together.
        core_mhz: the frequency of ideal cycles.
    """
    rows = []
    sections = _sections(work, names)
    for (pid, phase), section in sorted(sections.items(), key=lambda each: (each[0][0], names.phases[each[0][1]])):
        total = _total(section)
        total.ideal += totals.get((pid, phase), 0)
        for row in [*sorted(section, key=lambda each: each.duration), total]:
            ideal = row.ideal / core_mhz
            rows.append(
                {
                    "Pid": pid, "Phase": names.phases[phase], "Category": row.category,
                    "Kernel_Time": row.duration / 1000, "Frac_Time": _fraction(row.duration, total.duration),
                    "Calls": row.calls, "Ideal_Time": round(ideal, 4), "Ideal_Cyc": row.ideal,
                    "Frac_Ideal": _fraction(row.ideal, total.ideal),
                    "PT_Util": _utilization(ideal * 1000, row.duration),
                }
            )  # fmt: skip
    return pa.Table.from_pylist(rows)


def by_cycles(
    work: Work, names: Names, totals: dict[tuple[int, int], int], soc_mhz: float, core_mhz: float
) -> pa.Table:
    """Returns the table `categories_cycles`, by pid and cycles: phases are added up."""
    by_pid: dict[int, dict[str, _Row]] = {}
    for (pid, _), section in _sections(work, names).items():
        for row in section:
            by_pid.setdefault(pid, {}).setdefault(row.category, _Row(row.category)).add(row)
    rows = []
    for pid, categories in sorted(by_pid.items()):
        total = _total(list(categories.values()))
        total.ideal += sum(ideal for (of_pid, _), ideal in totals.items() if of_pid == pid)
        for row in [*sorted(categories.values(), key=lambda each: each.cycles), total]:
            at_core = int(row.cycles * core_mhz / soc_mhz)
            rows.append(
                {
                    "Pid": pid, "Category": row.category, "Cycles": row.cycles,
                    "Frac_Cycle": _fraction(row.cycles, total.cycles), "Calls": row.calls, "Cycles(core)": at_core,
                    "Ideal_Cyc": row.ideal, "Frac_Ideal": _fraction(row.ideal, total.ideal),
                    "PT_Util": _utilization(row.ideal, at_core),
                }
            )  # fmt: skip
    return pa.Table.from_pylist(rows)


def _sections(work: Work, names: Names) -> dict[tuple[int, int], list[_Row]]:
    """Returns the rows of each pid and phase, without that of the total."""
    found: dict[tuple[int, int], dict[str, _Row]] = {}
    groups = Groups(work.pid, work.phase, work.category)
    columns = [groups.key(each) for each in (work.pid, work.phase, work.category)]
    columns += [groups.sum(each) for each in (work.duration, work.cycles, work.ideal)] + [groups.counts]
    for pid, phase, category, duration, cycles, ideal, calls in zip(*(each.tolist() for each in columns), strict=True):
        if (pid, phase) not in found:
            others = [names.categories[each] for each in sorted(names.of_section.get((pid, phase), ()))]
            found[pid, phase] = {name: _Row(name) for name in (*ALWAYS, *others)}
        name = names.categories[category]
        found[pid, phase].setdefault(name, _Row(name)).add(_Row(name, duration, cycles, ideal, calls))
    return {key: list(rows.values()) for key, rows in found.items()}


def _total(rows: list[_Row]) -> _Row:
    total = _Row(TOTAL)
    for row in rows:
        total.add(row)
    return total


def _fraction(value: float, total: float) -> float:
    return round(value / total, 4) if total > 0 else 0.0


def _utilization(ideal: float, taken: float) -> float | None:
    """Returns ideal time as a fraction of the time taken; None above 1, as then a frequency is wrong."""
    found = _fraction(ideal, taken)
    return found if found <= 1 else None
