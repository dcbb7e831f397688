from __future__ import annotations

from iaprof.timelines.options import Options
from iaprof.timelines.stages.arrows import add_launch_flows
from iaprof.timelines.trace import Dialect
from unit.timelines.examples import flows, launch, launched, two_operations
from unit.timelines.traces import slice_, trace


def test_arrows_to_each_kernel_and_from_the_last_to_the_wait() -> None:
    made = launched()
    add_launch_flows(made, Options())
    assert flows(made) == [
        (10, "s", 4000, 5, 1010), (10, "f", 0, 7, 1070),
        (11, "s", 4000, 5, 1010), (11, "f", 0, 7, 1130),
        (12, "s", 0, 7, 1159.999), (12, "f", 4000, 5, 1240),
    ]  # fmt: skip
    texts = made.texts
    new = [texts.taken(each[1:]).to_pylist() for each in (made.flows.name, made.flows.category)]
    assert new == [["ac2g"] * 6, ["ac2g"] * 6]
    assert texts.taken(made.flows.extra["bp"]).to_pylist() == [None] * 4 + ["e"] * 3
    assert made.made == {"ends of arrows from launches to kernels": 6}


def test_ranks_with_the_same_correlations_keep_apart() -> None:
    # Given the same launch in two ranks' files, whose processes have numbers of their own
    made = trace(launch(4000, 0), launch(5000, 1), dialect=Dialect.TORCH, ranks=(0, 1))
    add_launch_flows(made, Options())

    # Then no arrow goes from one rank to another one, and none is missing
    pids: dict[int, list[int]] = {}
    for id_, _, pid, *_ in flows(made):
        pids.setdefault(id_, []).append(pid)
    assert sorted(map(tuple, pids.values())) == [(0, 4000), (1, 5000), (4000, 0), (4000, 0), (5000, 1), (5000, 1)]


def test_new_identifiers_are_above_those_of_flows() -> None:
    events = [*launch(), {"ph": "s", "id": 77, "cat": "other", "name": "o", "pid": 1, "tid": 1, "ts": 0}]
    made = trace(events, dialect=Dialect.TORCH)
    add_launch_flows(made, Options())
    assert [id_ for id_, phase, *_ in flows(made) if phase == "s"] == [78, 79, 80]


def test_kernels_without_a_launch_and_before_theirs() -> None:
    # Given a kernel without a correlation, one with 0, one of another launch, and one that starts before its own
    kernels = [slice_("k", 2000, 1, cat="kernel")]
    kernels += [slice_("k", ts, 1, cat="kernel", correlation=id_) for ts, id_ in ((2000, 0), (2000, 8), (5, 9))]
    made = trace([launch()[2], *kernels], dialect=Dialect.TORCH)
    add_launch_flows(made, Options())
    assert flows(made) == []
    assert [each.text for each in made.messages.said] == [
        "1 kernels start before their launch, so they get no arrow from it"
    ]


def test_a_wait_that_ends_before_the_kernels() -> None:
    events = launch()
    events[1] = slice_("aiuScheduleWait", 1040, 100, pid=4000, tid=5, cat="privateuse1_runtime", correlation=9)
    made = trace(events, dialect=Dialect.TORCH)
    add_launch_flows(made, Options())
    assert flows(made)[-2:] == [(12, "s", 0, 7, 1119.999), (12, "f", 4000, 5, 1140)]


def test_flex_has_no_launches() -> None:
    made = two_operations()
    add_launch_flows(made, Options())
    assert len(made.flows) == 0
