"""Modules that the product names in strings exist: linters see imports only, so a rename would go unnoticed."""

import ast
import functools
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = sorted(path.name for path in (ROOT / "src" / "iaprof").iterdir() if path.is_symlink())
NAME = re.compile(rf"\biaprof\.(?:{'|'.join(PACKAGES)})\b(?:\.\w+)*(?::\w+)?")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """What the sources consist of: not read when pytest collects, which each of its processes does."""
    return [(source, node) for source in SOURCES for node in ast.walk(ast.parse(source.read_bytes()))]


def named() -> set[str]:
    names = set(NAME.findall((ROOT / "pyproject.toml").read_text()))
    for _, node in nodes():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(NAME.findall(node.value))
    return names


def test_the_modules_that_strings_name_can_be_imported() -> None:
    for name in sorted(named()):
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        assert not function or callable(getattr(imported, function)), name


def test_whatever_runs_in_a_child_is_named_in_one_string() -> None:
    """Were the name put together from parts, nobody would find it here."""
    started: dict[str, set[object]] = {"Worker": set(), "Sandbox": set()}
    for source, node in nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in started:
            assert isinstance(node.args[0], ast.Constant), (source, node.lineno)
            started[node.func.id].add(node.args[0].value)
    assert {name for name in named() if ":" in name} >= started["Worker"] >= {"iaprof.sandbox.child:main"}
    assert named() >= started["Sandbox"] >= {"iaprof.report.gpu.reader"}
