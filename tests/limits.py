"""Limits of time: `make test` only asks that something ends, as others may use the machine; `make bench` measures it.

A test takes the fixture `within`; that marks it `timed`, and tests/bench/bench_limits.py runs all tests so marked, one
after the other, with the limits that they name.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator

GENEROUS_S = 120.0
MEASURED = "IAPROF_MEASURED_LIMITS"
"""The variable with the path of a file, to which each measured time is appended, a JSON object a line."""


class Within:
    """What the fixture gives."""

    @property
    def measures(self) -> bool:
        """Whether nothing else runs on the machine."""
        return MEASURED in os.environ

    @contextlib.contextmanager
    def __call__(self, seconds: float) -> Iterator[None]:
        """Says that what is done inside takes less than so many seconds on a machine that does nothing else."""
        began = time.monotonic()
        yield
        self.took(time.monotonic() - began, seconds)

    def took(self, took_s: float, seconds: float) -> None:
        """Says the same of a time that the test has measured itself."""
        path = os.environ.get(MEASURED)
        if path is None:
            assert took_s < max(GENEROUS_S, seconds)
            return
        test = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
        with open(path, "a") as file:
            file.write(json.dumps({"test": test, "limit_s": seconds, "took_s": took_s}) + "\n")
        assert took_s < seconds
