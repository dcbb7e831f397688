"""Small traces whose results are known, with slices on the host's clock as the earlier stages leave them.

Counters are those of the device: in all of these, 1000 cycles are 1 us.
"""

from __future__ import annotations

import numpy as np

from iaprof.timelines.trace import MADE, Dialect, Points, Trace
from unit.timelines.traces import Event, slice_, trace

FIRST = (1000000, 1010000, 1030000, 1080000, 1085000)
SECOND = (1040000, 1050000, 1100000, 1140000, 1141000)


def two_operations() -> Trace:
    """E1: two operations between two host slices; the first copies in and out."""
    return trace(
        [
            slice_("Flex RoundTrip", 900, 400, tid=9),
            slice_("AIU Roundtrip", 905, 300, tid=10),
            slice_("k_1 DmaI", 975, 10, FIRST, tid=11, Power=0),
            slice_("k_1 Cmpt Prep", 980, 20, FIRST, tid=12, Power=1000),
            slice_("k_1 Cmpt Exec", 1000, 50, FIRST, tid=13, Power=1000),
            slice_("m_2 Cmpt Prep", 1010, 50, SECOND, tid=12, Power=44000),
            slice_("k_1 DmaO", 1050, 5, FIRST, tid=14, Power=2000),
            slice_("m_2 Cmpt Exec", 1070, 40, SECOND, tid=13, Power=44000),
        ]
    )


def passes(*gaps: float) -> Trace:
    """E5: a kernel of another name, then five kernels that come once more after each gap (us)."""
    starts = np.cumsum([1020.0, *gaps])
    names = ("ax_1", "bx_1", "cx_1", "dx_1", "ex_1")
    kernels = [("warm_9", 1000.0)]
    kernels += [(name, start + 10 * number) for start in starts for number, name in enumerate(names)]
    return trace([slice_(f"{name} Cmpt Exec", ts, 5, (0, 0, 0, 5000, 5000)) for name, ts in kernels])


def all_reduce() -> Trace:
    """E6: two ranks, a file each, with aligned clocks: a kernel, an all-reduce of 4000 bytes, a kernel."""
    group = "AllReduce_all_reduce_3"
    there, back = f"[sync={group}_s0_r1_0]", f"[sync={group}_s1_r0x1_1]"

    def kernel(name: str, start: int, end: int, **others: str) -> Event:
        counters = [start, start, start, end, end]
        return slice_(f"{name} Cmpt Exec", start, end - start, [1000 * each for each in counters], tid=1, **others)

    def send(name: str, start: int, end: int, type_: str, **others: str | int) -> Event:
        counters = [1000 * each for each in (998, 998, start, start, end)]
        name = f"SenRdmaSend_{name} DmaO"
        return slice_(name, start, end - start, counters, tid=2, CollGroup=group, Type=type_, **others)

    def receive(name: str, start: int, end: int, peer: str) -> Event:
        counters = [1000 * each for each in (start, end, end, end, end)]
        name = f"SenRdmaRecv_{name} DmaI"
        members = {"CollGroup": group, "Type": "WDone Barrier", "Peer": peer, "Bytes": "4000"}
        return slice_(name, start, end - start, counters, tid=3, **members)

    rank_0 = [
        kernel("mm_4", 1000, 1040),
        send(f"71 {there}", 998, 1070, "SingleCast", Peer="1", Bytes="4000"),
        receive(f"74 [4000B] {back}", 998, 1140, "1"),
        kernel("mm_5", 1160, 1200),
    ]
    rank_1 = [
        kernel("mm_4", 1000, 1040),
        receive(f"72 [4000B] {there}", 998, 1070, "0"),
        kernel(f"{group}_Add_1", 1072, 1082, CollGroup=group),
        send(f"73 - Set BcList {back}", 1085, 1090, "Set BCList", Peers="0"),
        send(f"73 - Xseg to rank 0 {back}", 1086, 1091, "MultiCast XSEG", Peer="0"),
        send(f"73 Data {back}", 1092, 1140, "MultiCast", Bytes="4000"),
        kernel("mm_5", 1160, 1200),
    ]
    return trace(rank_0, [{**each, "pid": 1} for each in rank_1])


def charges() -> Trace:
    """E10: five kernels with a charge counter, which takes one impossible step and wraps."""
    power = (1000, 201000, 301000, 4294967000, 99704)
    starts = [1000 + 100 * number for number in range(5)]
    kernels = [
        slice_("k Cmpt Exec", ts, 60, [1000 * each for each in (ts, ts, ts, ts + 60, ts + 60)], Power=charge)
        for ts, charge in zip(starts, power, strict=True)
    ]
    return trace(kernels)


def launch(pid: int = 4000, device: int = 0) -> list[Event]:
    """E11: a launch of two kernels after a copy, and the wait for it, in PyTorch's format."""
    return [
        slice_("aiuLaunchControlBlocks", 1010, 20, pid=pid, tid=5, cat="privateuse1_runtime", correlation=9),
        slice_("aiuScheduleWait", 1040, 200, pid=pid, tid=5, cat="privateuse1_runtime", correlation=9),
        {"ph": "s", "id": 9, "cat": "ac2g", "name": "ac2g", "pid": pid, "tid": 5, "ts": 1010},
        slice_(
            "Memcpy (HtoD)", 1050, 10, pid=device, tid=7, cat="gpu_memcpy", correlation=9,
            args={"memory bandwidth (GB/s)": 4.0},
        ),
        slice_("mm_1", 1070, 50, pid=device, tid=7, cat="kernel", correlation=9),
        slice_("add_2", 1130, 30, pid=device, tid=7, cat="kernel", correlation=9),
    ]  # fmt: skip


def launched() -> Trace:
    """E11, as a trace."""
    return trace(launch(), dialect=Dialect.TORCH)


def points(made: Trace, track: str) -> list[tuple[int, float, float]]:
    """Returns the points of a track that stages made: pid, time in us, value."""
    chosen: Points = made.points.take(made.texts.matches(made.points.name, f"^{track}$") & (made.points.row == MADE))
    return list(zip(chosen.pid.tolist(), (chosen.time / 1000).tolist(), chosen.value.tolist(), strict=True))


def flows(made: Trace) -> list[tuple[int, str, int, int, float]]:
    """Returns the flows that stages made: identifier, phase, pid, tid, time in us; by identifier and time."""
    chosen = made.flows.take(made.flows.row == MADE)
    phases = chosen.phase.tolist()
    rows = zip(
        chosen.id.tolist(), [made.texts[each] for each in phases], chosen.pid.tolist(), chosen.tid.tolist(),
        (chosen.time / 1000).tolist(), strict=True,
    )  # fmt: skip
    return sorted(rows, key=lambda each: (each[0], each[1] == "f"))


def names(made: Trace) -> list[str]:
    """Returns the names of all slices."""
    return [made.texts[each] for each in made.slices.name.tolist()]


def member(made: Trace, name: str) -> list[str | None]:
    """Returns a text of all slices that stages added."""
    return [made.texts[each] if each >= 0 else None for each in made.slices.extra[name].tolist()]
