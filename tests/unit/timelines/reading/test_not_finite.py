"""Numbers that are not finite, as programs print them, are null, and their events stay."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from iaprof.timelines.reading.not_finite import with_nulls
from unit.timelines.reading.importing import rows_without_file

WORDS = [
    "inf", "-inf", "+inf", "INF", "Inf", "-INF", "infinity", "Infinity", "-Infinity", "nan", "-nan", "NaN", "NAN",
    "-NaN", "nan(ind)", "-nan(ind)", "nan(0x1)", "1.#INF", "-1.#IND", "1.#QNAN", "1.#INF00",
]  # fmt: skip
_X = '"ph":"X","pid":0,"tid":7,"ts":1,"dur":1'


@pytest.mark.parametrize("piece_bytes", [100, 1 << 20])
@pytest.mark.parametrize("word", WORDS)
def test_they_are_null(word: str, piece_bytes: int) -> None:
    name = f"a, {word}, b: {word}"  # of a text
    slices = f'{{{_X},"name":"{name}","args":{{"x":{word},"l":[1,{word} ,"t", {word}],"last": {word}}}}}'
    counter = f'{{"ph":"C","name":"power","pid":0,"ts":1,"args":{{"a":{word},"b":2}}}}'
    text = f'{{"before":{{"x":{word}}},"traceEvents":[{slices},{counter},{slices}],"after":[{word}]}}'

    rows, facts = rows_without_file(text.encode(), piece_bytes)

    assert not facts.counts.dropped
    assert [(row["name"], row["args"]) for row in rows["slice"]] == [
        (name, {"x": None, "l": [1, None, "t", None], "last": None})
    ] * 2
    assert [(row["series"], row["value"]) for row in rows["counter"]] == [("b", 2.0)]
    assert facts.members == {"before": {"x": None}, "after": [None]}
    assert facts.members_left_out == 0


def test_a_time_that_is_not_finite_is_none() -> None:
    text = f'[{{{_X.replace("1", "inf", 1)},"name":"a"}},{{{_X},"name":"b"}},inf,-nan]'
    rows, facts = rows_without_file(text.encode(), 1 << 20)
    assert facts.counts.dropped == {"without a time": 1, "not an object": 2}
    assert [row["name"] for row in rows["slice"]] == ["b"]


def test_beside_damaged_events_they_are_null() -> None:
    good, bad = f'{{{_X},"name":"a","args":{{"x":inf}}}}', f'{{{_X},"name":"a"b","args":{{"x":inf}}}}'
    for separator in (",", ",\n"):
        rows, facts = rows_without_file(f"[{separator.join([good, bad, bad, good] * 20)}]".encode(), 300)
        assert facts.counts.dropped == {"unreadable": 40}
        assert [row["args"] for row in rows["slice"]] == [{"x": None}] * 40


def test_bytes_are_counted_where_they_were_given() -> None:
    text = b",".join([b'{%b,"name":"\xff","args":{"x":inf,"y":nan}}' % _X.encode()] * 30)
    for piece_bytes in (200, 1 << 20):
        rows, facts = rows_without_file(b"[" + text + b"]", piece_bytes)
        assert (len(rows["slice"]), facts.counts.bad_bytes, facts.problems) == (30, 30, [])


_TEXTS = st.text(st.sampled_from('in f,:"\\]'), max_size=8) | st.sampled_from(["a, inf, b", "nan", '"inf"', "\\"])
_VALUES = st.recursive(
    _TEXTS | st.integers(0, 9) | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)


def _printed(value: Any, word: str, separator: str) -> str:
    """JSON with a word in place of null."""
    match value:
        case None:
            return word
        case dict():
            inside = (f"{json.dumps(key)}:{_printed(each, word, separator)}" for key, each in value.items())
            return f"{{{separator.join(inside)}}}"
        case list():
            return f"[{separator.join(_printed(each, word, separator) for each in value)}]"
    return json.dumps(value)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.just("a"), _VALUES), st.sampled_from(WORDS), st.sampled_from([",", ", ", ",\n"]))
def test_any_json_with_words_is_the_one_with_nulls(value: dict[str, Any], word: str, separator: str) -> None:
    text = _printed(value, word, separator).encode()
    found = with_nulls(text)
    expected = _printed(value, "null", separator)
    if not any(name.lstrip(" ")[:1] in (":", ",", "]", "}") for name in _texts(value)):
        assert found.text.decode() == expected
        assert found.given(len(found.text)) == len(text)


def _texts(value: Any) -> list[str]:
    match value:
        case str():
            return [value]
        case dict():
            return [text for pair in value.items() for each in pair for text in _texts(each)]
        case list():
            return [text for each in value for text in _texts(each)]
    return []
