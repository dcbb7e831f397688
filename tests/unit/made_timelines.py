"""An export with everything that formats of time lines show, and its totals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from iaprof.formats.export import About, CpuSamples, Executions, Export, Launches, Series, Thread, Track
from iaprof.formats.profile import Code, Kernel, Launch
from unit.profiles import Row, counts, profile

HOSTILE = 'a\x1b[2J\n"]}</script>\u202e'
APP = Launch("app", 7, ("main",))
MATMUL = Kernel(0x1000, "matmul", "m.cl")
SEND = Code("send", ("matmul",), (4,))


def executed() -> Export:
    """The same, with when samples were seen of a kernel that two stacks launch, one to a known queue, and another."""
    tracks = [
        Track("card0", "matmul", APP, 0x5000),
        Track("card0", "matmul", Launch("app", 7, ("main", HOSTILE))),
        Track("card1", "[unknown kernel]"),
    ]
    columns = np.array([(0, 6), (1, 2), (0, 9), (2, 1)])
    begins, ends = np.array([0.05, 0.06, 0.55, 0.9]), np.array([0.4, 0.06, 0.6, 1.0])
    return replace(export(), executions=Executions(tracks, columns[:, 0], begins, ends, columns[:, 1]))


def export(*, devices: tuple[str, str] = ("card0", "card0"), hosts: tuple[str, str] = ("", "")) -> Export:
    """Two intervals far apart, overlapping runs, a metric with fractional values, and CPU samples."""
    rows = [
        Row(0, APP, MATMUL, SEND, 8, counts(sbid=5, active=1), devices[0]),
        Row(0, APP, MATMUL, SEND, 16, counts(sbid=2), devices[1]),
        Row(7, APP, MATMUL, SEND, 8, counts(send=9), devices[0]),
    ]
    threads = [Thread("app", 7, 7, hosts[0]), Thread("worker", 7, 9, hosts[0]), Thread(HOSTILE, 7, 9, hosts[1])]
    columns = np.array([(0, 0, 100), (1, 0, 1), (0, 1, 3), (0, 0, 1), (2, 2, 4)])
    launches = Launches(
        ["matmul", "reduce", HOSTILE],
        threads,
        columns[:, 0],
        columns[:, 1],
        np.array([0.0, 0.1, 0.2, 0.5, 0.5]),
        np.array([0.3, 0.1, 0.25, 0.5, 0.6]),
        columns[:, 2],
        0.001,
    )
    cpu = CpuSamples([APP], np.zeros(2, np.int64), np.array([1, 2]), np.array([4, 6]))
    return Export(
        profile(rows, [50.0 + 0.1 * n for n in range(8)]),
        About("vm", "app --fast", "Battlemage", begun=1_700_000_000.0, seconds=1.0),
        0.1,
        cpu=cpu,
        series=[
            Series("frequency-actual-MHz", "", np.array([0.05, 0.15]), np.array([400.0, 2400.5])),
            Series("cpu-percent", HOSTILE, np.array([0.5]), np.array([99.0])),
        ],
        launches=launches,
    )
