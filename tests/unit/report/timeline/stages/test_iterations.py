from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from iaprof.report.timeline.options import Options
from iaprof.report.timeline.stages.iterations import Word, collect_iteration_stats, find_word
from unit.report.timeline.examples import passes, two_operations
from unit.report.timeline.traces import slice_, trace


def test_two_iterations_of_three_passes() -> None:
    made = passes(100, 100)
    collect_iteration_stats(made, Options())
    assert made.tables["iterations"].to_pylist() == [
        {"pid": 0, "Kernels": 5, "Iterations": 2, "Mean": 100.0, "Min": 100.0, "Max": 100.0, "StDev": 0.0}
    ]
    assert [each.text for each in made.messages.said] == ["[0] avg_iteration_time=100.0, iterations=2"]


def test_the_variance_of_iterations() -> None:
    made = passes(100, 110, 120)
    collect_iteration_stats(made, Options())
    row = made.tables["iterations"].to_pylist()[0]
    assert row == {"pid": 0, "Kernels": 5, "Iterations": 3, "Mean": 110.0, "Min": 100.0, "Max": 120.0, "StDev": 10.0}


def test_too_few_kernels_have_no_iterations() -> None:
    made = two_operations()
    collect_iteration_stats(made, Options())
    assert made.tables["iterations"].column("Iterations").to_pylist() == [0]


def test_an_iteration_after_a_mismatch_is_left_out() -> None:
    # Given three passes, a kernel of another name, and two passes
    letters = "abcde" * 3 + "x" + "abcde" * 2
    kernels = [slice_(f"{letter} Cmpt Exec", 10 * n, 5, (0, 0, 0, 1, 1)) for n, letter in enumerate(letters)]
    made = trace(kernels)
    collect_iteration_stats(made, Options())

    # Then the distance across it does not count: two before it and one after it do
    row = made.tables["iterations"].to_pylist()[0]
    assert (row["Iterations"], row["Mean"]) == (3, 50.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcabcabcabc", Word(0, 6)),
        ("aaaaaaaaaaaa", Word(0, 5)),
        ("wabcdeabcde", Word(1, 5)),
        ("wvabcdabcd", Word(2, 4)),
        ("wvuabcdabcd", Word(0, 0)),
        ("abcdabcd", Word(0, 0)),
        ("", Word(0, 0)),
    ],
)
def test_the_first_word_that_comes_twice(text: str, expected: Word) -> None:
    found = find_word(np.array([ord(each) for each in text], np.int32))
    assert found == (expected if expected.length else None)


def _slowly(text: str) -> Word | None:
    """The definition: of each beginning, from short to long, of which prefixes are tried from short to long."""
    for end in range(10, len(text) + 1):
        for start in range(end // 3):
            half, rest = divmod(end - start, 2)
            if not rest and text[start : start + half] == text[start + half : end]:
                return Word(start, half)
    return None


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=60) | st.text("abcd", max_size=60), st.integers(1, 3))
def test_finds_what_the_definition_does(text: str, repeats: int) -> None:
    text *= repeats
    assert find_word(np.array([ord(each) for each in text], np.int32)) == _slowly(text)
