"""Traces in every form become the rows of a capture."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from iaprof.basics.errors import IaprofError
from unit.timelines.reading.importing import imported, rows_of, short

X = {"ph": "X", "name": "k_1 Cmpt Exec", "cat": "kernel", "pid": 1, "tid": 7, "ts": 1000.5, "dur": 50.25}
ROW = {"time_ns": 1_000_500, "duration_ns": 50_250, "pid": 1, "tid": 7, "name": "k_1 Cmpt Exec", "category": "kernel"}
TEXT = json.dumps([X, X])


def slices(folder: Path, *contents: Any) -> list[dict[str, Any]]:
    return short(rows_of(imported(folder, *contents)[0], "slice"))


FORMS: dict[str, Any] = {
    "list": TEXT,
    "blanks": "  \n" + TEXT + "\n",
    "no end": TEXT[:-1],  # the format lets it be missing
    "comma at the end": TEXT[:-1] + ",",
    "comma before the end": TEXT[:-1] + ",\n]",
    "object": {"traceEvents": [X, X]},
    "members": {
        "displayTimeUnit": "ns",
        "stackFrames": {"1": {"name": "a}],["}},
        "traceEvents": [X, X],
        "otherData": {},
    },
    "lists behind": json.dumps({"traceEvents": [X, X], "otherData": {"list": [{"ph": "X"}, {"ph": "X"}]}}, indent=1),
    "object without end": json.dumps({"traceEvents": [X, X]})[:-2],
    "byte order mark": b"\xef\xbb\xbf" + TEXT.encode(),
    "UTF-16": TEXT.encode("utf-16"),
    "UTF-16-LE": TEXT.encode("utf-16-le"),
    "UTF-16-BE": TEXT.encode("utf-16-be"),
    "UTF-32": TEXT.encode("utf-32"),
    "gzip": gzip.compress(TEXT.encode()),
    "gzip in two members": gzip.compress(TEXT[:40].encode()) + gzip.compress(TEXT[40:].encode()),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_files(tmp_path: Path, form: str) -> None:
    assert slices(tmp_path, FORMS[form]) == [ROW, ROW]


def test_an_operation_of_the_runtime(tmp_path: Path) -> None:
    counters = {"TS1": "0xf4240", "TS2": "1010000", "TS3": 1030000, "TS4": "0x107AC0", "TS5": "1085000"}
    begin = {"name": "k_1 DmaI", "ph": "B", "pid": 0, "tid": 71, "ts": 975, "attr": {**counters, "Power": "0x3e8"}}
    collective = {
        "name": "SenRDMAReceive_1 [sync=AllReduce_all_reduce_3_s1_r0_2] DmaI", "ph": "X", "pid": 0, "tid": 1, "ts": 1,
        "dur": 2, "args": {"CollGroup": "AllReduce_all_reduce_3", "Type": "WDone Barrier", "Peer": 1, "Bytes": "4000"},
    }  # fmt: skip
    found = slices(tmp_path, [begin, {"ph": "E", "pid": 0, "tid": 71, "ts": 985.001}, collective])
    assert found == [
        {
            "time_ns": 975_000, "duration_ns": 10_001, "tid": 71, "name": "k_1 DmaI", "ts1": 1000000, "ts2": 1010000,
            "ts3": 1030000, "ts4": 0x107AC0, "ts5": 1085000, "power": 1000,
        },
        {
            "time_ns": 1000, "duration_ns": 2000, "tid": 1, "bytes": 4000, "type": "WDone Barrier", "peers": "1",
            "name": "SenRdmaRecv_1 [sync=AllReduce_all_reduce_3_s1_r0_2] DmaI", "group": "AllReduce_all_reduce_3",
        },
    ]  # fmt: skip


TORCH = {
    "schemaVersion": 1,
    "distributedInfo": {"rank": 3, "world_size": 4},
    "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "mm Receive", "pid": 0, "tid": 7, "ts": 77, "dur": 50.0,
         "args": {"device": 0, "correlation": 9, "External id": 3, "memory bandwidth (GB/s)": 4.5, "grid": [1, 2]}},
        {"ph": "s", "id": 9, "cat": "ac2g", "name": "ac2g", "pid": 4000, "tid": 5, "ts": 1010.0},
        {"ph": "f", "id": "nine", "cat": "ac2g", "name": "ac2g", "pid": 4000, "tid": 5, "ts": 1010.0, "bp": "e"},
        {"ph": "i", "s": "g", "name": "Start", "pid": "Traces", "tid": "PyTorch (0)", "ts": 1.0},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "C", "name": "Power", "pid": 0, "ts": 5, "args": {"Watts": 12.5, "more": "0.5", "no": None}},
        {"ph": "b", "name": "request", "pid": 0, "ts": 5, "id": 7},
        {"ph": "?", "name": "odd", "pid": 0, "ts": 6},
    ],
}  # fmt: skip


def test_a_trace_of_torch(tmp_path: Path) -> None:
    text = json.dumps({**TORCH, "deviceProperties": [{"id": 0, "name": "AIU"}]})
    capture, (facts,) = imported(tmp_path, text.replace("77,", "1712345678901234.567,"))
    assert (facts.dialect, facts.rank, facts.problems) == ("torch", 3, [])
    assert facts.members == {k: v for k, v in TORCH.items() if k != "traceEvents"} | {
        "deviceProperties": [{"id": 0, "name": "AIU"}]
    }
    assert rows_of(capture, "slice")[0]["args"] == {"grid": [1, 2]}
    assert short(rows_of(capture, "slice")) == [
        {
            "time_ns": 1712345678901234567, "duration_ns": 50_000, "tid": 7, "name": "mm Receive",
            "category": "kernel", "correlation": 9, "external_id": 3, "bandwidth": 4.5, "args": {"grid": [1, 2]},
        }
    ]  # fmt: skip
    start, finish = rows_of(capture, "flow")
    assert (start["phase"], start["id"], start["args"]) == ("s", 9, None)
    assert (finish["phase"], finish["args"]) == ("f", {"bp": "e", "oid": "nine"})
    instants = rows_of(capture, "instant")
    assert [(row["phase"], row["time_ns"]) for row in instants] == [("i", 1000), ("M", 0), ("b", 5000), ("?", 6000)]
    assert instants[0]["args"] == {"s": "g", "opid": "Traces", "otid": "PyTorch (0)"}
    assert instants[0]["pid"] != instants[0]["tid"]
    assert [(row["series"], row["value"]) for row in rows_of(capture, "counter")] == [("Watts", 12.5), ("more", 0.5)]
    assert facts.counts.unknown_phases == 1


def test_pairs_nested_and_interleaved(tmp_path: Path) -> None:
    def event(phase: str, ts: int, name: str | None = None, tid: int = 1, **args: Any) -> dict[str, Any]:
        named = {} if name is None else {"name": name}
        return {"ph": phase, "pid": 0, "tid": tid, "ts": ts, **named, **({"args": args} if args else {})}

    events = [
        event("E", 0), event("B", 1, "outer", a=1), event("B", 2, "inner"), event("B", 2, "other", tid=2),
        event("E", 3), event("E", 4, "outer", b=2), event("E", 5, tid=2),  # nested, two threads
        event("B", 6, "x", tid=3), event("B", 7, "y", tid=3), event("E", 8, "x", tid=3), event("E", 9, "y", tid=3),
        event("E", 9, "z", tid=3), event("B", 10, "open"), event("B", 11, "late"), event("E", 10, "late"),
    ]  # fmt: skip
    found, (facts,) = imported(tmp_path, events)
    rows = [(row["name"], row["time_ns"], row["duration_ns"], row["args"]) for row in rows_of(found, "slice")]
    assert rows == [
        ("inner", 2000, 1000, None),
        ("outer", 1000, 3000, {"a": 1, "b": 2}),
        ("other", 2000, 3000, None),
        ("x", 6000, 2000, None),
        ("y", 7000, 2000, None),
    ]
    assert facts.counts.dropped == {
        "end without a beginning": 2, "beginning without an end": 1, "negative duration": 2,
    }  # fmt: skip
    assert facts.counts.merged == {"end of a slice": 5}


NUMBERS_IN_QUOTES = [
    {"ph": "X", "name": "a", "pid": "0", "tid": "7", "ts": "1", "dur": "2"},
    {"ph": "B", "name": "b", "pid": "0", "tid": 7, "ts": 5},
    {"ph": "E", "pid": 0, "tid": "7", "ts": 6},
    {"ph": "M", "name": "process_name", "pid": "0", "tid": "7", "args": {"name": "python"}},
    {"ph": "C", "name": "power", "pid": "0", "ts": 1, "args": {"W": "5"}},
    {"ph": "s", "name": "flow", "id": "9", "pid": "0", "tid": "7", "ts": 1},
    {"ph": "f", "name": "flow", "id": 9, "pid": 0, "tid": 7, "ts": 2},
]


@pytest.mark.parametrize("odd", [[], [{"ph": "i", "name": "i", "pid": "Traces", "tid": "0x7", "id": "nine", "ts": 1}]])
def test_numbers_in_quotes_are_numbers(tmp_path: Path, odd: list[Any]) -> None:
    capture, (facts,) = imported(tmp_path, {"distributedInfo": {"rank": "3"}, "traceEvents": NUMBERS_IN_QUOTES + odd})
    rows = [row for kind in ("slice", "counter", "flow", "instant") for row in rows_of(capture, kind)]
    assert [(row["pid"], row["tid"]) for row in rows if row["name"] not in ("power", "i")] == [(0, 7)] * 5
    assert [(row["pid"], row["value"]) for row in rows if row["name"] == "power"] == [(0, 5.0)]
    assert [row["id"] for row in rows_of(capture, "flow")] == [9, 9]
    assert all(row.get("args") in (None, {"name": "python"}) for row in rows if row["name"] != "i")
    assert facts.rank == 3
    if odd:
        assert rows[-1]["args"] == {"opid": "Traces", "otid": "0x7", "oid": "nine"}


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("-12", -12), ("+5", 5), ("007", 7), (" 7 ", 7), ("7.0", 7), (str(2**63 - 1), 2**63 - 1)],
)
def test_forms_of_numbers_in_quotes(tmp_path: Path, text: str, number: int) -> None:
    assert [
        (row["pid"], row["tid"]) for row in rows_of(imported(tmp_path, [X | {"pid": text, "tid": text}])[0], "slice")
    ] == [(number, number)]


@pytest.mark.parametrize("text", ["", "x", "0x7", "1.5", "7.", "1e3", "٣", str(2**63), "--1", "1 2"])
def test_texts_that_are_no_numbers(tmp_path: Path, text: str) -> None:
    (row,) = rows_of(imported(tmp_path, [X | {"pid": text}])[0], "slice")
    assert row["pid"] >= 1 << 48
    assert row["args"] == {"opid": text}


def test_own_output_of_the_reference_is_dropped(tmp_path: Path) -> None:
    own = {"traceEvents": [X, X, X], "otherData": {"Application": "Acelyzer 1.0"}}
    capture, (first, second) = imported(tmp_path, [X], own)
    assert len(rows_of(capture, "slice")) == 1
    assert second.counts.dropped == {"own output of the AIU Trace Analyzer": 3}
    assert first.counts.slices == 1


BAD: list[tuple[str, Any]] = [
    ("not an object", "null"),
    ("not an object", "5"),
    ("not an object", '"text"'),
    ("not an object", "[1, 2]"),
    ("without a phase", '{"name": "a", "pid": 0, "ts": 1}'),
    ("without a phase", '{"ph": 5, "name": "a", "pid": 0, "ts": 1}'),
    ("without a name", '{"ph": "X", "pid": 0, "ts": 1, "dur": 1}'),
    ("without a process", '{"ph": "X", "name": "a", "ts": 1, "dur": 1}'),
    ("without a time", '{"ph": "X", "name": "a", "pid": 0, "dur": 1}'),
    ("without a time", '{"ph": "X", "name": "a", "pid": 0, "dur": 1, "ts": NaN}'),
    ("without a time", '{"ph": "X", "name": "a", "pid": 0, "dur": 1, "ts": "soon"}'),
    ("without a time", '{"ph": "X", "name": "a", "pid": 0, "dur": 1, "ts": 1e300}'),
    ("without a duration", '{"ph": "X", "name": "a", "pid": 0, "ts": 1}'),
    ("without a duration", '{"ph": "X", "name": "a", "pid": 0, "ts": 1, "dur": Infinity}'),
    ("negative duration", '{"ph": "X", "name": "a", "pid": 0, "ts": 1, "dur": -1}'),
    ("counter without a value", '{"ph": "C", "name": "a", "pid": 0, "ts": 1, "args": {"x": "high"}}'),
    ("counter without a value", '{"ph": "C", "name": "a", "pid": 0, "ts": 1}'),
    ("unreadable", '{"ph": "X", "name": "a" "pid": 0, "ts": 1}'),
    ("unreadable", '{"ph": "X", "name": "a\\x", "pid": 0, "ts": 1}'),
    ("unreadable", '{"ph": "X", "name": nul, "pid": 0, "ts": 1, "args": {"list": [{"a": 1}, {"b": 2}]}}'),
    ("unreadable", '{"ph": "X", "a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
]


@pytest.mark.parametrize(("reason", "event"), BAD)
def test_a_bad_event_costs_only_itself(tmp_path: Path, reason: str, event: str) -> None:
    good = json.dumps(X)
    for piece_bytes in (1 << 20, 256):
        capture, (facts,) = imported(
            tmp_path, f'{{"traceEvents": [{good}, {event},\n {good}, {good}], "a": 1}}', piece_bytes=piece_bytes
        )
        assert facts.counts.dropped == {reason: 1}
        assert short(rows_of(capture, "slice")) == [ROW, ROW, ROW]
        assert facts.members == {"a": 1}


GOOD: list[tuple[str, dict[str, Any]]] = [
    ('{"ph": "X", "name": 5, "pid": 0, "ts": 1, "dur": 1}', {"name": "5"}),
    ('{"ph": "X", "name": "a", "pid": 0, "ts": "1.5", "dur": "0x1", "dur": "1"}', {"name": "a", "time_ns": 1500}),
    ('{"ph": "X", "name": "a", "pid": 0, "ts": 1, "dur": 1, "args": null}', {"name": "a"}),
    ('{"ph": "X", "name": "a", "pid": 0, "ts": 1, "dur": 1, "args": [1]}', {"name": "a", "args": {"args": [1]}}),
    ('{"ph": "X", "name": "a", "pid": 0, "ts": 1, "dur": 1, "args": {"b": NaN}}', {"name": "a", "args": {"b": None}}),
    ('{"ph": "X", "name": "a\nb", "pid": 0, "ts": 1, "dur": 1}', {"name": "a\nb"}),
    ('{"ph": "X", "name": "a\\ud800b", "pid": 0, "ts": 1, "dur": 1}', {"name": "a?b"}),
    ('{"ph": "X", "name": "a", "pid": 0, "ts": 1, "dur": 1, "tts": 5}', {"name": "a", "args": {"tts": 5}}),
    ('{"ph": "X", "name": "a", "pid": 0, "ts": 1, "dur": 1, "odd": [5]}', {"name": "a", "args": {"odd": [5]}}),
    ('{"ph": "X", "name": "a", "pid": 0, "ts": 1, "dur": 1, "args": {"TS1": "word"}}',
     {"name": "a", "args": {"TS1": "word"}}),
    ('{"ph": "X", "name": "a", "pid": 0, "ts": 1, "dur": 1, "args": {"TS1": 5, "TS2": 36893488147419103232}}',
     {"name": "a", "ts1": 5, "args": {"TS2": 36893488147419103232}}),
]  # fmt: skip


@pytest.mark.parametrize(("event", "expected"), GOOD)
def test_an_odd_event_is_kept(tmp_path: Path, event: str, expected: dict[str, Any]) -> None:
    capture, (facts,) = imported(tmp_path, f"[{json.dumps(X)}, {event}, {json.dumps(X)}]")
    rows = short(rows_of(capture, "slice"))
    assert rows[0] == rows[2] == ROW
    assert rows[1] == {"time_ns": 1000, "duration_ns": 1000, **expected}
    assert not facts.counts.dropped


def test_bytes_that_are_no_utf8_and_a_length_of_zero(tmp_path: Path) -> None:
    event = b'{"ph": "X", "name": "a\xffb", "pid": 0, "ts": 1, "dur": 0, "args": {"c": "\xc3"}}'
    capture, (facts,) = imported(tmp_path, b"[" + event + b"]")
    assert [(row["name"], row["args"]) for row in rows_of(capture, "slice")] == [("a?b", {"c": "?"})]
    assert (facts.counts.zero_durations, facts.counts.bad_bytes) == (1, 2)


@pytest.mark.parametrize("piece_bytes", [256, 1 << 20])
def test_bytes_that_are_no_utf8_are_counted_once(tmp_path: Path, piece_bytes: int) -> None:
    event = json.dumps(X).encode()
    bad = event.replace(b"k_1", b"k\xff\xfe1").replace(b"kernel", b"kernel\xc3")
    _, (facts,) = imported(tmp_path, b"[" + b",".join([event, bad, event] * 5) + b"]", piece_bytes=piece_bytes)
    assert (facts.counts.slices, facts.counts.bad_bytes) == (15, 15)


def test_slices_without_a_length_are_kept_and_those_with_cycles_counted_apart(tmp_path: Path) -> None:
    cycles = {f"TS{number}": 1000 * number for number in range(1, 6)}
    same = dict.fromkeys(cycles, 1000)
    _, (facts,) = imported(tmp_path, [X, X | {"dur": 0}, X | {"dur": 0, "args": cycles}, X | {"dur": 0, "args": same}])
    assert (facts.counts.zero_durations, facts.counts.zero_durations_with_cycles) == (3, 1)


def test_a_cut_file_loses_its_last_event(tmp_path: Path) -> None:
    whole = json.dumps({"traceEvents": [X, X]})
    capture, (facts,) = imported(tmp_path, whole[: whole.rindex('"dur"')])
    assert short(rows_of(capture, "slice")) == [ROW]
    assert facts.counts.dropped == {"cut off at the end of the file": 1}
    assert facts.problems == ["its list of events has no end: it may have been cut short"]


def test_a_cut_compressed_file(tmp_path: Path) -> None:
    packed = gzip.compress(json.dumps([X | {"ts": i * 1.37} for i in range(5000)]).encode())
    _, (facts,) = imported(tmp_path, packed[: len(packed) // 2])
    assert 1000 < facts.counts.slices < 4000
    assert facts.problems == ["its compressed data are damaged or cut short"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is empty"), (" \n ", "is empty"), ("3", "is not a trace"),
        ('"x"', "is not a trace"), ("{}", "has no traceEvents"),
        ('{"a": [1, 2', "has no traceEvents"), ("kernel\t1", "is not a trace"),
    ],
)  # fmt: skip
def test_files_that_are_no_trace(tmp_path: Path, content: str, sentence: str) -> None:
    with pytest.raises(IaprofError, match=sentence):
        imported(tmp_path, content)


@pytest.mark.parametrize("content", ["[]", "[", '{"traceEvents": []}', '{"traceEvents": null}'])
def test_traces_without_events(tmp_path: Path, content: str) -> None:
    _, (facts,) = imported(tmp_path, content)
    assert facts.counts.events == 0


def test_a_long_event_and_a_too_long_one(tmp_path: Path) -> None:
    long = X | {"args": {"long": "x" * 100_000, "TS1": 5}}
    capture, (facts,) = imported(tmp_path, [X, long, X], piece_bytes=1000)
    assert short(rows_of(capture, "slice")) == [ROW, ROW | {"ts1": 5}, ROW]
    assert facts.counts.cut_args == 1


@pytest.mark.parametrize(("length", "left_out"), [(60_000, 0), (500_000, 0), (2_000_000, 1)])
@pytest.mark.parametrize("piece_bytes", [10_000, 3 << 20])
def test_long_members(tmp_path: Path, length: int, left_out: int, piece_bytes: int) -> None:
    info = {"rank": 1, "é": 'a"}]\\' * (length // 6)}
    content = {"distributedInfo": info, "traceEvents": [X], "other": {"x": "y" * 100_000}, "last": 1}
    capture, (facts,) = imported(tmp_path, json.dumps(content, ensure_ascii=False), piece_bytes=piece_bytes)
    assert short(rows_of(capture, "slice")) == [ROW]
    assert (facts.members.get("distributedInfo"), facts.members["last"]) == (None if left_out else info, 1)
    assert facts.members_left_out == left_out + 1
