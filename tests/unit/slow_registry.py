"""The shapes of unit/slow_shapes.py and unit/slow_ranks.py by name: how large each is, and which verbs refuse it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from iaprof.formats.capture.limits import PARTS, SENSORS, STREAMS, Ratio
from unit.slow_ranks import (
    collective_ranks,
    distinct_texts,
    kernel_ranks,
    labels,
    labels_of_parts,
    long_labels,
    marked_rows,
    power_ranks,
    slice_pairs,
)  # fmt: skip
from unit.slow_shapes import (
    counter_names,
    counters,
    cpu_frames,
    deep_cpu_frames,
    deep_launches,
    described,
    distinct_transfers,
    distinct_waits,
    flows,
    gpu_instructions,
    gpu_kernels,
    gpu_lines,
    gpu_module_processes,
    gpu_modules,
    header_members,
    header_texts,
    imported,
    imported_frames,
    imported_rows,
    instants,
    launched_stacks,
    launches,
    long_list,
    losses,
    many_lists,
    metric_processes,
    metrics,
    named,
    named_modules,
    nested_slices,
    one_flow,
    one_list,
    overlapping_slices,
    python_codes,
    python_frames,
    same_losses,
    same_modules,
    slice_args,
    slice_names,
    slice_threads,
    slices,
    stall_addresses,
    stall_reads,
    stalls,
    stalls_nowhere,
    threads,
    transfers,
    wait_functions,
    waits,
)  # fmt: skip

VALUES = 9_900_000
_FEWER = {
    gpu_modules: 4_000_000,
    gpu_module_processes: 4_000_000,
    same_modules: 230_000,
    stall_addresses: 990_000,
    stalls_nowhere: 990_000,
}  # more are refused
SHAPES: dict[str, tuple[Callable[[Path, int], Path], int]] = {
    make.__name__: (make, _FEWER.get(make, VALUES))
    for make in (
        waits, distinct_waits, wait_functions, transfers, distinct_transfers, launches, launched_stacks,
        one_list, many_lists, long_list, cpu_frames, deep_cpu_frames, deep_launches, python_frames, python_codes,
        imported, imported_frames, imported_rows, slices, slice_names, nested_slices, overlapping_slices,
        slice_threads, slice_args, counters, counter_names, flows, one_flow, instants, metrics, metric_processes,
        losses, same_losses, header_members, header_texts, stalls, stall_reads, stall_addresses, stalls_nowhere,
        threads, described, named, named_modules, gpu_modules, gpu_module_processes, same_modules, gpu_kernels,
        gpu_instructions, gpu_lines, kernel_ranks, collective_ranks, power_ranks, slice_pairs, marked_rows, labels,
        long_labels, labels_of_parts, distinct_texts,
    )
}  # fmt: skip
"""What makes each shape, and of how many values a verb reads it, by name."""
TIME_LINES = ("slices", "slice_names", "nested_slices", "overlapping_slices", "slice_threads", "slice_args",
              "counters", "counter_names", "flows", "one_flow", "instants", "kernel_ranks", "collective_ranks",
              "power_ranks", "slice_pairs", "marked_rows")  # fmt: skip
"""Those of imported traces, whose formats are others."""

_NO_STALLS = r".* has time lines, but no stalls: look at it with 'iaprof timeline', 'info' and 'query'"
_NO_KERNEL = "no stall is in a known kernel: 'iaprof info' says what the capture contains"
_FEW_GROUPS = "outliers need 4 groups or more, and there are [12]"
_NO_TRANSFERS, _NO_WAITS = "this capture has no copies and fills: .*", "this capture has no waits: .*"
_READERS = ("info", "top", "annotate", "diff", "query", "archive", "redact", "merge", "page", "folded")
_READERS_OF_METRICS = ("top", "annotate", "diff", "archive", "redact", "page", "folded")


def _absurd(ratio: Ratio) -> str:
    return rf".* declares [\d,]+ {ratio.what}, more than {ratio.most:,}, which is absurd for its size: .* add --large"


REFUSALS: dict[tuple[str, str], str] = {
    **{(name, "top"): _NO_STALLS for name in TIME_LINES},
    **{(name, "outliers"): _FEW_GROUPS for name in SHAPES if name not in (*TIME_LINES, "distinct_texts")},
    **{
        (name, "annotate"): _NO_KERNEL
        for name in ("cpu_frames", "deep_cpu_frames", "stalls_nowhere", "stack_processes", "distinct_launches")
    },
    **{(name, "transfers"): _NO_TRANSFERS for name in SHAPES if "transfers" not in name},
    **{(name, "waits"): _NO_WAITS for name in SHAPES if name not in ("waits", "distinct_waits", "wait_functions")},
    **{("empty_parts", verb): _absurd(PARTS) for verb in _READERS},
    **{("streams", verb): _absurd(STREAMS) for verb in _READERS},
    **{("energy_names", verb): _absurd(SENSORS) for verb in _READERS_OF_METRICS},
}
"""What verbs of test_time_limit.py say, as regular expressions, where they refuse a shape; all others answer."""
