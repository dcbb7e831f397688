"""`iaprof import` and `iaprof timeline` read files in any encoding, and refuse compression that they do not read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.imports.encoded_text import EncodedText, encoding_of
from thorough import usually
from unit.in_process import iaprof as run
from unit.timelines.reading.perfetto.making import zstd

TEXT = (Path(__file__).parents[2] / "data/iaprof-text/2026.2.txt").read_text()
TRACE = json.dumps([{"ph": "X", "name": "é", "pid": 0, "tid": 7, "ts": 1, "dur": 1}], ensure_ascii=False)
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


@pytest.mark.parametrize("pack", usually([bytes], [bytes, gzip.compress]))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encodings(tmp_path: Path, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "plain.txt").write_text(TEXT)
    (tmp_path / "x.txt").write_bytes(pack(TEXT.encode(encoding)))
    (tmp_path / "x.json").write_bytes(pack(TRACE.encode(encoding)))
    for name in ("plain.txt", "x.txt", "x.json"):
        done = run("import", tmp_path / name, "-o", tmp_path / f"{name}.parquet")
        assert done.code == 0, done.err
    plain, text, trace = (CaptureReader(tmp_path / f"{name}.parquet") for name in ("plain.txt", "x.txt", "x.json"))
    assert len(plain.table("sample")) > 0
    assert text.table("sample").equals(plain.table("sample"))
    assert trace.table("slice")["name"].to_pylist() == ["é"]
    assert run("timeline", tmp_path / "x.json").code == 0


def _zipped(content: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("x", content)
    return made.getvalue()


@pytest.mark.parametrize("verb", ["import", "timeline"])
@pytest.mark.parametrize("content", [TEXT, TRACE])
@pytest.mark.parametrize(
    ("pack", "how", "command"),
    [
        (zstd, "zstd", "zstd -d"), (lzma.compress, "xz", "xz -d"), (bz2.compress, "bzip2", "bzip2 -d"),
        (_zipped, "zip", "unzip"),
    ],
)  # fmt: skip
def test_other_compression(
    tmp_path: Path, pack: Callable[[bytes], bytes], how: str, command: str, content: str, verb: str
) -> None:
    (tmp_path / "x").write_bytes(pack(content.encode()))
    done = run(verb, tmp_path / "x")
    sentence = f"iaprof: {tmp_path / 'x'} is compressed with {how}: decompress it first, with '{command}'\n"
    assert (done.code, done.out, done.err) == (1, "", sentence)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("size", [3, 100, 1 << 20])
def test_a_compressed_text_in_members_that_is_read_in_blocks(size: int) -> None:
    raw = TEXT.encode("utf-16")
    source = EncodedText(io.BytesIO(gzip.compress(raw[:101]) + gzip.compress(raw[101:]) + b"\0\0"), "x.gz")
    parts = []
    while part := source.read(size):
        parts.append(part)
    assert b"".join(parts).decode() == TEXT


def test_bytes_that_are_not_utf8_stay() -> None:
    assert EncodedText(io.BytesIO(b"string\t1\t\xff\n"), "x").read(100) == b"string\t1\t\xff\n"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [(lambda packed: packed[:-30], "cut short"), (lambda packed: packed[:40] + b"\xff" * 99, "damaged")],
)
def test_a_compressed_text_that_is_damaged(tmp_path: Path, change: Callable[[bytes], bytes], sentence: str) -> None:
    source = EncodedText(io.BytesIO(change(gzip.compress(TEXT.encode()))), "x.gz")
    with pytest.raises(IaprofError, match=f"x.gz has compressed data that are {sentence}: copy it again"):
        while source.read(1000):
            pass


def test_encoding_of_short_starts() -> None:
    found = [
        encoding_of(start) for start in (b"", b"x", b"\0", b"x\0", b"\0x", b"x\0\0\0", b"\0\0\0x", b"\0\0\0\0", b"xy")
    ]
    assert found == ["", "", "", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "", ""]
