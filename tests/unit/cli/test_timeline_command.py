"""`iaprof timeline` from the command line: what it prints and writes."""

from __future__ import annotations

import csv
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from iaprof.timelines.outputs import tables
from iaprof.timelines.stages.energy import TABLE
from unit.in_process import iaprof

DATA = Path(__file__).resolve().parents[1] / "timelines" / "data"
SAMPLE = (str(DATA / "sample_flex.json"), "-c", str(DATA / "sample_compiler_log.txt"), "--freq", "557.1:1100")


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_sample_of_the_runtime(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = iaprof("timeline", *SAMPLE, "-o", out)
    # the numbers that the AIU Trace Analyzer prints, but for the share of time: two kernels run at once
    assert done.code == 0
    assert "11,763.227 us  2,702.122 us  20.58 %" in done.out
    (active,) = rows(out / "active.csv")
    assert (active["Total Kernel Time"], active["Active percentage"]) == ("2702.1217", "20.58")
    total = next(row for row in rows(out / "categories.csv") if row["Category"] == "Total")
    assert (total["Ideal_Time"], total["Ideal_Cyc"], total["PT_Util"]) == ("505.7600", "556336", "0.1872")
    assert "Total" in (out / "categories.txt").read_text()
    assert sum(int(row["Calls"]) for row in rows(out / "summary.csv")) == 17
    trace = json.loads((out / "trace.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 17
    assert trace["deviceProperties"] == [{"id": 0, "type": "AIU", "name": "AIU"}]
    packets = pb.Trace.FromString((out / "trace.pftrace").read_bytes()).packet
    assert sum(packet.track_event.type == pb.TrackEvent.TYPE_SLICE_BEGIN for packet in packets) == 17


def test_a_trace_of_perfettos_says_the_same_as_the_json_beside_it(tmp_path: Path) -> None:
    assert iaprof("timeline", *SAMPLE, "-o", tmp_path / "out", "-q").code == 0
    tables, durations = {}, {}
    for name in ("trace.json", "trace.pftrace"):
        path = tmp_path / f"{name}.parquet"
        assert iaprof("import", tmp_path / "out" / name, "-o", path, "-q").code == 0

        def query(sql: str, path: Path = path) -> list[str]:
            return iaprof("query", path, sql, "--format=csv").out.splitlines()[1:]

        slices = query("SELECT time_ns, pid, tid, name, category, ts1, ts5, power, device FROM slices ORDER BY ALL")
        values = query("SELECT time_ns, pid, name, series, value FROM counters ORDER BY ALL")
        tables[name] = slices, values
        durations[name] = [int(line) for line in query("SELECT duration_ns FROM slices ORDER BY time_ns, name")]
    assert [len(slices) for slices, _ in tables.values()] == [17, 17]
    # Ends are rounded down in one of them, to the nearest ns in the other.
    pairs = zip(durations["trace.json"], durations["trace.pftrace"], strict=True)
    assert {nearest - below for nearest, below in pairs} == {0, 1}
    assert tables["trace.json"] == tables["trace.pftrace"]


def test_times_of_the_sample_are_exact_where_the_reference_rounds_them(tmp_path: Path) -> None:
    """It subtracts times of 1.5e12 us, which float64 resolves to 0.24 ns."""
    done = iaprof("timeline", *SAMPLE, "--json")
    notes = [message["text"] for message in json.loads(done.out)["messages"] if message["stage"] == "FREQ"]
    events = json.loads((DATA / "sample_flex.json").read_text(), parse_float=str)
    for number, digits in ((Fraction, "557.05/557.08/557.45"), (float, "557.05/557.09/557.48")):
        mhz = []
        for begin, end in zip(events[::2], events[1::2], strict=True):
            cycles = int(begin["attr"]["TS4"], 16) - int(begin["attr"]["TS3"], 16)
            mhz.append(float(cycles / (number(end["ts"]) - number(begin["ts"]))))
        assert f"{min(mhz):.2f}/{sum(mhz) / len(mhz):.2f}/{max(mhz):.2f}" == digits  # the second line: the reference's
    assert any("durations of kernels give 557.05/557.08/557.45 MHz" in note for note in notes)


def test_traces_and_the_capture_of_them_give_the_same(tmp_path: Path) -> None:
    assert iaprof("import", SAMPLE[0], "-o", tmp_path / "run.parquet").code == 0
    from_capture = iaprof("timeline", tmp_path / "run.parquet", *SAMPLE[1:], "-o", tmp_path / "a", "-q")
    from_traces = iaprof("timeline", *SAMPLE, "-o", tmp_path / "b", "-q")
    assert (from_capture.code, from_capture.out) == (0, from_traces.out)
    for path in sorted((tmp_path / "a").iterdir()):
        one, other = (
            [line for line in (tmp_path / folder / path.name).read_bytes().splitlines() if b"CmdLine" not in line]
            for folder in "ab"
        )
        assert one == other, path.name


def test_traces_are_read_without_a_word_of_the_capture_in_between() -> None:
    said = iaprof("timeline", *SAMPLE).err
    assert "[ iaprof timeline: read 1 trace, 34 events: 17 slices, 17 merged ]" in said
    assert "parquet" not in said


def test_json_has_everything(tmp_path: Path) -> None:
    def no_constant(name: str) -> Any:
        raise ValueError(name)

    done = iaprof("timeline", *SAMPLE, "--json")
    found = json.loads(done.out, parse_constant=no_constant)
    assert found["files"] == [{"name": "sample_flex.json", "dialect": "flex", "rank": 0, "ranks": [0]}]
    assert found["events"]["slices"] == 17
    assert found["tables"]["active"][0]["Active percentage"] == 20.58
    assert {"level": "note", "stage": "ITSTATS", "text": "[0] avg_iteration_time=0.0, iterations=0"} in found[
        "messages"
    ]


def test_dumps_and_files_for_tensorboard(tmp_path: Path) -> None:
    done = iaprof("timeline", *SAMPLE, "-o", tmp_path, "--tb", "--dump-after", "normalize_phase1", "-q")
    assert (done.code, done.err) == (0, "")
    (dump,) = tmp_path.glob("*_normalize_phase1.json")
    # which is before numbers are taken out of names
    numbered = re.compile(r"_\d+ Cmpt Exec$")
    names = [[event["name"] for event in json.loads(path.read_text())["traceEvents"]]
             for path in (dump, tmp_path / "trace.json")]  # fmt: skip
    assert [any(map(numbered.search, each)) for each in names] == [True, False]
    worker = json.loads((tmp_path / "trace_worker_0.pt.trace.json").read_text())
    slices = [event for event in worker["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in slices[:1]] == ["ProfilerStep#0"] and len(slices) == 1 + 17


def test_stages_are_listed_with_what_a_profile_turns_off() -> None:
    everything = iaprof("timeline", "--list-stages").out
    minimal = iaprof("timeline", "--list-stages", "--profile", "minimal").out
    assert "  off  " not in everything
    assert minimal.count("  off  ") > 10
    assert len(minimal.splitlines()) == len(everything.splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("x.json", "--freq", "0"), "0 is not a frequency in MHz"),
        (("x.json", "--freq", "1:2:3"), "1:2:3 is not a frequency"),
        (("x.json", "--counters", "watts"), "there is no watts; there are power_ts4"),
        (("x.json", "--counters", "power_ts3,power_ts4"), "give one of them"),
        (("x.json", "--power-scale", "0"), "0 is not a number of watts above 0"),
        (("x.json", "--overlap", "stack"), "there is no stack; there are tid, drop, async, shift, warn"),
        (("x.json", "--align-ranks", "loose"), "there is no loose"),
        (("x.json", "--filter", "name"), "name is not an ATTRIBUTE:REGEX"),
        (("x.json", "--filter", "name:["), "is not an ATTRIBUTE:REGEX"),
        (("x.json", "--limit", '{"first": 3}'), "is not a JSON object with count"),
        (("x.json", "--limit", '{"skip": "3"}'), "has a value that is not a number"),
        (("x.json", "--stages", "none_such"), "there is no stage none_such"),
        (("x.json", "--profile", "none_such"), "there is no profile none_such"),
        (("x.json", "--dump-after", "all"), "--dump-after needs a folder"),
        (("x.json", "--pddf"), "--tb, --html and --pddf need a folder"),
        (("x.json", "--power-stats", "--counters", "none"), "--power-stats needs the counter power_ts4"),
    ],
)
def test_wrong_usage_is_one_sentence(words: tuple[str, ...], message: str) -> None:
    done = iaprof("timeline", *words)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1


def test_files_that_are_not_there_or_in_the_way(tmp_path: Path) -> None:
    done = iaprof("timeline", tmp_path / "absent.json")
    assert (done.code, done.err.count("\n")) == (1, 1)
    (tmp_path / "file").touch()
    assert "is not a folder" in iaprof("timeline", *SAMPLE, "-o", tmp_path / "file").err
    assert "is not empty" in iaprof("timeline", *SAMPLE, "-o", tmp_path).err
    assert iaprof("timeline", *SAMPLE, "-o", tmp_path, "--force").code == 0


def test_a_row_for_each_slice(tmp_path: Path) -> None:
    assert iaprof("timeline", *SAMPLE, "-o", tmp_path, "--pddf", "-q").code == 0
    found = rows(tmp_path / "pddf.csv")
    assert list(found[0]) == [
        "Rank", "Timestamp", "Duration", "Category", "Event Name", "Event CLass", "Job", "Size", "PT_Active",
    ]  # fmt: skip
    assert len(found) == 17
    assert sum(float(row["Duration"]) for row in found) == pytest.approx(2702.122, abs=0.01)
    # 104.7709 us of ideal time, in the table of categories, of 353.513 us
    assert float(found[0]["PT_Active"]) == pytest.approx(104.7709 / 353.513, rel=1e-4)
    assert (found[0]["Category"], found[0]["Event CLass"], found[0]["Job"]) == (
        "kernel", "COMPUTE_EXEC", "sample_flex.json",
    )  # fmt: skip
    times = [float(row["Timestamp"]) for row in found]
    assert times == sorted(times)


def kernel(pid: int, ts: float = 0) -> dict[str, Any]:
    counters = {f"TS{number}": str(1000 * number) for number in range(1, 6)}
    return {"ph": "X", "name": "k Cmpt Exec", "pid": pid, "tid": 1, "ts": ts, "dur": 1, "args": counters}


def files_of(tmp_path: Path, *contents: Any) -> list[Path]:
    paths = []
    for number, content in enumerate(contents):
        paths.append(tmp_path / f"job-{number}.json")
        paths[-1].write_text(json.dumps(content))
    return paths


def test_json_has_the_ranks_of_each_file(tmp_path: Path) -> None:
    # Given files of ranks 3, of 1 and 2, of no rank, and of PyTorch's ranks 5 and 6, the last without events
    torch = {"deviceProperties": [{"id": 0}], "distributedInfo": {"rank": 5}}
    host = {"ph": "X", "cat": "cpu_op", "name": "mm", "pid": 77, "tid": 1, "ts": 0, "dur": 1}
    files = files_of(
        tmp_path, [kernel(3)], [kernel(1), kernel(2)], [], {**torch, "traceEvents": [host]},
        {**torch, "distributedInfo": {"rank": 6}, "traceEvents": []},
    )  # fmt: skip
    found = json.loads(iaprof("timeline", *files, "--json", "-q").out)["files"]
    assert [(file["rank"], file["ranks"]) for file in found] == [
        (3, [3]), (None, [1, 2]), (None, []), (5, [5]), (6, [6]),
    ]  # fmt: skip


@pytest.mark.parametrize("words", [["timeline", "{trace}"], ["timeline", "{trace}", "-o", "{out}"],
                                   ["diff", "{capture}", "{capture}"]])  # fmt: skip
def test_a_compiler_log_that_is_missing_is_an_error(tmp_path: Path, words: list[str]) -> None:
    (trace,) = files_of(tmp_path, [kernel(0)])
    capture = tmp_path / "run.parquet"
    assert iaprof("import", trace, "-o", capture, "-q").code == 0
    places = {"trace": trace, "capture": capture, "out": tmp_path / "out"}
    done = iaprof(*(word.format(**places) for word in words), "-c", tmp_path / "none.log")
    message = f"-c: {tmp_path / 'none.log'} is neither a file nor a folder: name a compiler log, or a folder of one"
    assert (done.code, done.out, done.err) == (1, "", f"iaprof: {message}\n")
    assert not (tmp_path / "out").exists()


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    for content in ("", " \n\n"):
        (tmp_path / "x.json").write_text(content)
        done = iaprof("import", tmp_path / "x.json", "-o", tmp_path / "x.parquet")
        assert (done.code, done.err.splitlines()) == (
            1, [f"iaprof: {tmp_path / 'x.json'} is empty: pass an iaprof text or a trace"],
        )  # fmt: skip
        assert "x.json is empty: it is not a trace" in iaprof("timeline", tmp_path / "x.json").err


def test_a_failed_run_leaves_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("")
    (tmp_path / "there").mkdir()
    for folder in ("new", "new/inside/deeper", "there", "there/inside"):
        assert iaprof("timeline", tmp_path / "bad.json", "-o", tmp_path / folder).code == 1
        assert iaprof("timeline", tmp_path / "absent.json", "-o", tmp_path / folder).code == 1
    # A folder that was there stays
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bad.json", "there"]


def test_force_leaves_files_of_one_run_only(tmp_path: Path) -> None:
    # Given what a run with many outputs left, and files of the user's
    ranks = files_of(tmp_path, [kernel(0)], [kernel(1)])
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    (out / "01_mine.json").parent.mkdir()
    for name in ("notes.txt", "my.csv", "01_mine.json", "trace_worker_x.pt.trace.json"):
        (out / name).write_text("mine")
    options = ("--html", "--pddf", "--tb", "--dump-after", "all", "--power-stats", "--collectives")
    assert iaprof("timeline", *SAMPLE, *options, "-o", out, "--force", "-q").code == 0
    assert iaprof("timeline", *ranks, "--tb", "-o", out, "--force", "-q").code == 0
    assert iaprof("timeline", ranks[0], "-o", out, "--force", "-q").code == 0
    assert iaprof("timeline", ranks[0], "-o", fresh, "-q").code == 0
    # Then there is what the last run wrote, and the user's files
    mine = {"notes.txt", "my.csv", "01_mine.json", "trace_worker_x.pt.trace.json"}
    assert {path.name for path in out.iterdir()} == {path.name for path in fresh.iterdir()} | mine


def test_force_keeps_what_the_run_reads_and_dumps(tmp_path: Path) -> None:
    assert iaprof("timeline", *SAMPLE, "-o", tmp_path, "--pddf", "--tb", "-q").code == 0
    read = tmp_path / "trace_worker_0.pt.trace.json"
    assert iaprof("timeline", read, "-o", tmp_path, "--dump-after", "normalize_phase1", "--force", "-q").code == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert {read.name, "00_normalize_phase1.json", "trace.json"} <= names
    assert not {"pddf.csv", "categories.csv", "categories.txt"} & names


def test_every_table_is_known_to_force() -> None:
    sources = (Path(tables.__file__).parents[1] / "stages").rglob("*.py")
    names = {name for source in sources for name in re.findall(r'trace\.tables\["(\w+)"\] =', source.read_text())}
    assert names | {TABLE} == set(tables.TABLES)
