"""The small inputs of the specification, in the format of traces.py: times in us, counters in cycles."""

from __future__ import annotations

from typing import Any

from unit.timelines.examples import FIRST, SECOND
from unit.timelines.traces import Event, slice_

E1 = [
    slice_("Flex RoundTrip", 900, 400, tid=11),
    slice_("AIU Roundtrip", 905, 300, tid=12),
    slice_("k_1 DmaI", 975, 10, FIRST, tid=13, Power=0),
    slice_("k_1 Cmpt Prep", 982, 18, FIRST, tid=14, Power=1000),
    slice_("k_1 Cmpt Exec", 1000, 50, FIRST, tid=15, Power=1000),
    slice_("k_1 DmaO", 1050, 5, FIRST, tid=16, Power=2000),
    slice_("m_2 Cmpt Prep", 1040, 20, SECOND, tid=14, Power=44000),
    slice_("m_2 Cmpt Exec", 1070, 40, SECOND, tid=15, Power=44000),
]

E2_TIMES = [(0, 100), (10, 20), (50, 80), (60, 120), (200, 10), (200, 30), (300, 50), (349.997, 20)]
E2 = [slice_(f"s{number}", 1000 + ts, dur, tid=1000) for number, (ts, dur) in enumerate(E2_TIMES)]


def e4(*first: int) -> list[Event]:
    """Kernels whose counters start at these cycles, of which the trace has 32 bits."""
    steps = (0, 40000, 60000, 260000, 262000)
    return [
        slice_("k Cmpt Exec", 10**7 + (c + 60000) / 1000, 200, [(c + step) % 2**32 for step in steps]) for c in first
    ]


E4 = e4(4284967296, 2**32 + 5000000, 3 * 2**32 + 1000)
E4B = e4(4284967296, 2**32 - 50000, 2**32 + 5000000)


def e7(ts: float, cycles: int) -> list[Event]:
    """A job of two kernels, counted at 560 MHz."""
    c = cycles + 100 * 560
    return [
        slice_("a Cmpt Exec", ts, 40, [cycles, cycles, cycles, cycles + 22400, cycles + 22400]),
        slice_("b Cmpt Exec", ts + 100, 10, [c, c, c, c + 5600, c + 5600]),
    ]


E7 = [e7(10**6, 10**6), e7(3 * 10**6, 10**6 + 2 * 10**6 * 560)]
E8 = [
    slice_("AIU Roundtrip", 1000, 300),
    slice_("k Cmpt Exec", 1600, 50, [0, 0, 100000, 150000, 150000]),
    slice_("l Cmpt Exec", 1700, 50, [0, 0, 200000, 250000, 250000]),
]


def _e9_job(ts: float, dur: float, kernel: int) -> list[Event]:
    c = kernel * 1000
    return [
        slice_("Flex RoundTrip", ts, dur),
        slice_("k Cmpt Exec", kernel, 200, [c, c, c, c + 200000, c + 200000]),
    ]


E9_TORCH = [slice_("Torch-Compiled Region", ts, 600, pid=4000) for ts in (2000, 3000, 4000)]
E9_FLEX = [_e9_job(90020, 560, 90200), _e9_job(91020, 550, 91200), _e9_job(92020, 540, 92200)]


_G = "AllReduce_all_reduce_3"


def collective(name: str, pid: int, start: int, end: int, ahead: int = 0, **args: Any) -> Event:
    """A device slice that was queued at 998, on a rank whose counter is ahead by some us."""
    window = name.rpartition(" ")[2]
    us = {"DmaI": (start, end, end, end, end), "Exec": (998, 998, start, end, end), "DmaO": (998, 998, 998, start, end)}
    counters = [(time + ahead) * 1000 for time in us[window]]
    return slice_(name, start, end - start, counters, pid=pid, **args)


def e6(ahead: int = 500, host: int = 0) -> list[list[Event]]:
    """A chain of two ranks; rank 1's counter is ahead by some us, its host's clock by others."""
    group: dict[str, Any] = {"CollGroup": _G, "Bytes": 4000}
    sync = f"[sync={_G}_s0_r1_0]"
    back = f"[sync={_G}_s1_r0x1_2]"
    first = [
        collective("mm_4 Cmpt Exec", 0, 1000, 1040),
        collective(f"SenRdmaSend_1 {sync} DmaO", 0, 998, 1070, Type="SingleCast", Peer=1, **group),
        collective(f"SenRdmaReceive_2 [4000B] {back} DmaI", 0, 998, 1140, Type="WDone Barrier", Peer=1, **group),
        collective("mm_5 Cmpt Exec", 0, 1160, 1200),
    ]
    second = [
        collective("mm_4 Cmpt Exec", 1, 1000, 1040, ahead),
        collective(f"SenRdmaReceive_1 [4000B] {sync} DmaI", 1, 998, 1070, ahead, Type="WDone Barrier", Peer=0, **group),
        collective(f"{_G}_Add_1 Cmpt Exec", 1, 1072, 1082, ahead, CollGroup=_G),
        collective(f"SenRdmaSend_3 - Set BcList {back} DmaO", 1, 1085, 1090, ahead, Type="Set BCList", Peers="0",
                   CollGroup=_G),
        collective(f"SenRdmaSend_3 - Xseg to rank 0 {back} DmaO", 1, 1086, 1091, ahead, Type="MultiCast XSEG", Peer=0,
                   CollGroup=_G),
        collective(f"SenRdmaSend_3 Data {back} DmaO", 1, 1092, 1140, ahead, Type="MultiCast", **group),
        collective("mm_5 Cmpt Exec", 1, 1160, 1200, ahead),
    ]  # fmt: skip
    return [first, [{**event, "ts": event["ts"] + host} for event in second]]


def e12(pid: int, *ends: int) -> list[Event]:
    """AllReduce groups 1, 2, ... that end at these us of a rank's counter."""
    return [
        slice_(f"AllReduce_x_{number} Cmpt Exec", end - 10, 10, [end * 1000 - 10000] * 3 + [end * 1000] * 2, pid=pid,
               CollGroup=f"AllReduce_x_{number}")
        for number, end in enumerate(ends, 1)
    ]  # fmt: skip


E12 = [
    e12(0, 1140, 2140),
    [*e12(1, 1640, 2641), slice_("k Cmpt Exec", 1990.36, 10, [1990360] * 3 + [2000360] * 2, pid=1)],
]
