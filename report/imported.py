"""Makes the report of a capture imported from another tool's text, whose stalls are already joined and symbolized."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from iaprof.basics.errors import UsageError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.profile import Profile
from iaprof.report.facts import Facts, Matched, Report
from iaprof.report.join.named import NO_INSTRUCTIONS
from iaprof.report.join.selection import Selection
from iaprof.report.samples import profile_of


def can_select(selection: Selection) -> bool:
    """Whether imported captures have what the selection filters by."""
    return not (selection.tids or selection.cgroups or selection.devices)


def build_imported(
    capture: CaptureReader, selection: Selection, interval_ns: int, start_ns: int | None = None
) -> Report:
    """Reads the `sample` rows of a capture.

    Args:
        capture: the open capture.
        selection: the filters.
        interval_ns: the length of an interval; 0: a single interval.
        start_ns: what the selection's time range is relative to; None: the capture's start.

    Raises:
        CaptureError: the capture is damaged.
        UsageError: the selection filters by something that imported captures lack.
    """
    if not can_select(selection):
        raise UsageError("--tid, --cgroup and --device find nothing here: an imported text does not contain them")
    row_filter = selection.row_filter(capture.header, start_ns)
    profile = _selected(profile_of(capture, interval_ns, (row_filter.begin_ns, row_filter.end_ns)), selection)
    totals = profile.counts.sum(axis=1).astype(np.int64)
    known_kernel = np.array([kernel is not None for kernel in profile.kernels], bool)[profile.kernel]
    known_launch = np.array([launch is not None for launch in profile.launches], bool)[profile.launch]
    decoded = np.array([code.mnemonic not in NO_INSTRUCTIONS for code in profile.codes], bool)[profile.code]
    samples = int(totals.sum())
    matched = Matched(
        samples,
        int(totals[known_kernel].sum()),
        int(totals[decoded].sum()),
        0,  # the text does not say which other stacks can have launched a kernel
    )
    facts = Facts(
        stalls=samples,
        active=profile.active,
        unknown_kernel=samples - matched.kernel,
        no_launch=int(totals[known_kernel & ~known_launch].sum()),
        matched=matched,
    )
    return Report(replace(profile, matched=matched.shares()), facts, capture.header, [None] * len(profile.kernels))


def _selected(profile: Profile, selection: Selection) -> Profile:
    counts = profile.counts * selection.reason_mask(profile.reasons).astype(np.uint64)
    launches = [
        (not selection.pids or (launch is not None and launch.pid in selection.pids))
        and (not selection.comms or (launch is not None and launch.comm in selection.comms))
        and selection.matches_stack(launch.stack if launch is not None else ())
        for launch in profile.launches
    ]
    pattern = selection.kernel
    kernels = [pattern is None or (k is not None and pattern.search(k.symbol) is not None) for k in profile.kernels]
    launched, of_kernel = np.array(launches, bool)[profile.launch], np.array(kernels, bool)[profile.kernel]
    return replace(profile, counts=counts).only(np.any(counts, axis=1) & launched & of_kernel)
