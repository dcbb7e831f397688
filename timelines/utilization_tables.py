"""Tables of how well kernels use the device, by category: in the reference's newest layout, and in its README's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.timelines.compiler_logs import OTHER, TOTAL
from iaprof.timelines.grouped import Groups

ALWAYS = ("StcdpHbm", OTHER)  # categories with a row whether or not there are such kernels


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
        totals: by pid and phase, ideal cycles that are known of all kernels together only.
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


def _fraction(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole > 0 else 0.0


def _utilization(ideal: float, taken: float) -> float | None:
    """Returns the share of the time taken that is ideal; None above 1, which cannot be: a frequency is wrong."""
    found = _fraction(ideal, taken)
    return found if found <= 1 else None
