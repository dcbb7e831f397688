from __future__ import annotations

from hypothesis import given, strategies as st

from iaprof.timelines.trace import NO_TEXT, Texts

FEW = st.lists(st.text("ab", max_size=2) | st.none(), max_size=6)


@given(st.lists(FEW | st.lists(st.text("abc", max_size=4), max_size=40), max_size=6))
def test_each_text_has_one_code(calls: list[list[str | None]]) -> None:
    texts = Texts()
    expected: dict[str, int] = {}
    for call in calls:
        codes = texts.codes(call).tolist()
        for text, code in zip(call, codes, strict=True):
            assert code == (NO_TEXT if text is None else expected.setdefault(text, code))
        assert texts.matches(texts.codes(call), "^a").tolist() == [(text or "").startswith("a") for text in call]
    assert sorted(expected.values()) == list(range(len(texts)))
    assert {text: texts.code(text) for text in expected} == expected
    assert texts.values.to_pylist() == sorted(expected, key=lambda text: expected[text])
