from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.timelines.columns import ABSENT, Constant, Narrow, Repeated, joined, pack, unpacked
from iaprof.timelines.trace import Slices

_ROWS = np.array([3, 0, 3, 1])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.full(5, ABSENT), Constant),
        (np.full(5, np.nan), Constant),
        (np.array([0, 255, 3, 4]), Narrow),
        (np.array([ABSENT, 254, 0, 4]), Narrow),
        (np.array([ABSENT, 255, 0, -4]), Narrow),
        (np.array([1 << 40, (1 << 40) + 7, ABSENT, 1 << 40]), Narrow),
        (np.array([-1, 5, 7, -1], np.int32), Narrow),
        (np.array([0.0, 5.0, 7.0, 1e9]), Narrow),
        (np.array([0.0, -0.0, 7.0, 1.0]), np.ndarray),
        (np.array([0.0, np.nan, 7.0, 1.0]), np.ndarray),
        (np.array([0, 1 << 62, 3, -(1 << 62)]), np.ndarray),
        (np.array([True, False, True, True]), np.ndarray),
        (np.array([[1, 2], [1, 2], [ABSENT, ABSENT], [1, 2]]), Repeated),
        (np.full((4, 2), ABSENT), Repeated),
    ],
)
def test_packed_columns_have_the_same_values(values: NDArray[Any], kind: type) -> None:
    packed = pack(values)
    assert isinstance(packed, kind)
    assert unpacked(packed).tobytes() == values.tobytes()
    assert unpacked(packed).dtype == values.dtype
    taken = packed.take(_ROWS, 0) if isinstance(packed, np.ndarray) else packed.take(_ROWS)
    assert unpacked(taken).tobytes() == values[_ROWS].tobytes()
    for other in (values, values[:1]):
        both = joined([packed, pack(other)])
        assert unpacked(both).tobytes() == np.concatenate([values, other]).tobytes()


def test_tables_are_the_same_when_packed() -> None:
    slices = Slices.of(4, start=np.array([1, 2, 3, 4]), tid=np.array([7, 8, 7, 8]))
    slices.extra["class"] = np.array([0, -1, 0, 0], np.int32)
    slices.pack(0)
    slices.keep(np.array([True, False, True, True]))
    assert slices.tid.tolist() == [7, 7, 8]
    assert {**slices.extra}["class"].tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        slices.pid[0] = 1
    slices.unpack("pid")
    slices.pid[0] = 1
    assert slices.joined(slices.take(np.array([0]))).pid.tolist() == [1, 0, 0, 1]
    assert slices.counter(0).tolist() == [ABSENT] * 3
