"""Compressed traces of kilobytes that become gigabytes: they are refused, however little their content says."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from iaprof.formats.imports import encoded_text
from iaprof.timelines.reading import source
from thorough import thorough
from unit.in_process import iaprof

EVENT = b'{"name":"a","ph":"X","ts":1,"dur":1,"pid":1,"tid":1}'


def bomb(path: Path, spaces: int) -> Path:
    path.write_bytes(gzip.compress(b'{"traceEvents":[' + b" " * spaces + EVENT + b"]}"))
    return path


def test_a_trace_that_becomes_absurdly_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a limit that a test reaches soon, and a file of 20 kB that becomes 20 MB
    monkeypatch.setattr(source, "MOST_EXPANDED", 1 << 22)
    trace = bomb(tmp_path / "t.json.gz", 20 << 20)
    # when it is imported
    ran = iaprof("import", trace, "-o", tmp_path / "c.parquet")
    # then one sentence says what to do, and nothing is written
    assert ran.code == 1
    assert ran.err.startswith(f"iaprof: {trace} becomes absurdly large when it is decompressed")
    assert ran.err.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["t.json.gz"]


@thorough
def test_a_text_that_becomes_absurdly_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a text of the Intel tool that goes on with 20 MB of empty lines, in members of which each is small
    text = (Path(__file__).parents[3] / "data/iaprof-text/2026.2.txt").read_bytes()
    path = tmp_path / "t.txt.gz"
    path.write_bytes(gzip.compress(text) + gzip.compress(b"\n" * (1 << 20)) * 20)
    assert iaprof("import", path, "-o", tmp_path / "c.parquet").code == 0
    (tmp_path / "c.parquet").unlink()
    # when the limit is less
    monkeypatch.setattr(encoded_text, "MOST_EXPANDED", 1 << 22)
    ran = iaprof("import", path, "-o", tmp_path / "c.parquet")
    # then it is refused as a trace is
    assert ran.code == 1
    assert ran.err.startswith(f"iaprof: {path} becomes absurdly large when it is decompressed")
    assert [each.name for each in tmp_path.iterdir()] == ["t.txt.gz"]


def test_a_trace_that_compresses_well_is_imported(tmp_path: Path) -> None:
    ran = iaprof("import", bomb(tmp_path / "t.json.gz", 20 << 20), "-o", tmp_path / "c.parquet")
    assert (ran.code, "1 slice" in ran.err) == (0, True), ran.err
