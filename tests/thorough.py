"""Tests that `make test-thorough` runs, not `make test`: those of more inputs, and those that take longest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough


def usually(kept: Iterable[object], every: Iterable[Any]) -> list[Any]:
    """Returns parameters, of which `make test` takes those that are kept."""
    kept, every = list(kept), list(every)
    assert all(each in every for each in kept)
    return [each if each in kept else _thorough(each) for each in every]


def _thorough(parameter: Any) -> Any:
    return pytest.param(*(parameter if isinstance(parameter, tuple) else (parameter,)), marks=thorough)
