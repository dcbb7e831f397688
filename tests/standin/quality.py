# SPDX-License-Identifier: Apache-2.0
"""How well a report joins stalls to launches, on a capture of the mixed workload (mixed.py), whose truth is known.

- **The truth** is in the records: bits that the hardware does not use tell which site each is of (`in_order` in gpu.c).
- **The right process and kernel:** a report by reads of the stalls says what it gave to which process and kernel, and
  what it labelled as ambiguous. It is compared read by read, so that two mistakes cannot cancel each other.
- **The right stack:** half the sum of |count - truth| over all (process, stack, kernel, offset, reason). What is
  labelled has no stack. So that this makes no method look better or worse, stacks are compared in a capture without
  the records that were labelled or are in a wrong process: each method is given the same ones. `errors` does it for
  any capture, where what is labelled is an error.
- **The oracle** knows when each launch executed. It splits what a read has at an address among the launches of kernels
  there by the time for which they executed since the read before. What is left is the noise of sampling.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS, make_rows
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.gpu.intel import records
from iaprof.gpu.intel.reasons import REASONS
from standin.hardware import Execution, Ledger

LAYOUT = records.XE2
SITE_WORD, SITE_BIT = 1, 49  # `unused` of that layout in gpu.c
LOW_BITS = 0xFFFFFFFF  # of an address: what a record holds
POLL_NS = 5_000_000  # the driver makes records visible this often
INTERVAL_NS = 1_000_000  # the shortest of a report, and less than the time between two reads
LAUNCH_FUNCTION = "zeCommandListAppendLaunchKernel"
AMBIGUOUS = "[ambiguous: "

Cell = tuple[int, str, str, int, str]
"""Process (0 for none), stack, kernel, offset and reason."""
Cells = Counter[Cell]
Report = Callable[..., str]
"""What `iaprof report CAPTURE OPTIONS...` prints."""
METHODS = ("latest", "proportional")


@dataclass(frozen=True)
class Stalls:
    """Records of a capture, each with its read and its truth."""

    begin_ns: NDArray[np.int64]  # [reads]
    end_ns: NDArray[np.int64]  # [reads]
    read: NDArray[np.int64]  # [n]
    site: NDArray[np.int64]  # [n], index of Ledger.sites
    ip: NDArray[np.int64]  # [n], low 32 bits
    counts: NDArray[np.int64]  # [n, 10], in the order of REASONS

    def __len__(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True)
class Places:
    """How much was given to the right process and kernel."""

    stalls: int
    labelled: int  # as ambiguous
    right: int  # of those that are not

    @property
    def right_share(self) -> float:
        """Of what is not labelled."""
        return self.right / max(self.stalls - self.labelled, 1)


@dataclass(frozen=True)
class Quality:
    """How well a capture was reported. Errors are in stalls, by method, of which `oracle` is one."""

    places: Places
    compared: int  # stalls that are not labelled, and their
    errors: dict[str, float]


@dataclass(frozen=True)
class Workload:
    """What a recording had to offer."""

    pairs: int  # of a read and a kernel that has stalls in it
    with_choice: int  # of those: launches from two stacks or more were not finished
    with_mixture: int  # of those: stalls of two stacks or more
    delay_ms: tuple[float, float, float]  # from a launch to its execution: median, 99 %, longest
    duration_ms: tuple[float, float]  # of executions: shortest, longest


def read_stalls(capture: Path) -> Stalls:
    """The records of a capture that an `in_order` GPU made; their order is that of the rows."""
    table = CaptureReader(capture).table("stall", ("time_ns", "begin_ns", "w0", "w1"))
    words = [_values(table[name]) for name in ("w0", "w1")]
    return Stalls(
        table["begin_ns"].to_numpy().astype(np.int64),
        table["time_ns"].to_numpy().astype(np.int64),
        np.repeat(np.arange(len(table)), _lengths(table["w0"])),
        (words[SITE_WORD] >> np.uint64(SITE_BIT)).astype(np.int64),
        LAYOUT.ips(words).astype(np.int64),
        np.stack([LAYOUT.counts(words, reason) for reason in REASONS], axis=1).astype(np.int64),
    )


def _lengths(column: pa.ChunkedArray) -> NDArray[np.int64]:
    return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks]).astype(np.int64)


def _values(column: pa.ChunkedArray) -> NDArray[np.uint64]:
    return np.concatenate([chunk.flatten().to_numpy() for chunk in column.chunks])


def jobs_of(ledger: Ledger) -> pa.StructArray:
    """`gpu_job` rows as a scheduler would make them that gives a launch to the GPU at once: a job for each."""
    first: dict[int, Execution] = {}
    ends: dict[int, int] = {}
    for each in ledger.executions:
        first.setdefault(each.launch, each)
        ends[each.launch] = max(each.end_ns, ends.get(each.launch, 0))
    of_launches = list(first.values())
    launched = np.array([each.launched_ns for each in of_launches], np.uint64)
    columns = {
        "time_ns": launched,
        "end_ns": pa.array([ends[each.launch] for each in of_launches], pa.uint64()),
        "queued_ns": pa.array(launched),
        "pid": np.array([ledger.sites[each.site].pid for each in of_launches], np.uint32),
        "queue": pa.array(["ccs0"] * len(launched), pa.string()),
        "device": pa.nulls(len(launched), pa.string()),
        "at_once": np.zeros(len(launched), bool),
    }
    return make_rows("gpu_job", columns)


def write_part(capture: Path, kept: NDArray[np.bool_] | None, part: Path, jobs: pa.StructArray | None = None) -> None:
    """Writes the capture with some of its records, bool[n], in the order of `read_stalls`; None: with all; and jobs."""
    reader = CaptureReader(capture)
    done = 0
    with part.open("wb") as file:
        writer = CaptureWriter(file)
        for kind, type_ in KINDS.items():
            for table in reader.tables(kind):
                columns = [column.combine_chunks() for column in table.columns]
                if kind == "stall" and kept is not None:
                    records = int(_lengths(table["w0"]).sum())
                    keep = kept[done : done + records]
                    done += records
                    read = np.repeat(np.arange(len(table)), _lengths(table["w0"]))[keep]
                    offsets = np.append(0, np.cumsum(np.bincount(read, minlength=len(table)))).astype(np.int32)
                    for index, member in enumerate(type_):
                        if pa.types.is_list(member.type) and not columns[index].null_count:
                            values = pa.array(columns[index].flatten().to_numpy()[keep])
                            columns[index] = pa.ListArray.from_arrays(pa.array(offsets), values, type=member.type)
                plain = [column.cast(member.type) for column, member in zip(columns, type_, strict=True)]
                writer.write(kind, pa.StructArray.from_arrays(plain, fields=list(type_)))
        if jobs is not None:
            writer.write("gpu_job", jobs)
        writer.close(reader.header)


def true_cells(stalls: Stalls, ledger: Ledger) -> Cells:
    """The stalls by cell, as they happened."""
    return _cells(ledger, stalls.site, stalls.ip, stalls.counts.astype(np.float64))


def ledger_cells(ledger: Ledger) -> Cells:
    """What the GPU's own books say was captured."""
    cells: Cells = Counter()
    for row in ledger.rows:
        if row.captured:
            cells[row.pid, row.stack, row.kernel, row.offset, row.reason] += row.captured
    return cells


def oracle(stalls: Stalls, ledger: Ledger) -> Cells:
    """The stalls by cell, as one would say who knows when each launch executed."""
    low = np.array([site.address & LOW_BITS for site in ledger.sites])
    high = low + np.array([site.size for site in ledger.sites])
    # A read follows the driver's look at what there is at once: what it has is what came since the read before, and
    # not earlier than the look before. The wider span is for what does not keep to that.
    executed = _executed(stalls.begin_ns + POLL_NS, stalls.end_ns, ledger.executions, len(ledger.sites))
    executed += 1e-6 * _executed(stalls.begin_ns, stalls.end_ns, ledger.executions, len(ledger.sites))
    ips, ip_of = np.unique(stalls.ip, return_inverse=True)
    pairs, pair_of = np.unique(stalls.read * len(ips) + ip_of, return_inverse=True)
    counts = np.stack([np.bincount(pair_of, column, len(pairs)) for column in stalls.counts.T], axis=1)
    read, ip = np.divmod(pairs, len(ips))
    shares = []
    for index, address in enumerate(ips.tolist()):
        here = np.flatnonzero(ip == index)
        sites = np.flatnonzero((low <= address) & (address < high))
        weights = executed[np.ix_(read[here], sites)]
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
        shares.append((sites, np.full(len(sites), address), weights.T @ counts[here]))
    return _cells(ledger, *(np.concatenate(columns) for columns in zip(*shares, strict=True)))


def _executed(
    begins: NDArray[np.int64], ends: NDArray[np.int64], executions: list[Execution], sites: int
) -> NDArray[np.float64]:
    """For how long each site's launches executed in each span, ns: float64[spans, sites]."""
    pieces = np.array([(each.site, each.begin_ns, each.end_ns) for each in executions], np.int64).reshape(-1, 3)
    result = np.zeros((len(begins), sites))
    for site in np.unique(pieces[:, 0]).tolist():
        mine = pieces[pieces[:, 0] == site, 1:]
        at = mine.reshape(-1)
        so_far = np.cumsum(np.stack([np.zeros(len(mine)), mine[:, 1] - mine[:, 0]], axis=1).reshape(-1))
        result[:, site] = np.interp(ends, at, so_far) - np.interp(begins, at, so_far)
    return result


def _cells(ledger: Ledger, site: NDArray[np.int64], ip: NDArray[np.int64], counts: NDArray[np.float64]) -> Cells:
    """Rows of any number for each site and address, added up."""
    keys, key_of = np.unique(site << 32 | ip, return_inverse=True)
    sums = np.stack([np.bincount(key_of, column, len(keys)) for column in counts.T], axis=1)
    cells: Cells = Counter()
    for key, row in zip(keys.tolist(), sums.tolist(), strict=True):
        of = ledger.sites[key >> 32]
        offset = (key & LOW_BITS) - (of.address & LOW_BITS)
        for reason, count in zip(REASONS, row, strict=True):
            if count:
                cells[of.pid, of.stack, of.kernel, offset, reason] += count
    return cells


def reported_cells(folded: str, ledger: Ledger) -> Cells:
    """Folded stacks by cell; where there is no process, no stack or no known kernel, those of the text."""
    labels = sorted({site.stack for site in ledger.sites}, key=len, reverse=True)
    kernels = {site.kernel for site in ledger.sites}
    known: dict[str, tuple[int, str]] = {}
    cells: Cells = Counter()
    for line in folded.splitlines():
        text, count = line.rsplit(" ", 1)
        cpu, _, gpu = text.partition(";-;")
        if cpu not in known:
            _, *frames = cpu.split(";")
            pid = int(frames.pop(0)) if frames and frames[0].isdigit() else 0
            user = ";".join(frames).removesuffix(f";{LAUNCH_FUNCTION}")
            known[cpu] = (pid, next((each for each in labels if user == each or user.endswith(f";{each}")), user))
        *frames, reason, offset = (frame[:-4] for frame in gpu.split(";"))
        kernel = next((frame for frame in frames if frame in kernels), frames[0])
        cells[*known[cpu], kernel, int(offset, 16), reason] += int(count)
    return cells


def error(cells: Cells, truth: Cells) -> float:
    """Half the sum of the differences: of as many stalls in both, those that are in a wrong cell."""
    return sum(abs(cells[key] - truth[key]) for key in cells.keys() | truth.keys()) / 2


def measure(capture: Path, ledger: Ledger, report: Report, *options: str) -> Quality:
    """Reports a capture by all methods. Leaves a capture without what is labelled beside it.

    Args:
        capture: of the mixed workload.
        ledger: of the GPU that it was recorded with.
        report: makes folded stacks.
        options: for each report.
    """
    stalls = read_stalls(capture)
    places, kept = judge(capture, stalls, ledger, report, *options)
    part = capture.with_name(capture.name + ".part")
    write_part(capture, kept, part)
    compared = read_stalls(part)
    return Quality(
        places,
        len(compared),
        errors(part, compared, ledger, report, *options),
    )


def errors(capture: Path, stalls: Stalls, ledger: Ledger, report: Report, *options: str) -> dict[str, float]:
    """The error of each method, in stalls; what is labelled is an error."""
    truth = true_cells(stalls, ledger)
    found = {}
    for method in METHODS:
        cells = reported_cells(report(capture, f"--attribution={method}", *options), ledger)
        assert sum(cells.values()) == len(stalls)
        found[method] = error(cells, truth)
    return found | {"oracle": error(oracle(stalls, ledger), truth)}


_BY_READ = re.compile(r"([\d.]+) s;(.*?);-;([^;]*)_\[G\];(?:.*;)?0x([0-9a-f]+)_\[g\] (\d+)")


def judge(
    capture: Path, stalls: Stalls, ledger: Ledger, report: Report, *options: str
) -> tuple[Places, NDArray[np.bool_]]:
    """Compares process and kernel, read by read.

    Args:
        capture: of the mixed workload.
        stalls: of this capture.
        ledger: of the GPU.
        report: makes folded stacks.
        options: for the report.

    Returns:
        The outcome, and which records are at their process, kernel and instruction without being labelled: bool[n].
    """
    start_ns = CaptureReader(capture).header["clock"]["monotonic_ns"]
    frames = "--frames=interval,process,pid,function,offset"
    text = report(capture, frames, f"--interval={INTERVAL_NS / 1e9}", *options)
    told: Counter[tuple[int, int, str, int]] = Counter()
    labelled = total = 0
    for line in text.splitlines():
        match = _BY_READ.fullmatch(line)
        assert match, line
        seconds, process, kernel, offset, count = match.groups()
        total += int(count)
        if process.startswith(AMBIGUOUS):
            labelled += int(count)
        else:
            pid = process.rpartition(";")[2]
            key = (round(float(seconds) * 1e9 / INTERVAL_NS), int(pid) if pid.isdigit() else 0, kernel, int(offset, 16))
            told[key] += int(count)
    assert total == len(stalls)
    interval = (stalls.end_ns - start_ns) // INTERVAL_NS
    places = len(ledger.sites) << 32
    keys, key_of = np.unique(stalls.read * places + (stalls.site << 32 | stalls.ip), return_inverse=True)
    sums = np.bincount(key_of, stalls.counts.sum(axis=1), len(keys)).astype(np.int64)
    columns = (interval[keys // places], keys % places >> 32, keys & LOW_BITS, sums)
    truth: Counter[tuple[int, int, str, int]] = Counter()
    true_keys = []
    for number, site, ip, count in zip(*(column.tolist() for column in columns), strict=True):
        of = ledger.sites[site]
        true_keys.append((number, of.pid, of.kernel, ip - (of.address & LOW_BITS)))
        truth[true_keys[-1]] += count
    right = sum(min(count, truth[key]) for key, count in told.items())
    kept = np.array([key in told for key in true_keys], bool)
    return Places(total, labelled, right), kept[key_of]


def describe(stalls: Stalls, ledger: Ledger) -> Workload:
    """How hard it was."""
    pieces = np.array([(e.launch, e.site, e.launched_ns, e.begin_ns, e.end_ns) for e in ledger.executions], np.int64)
    launches, first, launch_of = np.unique(pieces[:, 0], return_index=True, return_inverse=True)
    site, launched, begin = pieces[first, 1], pieces[first, 2], pieces[first, 3]
    end = np.zeros(len(launches), np.int64)
    np.maximum.at(end, launch_of, pieces[:, 4])
    durations = np.bincount(launch_of, pieces[:, 4] - pieces[:, 3])
    kernels = sorted({(each.pid, each.address, each.kernel) for each in ledger.sites})
    kernel_of = np.array([kernels.index((each.pid, each.address, each.kernel)) for each in ledger.sites])
    sampled = np.unique((stalls.read * len(kernels) + kernel_of[stalls.site]) * len(kernel_of) + stalls.site)
    pairs, mixture = np.unique(sampled // len(kernel_of), return_counts=True)
    by_kernel = [np.flatnonzero(kernel_of[site] == number) for number in range(len(kernels))]
    choices = 0
    for pair in pairs.tolist():
        read, kernel = divmod(pair, len(kernels))
        mine = by_kernel[kernel]
        there = (launched[mine] < stalls.end_ns[read]) & (end[mine] > stalls.begin_ns[read])
        choices += len(np.unique(site[mine[there]])) > 1
    middle, late, longest = np.percentile((begin - launched) / 1e6, (50, 99, 100)).tolist()
    return Workload(
        len(pairs), choices, int((mixture > 1).sum()), (middle, late, longest),
        (durations.min() / 1e6, durations.max() / 1e6),
    )  # fmt: skip
