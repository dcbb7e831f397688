from __future__ import annotations

import io
from typing import Any

from iaprof.formats.export import About, Export
from iaprof.formats.profile import StackOptions, empty_profile
from iaprof.formats.writers.folded import Folded
from iaprof.timelines.trace import Dialect, Trace
from iaprof.timelines.views.stacks import stacks
from iaprof.timelines.views.totals import totals
from unit.timelines.traces import slice_, trace


def lines(made: Trace) -> list[str]:
    out = io.StringIO()
    shape = StackOptions(components=("process", "cpu"), cpu_samples=True, slices=True)
    Folded().write(Export(empty_profile(), About(), cpu=stacks(made)), shape, out)
    return out.getvalue().splitlines()


def step() -> Trace:
    """A Python function, an operator in it, and its launch of a kernel, on a file of rank 3."""
    host: dict[str, Any] = {"pid": 40, "tid": 5}
    return trace(
        [
            slice_("train.py(3): step", 1000, 300, cat="python_function", **host),
            slice_("aten::mm", 1005, 50, cat="cpu_op", **host),
            slice_("cudaLaunchKernel", 1010, 20, cat="cuda_runtime", correlation=9, **host),
            slice_("gemm_128", 1070, 50, pid=0, tid=7, cat="kernel", correlation=9),
            slice_("gemm_64", 1130, 60, pid=0, tid=7, cat="kernel"),
        ],
        dialect=Dialect.TORCH,
        ranks=[3],
    )


def test_kernels_are_below_the_operators_that_launched_them() -> None:
    assert lines(step()) == [
        "rank 3;kernel;gemm_[N] 60000",
        "rank 3;kernel;train.py(3): step;aten::mm;cudaLaunchKernel;gemm_[N] 50000",
        "rank 3;thread 5;train.py(3): step 250000",
        "rank 3;thread 5;train.py(3): step;aten::mm 30000",
        "rank 3;thread 5;train.py(3): step;aten::mm;cudaLaunchKernel 20000",
    ]


def test_a_trace_without_slices_has_no_stacks() -> None:
    assert lines(trace([])) == []


def test_a_launch_inside_of_the_kernel_that_it_caused_does_no_harm() -> None:
    # Given slices of one thread that would be inside of each other in a circle
    kernel = slice_("gemm", 0, 100, cat="kernel", correlation=9)
    made = trace([kernel, slice_("launch", 10, 10, correlation=9, cat="runtime")], dialect=Dialect.TORCH)

    # Then the device's slices are apart from the host's
    assert lines(made) == ["rank 0;kernel;launch;gemm 100000", "rank 0;thread 1;launch 10000"]


def test_time_of_frames_that_are_too_deep_stays() -> None:
    made = trace([slice_(f"f{'abcdefghij'[n % 10]}", n, 2000 - 2 * n) for n in range(1000)])
    found = lines(made)
    assert max(line.count(";") for line in found) == 201
    assert sum(int(line.rsplit(" ", 1)[1]) for line in found) == 2_000_000


def test_names_cannot_break_a_line() -> None:
    made = trace([slice_("a;b\nc\x1b[2J", 0, 1), slice_("", 2, 1)])
    assert lines(made) == ["rank 0;thread 1;[unnamed] 1000", "rank 0;thread 1;a:b\\x0ac\\x1b[2J 1000"]


def test_totals_by_row_category_and_name() -> None:
    rows = totals(step()).to_pylist()
    assert [(row["side"], row["category"], row["name"], row["calls"], row["total_us"], row["self_us"])
            for row in rows] == [
        ("host", "python_function", "train.py(3): step", 1, 300.0, 250.0),
        ("device", "kernel", "gemm_[N]", 2, 110.0, 110.0),
        ("host", "cpu_op", "aten::mm", 1, 50.0, 30.0),
        ("host", "cuda_runtime", "cudaLaunchKernel", 1, 20.0, 20.0),
    ]  # fmt: skip
    gemm = rows[1]
    assert (gemm["rank"], gemm["pid"], gemm["tid"]) == (3, 0, 7)
    assert (gemm["mean_us"], gemm["min_us"], gemm["max_us"]) == (55.0, 50.0, 60.0)
