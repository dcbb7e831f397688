"""The stages in order, on examples and on hostile events."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from bench.made_traces import chains
from iaprof.timelines import registry
from iaprof.timelines.columns import LEAST_PACKED, Narrow
from iaprof.timelines.options import Limit, Options, Overlap
from iaprof.timelines.trace import ABSENT, Dialect, Trace
from thorough import thorough
from unit.timelines.clock_examples import E1, E9_FLEX, E9_TORCH, e6
from unit.timelines.traces import Event, trace


def _run(of: Trace, options: Options) -> Trace:
    registry.run(of, options, [True] * len(registry.STAGES), lambda number, stage: None)
    return of


@pytest.mark.parametrize("stage", registry.STAGES, ids=[f"{n}-{stage.name}" for n, stage in enumerate(registry.STAGES)])
def test_each_stage_can_be_loaded(stage: registry.Stage) -> None:
    assert callable(stage.load())


@pytest.mark.parametrize("stage", registry.STAGES, ids=[f"{n}-{stage.name}" for n, stage in enumerate(registry.STAGES)])
@pytest.mark.parametrize("overlap", Overlap)
def test_each_stage_takes_a_trace_without_events(stage: registry.Stage, overlap: Overlap) -> None:
    empty = trace()
    stage.load()(empty, _all_on(overlap))
    assert len(empty.slices) == 0


def _all_on(overlap: Overlap) -> Options:
    return Options(
        overlap=overlap, align_jobs=True, drop_globals=True, split=True, dilate_ranks=True,
        limit=Limit(skip=1, count=50), filters=(("name", "odd"), ("args.TS1", "7")),
    )  # fmt: skip


_COUNTERS = st.one_of(
    st.none(),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**62, 2**63 - 1, -1, -(2**63) + 1]),
)
_NAMES = st.sampled_from(
    [
        "k_1 Cmpt Exec",
        "k_1 Cmpt Prep",
        "a DmaI",
        "SenRDMASend_4 DmaO",
        "AIU Roundtrip",
        "Flex RoundTrip",
        "odd",
        "",
        "Torch-Compiled Region",
        "Receive_12_ DmaI",
    ]
)
_TIMES = st.one_of(st.floats(0, 5e3), st.sampled_from([0.0, 9e15, -9e15, 1.7e15]))
_DURATIONS = st.one_of(st.floats(0, 5e3), st.sampled_from([0.0, -1.0, 1e15, 1e300, float("inf"), float("nan")]))


@st.composite
def _events(draw: st.DrawFn) -> Event:
    args: dict[str, object] = {f"TS{n}": draw(_COUNTERS) for n in range(1, 6)}
    if draw(st.booleans()):
        args = dict(zip(args, sorted(draw(_COUNTERS) or 0 for _ in args), strict=True))
    texts: dict[str, object] = {}
    texts["CollGroup"] = draw(st.sampled_from([None, "AllReduce_1", "AllReduce_2", "G"]))
    texts["Type"] = draw(st.sampled_from([None, "SingleCast", "MultiCast", "WDone Barrier"]))
    texts["Peer"] = draw(st.sampled_from([None, 0, 1, "r0x7", "0,1"]))
    pid, tid = draw(st.sampled_from([0, 1, -5, 2**62])), draw(st.sampled_from([0, 1, 2**63 - 1, -(2**63)]))
    return {
        "ph": "X", "name": draw(_NAMES), "ts": draw(_TIMES), "dur": draw(_DURATIONS), "pid": pid, "tid": tid,
        "args": args | texts,
    }  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.lists(_events(), max_size=8), max_size=3),
    st.sampled_from(Dialect),
    st.sampled_from(Overlap),
    st.booleans(),
    st.sampled_from([1000.0, 557.1, 1e-3, 1e6]),
)
@thorough
def test_no_event_is_lost_uncounted_and_none_ends_the_run(
    files: list[list[Event]], dialect: Dialect, overlap: Overlap, all_on: bool, soc_mhz: float
) -> None:
    options = dataclasses.replace(_all_on(overlap) if all_on else Options(overlap=overlap), soc_mhz=soc_mhz)
    made = _run(trace(*files, dialect=dialect), options)
    gone = sum(made.dropped.values()) + sum(made.merged.values())
    left = sum(map(len, (made.slices, made.points, made.flows, made.instants)))
    assert left + gone == sum(map(len, files)) + sum(made.made.values())
    counters = made.slices.counters
    assert ((counters == ABSENT).all(1) | (counters[:, 1:] >= counters[:, :-1]).all(1)).all()
    assert ((counters == ABSENT).all(1) | (counters != ABSENT).all(1)).all()


def test_stages_run_in_order_on_the_examples() -> None:
    options = Options(keep_names=True, keep_preparations=True)
    torch = _run(trace(E9_TORCH, *E9_FLEX), options)
    assert (torch.slices.start / 1e3).tolist() == [2000, 2040, 2220, 3000, 3040, 3220, 4000, 4040, 4220]
    ranks = _run(trace(*e6()), options)
    assert ranks.texts.taken(ranks.slices.name[ranks.slices.start == 1160000]).to_pylist() == ["mm_5 Cmpt Exec"] * 2
    e1 = _run(trace(E1), options)
    assert [e1.texts[code] for code in e1.slices.name] == [
        "Flex RoundTrip", "AIU Roundtrip", "k_1 DmaI", "k_1 Cmpt Prep", "k_1 Cmpt Exec", "m_2 Cmpt Prep", "k_1 DmaO",
        "m_2 Cmpt Exec",
    ]  # fmt: skip
    # m_2 Cmpt Prep waits from 1010 on, nothing else is in its row then.
    assert sorted(set(e1.slices.tid.tolist())) == [1000, 1100, 1200, 1300, 1400, 1500]


def test_options_ask_for_stages() -> None:
    always = {stage.name for stage in registry.STAGES if stage.is_asked_for(Options())}
    asked = {stage.name for stage in registry.STAGES if stage.is_asked_for(_all_on(Overlap.ASYNC))}
    assert asked - always == {
        "frequency_align_collect", "frequency_align_apply", "remove_ids_from_name", "tripple_phased_events",
        "mp_ts_calibration_v2", "drop_global_events",
    }  # fmt: skip
    assert always - asked == {"mp_sync_tight_v1"}
    assert all(a != b for a, b in itertools.pairwise(registry.STAGES))


def _unpacked(monkeypatch: pytest.MonkeyPatch, ranks: int) -> int:
    """How many columns of a trace are unpacked while all stages run."""
    made = chains(1 << 17, ranks)
    made.pack()
    count = 0

    def counted(self: Narrow) -> Any:
        nonlocal count
        count += len(self) >= LEAST_PACKED // 8
        return values(self)

    values = Narrow.values
    with monkeypatch.context() as patched:
        patched.setattr(Narrow, "values", counted)
        _run(made, Options(collectives=True, flows=True, power_statistics=True))
    assert len(made.tables["active"]) == ranks
    return count


@thorough
def test_columns_are_not_unpacked_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # given traces of as many slices, of few ranks and of many: unpacking is of all rows, so it would take too long
    few, many = (_unpacked(monkeypatch, ranks) for ranks in (4, 128))
    assert many < few + 64
