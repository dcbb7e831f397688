"""`iaprof import` of traces, in children as it runs, and the verbs on what it makes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from iaprof.formats.capture.reader import CaptureReader
from unit.in_process import iaprof as run
from unit.report.together import runs
from unit.timelines.reading.perfetto.making import Maker, zstd

X = {"ph": "X", "name": "secret k_1 Cmpt Exec", "cat": "kernel", "pid": 0, "tid": 7, "ts": 1000.5, "dur": 50.25,
     "args": {"TS1": "0x10", "path": "/home/me"}}  # fmt: skip
TORCH = {
    "deviceProperties": [{"id": 0, "name": "AIU"}],
    "distributedInfo": {"rank": 1},
    "traceEvents": [X, {"ph": "?"}],
}


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    (tmp_path / "a.json").write_text(json.dumps([X] * 3))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(TORCH).encode()))
    done = run("import", tmp_path / "a.json", tmp_path / "b.json.gz", "-o", tmp_path / "run.parquet")
    assert done.code == 0, done.err
    assert "iaprof: warning: b.json.gz: 1 event dropped: 1 without a name\n" in done.err
    assert "; 2 traces, 5 events: 4 slices, 1 dropped ]" in done.err
    return tmp_path / "run.parquet"


def test_several_files_become_one_capture(capture: Path) -> None:
    reader = CaptureReader(capture)
    assert reader.table("slice")["file"].to_pylist() == [0, 0, 0, 1]
    assert reader.header["imported"] == {"format": "trace", "files": 2}
    assert [(file["name"], file["dialect"], file["rank"]) for file in reader.header["traces"]] == [
        ("a.json", "flex", 0), ("b.json.gz", "torch", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("damage", ["", '{"name": nul},', '{"tts": 1e3}, {"odd": "\\ud800"},', "null, 5,"])
def test_children_need_no_file_that_they_cannot_open(tmp_path: Path, encoding: str, damage: str) -> None:
    event = {
        "ph": "X",
        "name": "a",
        "pid": "é",
        "ts": "1e3",
        "dur": 5.12345,
        "args": {"TS1": "0xF", "TS2": [1]},
        "x": 1,
    }
    text = f"[{damage}{json.dumps([X, event], indent=1)[1:]}"
    (tmp_path / "x.json").write_bytes(text.encode(encoding))
    done = run("import", tmp_path / "x.json", "-o", tmp_path / "x.parquet")
    assert done.code == 0, done.err
    assert CaptureReader(tmp_path / "x.parquet").table("slice")["time_ns"].to_pylist() == [1_000_500, 1_000_000]


def test_json_and_the_default_name(tmp_path: Path) -> None:
    (tmp_path / "run.pt.trace.json").write_text(json.dumps(TORCH))
    done = run("import", tmp_path / "run.pt.trace.json", "--json")
    described: dict[str, Any] = json.loads(done.out)
    assert described["output"] == str(tmp_path / "run.parquet")
    assert described["files"][0]["counts"]["dropped"] == {"without a name": 1}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is empty: pass an iaprof text or a trace"),
        ("3", "neither iaprof text nor a trace"),
        ("{}", "has no traceEvents: it is not a trace"),
        ("{", "no trace"),
    ],
)
def test_what_is_none_of_these(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "x.json").write_text(content)
    done = run("import", tmp_path / "x.json")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("iaprof: ") and sentence in done.err and done.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_the_same_file_twice_and_several_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([X]))
    (tmp_path / "y.json").symlink_to(tmp_path / "x.json")
    done = run("import", tmp_path / "x.json", tmp_path / "y.json", "-o", tmp_path / "run.parquet")
    assert (done.code, done.err.count("is the same file as")) == (2, 1)
    (tmp_path / "z.json").write_text(json.dumps([X]))
    done = run("import", tmp_path / "x.json", tmp_path / "z.json")
    assert (done.code, done.err) == (2, "iaprof: several files become one capture: name it with -o\n")


def test_a_trace_with_packets_compressed_with_zstd_is_read_by_other_children(tmp_path: Path) -> None:
    made = Maker()
    made.slice(1000, 3000, 0, "a")
    plain = made.bytes()
    packed = pb.Trace(packet=[pb.TracePacket(zstd_compressed_packets=zstd(plain))]).SerializeToString()
    (tmp_path / "x.pftrace").write_bytes(plain + packed)
    (tmp_path / "y.json").write_text(json.dumps([X]))
    done = run("import", tmp_path / "y.json", tmp_path / "x.pftrace", "-o", tmp_path / "run.parquet")
    assert done.code == 0, done.err
    assert CaptureReader(tmp_path / "run.parquet").table("slice")["duration_ns"].to_pylist() == [50_250, 2000, 2000]


def test_other_verbs(capture: Path) -> None:
    shown = run("info", capture).out
    assert "  1  torch        1       2        1  b.json.gz" in shown
    assert "\n  slices         4\n" in shown
    done = run("top", capture)
    assert done.code == 1
    assert "has time lines, but no stalls" in done.err
    found = run("query", capture, "SELECT count(*) AS n, sum(duration_ns) AS d FROM slices", "--format", "csv")
    assert found.out.split() == ["n,d", "4,201000"]


def test_redaction(capture: Path) -> None:
    run("archive", "--redact", capture, "-o", capture.with_name("redacted.parquet"))
    reader = CaptureReader(capture.with_name("redacted.parquet"))
    row = reader.table("slice").to_pylist()[0]
    assert row["args"] is None
    assert row["name"].startswith("slice-") and row["name"].endswith(" Cmpt Exec")
    assert b"secret" not in capture.with_name("redacted.parquet").read_bytes()
    assert "a.json" not in json.dumps(reader.header)


def test_merging(capture: Path, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps([X]))
    run("import", tmp_path / "c.json")
    done = run("merge", capture, tmp_path / "c.parquet", "-o", tmp_path / "merged.parquet")
    assert done.code == 0, done.err
    assert [part.count("slice") for part in CaptureReader(tmp_path / "merged.parquet").parts] in ([4, 1], [1, 4])


def test_ranks_of_the_runtimes_files_are_their_pids(tmp_path: Path) -> None:
    host = {"ph": "X", "name": "host", "pid": 9, "tid": 7, "ts": 1, "dur": 1}
    (tmp_path / "a.json").write_text(json.dumps([X | {"pid": pid} for pid in (2, 0, 1, 7)] + [host]))
    (tmp_path / "b.json").write_text(json.dumps(TORCH))
    for name in "ab":
        assert run("import", tmp_path / f"{name}.json").code == 0
    assert CaptureReader(tmp_path / "a.parquet").header["traces"][0]["ranks"] == [0, 1, 2, 7]
    assert "  0  flex     0-2, 7       5        -  a.json" in run("info", tmp_path / "a.parquet").out
    done = run("merge", tmp_path / "a.parquet", tmp_path / "b.parquet", "-o", tmp_path / "both.parquet")
    assert "; 2 recordings; 6 slices; lost: nothing ]" in done.err
    shown = run("info", tmp_path / "both.parquet").out
    assert "     0  0  flex     0-2, 7       5        -  a.json" in shown
    assert "     1  0  torch         1       2        1  b.json" in shown


def test_a_trace_is_joined_to_the_capture_of_the_same_run(tmp_path: Path) -> None:
    trace, stalls = runs.trace(tmp_path / "t.pt.trace.json", runs.calls()), runs.recorded(tmp_path / "cap.parquet")
    done = run("import", trace, "--with", stalls, "-o", tmp_path / "both.parquet")
    assert done.code == 0, done.err
    assert done.err.splitlines()[0] == (
        "iaprof: t.pt.trace.json: clocks joined by launches: 5 of 5 launches fit, "
        "0 ns apart in the median, 0 ns at most"
    )
    both = CaptureReader(tmp_path / "both.parquet")
    assert [both.count(kind) for kind in ("stall", "launch")] == [5, 5]
    assert run("timeline", tmp_path / "both.parquet").code == 0
    assert "t.pt.trace.json" in run("info", tmp_path / "both.parquet").out


@pytest.mark.parametrize("kind", ["trace", "nothing", "text"])
def test_what_cannot_be_joined_is_refused_and_nothing_is_written(tmp_path: Path, capture: Path, kind: str) -> None:
    trace = runs.trace(tmp_path / "t.json", runs.calls())
    stalls = {"trace": capture, "nothing": tmp_path / "no.parquet", "text": runs.recorded(tmp_path / "cap.parquet")}[
        kind
    ]
    if kind == "text":
        trace.write_text("0.1,abc")
    done = run("import", trace, "--with", stalls, "-o", tmp_path / "both.parquet")
    assert done.code in (1, 2) and done.err.count("\n") == 1, done.err
    assert not (tmp_path / "both.parquet").exists()


def test_the_capture_itself_is_never_written_over(tmp_path: Path) -> None:
    stalls = runs.recorded(tmp_path / "cap.parquet")
    done = run("import", runs.trace(tmp_path / "t.json", []), "--with", stalls, "-o", stalls, "--force")
    assert done.code == 1 and "is the input" in done.err
