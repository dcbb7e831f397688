"""What the files of each format add up to, as a reader of that format would."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from unit import writers

TOTALS: dict[str, Callable[[Path], int]] = {
    name: total
    for module in pkgutil.iter_modules(writers.__path__)
    for name, total in getattr(import_module(f"unit.writers.{module.name}"), "TOTALS", {}).items()
}
"""By the name of the format: the samples in a file, as the tests of that format count them."""
