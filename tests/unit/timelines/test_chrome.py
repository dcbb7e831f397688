"""Chrome's trace format as it is written: every event, in order, as JSON that anyone can read."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies

from iaprof.formats.chrome import member, microseconds, numbers, objects, quoted
from iaprof.timelines.arguments import Arguments
from iaprof.timelines.made_events import Ends, add_arrows
from iaprof.timelines.outputs.chrome import workers, write_chrome
from iaprof.timelines.trace import ABSENT, Dialect, Trace
from unit.timelines.examples import FIRST
from unit.timelines.traces import Event, shared_counters, slice_, trace

COUNTERS = list(FIRST)


def written(of: Trace, **arguments: list[str | None]) -> dict[str, Any]:
    output = io.BytesIO()
    given_ = {kind: Arguments([pa.array(texts, pa.string())]) for kind, texts in arguments.items()}
    write_chrome(of, given_, {"CmdLine": "timeline x"}, output)
    result: dict[str, Any] = json.loads(output.getvalue(), parse_constant=lambda name: 1 / 0)
    return result


def test_events_of_all_kinds_are_in_order_of_time() -> None:
    # given
    made = trace(
        [
            slice_("k_1 Cmpt Exec", 1000, 50.5, COUNTERS, Power=1000, cat="kernel", tid=7),
            {"ph": "C", "name": "Power", "ts": 3, "pid": 0, "args": {"Watts": 1.5}},
            {"ph": "s", "id": 3, "ts": 4, "name": "x", "cat": "ac2g"},
            {"ph": "f", "id": 3, "ts": 1000, "name": "x", "cat": "ac2g"},
            {"ph": "M", "name": "process_name", "pid": 5},
        ],
        [slice_("m", 1000, 200, pid=1, CollGroup="G")],
    )
    made.slices.extra |= {"class": made.texts.codes(["COMPUTE_EXEC", None]), "OVC": np.array([0, ABSENT])}
    # when
    found = written(made, slice=['{"opid":"a b"}', "{}"], instant=['{"name":"AIU"}'])
    # then
    place = {"pid": 0, "tid": 0}
    counters = {f"TS{n}": str(value) for n, value in enumerate(COUNTERS, 1)}
    args = counters | {"Power": "1000", "jobname": "job-0.json", "class": "COMPUTE_EXEC", "OVC": 0, "opid": "a b"}
    flow = {"name": "x", "cat": "ac2g", **place, "id": 3, "args": {}}
    assert found["traceEvents"] == [
        {"ph": "M", "name": "process_name", "pid": 5, "tid": 0, "ts": 0, "args": {"name": "AIU"}},
        {"ph": "C", "name": "Power", **place, "ts": 3, "args": {"Watts": 1.5}},
        {"ph": "s", **flow, "ts": 4},
        {"ph": "X", "name": "m", "pid": 1, "tid": 1, "ts": 1000, "dur": 200,
         "args": {"CollGroup": "G", "jobname": "job-1.json"}},
        {"ph": "X", "name": "k_1 Cmpt Exec", "cat": "kernel", "pid": 0, "tid": 7, "ts": 1000, "dur": 50.5,
         "args": args},
        {"ph": "f", **flow, "ts": 1000, "bp": "e"},
    ]  # fmt: skip
    assert found["deviceProperties"] == [{"id": 0, "name": "AIU"}]
    assert found["otherData"] == {"Application": "iaprof", "CmdLine": "timeline x"}


def test_series_of_a_counter_at_one_time_are_one_event_as_they_came() -> None:
    def values(ts: float, name: str = "Memory", **args: float) -> Event:
        return {"ph": "C", "name": name, "ts": ts, "pid": 0, "args": args}

    events = [values(5, used=1, free=2.5), values(5, "Other", used=3), values(6, used=4, free=5), values(6, used=7)]
    found = written(trace(events))["traceEvents"]
    assert [(event["ts"], event["name"], list(event["args"].items())) for event in found] == [
        (5, "Memory", [("used", 1), ("free", 2.5)]),
        (5, "Other", [("used", 3)]),
        (6, "Memory", [("used", 4), ("free", 5)]),
        (6, "Memory", [("used", 7)]),
    ]


def test_the_end_of_an_arrow_says_to_which_slice_it_is_bound_beside_its_arguments_only() -> None:
    made = trace([])
    ends = Ends(np.zeros(1, np.int32), np.array([1]), np.array([2]), np.array([3000]))
    name = made.texts.codes(["x"])
    add_arrows(made, "FLOWS", ends, ends, name, name, 0)
    found = written(made)["traceEvents"]
    assert [(event["ph"], event.get("bp"), event["args"]) for event in found] == [("s", None, {}), ("f", "e", {})]


def test_a_trace_without_events() -> None:
    assert written(trace([]))["traceEvents"] == []


def test_times_are_exact() -> None:
    times = [0, 1, -1, 1500, -1500, 999, 1_763_856_000_123_456_789]
    texts = microseconds(np.array(times)).to_pylist()
    assert texts == ["0", "0.001", "-0.001", "1.5", "-1.5", "0.999", "1763856000123456.789"]


def test_what_is_no_json_is_left_out() -> None:
    assert numbers(np.array([1.5, np.nan, np.inf, -np.inf])).to_pylist() == ["1.5", None, None, None]
    assert numbers(np.array([1, ABSENT])).to_pylist() == ["1", None]
    assert numbers(np.array([True, False])).to_pylist() == ["true", None]


def test_objects_whose_members_are_all_absent() -> None:
    nothing, some = member("b", pa.nulls(3, pa.string())), member("a", pa.array([None, "1", None]))
    assert objects([nothing, some], 3).to_pylist() == ["{}", '{"a":1}', "{}"]
    assert objects([nothing], 3).to_pylist() == ["{}"] * 3
    assert objects([], 2).to_pylist() == ["{}"] * 2
    assert objects([], 2, '{"x":1,').to_pylist() == ['{"x":1}'] * 2


@given(strategies.lists(strategies.lists(strategies.none() | strategies.integers(0, 9), min_size=3, max_size=3)))
@settings(deadline=None)
def test_objects_have_the_members_that_are_not_absent(columns: list[list[int | None]]) -> None:
    members = [
        member(f"{number}", pa.array([None if each is None else str(each) for each in column], pa.string()), '"')
        for number, column in enumerate(columns)
    ]
    found = [json.loads(text) for text in objects(members, 3, '{"x":1,').to_pylist()]
    assert found == [
        {"x": 1, **{str(n): str(column[row]) for n, column in enumerate(columns) if column[row] is not None}}
        for row in range(3)
    ]


def test_braces_at_the_end_of_args_stay() -> None:
    made = trace([slice_("k", 1, 1), slice_("k", 2, 1), slice_("k", 3, 1), slice_("k", 4, 1)])
    found = written(made, slice=['{"x":{"y":{}}}', ' { "z": "}" } ', "[1]", None])
    assert [{**event["args"], "jobname": ""} for event in found["traceEvents"]] == [
        {"x": {"y": {}}, "jobname": ""}, {"z": "}", "jobname": ""}, {"args": "[1]", "jobname": ""}, {"jobname": ""},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "odd",
    [
        ['{"a":1},"name":"another"}'],  # ends the args, and begins members of the event
        ['{"a":1}}', "{nonsense}", '{"a" 1}', '{"a":NaN}', '{"a":1,}', '{"a":"\t"}', '{"a":' + "[" * 5000 + "}"],
        ['{"a":"}', '{"}'],  # one object together
        ['{"a":1}\n{"b":1}'],
    ],
)
def test_args_that_are_no_objects_stay_in_their_event_as_text(odd: list[str]) -> None:
    # given the rows of a hostile capture
    good = ['{"n":1}', '{"n":\n2}']
    made = trace([slice_("k", number, 1) for number in range(len(odd) + 2)])

    # when they are written, then the file is JSON, and no event has another one's args
    found = written(made, slice=[good[0], *odd, good[1]])
    args = [event["args"] for event in found["traceEvents"]]
    assert [event["name"] for event in found["traceEvents"]] == ["k"] * len(args)
    assert [each["n"] for each in (args[0], args[-1])] == [1, 2]
    assert [each["args"] for each in args[1:-1]] == odd


@given(texts=strategies.lists(strategies.none() | strategies.text(), max_size=8))
@settings(deadline=None)
def test_any_text_is_a_json_string(texts: list[str | None]) -> None:
    utf8 = [None if text is None else text.encode(errors="replace").decode() for text in texts]
    found = quoted(pa.array(utf8, pa.large_string())).to_pylist()
    assert [None if text is None else json.loads(text) for text in found] == utf8


def test_more_events_than_one_chunk() -> None:
    # given a slice, 200,000 times in falling order
    made, count = trace([slice_("k", 1, 1)]), 200_000
    made.slices = made.slices.take(np.zeros(count, np.int64))
    made.slices.start = np.arange(count, 0, -1) * 1000
    made.slices.row = np.arange(count)
    # when
    events = written(made, slice=[f'{{"n":{number}}}' for number in range(count)])["traceEvents"]
    # then each has its own arguments
    assert [(event["ts"], event["args"]["n"]) for event in events] == [(n, count - n) for n in range(1, count + 1)]


def test_a_worker_has_the_events_of_its_rank() -> None:
    # given a FLEX trace with the host's events at 1000 more than the rank
    made = trace([slice_("k", 1, 1, pid=0), slice_("k", 1, 1, pid=1), slice_("host", 1, 1, pid=1001)])
    assert {rank: len(rows.kinds[0]) for rank, rows in workers(made)} == {0: 1, 1: 2}
    # and traces of PyTorch, whose hosts have pids of their own
    files = [[slice_("k", 1, 1, pid=rank), slice_("op", 1, 1, pid=4000)] for rank in range(2)]
    made = trace(*files, dialect=Dialect.TORCH, ranks=(0, 1))
    assert {rank: rows.kinds[0].tolist() for rank, rows in workers(made)} == {0: [0, 1], 1: [2, 3]}


@settings(deadline=None)
@given(strategies.lists(strategies.integers(0, 3), min_size=2, max_size=40), strategies.booleans())
def test_counters_that_slices_share_are_those_of_each_slice(operations: list[int], is_power_shared: bool) -> None:
    # given: operations of several slices, the first of which has no counters
    plain, packed = shared_counters(operations, is_power_shared), shared_counters(operations, is_power_shared)
    # when
    packed.slices.pack(0)
    # then
    assert written(packed) == written(plain)
    last = written(plain)["traceEvents"][-1]["args"]
    assert last.get("TS5") == (str(5_000_000 + max(operations)) if max(operations) else None)
