"""Modules that the product names in strings exist: linters see imports only, so a rename would go unnoticed."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = sorted(path.name for path in (ROOT / "src" / "iaprof").iterdir() if path.is_symlink())
NAME = re.compile(rf"\biaprof\.(?:{'|'.join(PACKAGES)})\b(?:\.\w+)*(?::\w+)?")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def strings(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


NAMED = {name for source in SOURCES for text in strings(source) for name in NAME.findall(text)}
NAMED |= set(NAME.findall((ROOT / "pyproject.toml").read_text()))


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_module_that_a_string_names_can_be_imported(name: str) -> None:
    module, _, function = name.partition(":")
    imported = importlib.import_module(module)
    assert not function or callable(getattr(imported, function))


def test_whatever_runs_in_a_child_is_named_in_one_string() -> None:
    """Were the name put together from parts, nobody would find it here."""
    started: dict[str, set[object]] = {"Worker": set(), "Sandbox": set()}
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_bytes())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in started:
                assert isinstance(node.args[0], ast.Constant), (source, node.lineno)
                started[node.func.id].add(node.args[0].value)
    assert {name for name in NAMED if ":" in name} >= started["Worker"] >= {"iaprof.sandbox.child:main"}
    assert NAMED >= started["Sandbox"] >= {"iaprof.report.gpu.reader"}
