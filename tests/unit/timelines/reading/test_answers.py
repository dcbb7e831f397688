"""What a child answers is checked: an attacker may control it."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

from iaprof.sandbox.parent import AnswerError
from iaprof.timelines.reading import answer
from iaprof.timelines.reading.answer import Columns
from iaprof.timelines.reading.imported_file import TableMaker

SLICES = {
    "time_ns": np.array([1, 2]), "duration_ns": np.array([3, 4]), "pid": np.array([0, 0]), "tid": np.array([0, 0]),
    "name": np.array([0, 1], np.int32), "args_row": np.array([1]), "args_length": np.array([2]),
    "args": np.frombuffer(b"{}", np.uint8),
}  # fmt: skip


def answered(columns: Columns) -> tuple[dict[str, Any], bytes]:
    file = os.memfd_create("answer")
    try:
        found = answer.write(columns, file)
        return found, os.pread(file, 1 << 20, 0)
    finally:
        os.close(file)


def test_what_is_written_is_read() -> None:
    found, content = answered(Columns(slices=SLICES, texts=["a", "b"], cut_args=3))
    read = answer.read(found, content)
    assert {name: values.tolist() for name, values in read.slices.items()} == {
        name: values.tolist() for name, values in SLICES.items()
    }
    assert (read.texts, read.cut_args, read.flows) == (["a", "b"], 3, {})
    table = TableMaker(7, renames=True).tables(read)["slice"]
    assert table.select(["time_ns", "file", "name", "args"]).to_pylist() == [
        {"time_ns": 1, "file": 7, "name": "a", "args": None},
        {"time_ns": 2, "file": 7, "name": "b", "args": "{}"},
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"name": np.array([0, 2], np.int32)},
        {"name": np.array([-1, 0], np.int32)},
        {"name": np.array([0], np.int32)},
        {"name": np.array([0, 1])},
        {"pid": np.array([1.0, 2.0])},
        {"args_row": np.array([2])},
        {"args_row": np.array([-1])},
        {"args_length": np.array([3])},
        {"args_length": np.array([-2])},
        {"phase": np.array([0, 9], np.uint8)},
        {"odd": np.array([0, 9])},
        {"duration_ns": np.array([0.5, 0.5])},
    ],
)
def test_columns_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    found, content = answered(Columns(slices={**SLICES, **change}, texts=["a", "b"]))
    with pytest.raises(AnswerError):
        answer.read(found, content)


def test_args_that_are_no_text_are_refused() -> None:
    args = {"args": np.frombuffer(b"\xff\xfe", np.uint8)}
    found, content = answered(Columns(slices={**SLICES, **args}, texts=["a", "b"]))
    with pytest.raises(AnswerError):
        TableMaker(0, renames=False).tables(answer.read(found, content))


def test_any_content_is_an_error_or_columns() -> None:
    choice = random.Random(7)
    found, content = answered(Columns(slices=SLICES, texts=["a", "b"]))
    for _ in range(2000):
        changed = bytearray(content)
        for _ in range(choice.randrange(1, 4)):
            changed[choice.randrange(len(changed))] = choice.randrange(256)
        try:
            read = answer.read(found, bytes(changed[: choice.choice([len(changed), choice.randrange(len(changed))])]))
            TableMaker(0, renames=True).tables(read)
        except AnswerError:
            pass
