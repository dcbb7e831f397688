from __future__ import annotations

import numpy as np
import pytest

from iaprof.timelines.options import Limit, Options
from iaprof.timelines.stages.selection import normalize_phase1
from iaprof.timelines.trace import Trace
from unit.timelines.clock_examples import E1
from unit.timelines.traces import slice_, trace


def _names(of: Trace) -> list[str]:
    return [of.texts[code] for code in of.slices.name]


def _limited(**limit: object) -> Trace:
    others = [
        {"ph": "M", "name": "process_name", "ts": 0},
        {"ph": "i", "name": "instant", "ts": 981},
        {"ph": "C", "name": "Memory", "ts": 976, "args": {"used": 1, "free": 2}},
        {"ph": "s", "id": 1, "name": "flow", "ts": 2000},
    ]
    made = trace([*others, *E1])
    normalize_phase1(made, Options(limit=Limit(**limit)))  # type: ignore[arg-type]
    return made


def test_e1_events_are_skipped_and_counted_in_the_order_of_time() -> None:
    e1 = trace(E1)
    normalize_phase1(e1, Options(limit=Limit(skip=2, count=3)))
    assert _names(e1) == ["k_1 DmaI", "k_1 Cmpt Prep", "k_1 Cmpt Exec"]
    assert dict(e1.dropped) == {"limit": 5}


def test_all_kinds_of_events_count_but_metadata() -> None:
    made = _limited(skip=2, count=3)
    assert _names(made) == ["k_1 DmaI"]
    assert made.points.value.tolist() == [1, 2]  # two series of one event
    assert [made.texts[code] for code in made.instants.name] == ["process_name", "instant"]
    assert len(made.flows) == 0
    assert dict(made.dropped) == {"limit": 8}


def test_a_span_takes_what_touches_it() -> None:
    made = _limited(start_ns=1205_000, end_ns=1_999_999)
    assert _names(made) == ["Flex RoundTrip", "AIU Roundtrip"]
    assert (len(made.points), len(made.flows), len(made.instants)) == (0, 0, 1)


def test_phases_that_are_not_counted_are_the_users() -> None:
    made = _limited(count=0, phases_not_counted="Cs")
    assert (len(made.slices), len(made.points), len(made.flows), len(made.instants)) == (0, 2, 1, 0)


def test_names_are_unified() -> None:
    named = trace([slice_("SenRDMAReceive_1 DmaI", 0, 1)])
    normalize_phase1(named, Options())
    assert _names(named) == ["SenRdmaRecv_1 DmaI"]


_SLICES = [
    slice_("a Cmpt Exec", 1.5, 2, [16, 20, 30, 40, 50], pid=3, cat="kernel", CollGroup="G_1", Power=7),
    slice_("b, c: d", 2, 2, tid=9, Bytes=128),
]


@pytest.mark.parametrize(
    ("attribute", "pattern", "kept"),
    [
        ("name", "^b, c: d$", "a"), ("name", "x|Exec", "b"), ("cat", "kern", "b"), ("pid", "^3$", "b"),
        ("tid", "9", "a"),
        ("ph", "X", ""), ("ts", r"^1\.5$", "b"), ("dur", "^2$", ""), ("args.TS1", "^16$", "b"),
        ("args.CollGroup", "G_", "b"),
        ("args.Power", "7", "b"), ("args.bytes", "128", "a"), ("args.Bytes", "128", "a"), ("args.jobname", "job-0", ""),
        ("args.reqID", "^1", "b"), ("args.ok", "True", "a"), ("args.share", "0.5", "b"), ("args.TS1", "-9223", "ab"),
    ],
)  # fmt: skip
def test_slices_are_filtered_by_their_attributes(attribute: str, pattern: str, kept: str) -> None:
    made = trace(_SLICES)
    made.slices.extra = {
        "reqID": made.texts.codes(["12", None]),
        "ok": np.array([False, True]),
        "share": np.array([0.5, np.nan]),
    }
    normalize_phase1(made, Options(filters=((attribute, pattern),)))
    assert "".join(name[0] for name in _names(made)) == kept
    assert made.dropped["filter"] == 2 - len(kept)


def test_filters_that_can_drop_nothing_are_said() -> None:
    made = trace(_SLICES)
    normalize_phase1(made, Options(filters=(("args.nothing", "1"), ("name", "("), ("args.device", "1"))))
    assert len(made.slices) == 2
    assert [f"{message.stage} {message.text}" for message in made.messages.said] == [
        "FLTR No slice has args.nothing: the filter args.nothing:1 drops nothing",
        "FLTR The filter name:( is not a regular expression: it drops nothing",
        "FLTR No slice has args.device: the filter args.device:1 drops nothing",
    ]
