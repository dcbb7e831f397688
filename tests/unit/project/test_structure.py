# SPDX-License-Identifier: Apache-2.0
"""The structure is what docs/architecture.md says."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TOPS = {path.name for path in (ROOT / "src" / "iaprof").iterdir() if path.is_dir() and not path.name.startswith("__")}


def product_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", *TOPS], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


def test_every_package_is_in_the_picture_of_the_structure() -> None:
    packages = {str(Path(path).parent) for path in product_files() if path.endswith("/__init__.py")}
    table = re.findall(r"^\| `([\w/]+)` \|", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)
    assert packages >= TOPS
    assert Counter(table) == Counter(packages)


def test_the_picture_fits_on_two_screens() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) <= 110


def test_a_verb_fits_on_a_screen() -> None:
    """It reads options and asks what it shows; both are elsewhere."""
    functions = [
        (path.name, each.name, (each.end_lineno or 0) - each.lineno + 1)
        for path in (ROOT / "cli" / "verbs").glob("*.py")
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.FunctionDef)
    ]
    assert {"report", "top", "diff", "timeline", "record"} <= {name for _, name, _ in functions}
    assert [each for each in functions if each[2] > 60] == []
