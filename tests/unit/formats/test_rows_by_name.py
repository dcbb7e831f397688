"""Rows are made of columns by name, so that columns of the same type cannot be swapped."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture.schema import KINDS, make_rows

ONE, TWO = np.array([1], np.uint32), np.array([2], np.uint32)
COLUMNS = {
    "cpu": np.array([3], np.uint32), "tid": TWO, "pid": ONE, "time_ns": np.array([4], np.uint64),
    "kernel_stack": np.array([6], np.uint64), "stack": np.array([5], np.uint64),
    "left_out": pa.array([None], pa.string()),
}  # fmt: skip


def test_the_order_of_columns_does_not_matter() -> None:
    rows = make_rows("cpu_sample", COLUMNS)
    assert rows.type == KINDS["cpu_sample"]
    assert rows.to_pylist() == [
        {"time_ns": 4, "pid": 1, "tid": 2, "cpu": 3, "stack": 5, "kernel_stack": 6, "left_out": None}
    ]


@pytest.mark.parametrize("changed", [{"tid": None}, {"uid": ONE}])
def test_a_missing_or_unknown_column_is_an_error(changed: dict[str, np.ndarray | None]) -> None:
    columns = {name: column for name, column in {**COLUMNS, **changed}.items() if column is not None}
    with pytest.raises(TypeError, match=r"of cpu_sample rows are missing or unknown: [tu]id"):
        make_rows("cpu_sample", columns)


def test_a_column_of_another_type_is_an_error() -> None:
    with pytest.raises(pa.ArrowException):
        make_rows("cpu_sample", {**COLUMNS, "pid": np.array([1], np.uint64)})
