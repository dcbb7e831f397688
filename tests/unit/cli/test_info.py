"""`iaprof info`: the whole text, the same facts as JSON, that no rows are read, and untrusted headers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from iaprof.cli.verbs import info as verb
from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.merged import part_labels
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.report.inventory import inventory
from iaprof.report.merging import merge
from unit.capturing import capture, launch, record, stall

SECOND = 1_000_000_000
STREAM = {"device": "/dev/dri/renderD128", "card": "card0", "name": "Ponte Vecchio (Xe-HPC)", "device_id": 0xBD5,
          "pci_address": "0000:03:00.0", "gt": 0, "tile": 0, "xecores": 64, "ip_version": [12, 60, 0],
          "layout": "pvc", "rate_cycles": 1757, "subsample": 8}  # fmt: skip
FULL: dict[str, Any] = {
    "iaprof": "0.1.0",
    "python": "3.11.7",
    "host": {"name": "node1", "kernel": "6.18.0", "machine": "x86_64", "cpus": 96, "boot_id": "b"},
    "command": ["./train", "--data", "my data"],
    "arguments": ["iaprof", "record", "-p", "7,8", "--", "./train", "--data", "my data"],
    "clock": {"monotonic_ns": 10 * SECOND, "realtime_ns": 1_795_257_213_747_495_691},
    "end_ns": 210 * SECOND,
    "part": 2,
    "max_cpu_percent": 1.0,
    "thinned": [{"time_ns": 5, "cpu_hz": 24, "metric_interval_ns": 10_000_000, "percent": 0.9},
                {"time_ns": 6, "cpu_hz": 0, "metric_interval_ns": 20_000_000, "percent": 0.9}],
    "removed_files": {"files": 12, "bytes": 34_000_000},
    "paused": [[20 * SECOND, 21 * SECOND], [30 * SECOND, 30 * SECOND + SECOND // 2]],
    "scope": [7, 8],
    "streams": [STREAM, STREAM | {"tile": 1, "gt": 1, "name": "", "card": ""}],
    "libraries": [{"path": "/opt/libze_intel_gpu.so.1", "probes": 2}, {"path": "/opt/other.so", "probes": 1}],
    "probes": {"launches": 4, "probe_ns": 5_000},
    "totals": {"stalls": 1_234_567, "launches": 3, "carried_launches": 1},
    "losses": [{"source": "launches", "what": "lost", "count": 1200, "events": 2},
               {"source": "stalls of card0, GT 0", "what": "overflow", "count": None, "events": 1}],
    "cost": {"cpu_s": 4, "compile_cpu_s": 0.75, "learn_cpu_s": 0.5, "finish_cpu_s": 0.4, "peak_bytes": 116_277_248,
             "finish_peak_bytes": 121_253_888, "spool_bytes": 372_928, "probe_ns": 5_000},
    "symbols": {"which": "needed", "modules": 6, "addresses": 1065, "named": 1023, "skipped": 0},
    "matched": {"kernel": 0.99999, "instruction": 0.99, "stack": 0.5, "ambiguous": 0.001},
    "redacted": True,
    "recovered": True,
}  # fmt: skip


def full(path: Path, **more: Any) -> Path:
    stacks = [{"id": 1, "time_ns": 1, "pid": 7, "truncated": False, "ips": []}]
    return capture(path, FULL | more, stall=[stall(9, record(64, sbid=3))], launch=[launch(n, 7, 64) for n in range(4)],
                   stack=stacks)  # fmt: skip


def shown(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    verb.info(path)
    return capsys.readouterr().out.replace(str(path), path.name)


def test_a_capture_with_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = full(tmp_path / "cap.parquet")
    assert (
        shown(path, capsys)
        == f"""\
cap.parquet: {path.stat().st_size / 1000:.1f} kB, format 12

Recording
  host           node1 (Linux 6.18.0, x86_64, 96 CPUs)
  command        ./train --data 'my data'
  recorded by    iaprof record -p 7,8 -- ./train --data 'my data'
  version        iaprof 0.1.0, Python 3.11.7
  started        2026-11-21 10:33:33 UTC
  duration       3:20 min
  paused         2 times, 1.50 s
  processes      7, 8
  kept           one of every 8 records
  file           number 2 of the recording; the first one is 0
  thinned        sampling was changed 2 times to keep to 1 % of a CPU: at its
                 lowest, no CPU samples, metrics each 20 ms
  removed        12 earlier files, 34.0 MB, to make room
  redacted       names are hashes
  recovered      from the spool of a recording that did not end

GPUs
  CARD        PCI ADDRESS   TILE/GT  IP       XECORES  CYCLES  NAME
  card0       0000:03:00.0  0/0      12.60.0       64   1,757  Ponte Vecchio (Xe-HPC)
  renderD128  0000:03:00.0  1/1      12.60.0       64   1,757  Xe-HPC

Contents
  stall records  1,234,567  in 1 read
  launches               3  and 1 launch from before this file
  stacks                 1

Lost
  launches lost: 1,200, 2 times
  stalls of card0, GT 0 overflow: an unknown number, 1 time

Quality
  matched        100.0 % to a kernel, 99.0 % to an instruction, 50.0 % to one
                 stack, 0.1 % ambiguous
  named          1,023 of 1,065 CPU addresses in 6 files

Own cost
  CPU            4.00 s recording (2.0 % of one CPU), 0.75 s of it compiling
                 BPF, 0.50 s of it learning to unwind, 0.40 s writing the
                 capture
  probes         1.2 µs a launch
  memory         116.3 MB recording, 121.3 MB writing the capture
  spool          372.9 kB

Libraries
  2 probes       /opt/libze_intel_gpu.so.1
  1 probe        /opt/other.so
"""
    )


def test_a_capture_with_almost_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = capture(tmp_path / "cap.parquet", {"imported": {"format": "iaprof 2026.2"}})
    assert (
        shown(path, capsys)
        == f"""\
cap.parquet: {path.stat().st_size} bytes, format 12

Recording
  imported       from iaprof 2026.2

Contents
  stall records  0

Lost
  nothing
"""
    )


def test_a_capture_of_nvidia_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = {"device": "/dev/nvidia0", "card": "nvidia0", "name": "NVIDIA H200", "pci_address": "0000:01:00.0",
              "ip_version": [9, 0], "multiprocessors": 132, "layout": "pc-samples", "rate_cycles": 1 << 18}  # fmt: skip
    path = full(tmp_path / "cap", streams=[stream])
    verb.info(path)
    said = capsys.readouterr().out
    assert "  CARD     PCI ADDRESS   TILE/GT  COMPUTE  SMS   CYCLES  NAME\n" in said
    assert "  nvidia0  0000:01:00.0  -/-      9.0      132  262,144  NVIDIA H200\n" in said
    verb.info(path, as_json=True)
    (known,) = json.loads(capsys.readouterr().out)["parts"][0]["streams"]
    assert (known["ip_version"], known["generation"], known["multiprocessors"]) == ("9.0", "Hopper", 132)
    assert known["xecores"] is None


def test_launches_that_did_not_enter_the_kernel_count_in_what_a_launch_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(full(tmp_path / "c", totals={"launches": 10}), capsys)
    assert "probes         0.5 µs a launch" in text


def test_a_merged_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = {"host": {"name": "node2"}, "clock": {"monotonic_ns": 1, "realtime_ns": SECOND}, "totals": {"stalls": 3}}
    merge([full(tmp_path / "a"), capture(tmp_path / "b", other, stall=[stall(9)])], tmp_path / "all.parquet")
    assert (
        shown(tmp_path / "all.parquet", capsys)
        == f"""\
all.parquet: {(tmp_path / "all.parquet").stat().st_size / 1000:.1f} kB, format 12, merged from 2 recordings

Parts
  #  BEGUN (UTC)          DURATION    RECORDS  LAUNCHES  LOST  FROM
  0  1970-01-01 00:00:01         -          3         0     -  node2
  1  2026-11-21 10:33:33  3:20 min  1,234,567         3     2  node1

Contents
  stall records  1,234,570  in 2 reads
  launches               3  and 1 launch from before this file
  stacks                 1

Lost
  launches lost: 1,200, 2 times
  stalls of card0, GT 0 overflow: an unknown number, 1 time
"""
    )


def test_json_has_the_same_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = full(tmp_path / "cap.parquet", streams=[STREAM])
    verb.info(path, as_json=True)
    counts = {"stalls": 1_234_567, "stall_reads": 1, "launches": 3, "stacks": 1, "python_codes": 0, "mappings": 0,
              "process_events": 0, "modules": 0, "cpu_samples": 0, "waits": 0, "metrics": 0, "named_modules": 0,
              "symbols": 0, "imported_samples": 0, "slices": 0, "counter_values": 0, "flows": 0,
              "instants": 0, "carried_launches": 1, "executions": 0, "unknown_executions": 0, "timed_executions": 0,
              "gpu_jobs": 0,
              "transfers": 0, "transferred_bytes": 0, "recorder_cpu_samples": 0, "other_cpu_samples": 0}  # fmt: skip
    assert json.loads(capsys.readouterr().out) == {
        "file": str(path),
        "bytes": path.stat().st_size,
        "format": 12,
        "merged": False,
        "counts": counts,
        "losses": FULL["losses"],
        "parts": [
            {
                "label": "", "file": "", "format": 12, "iaprof": "0.1.0", "python": "3.11.7", "host": "node1",
                "kernel": "6.18.0", "machine": "x86_64", "cpus": 96, "command": FULL["command"],
                "arguments": FULL["arguments"], "labels": {},
                "begun": "2026-11-21T10:33:33.747495Z", "duration_s": 200.0, "part": 2,
                "removed_files": FULL["removed_files"],
                "thinned": "sampling was changed 2 times to keep to 1 % of a CPU: at its lowest, no CPU samples, "
                           "metrics each 20 ms",
                "paused": 2, "paused_s": 1.5, "scope": [7, 8], "stack_depth": None, "cpu_hz": None,
                "metric_interval_ns": None, "libraries": FULL["libraries"], "counts": counts,
                "losses": FULL["losses"],
                "streams": [{
                    "card": "card0", "device": "/dev/dri/renderD128", "name": "Ponte Vecchio (Xe-HPC)",
                    "pci_address": "0000:03:00.0", "tile": 0, "gt": 0, "xecores": 64, "ip_version": "12.60.0",
                    "generation": "Xe-HPC", "layout": "pvc", "layout_guessed": False, "rate_cycles": 1757,
                    "subsample": 8, "samples": None, "multiprocessors": None,
                }],
                "cost": {
                    "cpu_s": 4.0, "compile_cpu_s": 0.75, "learn_cpu_s": 0.5, "cpu_percent": 2.0, "finish_cpu_s": 0.4,
                    "peak_bytes": 116_277_248, "finish_peak_bytes": 121_253_888, "spool_bytes": 372_928,
                    "probe_ns_per_launch": 1250.0,
                },
                "symbols": {"which": "needed", "modules": 6, "addresses": 1065, "named": 1023},
                "warnings": [], "matched": FULL["matched"], "stack_ends": None,
                    "python_stacks": None, "waits": None, "traces": [], "imported": None, "redacted": True,
                "recovered": True,
            }
        ],
    }  # fmt: skip


def test_no_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a capture with damage in the rows of every kind
    path = full(tmp_path / "cap.parquet")
    kinds = {kind: [dict.fromkeys(field.name for field in KINDS[kind])] for kind in KINDS}
    damaged = capture(tmp_path / "damaged", FULL, **kinds)
    with pytest.raises(CaptureError):
        CaptureReader(damaged).table("launch")
    # when, then
    assert inventory(CaptureReader(damaged)).counts["stacks"] == 1
    assert inventory(CaptureReader(path)).counts["stacks"] == 1


def test_a_spool_is_not_a_capture(tmp_path: Path) -> None:
    (tmp_path / "c.spool").write_bytes(b"IAPS\1\0\0\0")
    with pytest.raises(CaptureError, match=r"spool of an unfinished recording: iaprof recover .*c\.spool"):
        verb.info(tmp_path / "c.spool")


def test_the_output_is_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = {
        "streams": [STREAM] * 1000,
        "libraries": FULL["libraries"] * 1000,
        "losses": FULL["losses"] * 1000,
        "scope": list(range(100_000)),
        "command": ["x" * 100_000],
    }
    text = shown(full(tmp_path / "c", **many), capsys)
    assert len(text.splitlines()) < 200
    assert "and 950 more (--json has all)" in text
    assert "and 1,950 more" in text


ODD = st.sampled_from([1 << 63, 1 << 64, 1e400, "\x1b[2J"])
NAMES = st.sampled_from([*FULL, *STREAM, *FULL["cost"], *FULL["clock"], "events", "count", "source", "what", "path"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | ODD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(FULL)), JSON, max_size=6), st.booleans())
def test_untrusted_headers(tmp_path_factory: pytest.TempPathFactory, changed: dict[str, Any], is_merged: bool) -> None:
    # given a header with anything in it
    path = tmp_path_factory.getbasetemp() / "c"
    about = FULL | changed
    capture(path, {"parts": [about, changed], **changed} if is_merged else about)
    # when
    found = inventory(CaptureReader(path))
    lines = verb.text(found, None, False)
    # then
    assert len(lines) > 3
    assert all(line.isprintable() for line in lines)
    assert len(found.parts) == 1 + is_merged
    assert len(json.loads(json.dumps(asdict(found)))["parts"]) == 1 + is_merged
    labels = part_labels([about, changed])
    assert len(labels) == 2
    assert all(labels)


GUESSED = STREAM | {"ip_version": [41, 2, 0], "layout": "xe3p", "layout_guessed": True}
GUESS = (
    "card0 has graphics IP 41.02.0, which this version of iaprof does not know: its stall records are read as xe3p "
    "records, which is a guess, so kernels and counts may be wrong; use a newer iaprof"
)


def test_a_guessed_layout_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # given a GPU of two tiles that the recorder did not know
    path = full(tmp_path / "cap.parquet", streams=[GUESSED, GUESSED | {"tile": 1}])
    # then there is one warning, wrapped
    text = shown(path, capsys)
    [warnings] = [group for group in text.split("\n\n") if group.startswith("Warnings")]
    assert " ".join(warnings.split()) == f"Warnings {GUESS}"
    verb.info(path, as_json=True)
    [part] = json.loads(capsys.readouterr().out)["parts"]
    assert part["warnings"] == [GUESS]
    assert [stream["layout_guessed"] for stream in part["streams"]] == [True, True]
    # and for a merged capture, the warning has the part's label
    merge([path, full(tmp_path / "other.parquet", part=3)], tmp_path / "all")
    [label, _] = [part.label for part in inventory(CaptureReader(tmp_path / "all")).parts]
    assert f"{label}: {GUESS}" in " ".join(shown(tmp_path / "all", capsys).split())
