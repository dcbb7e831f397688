"""What is damaged in a list of events is counted element by element, and everything else is read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from iaprof.timelines.reading import event_decoding
from thorough import usually
from unit.timelines.reading.importing import imported, rows_without_file

GOOD = '{"ph":"X","name":"a","pid":0,"tid":7,"ts":1,"dur":1}'
RUNS = {
    "Windows path": r'{"ph":"X","name":"C:\Users\x","pid":0,"tid":7,"ts":1,"dur":1}',
    "stray quote": '{"ph":"X","name":"a"b","pid":0,"tid":7,"ts":1,"dur":1}',
    "stray quotes": '{"ph":"X","name":"a" "b" c","pid":0,"tid":7,"ts":1,"dur":1}',
    "word": '{"ph":"X","name":nul,"pid":0,"ts":1,"args":{"list":[{"a":1},{"b":2}]}}',
    "list before the phase": '{"args":{"list":[{"a":1},{"b":2}]},"ph":"X","name":nul,"pid":0}',
    "no members": '{"ph" "X"}',
    "no brace": '{"ph":"X","name":"a","pid":0,"ts":1,"dur":1',
    "cut": '{"ph":"X","name":"a","pid":0,"ts"',
    "no element": "xyz",
    "Python": "{'ph':'X','name':'a','pid':0,'ts':1,'dur':1,'args':{'l':[{'a':1},{'b':2}]}}",
    "JavaScript": '{ph:"X",name:"f({a}, {b})",pid:0,ts:1,dur:1}',
    "brace too many": '{"ph":"X"},"name":"a","pid":0,"ts":1,"dur":1}',
}


@pytest.mark.parametrize("separator", usually([",\n"], [",", ", ", ",\n", ",\n  "]))
@pytest.mark.parametrize("bad", RUNS)
def test_each_of_a_run_is_counted(bad: str, separator: str) -> None:
    text = separator.join([GOOD, *[RUNS[bad]] * 100, GOOD])
    for piece_bytes in (1 << 20, 2000, 256):
        rows, facts = rows_without_file(f'{{"traceEvents":[{text}],"x":1}}'.encode(), piece_bytes)
        assert facts.counts.dropped == {"unreadable": 100}
        assert (len(rows["slice"]), facts.counts.events, facts.members) == (2, 102, {"x": 1})


@pytest.mark.parametrize("separator", [",", ",\n"])
def test_values_between_damaged_events_are_counted(tmp_path: Path, separator: str) -> None:
    bad = RUNS["stray quote"]
    text = separator.join([bad, "5", "7", bad, "null", GOOD, bad, "8", "true"])
    _, (facts,) = imported(tmp_path, f"[{text}]")
    assert facts.counts.dropped == {"unreadable": 3, "not an object": 5}
    assert facts.counts.slices == 1
    assert not facts.problems


def test_an_event_that_is_cut_off_is_the_last_one() -> None:
    text = ",".join([GOOD, RUNS["no brace"], RUNS["no brace"], GOOD, RUNS["cut"]])
    _, facts = rows_without_file(f"[{text}".encode(), 1 << 20)
    assert facts.counts.dropped == {"unreadable": 2, "cut off at the end of the file": 1}
    assert facts.counts.slices == 2


@pytest.mark.parametrize("separator", [",", ",\n"])
def test_a_piece_that_ends_with_a_damaged_event_is_read_once(separator: str) -> None:
    bad = r'{"ph":"X","pid":0,"tid":7,"ts":1,"dur":1,"args":{"file":"C:\Users\x"}}'
    data = (separator.join([GOOD, bad, bad]) + ",").encode()
    piece = event_decoding.read(data, is_last=False)
    assert (piece.consumed, piece.lost, len(piece.events), piece.dropped["unreadable"]) == (len(data), False, 1, 2)
    # And an event that goes on behind the piece is not taken for a damaged one
    cut = data + b'{"ph":"X","args":{"list":[{"a":1},'
    assert event_decoding.read(cut, is_last=False).consumed <= len(data)


def test_a_brace_too_many_behind_an_event_is_no_event() -> None:
    _, facts = rows_without_file(f"[{GOOD}}},{GOOD}}}}},\n{GOOD}]".encode(), 1 << 20)
    assert (facts.counts.slices, facts.counts.events) == (3, 3)


_ARGS = st.sampled_from(['{"x":1}', '{"p":"C:/x","l":[{"a":1},{"b":[2,{}]}]}', "{}", '{"TS1":"0x10"}'])


@st.composite
def _events(draw: st.DrawFn) -> str:
    phase, name = draw(st.sampled_from("XXXiB")), draw(st.sampled_from(["a", "f(int, {x})", "b c"]))
    members = [f'"ph":"{phase}"', f'"name":"{name}"', '"pid":0', f'"tid":{draw(st.integers(0, 3))}', '"ts":12.5']
    if draw(st.integers(0, 9)):
        members.append('"dur":1')
    if draw(st.booleans()):
        members.insert(draw(st.integers(0, len(members))), f'"args":{draw(_ARGS)}')
    return "{" + ",".join(members) + "}"


_DAMAGES = st.sampled_from(['"', "\\", ":", ",", "x", "{", "}", "[", "", "nul", "\\U"])


@st.composite
def _damaged(draw: st.DrawFn) -> str:
    """An event in which a character is inserted, replaced or missing, between its first and its last brace."""
    text = draw(_events())
    at = draw(st.integers(1, len(text) - 2))
    return text[:at] + draw(_DAMAGES) + text[at + draw(st.integers(0, 1)) :]


@st.composite
def _damaged_in_texts(draw: st.DrawFn) -> str:
    """An event whose brackets balance nevertheless."""
    old, new = draw(
        st.sampled_from(
            [('"name":"', '"name":"C:\\Users\\'), ('"name":"', '"name":"a"'), ('"ts":', '"ts":nul'), (":", " "),
             ('"pid":0', '"pid":'), ('"tid"', 'tid"')]
        )
    )  # fmt: skip
    return draw(_events()).replace(old, new, 1)


_OTHERS = st.sampled_from(["5", "-1.5e3", "null", '"text"', "[1, 2]", "xyz"])


def slowly(elements: list[str]) -> tuple[int, Counter[str]]:
    """Reads each element alone, and returns how many are rows, and how many are dropped, by reason."""
    dropped: Counter[str] = Counter()
    kept, begun = 0, Counter[int]()
    for element in elements:
        try:
            event, end = json.JSONDecoder(strict=False).raw_decode(element)
        except ValueError:
            event, end = None, -1
        if end < 0 or element[end:].strip("}"):
            dropped["unreadable"] += 1
        elif not isinstance(event, dict):
            dropped["not an object"] += 1
        else:
            reason = _reason(event)
            if reason is not None:
                dropped[reason] += 1
            elif event["ph"] == "B":
                begun[event.get("tid", 0)] += 1
            else:
                kept += 1
    dropped["beginning without an end"] += begun.total()
    return kept, +dropped


def _reason(event: dict[str, Any]) -> str | None:
    if "ph" not in event:
        return "without a phase"
    if "name" not in event:
        return "without a name"
    if "pid" not in event:
        return "without a process"
    if "ts" not in event:
        return "without a time"
    if event["ph"] == "X" and "dur" not in event:
        return "without a duration"
    return None


def _check(elements: list[str], separator: str, piece_bytes: int, is_list: bool) -> None:
    text = separator[1:] + separator.join(elements)  # the first is also in a line of its own
    content = f"[{text}]" if is_list else f'{{"a":1,"traceEvents":[{text}],"b":2}}'
    rows, facts = rows_without_file(content.encode(), piece_bytes)
    kept, dropped = slowly(elements)
    assert facts.counts.dropped == dropped, content
    assert len(rows["slice"]) + len(rows["instant"]) == kept
    assert facts.counts.events == len(elements)
    assert facts.members == ({} if is_list else {"a": 1, "b": 2})


_PIECES = st.sampled_from([150, 1000, 1 << 20])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(_events() | _damaged() | _OTHERS, min_size=1, max_size=12), st.sampled_from([",\n", ",\n  "]), _PIECES,
    st.booleans(),
)  # fmt: skip
def test_lines_damaged_at_random(elements: list[str], separator: str, piece_bytes: int, is_list: bool) -> None:
    _check(elements, separator, piece_bytes, is_list)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(_events() | _damaged_in_texts() | _OTHERS, min_size=1, max_size=12), st.sampled_from([",", ", "]), _PIECES,
    st.booleans(),
)  # fmt: skip
def test_events_damaged_in_texts(elements: list[str], separator: str, piece_bytes: int, is_list: bool) -> None:
    _check(elements, separator, piece_bytes, is_list)
