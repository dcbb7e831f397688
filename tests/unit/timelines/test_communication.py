"""Kernels of communication libraries move data: they are communication, and compute nothing."""

from __future__ import annotations

import pytest

from iaprof.timelines.options import Options
from iaprof.timelines.stages.collectives.balance import calculate_stats_v2, compare_ranks
from iaprof.timelines.stages.summaries import calculate_stats
from iaprof.timelines.trace import Dialect
from iaprof.timelines.views.busy import CLASSES, classes
from unit.timelines.traces import slice_, trace


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",  # before NCCL 2.19
        "void rccl_kernel<float>(int)",
        "oneccl_allreduce_large<float>",
    ],
)
@pytest.mark.parametrize("dialect", [Dialect.TORCH, Dialect.UNKNOWN])
def test_they_overlap_computation(name: str, dialect: Dialect) -> None:
    # Given a multiplication of 100 us, from 0 on, and an all-reduce from 60 to 200, in a range of the process group
    made = trace(
        [
            {**slice_("gemm", 0, 100, tid=7), "cat": "kernel"},
            {**slice_(name, 60, 140, tid=20), "cat": "kernel"},
            {**slice_("nccl:all_reduce", 50, 150, tid=20), "cat": "gpu_user_annotation"},
            {**slice_("nccl:all_reduce", 10, 5, tid=1, pid=9), "cat": "user_annotation"},
        ],
        dialect=dialect,
    )
    compare_ranks(made, Options())
    calculate_stats(made, Options())
    calculate_stats_v2(made, Options())
    # Then 100 us compute, 140 communicate, 40 do both, and the device is busy for all of the 200
    (row,) = made.tables["overlap"].to_pylist()
    share = pytest.approx(100 * 40 / 140)
    assert [*row.values()] == [0, 100, 140, 40, share]
    (summary,) = made.tables["stats_summary"].to_pylist()
    assert (summary["comp_active_atime"], summary["comm_active_atime"], summary["elapsed_time"]) == (100, 140, 200)
    assert made.tables["active"]["Active percentage"].to_pylist() == [100]
    assert [CLASSES[each] for each in classes(made)] == ["computation", *["communication"] * 3]


def test_kernels_of_the_aiu_that_add_up_compute() -> None:
    counters = [0, 0, 0, 50_000, 50_000]
    made = trace(
        [
            slice_("AllReduce_x_1_Add Cmpt Exec", 0, 50, counters, CollGroup="AllReduce_x_1"),
            slice_("SenRdmaSend_1 DmaO", 20, 60, counters, tid=8, CollGroup="AllReduce_x_1"),
        ]
    )
    compare_ranks(made, Options())
    (row,) = made.tables["overlap"].to_pylist()
    assert (row["Computation"], row["Communication"], row["Overlap"]) == (50, 60, 30)
