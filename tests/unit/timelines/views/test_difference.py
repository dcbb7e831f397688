from __future__ import annotations

import numpy as np
import pyarrow as pa

from iaprof.timelines.trace import Dialect, Trace
from iaprof.timelines.views.totals import Difference, Key, Use, difference, uses
from unit.timelines.traces import slice_, trace


def run(*kernels: tuple[str, float], pid: int = 0) -> Trace:
    events = [
        slice_(f"{name} Cmpt Exec", 1000 * n, dur, (0, 0, 0, 1, 1), pid=pid) for n, (name, dur) in enumerate(kernels)
    ]
    return trace([*events, slice_("Callback", 0, 7, tid=9)])


def changes(found: Difference) -> list[tuple[str, float, str]]:
    return [(each.key[2] if each.key else "", round(each.change, 6), each.state) for each in found.entries]


def test_kernels_of_two_runs_the_largest_change_first() -> None:
    before = uses(run(("mm_1", 10), ("mm_2", 20), ("add_1", 5), ("old", 1)), "kernel", per_rank=False)
    after = uses(run(("mm_1", 12), ("add_1", 5), ("new", 2)), "kernel", per_rank=False)
    assert before[None, "", "mm_[N] Cmpt Exec"] == Use(2, 30.0)
    found = difference(before, after, "kernel", 0)
    assert changes(found) == [
        ("mm_[N] Cmpt Exec", -18.0, ""),
        ("new Cmpt Exec", 2.0, "new"),
        ("old Cmpt Exec", -1.0, "gone"),
        ("add_[N] Cmpt Exec", 0.0, ""),
    ]
    assert (found.entries[0].before.mean_us, found.entries[0].after.mean_us) == (15.0, 12.0)
    assert (found.total.before, found.total.after) == (Use(4, 36.0), Use(3, 19.0))


def test_what_is_beyond_the_limit_is_added_up() -> None:
    found = difference({(None, "", "a"): Use(1, 4.0), (None, "", "b"): Use(2, 1.0)}, {}, "kernel", 1)
    assert changes(found) == [("a", -4.0, "gone")]
    assert (found.more, found.rest.before, found.rest.change, found.rest.state) == (1, Use(2, 1.0), -1.0, "")


def test_shares_of_all_time() -> None:
    before: dict[Key, Use] = {(None, "", "a"): Use(1, 30.0), (None, "", "b"): Use(1, 10.0)}
    after: dict[Key, Use] = {(None, "", "a"): Use(1, 30.0), (None, "", "b"): Use(1, 30.0)}
    found = difference(before, after, "kernel", 0, is_relative=True)
    assert changes(found) == [("a", -25.0, ""), ("b", 25.0, "")]
    assert difference({}, {}, "kernel", 0, is_relative=True).total.change == 0


def test_categories_have_times_without_what_is_inside() -> None:
    made = trace(
        [
            slice_("step", 0, 100, cat="python_function"),
            slice_("aten::mm", 10, 30, cat="cpu_op"),
            slice_("gemm", 50, 20, cat="kernel", tid=7),
        ],
        [slice_("gemm", 50, 8, cat="kernel", tid=7)],
        dialect=Dialect.TORCH,
        ranks=[0, 1],
    )
    assert uses(made, "category", per_rank=False) == {
        (None, "host", "python_function"): Use(1, 70.0),
        (None, "host", "cpu_op"): Use(1, 30.0),
        (None, "device", "kernel"): Use(2, 28.0),
    }
    assert uses(made, "category", per_rank=True)[1, "device", "kernel"] == Use(1, 8.0)


def test_categories_of_a_compiler_have_ideal_times_and_one_can_be_called_total() -> None:
    made = run(("mm_1", 10), ("plain", 20), ("add_1", 5))
    made.slices.extra["pt_active"] = np.array([0.5, 0.25, 1.2, np.nan])
    made.tables["categories"] = pa.table(
        {
            "Pid": [0] * 4, "Phase": ["UNKN"] * 4, "Category": ["other", "Bmm", "Total", "Total"],
            "Kernel_Time": [0.0, 15.0, 20.0, 35.0], "Calls": [0, 2, 1, 3], "Ideal_Time": [0.0, 5.0, 5.0, 10.0],
        }
    )  # fmt: skip
    assert uses(made, "category", per_rank=True) == {
        (0, "", "Bmm"): Use(2, 15.0, 5.0),
        (0, "", "Total"): Use(1, 20.0, 5.0),
    }
    kernels = uses(made, "kernel", per_rank=False)
    assert kernels[None, "", "mm_[N] Cmpt Exec"].utilization == 0.5
    assert kernels[None, "", "add_[N] Cmpt Exec"].utilization == 0.0  # faster than ideal cannot be
    assert difference(kernels, {}, "kernel", 0).total.before == Use(3, 35.0, 10.0)
