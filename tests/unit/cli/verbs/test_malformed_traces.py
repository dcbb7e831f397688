"""Inputs on which the AIU Trace Analyzer ends with a traceback: the command says and counts what is bad."""

from __future__ import annotations

import csv
import gzip
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from iaprof.formats.capture.reader import CaptureReader
from unit.in_process import iaprof
from unit.timelines.clock_examples import E1, e6
from unit.timelines.examples import launch

COUNTERS = {"TS1": "1000000", "TS2": "1010000", "TS3": "1030000", "TS4": "1080000", "TS5": "1085000", "Power": "1000"}
K = {"ph": "X", "name": "k_1 Cmpt Exec", "pid": 0, "tid": 1, "ts": 1000, "dur": 50, "args": COUNTERS}
M = {**K, "name": "m_2 Cmpt Exec", "ts": 1070, "dur": 40}
TWO = json.dumps([K, M])


class Case(NamedTuple):
    """A file, and what becomes of its events."""

    content: str | bytes
    slices: int = 3
    others: int = 0  # counters, flows and instants
    dropped: Mapping[str, int] = {}
    merged: int = 0
    said: str = ""  # of the file, on stderr


def between(*events: Any) -> str:
    """A trace of two good kernels with other events between them."""
    return json.dumps([K, *events, M])


def torch(*events: Any, devices: Any = ({"id": 0, "name": "AIU"},)) -> str:
    """A trace in PyTorch's dialect."""
    return json.dumps({"deviceProperties": devices, "traceEvents": events})


def event(phase: str, **members: Any) -> dict[str, Any]:
    """An event on the thread of the kernels."""
    return {"ph": phase, "name": "a", "pid": 0, "tid": 1, "ts": 1005, **members}


FORMS = {
    "truncated": Case(TWO[:-30], 1, 0, {"cut off at the end of the file": 1}),
    "without its bracket": Case(TWO[:-1], 2),
    "with a last comma": Case(TWO[:-1] + ",]", 2),
    "compressed": Case(gzip.compress(TWO.encode()), 2),
    "byte order mark": Case(b"\xef\xbb\xbf" + TWO.encode(), 2),
    "UTF-16": Case(TWO.encode("utf-16"), 2),
    "bad UTF-8": Case(TWO.encode().replace(b"m_2", b"m\xff2"), 2, said="bytes that are not UTF-8"),
    "control character": Case(TWO.replace("m_2", "m\x012"), 2),
    "deep nesting": Case(TWO[:-1] + ',{"ph":"X","a":' + "[" * 100_000 + "]" * 100_000 + "}]", 2, 0, {"unreadable": 1}),
    "null traceEvents": Case('{"traceEvents":null}', 0, said="its traceEvents are not a list"),
}
EVENTS = {
    "text as ts": Case(between({**K, "ts": "soon"}), 2, 0, {"without a time": 1}),
    "null args": Case(between({**K, "args": None})),
    "list of args": Case(between({**K, "args": [1, 2]})),
    "no ph": Case(between({"name": "a", "pid": 0, "ts": 1}), 2, 0, {"without a phase": 1}),
    "no dur": Case(between(event("X")), 2, 0, {"without a duration": 1}),
    "number as name": Case(between({**K, "name": 5})),
    "null, number, list": Case(between(None, 7, [1]), 2, 0, {"not an object": 3}),
    "instant without args": Case(between(event("i")), 2, 1),
    "asynchronous": Case(between(event("b", id=1), event("e", id=1)), 2, 2),
    "other phases": Case(between(*(event(phase) for phase in "PNODvRtnI")), 2, 9),
    "counter Power": Case(between(event("C", name="Power", args={"Watts": 5})), 2, 1),
    "negative dur": Case(between({**K, "dur": -1}), 2, 0, {"negative duration": 1}),
}
PAIRS = {
    "nested": Case(between(event("B"), event("B", name="b"), event("E", name="b"), event("E")), 4, merged=2),
    "interleaved": Case(between(event("B"), event("B", tid=2), event("E"), event("E", tid=2)), 4, merged=2),
    "E without B": Case(between(event("E")), 2, 0, {"end without a beginning": 1}),
    "B without E": Case(between(event("B")), 2, 0, {"beginning without an end": 1}),
}
CYCLES = {
    "integers": Case(between({**K, "args": {name: int(value) for name, value in COUNTERS.items()}})),
    "words": Case(between({**K, "args": dict.fromkeys(COUNTERS, "word")}), said="should be numbers or texts"),
    "some missing": Case(between({**K, "args": {"TS1": "5", "TS3": "6"}})),
    "not rising": Case(between({**K, "args": {**COUNTERS, "TS3": "5", "TS4": "4"}})),
    "no length": Case(between({**K, "dur": 0}), said="slices without a length, which are kept: 1 (1 with cycles)"),
    "equal": Case(between({**K, "args": dict.fromkeys(COUNTERS, "1000")})),
    "kernel without": Case(between({**K, "args": {}})),
    "before its counters": Case(between({**K, "ts": 1, "dur": 1})),
}
TORCH = {
    "no devices": Case(torch({**K, "cat": "kernel"}, devices=[]), 1),
    "two devices": Case(torch({**K, "cat": "kernel"}, devices=[{"id": 0}, {"id": 1}]), 1),
    "devices that are none": Case(torch({**K, "cat": "kernel"}, devices=[5, None, "x"]), 1),
    "no correlation": Case(torch({**K, "cat": "kernel", "args": {"device": 0}}), 1),
    "text as correlation": Case(torch({**K, "cat": "kernel", "args": {"correlation": "x"}}), 1,
                                said="should be numbers or texts"),
    "correlation without cat": Case(torch({**K, "args": {"correlation": 9}}, event("s", id=9)), 1, 1),
    "kernel without counters": Case(torch({**K, "cat": "kernel", "args": {}}), 1),
}  # fmt: skip
STAGES = {
    "40 threads": Case(json.dumps([{**K, "tid": number, "ts": 1000 + number, "dur": 0.5} for number in range(40)]), 40),
    "seven that overlap": Case(json.dumps([{**K, "name": "h", "ts": 1000 + n, "args": {}} for n in range(7)]), 7),
    "ranks not from 0 on": Case(
        json.dumps([{**K, "pid": pid, "args": {**COUNTERS, "CollGroup": "AllReduce_x_1"}} for pid in (3, 9)]), 2
    ),
}
CASES = FORMS | EVENTS | PAIRS | CYCLES | TORCH | STAGES
NO_TRACES = {
    "empty": "", "blank": " \n\n", "scalar": "5", "text": '"x"', "null": "null", "log": "0: a\n1: b\n",
    "other object": '{"a": 1}', "deep": '{"a":' * 100_000,
}  # fmt: skip
EVERYTHING = (
    "--flow", "--collectives", "--power-stats", "--tb", "--keep-prep",
    "--counters", "power_ts4,coll_bw,bandwidth,prep_queue,rcu_util",
)  # fmt: skip


class Imported(NamedTuple):
    """All cases as one capture."""

    path: Path
    said: str
    files: dict[str, dict[str, Any]]  # as in the capture's header


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder = tmp_path_factory.mktemp("malformed")
    paths = [folder / f"{number:02}.txt" for number in range(len(CASES))]  # their names do not tell what they are
    for path, case in zip(paths, CASES.values(), strict=True):
        path.write_bytes(case.content if isinstance(case.content, bytes) else case.content.encode())
    done = iaprof("import", *paths, "-o", folder / "run.parquet")
    assert done.code == 0, done.err
    header = CaptureReader(folder / "run.parquet").header
    return Imported(folder / "run.parquet", done.err, dict(zip(CASES, header["traces"], strict=True)))


@pytest.mark.parametrize("name", CASES)
def test_what_is_bad_is_counted_and_the_rest_kept(imported: Imported, name: str) -> None:
    case, file = CASES[name], imported.files[name]
    counts = file["counts"]
    kept = {kind: counts[kind] for kind in ("slices", "counters", "flows", "instants")}
    assert (kept.pop("slices"), sum(kept.values())) == (case.slices, case.others)
    assert counts["dropped"] == dict(case.dropped)
    assert sum(counts["merged"].values()) == case.merged
    total = case.slices + case.others + sum(case.dropped.values()) + case.merged
    assert counts["events"] == total
    lines = [line for line in imported.said.splitlines() if line.startswith(f"iaprof: warning: {file['name']}: ")]
    if case.dropped:
        ((reason, number),) = case.dropped.items()
        assert any(f"{number} event" in line and f"{number} {reason}" in line for line in lines), imported.said
    assert any(case.said in line for line in lines) or not case.said, imported.said


def no_constant(name: str) -> Any:
    """Refuses what is not JSON."""
    raise ValueError(name)


def check_outputs(folder: Path) -> None:
    """Checks that all files are valid JSON and CSV."""
    for path in folder.iterdir():
        if path.suffix == ".json":
            assert isinstance(json.loads(path.read_text(), parse_constant=no_constant)["traceEvents"], list)
        elif path.suffix == ".csv":
            with path.open(newline="") as file:
                head, *rows = list(csv.reader(file, strict=True))
            assert all(len(row) == len(head) for row in rows), path.name


@pytest.mark.parametrize(
    "options",
    [
        EVERYTHING, ("--overlap", "async"), ("--align-ranks", "dilated", "--split"), ("--merge-sends", "--flow"),
        ("--overlap", "shift", "--align-jobs", "--profile", "torch"), ("--overlap", "drop", "--drop-globals"),
    ],
)  # fmt: skip
def test_stages_make_valid_files_of_what_was_kept(imported: Imported, tmp_path: Path, options: tuple[str, ...]) -> None:
    done = iaprof("timeline", imported.path, "-o", tmp_path / "out", "--json", *options)
    assert done.code == 0, done.err
    check_outputs(tmp_path / "out")
    events = json.loads(done.out, parse_constant=no_constant)["events"]
    rows = sum(CaptureReader(imported.path).count(kind) for kind in ("slice", "counter", "flow", "instant"))
    made, dropped, merged = (sum(events[what].values()) for what in ("made", "dropped", "merged"))
    assert sum(events[kind] for kind in ("slices", "counters", "flows", "instants")) == rows + made - dropped - merged
    for what in ("dropped", "merged", "made"):
        for reason, number in events[what].items():
            assert f"{number:,} {reason}" in done.err


@pytest.mark.parametrize("name", NO_TRACES)
@pytest.mark.parametrize("verb", ["import", "timeline"])
def test_what_is_no_trace_is_one_sentence(tmp_path: Path, name: str, verb: str) -> None:
    (tmp_path / "x.json").write_text(NO_TRACES[name])
    done = iaprof(verb, tmp_path / "x.json", "-o", tmp_path / "out")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("iaprof: ") and done.err.count("\n") == 1
    assert "x.json" in done.err and "trace" in done.err
    assert not [path for path in tmp_path.iterdir() if path.is_file() and path.name != "x.json"]


def test_patterns_that_a_shell_left_alone(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"job-{number}.json").write_text(TWO)
    done = iaprof("timeline", tmp_path / "job-[01].json", "--json", "-q")
    assert [file["name"] for file in json.loads(done.out)["files"]] == ["job-0.json", "job-1.json"]
    assert iaprof("import", tmp_path / "job-*.json", "-o", tmp_path / "run.parquet").code == 0
    done = iaprof("import", tmp_path / "none-*.json", "-o", tmp_path / "none.parquet")
    assert (done.code, done.err) == (1, f"iaprof: no file matches {tmp_path / 'none-*.json'}\n")


def test_pipes_are_imported_alone_and_other_verbs_say_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "x.json").write_text(TWO)

    def write() -> None:
        (tmp_path / "pipe.json").write_text(TWO)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    done = iaprof("import", tmp_path / "pipe.json", "-o", tmp_path / "run.parquet")
    writer.join()
    assert (done.code, CaptureReader(tmp_path / "run.parquet").count("slice")) == (0, 2)
    for words in (("timeline", tmp_path / "pipe.json"), ("timeline", tmp_path / "x.json", tmp_path / "pipe.json"),
                  ("timeline", "/dev/zero")):  # fmt: skip
        done = iaprof(*words)
        assert (done.code, done.out) == (1, "")
        assert "is not a file: traces are read from files" in done.err and done.err.count("\n") == 1


def from_first(active: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table `active` with times from its first one on: redaction moves the clock."""
    first = min(row["Start Time"] for row in active)
    return [row | {name: round(row[name] - first, 1) for name in ("Start Time", "End Time")} for row in active]


def test_other_verbs_work_on_ranks_merged_redacted_and_recovered(tmp_path: Path) -> None:
    contents: list[Any] = [E1, *e6(), {"deviceProperties": [{"id": 0}], "traceEvents": launch()}]
    parts = []
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
        parts.append(tmp_path / f"{number}.parquet")
        assert iaprof("import", tmp_path / f"{number}.json", "-o", parts[-1], "-q").code == 0
    merged, redacted = tmp_path / "merged.parquet", tmp_path / "redacted.parquet"
    assert iaprof("merge", *parts, "-o", merged).code == 0
    assert iaprof("archive", "--redact", merged, "-o", redacted).code == 0
    assert "slices" in iaprof("info", redacted).out
    query = "SELECT count(*) AS n, sum(duration_ns) AS d FROM slices"
    of_each = [iaprof("query", path, query, "--format", "csv").out for path in (merged, redacted)]
    lists = [content["traceEvents"] if isinstance(content, dict) else content for content in contents]
    slices = [event for events in lists for event in events if event["ph"] == "X"]
    assert of_each == [f"n,d\n{len(slices)},{round(sum(each['dur'] for each in slices) * 1000)}\n"] * 2
    together = iaprof("timeline", *(tmp_path / f"{number}.json" for number in range(4)), "--flow", "--json", "-q").out
    for path in (merged, redacted):
        done = iaprof("timeline", path, "--flow", "--json", "-q")
        assert done.code == 0, done.err
        found, expected = json.loads(done.out), json.loads(together)
        assert found["events"] == expected["events"]
        assert from_first(found["tables"]["active"]) == from_first(expected["tables"]["active"])
    done = iaprof("recover", merged, "-o", tmp_path / "recovered.parquet")
    assert (done.code, done.err.count("\n")) == (1, 1)  # a capture is not a spool: one sentence
