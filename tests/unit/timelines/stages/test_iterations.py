from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from iaprof.timelines.options import Options
from iaprof.timelines.stages.iterations import Word, collect_iteration_stats, find_word
from iaprof.timelines.trace import Dialect, Trace
from unit.timelines.examples import passes, two_operations
from unit.timelines.traces import slice_, trace


def known(made: Trace) -> list[dict[str, Any]]:
    """The rows of the table, without what is null."""
    rows = made.tables["iterations"].to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def test_two_iterations_of_three_passes() -> None:
    made = passes(100, 100)
    collect_iteration_stats(made, Options())
    assert known(made) == [
        {"pid": 0, "Kernels": 5, "Iterations": 2, "Mean": 100.0, "Min": 100.0, "Max": 100.0, "StDev": 0.0}
    ]
    assert made.tables["iteration_times"].to_pylist() == [
        {"pid": 0, "Iteration": number, "Start Time": start, "Time": 100.0, "Kernel Time": 25.0}
        for number, start in enumerate((1020.0, 1120.0))
    ]
    assert [each.text for each in made.messages.said] == ["[0] avg_iteration_time=100.0, iterations=2"]


def test_the_variance_of_iterations() -> None:
    made = passes(100, 110, 120)
    collect_iteration_stats(made, Options())
    # 25 us of kernels in each: what makes the third one slower is outside of them
    assert known(made) == [
        {"pid": 0, "Kernels": 5, "Iterations": 3, "Mean": 110.0, "Min": 100.0, "Max": 120.0, "StDev": 10.0,
         "Slowest": 2, "Slower By": 10.0, "Idle Excess": 10.0}
    ]  # fmt: skip


def test_the_kernel_that_makes_an_iteration_slow() -> None:
    # Given four passes of five kernels of 5 us, 10 us apart, of which the third has a kernel of 29 us
    kernels, time = [slice_("warm Cmpt Exec", 0, 5, (0, 0, 0, 1, 1))], 20
    for number, letter in enumerate("abcde" * 4):
        length = 29 if number == 12 else 5
        kernels.append(slice_(f"{letter} Cmpt Exec", time, length, (0, 0, 0, 1, 1)))
        time += length + 5
    made = trace(kernels)
    collect_iteration_stats(made, Options())

    # Then 50, 50 and 74 us are 58 in the mean, and the kernel's 5, 5 and 29 us are 13
    (row,) = known(made)
    assert (row["Iterations"], row["Mean"], row["Max"], row["Slowest"], row["Slower By"]) == (3, 58.0, 74.0, 2, 16.0)
    assert (row["Kernel"], row["Kernel Excess"], row["Idle Excess"]) == ("c Cmpt Exec", 16.0, 0.0)


def test_the_steps_of_pytorch_are_iterations() -> None:
    events = []
    for number, (start, length, gemm) in enumerate(((0, 100, 20), (100, 160, 70))):
        events += [
            slice_(f"ProfilerStep#{number}", start, length, pid=40, tid=5, cat="user_annotation"),
            slice_("gemm", start + 10, gemm, cat="kernel", tid=7),
            slice_("add", start + 90, 5, cat="kernel", tid=7),
        ]
    events.append(slice_("gemm", 300, 40, cat="kernel", tid=7))  # after all steps
    made = trace(events, dialect=Dialect.TORCH, ranks=[3])
    collect_iteration_stats(made, Options())
    (row,) = known(made)
    assert (row["pid"], row["Kernels"], row["Iterations"], row["Mean"]) == (3, 2, 2, 130.0)
    # 30 us more than the mean: 25 of them in gemm (45 in the mean), 5 outside of kernels
    assert (row["Slowest"], row["Slower By"], row["Kernel"]) == (1, 30.0, "gemm")
    assert (row["Kernel Excess"], row["Idle Excess"]) == (25.0, 5.0)


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
