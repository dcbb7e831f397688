"""Callers that were guessed are marked in every output, and the stacks that have one are counted as guessed."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.csv
import pyarrow.parquet
import pytest

from iaprof.formats.wire.unwind_rules import Mark
from iaprof.formats.writers.pprof import new_profile
from iaprof.report.merging import merge
from unit.capturing import HEADER, capture, launch, record, stall
from unit.in_process import iaprof

SECOND = 1_000_000_000
APP, PYTHON = 0x1000, 0x4000  # where the two files are mapped
KERNEL = 0x8000_0001_0000
GUESSED, INTERRUPTED, NONE = int(Mark.GUESSED), int(Mark.INTERRUPTED), 0
FUNCTIONS = {0x10: "launch_it", 0x20: "blas", 0x30: "solve", 0x40: "main"}  # each of 16 bytes, at this offset
SHOWN = {"launch_it": APP + 0x10, "blas": APP + 0x28, "solve": APP + 0x38, "main": APP + 0x48}
WHOLE, PART = 1, 2  # samples of each stack
BY_RULES, BY_GUESS = "main;solve;blas;launch_it", "main;solve_[guessed];blas;launch_it"


def stack(number: int, ips: list[int], marks: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """A `stack` row."""
    row = {"id": number, "time_ns": 1, "pid": 7, "truncated": False, "ips": ips, "ended": "whole", "marks": marks}
    return row | more


INNERMOST_FIRST = [SHOWN[name] for name in ("launch_it", "blas", "solve", "main")]
STACKS = [stack(1, INNERMOST_FIRST), stack(2, INNERMOST_FIRST, [NONE, NONE, GUESSED, NONE])]


def file_at(start: int, path: str) -> dict[str, Any]:
    """A `mapping` row."""
    return {"time_ns": 0, "pid": 7, "start": start, "length": 0x1000, "offset": 0, "path": path,
            "build_id": path.encode().ljust(20)[:20], "inode": None}  # fmt: skip


def made(path: Path, stacks: list[dict[str, Any]] = STACKS, **more: Any) -> Path:
    """A capture in which each stack launches a kernel: the stack with number n has n samples of each sort."""
    found: dict[str, list[dict[str, Any]]] = {
        "stall": [], "launch": [], "cpu_sample": [], "stack": stacks,
        "mapping": [file_at(APP, "/opt/libapp.so"), file_at(PYTHON, "/usr/bin/python3.11")],
        "module": [{"id": 1, "what": "file", "path": "/opt/libapp.so", "build_id": b"/opt/libapp.so".ljust(20),
                    "inode": 0, "pid": 0, "source": "symbols", "problem": "", "frame_pointers": None,
                    "outermost": None, "no_calls": None}],
        "symbol": [{"module": 1, "address": at, "size": 16, "depth": 0, "function": name, "file": "", "line": 0}
                   for at, name in FUNCTIONS.items()],
    }  # fmt: skip
    for each in stacks:
        number = each["id"]
        address, time = KERNEL + 0x1000 * number, (number + 2) * SECOND
        found["stall"].append(stall(time, record(address, sbid=number), begin_ns=time - 9))
        found["launch"].append(launch(time - 10, 7, address, number, name="k"))
        sample = {"time_ns": time, "pid": 7, "tid": 7, "cpu": 0, "stack": number, "kernel_stack": 0}
        found["cpu_sample"] += [sample] * number
    header = HEADER | {"end_ns": 20 * SECOND, "stack_ends": {}, "host": {"name": path.name, "boot_id": path.name}}
    return capture(path, header, **(found | more))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return made(tmp_path / "c.parquet")


def folded(path: Path, *words: str) -> list[str]:
    """The lines of folded stacks."""
    done = iaprof("report", path, "-q", "--frames", "cpu", *words)
    assert done.code == 0, done.err
    return sorted(done.out.splitlines())


def test_the_caller_that_was_guessed_is_marked(path: Path) -> None:
    assert folded(path) == [f"{BY_RULES} 1", f"{BY_GUESS} 2"]
    assert folded(path, "--cpu-samples") == [f"{BY_RULES} 1", f"{BY_GUESS} 2"]
    # or it is not, so that stacks merge with those of others who do not tell
    assert folded(path, "--no-mark-guesses") == [f"{BY_RULES} 3"]
    assert folded(path, "--no-mark-guesses", "--cpu-samples") == [f"{BY_RULES} 3"]


def test_what_a_signal_interrupted_is_not_a_guess_and_marks_may_be_hostile(tmp_path: Path) -> None:
    marks = [
        [NONE, NONE, INTERRUPTED, NONE],
        [NONE, NONE, INTERRUPTED | GUESSED, NONE],
        [GUESSED] * 3,  # not as many as addresses
        [GUESSED] * 5,
        [],
    ]
    stacks = [stack(number + 1, INNERMOST_FIRST, each) for number, each in enumerate(marks)]
    assert folded(made(tmp_path / "c", stacks)) == [f"{BY_RULES} {1 + 3 + 4 + 5}", f"{BY_GUESS} 2"]


def test_all_functions_that_are_inlined_at_a_guess_are_guesses(tmp_path: Path) -> None:
    inlined = [
        {"module": 1, "address": at, "size": 16, "depth": depth, "function": name, "file": "app.c", "line": 10 + depth}
        for at, names in {0x10: ["launch_it"], 0x30: ["solve", "step"]}.items()
        for depth, name in enumerate(names)
    ]
    stacks = [stack(1, [SHOWN["launch_it"], SHOWN["solve"]], [NONE, GUESSED])]
    path = made(tmp_path / "c", stacks, symbol=inlined)
    assert folded(path) == ["solve_[guessed];step_[guessed];launch_it 1"]
    assert folded(path, "--no-inlines") == ["solve_[guessed];launch_it 1"]
    assert folded(path, "--lines") == ["solve app.c:10_[guessed];step app.c:11_[guessed];launch_it app.c:10 1"]


def test_frames_without_a_name_are_marked_too(tmp_path: Path) -> None:
    ips = [SHOWN["launch_it"], APP + 0x81, 0x9_0001]  # no symbol, and no mapping
    path = made(tmp_path / "c", [stack(1, ips, [NONE, GUESSED, GUESSED])])
    assert folded(path) == ["0x90000_[guessed];[libapp.so+0x80]_[guessed];launch_it 1"]
    # and diff does not take the address for a difference
    assert (
        ";[unnamed]_[guessed];[libapp.so+0x80]_[guessed];" in iaprof("diff", path, path, "-q", "--format", "folded").out
    )


def test_python_functions_are_known_and_never_marked(tmp_path: Path) -> None:
    # given a stack whose evaluation loop was guessed, as was what called the interpreter
    python = [{"code": 1, "line": 3, "at": 1}]
    ips, marks = [SHOWN["launch_it"], PYTHON + 0x28, PYTHON + 0x38, SHOWN["main"]], [NONE, GUESSED, GUESSED, GUESSED]
    codes = [{"id": 1, "name": "train", "file": "train.py", "first_line": 1}]
    path = made(tmp_path / "c", [stack(1, ips, marks, python=python, python_ended="whole")], python_code=codes)
    assert folded(path) == ["main_[guessed];py::train:train.py;launch_it 1"]
    loop = "main_[guessed];[python3.11+0x37]_[guessed];py::train:train.py;launch_it 1"
    assert folded(path, "--no-hide-cpython") == [loop]


def test_stacks_with_a_guess_are_counted_as_guessed(path: Path) -> None:
    told = "1 of 3 samples (33.3 %) have a whole stack, 2 (66.7 %) a guessed one"
    for verb in ("report", "top"):
        assert f"; stacks: {told}; " in iaprof(verb, path).err
        ends = json.loads(iaprof(verb, path, "-q", "--json").out)["stack_ends"]
        assert [ends[name] for name in ("stacks", "whole", "guessed", "guessed_early", "cut")] == [3, 1, 2, 0, 0]
        assert ends["guesses"] == [{"library": "libapp.so", "count": 2}]
    # whether guesses are marked or not
    assert f"; stacks: {told}; " in iaprof("report", path, "--no-mark-guesses").err


def test_several_captures(path: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "other.parquet")
    done = iaprof("report", path, other, "--frames", "cpu", "--cache", tmp_path / "cache")
    assert sorted(done.out.splitlines()) == [f"{BY_RULES} 2", f"{BY_GUESS} 4"]
    assert "2 of 6 samples (33.3 %) have a whole stack, 4 (66.7 %) a guessed one" in done.err
    # kept profiles, too, and none of these instead of one with other options
    again = iaprof("report", path, other, "--frames", "cpu", "--cache", tmp_path / "cache")
    assert again.out == done.out
    bare = iaprof("report", path, other, "--frames", "cpu", "--cache", tmp_path / "cache", "--no-mark-guesses")
    assert bare.out == f"{BY_RULES} 6\n"
    merge([path, other], tmp_path / "merged.parquet")
    assert folded(tmp_path / "merged.parquet") == [f"{BY_RULES} 2", f"{BY_GUESS} 4"]


def test_archives_and_redacted_ones(path: Path, tmp_path: Path) -> None:
    plain, redacted = tmp_path / "plain.parquet", tmp_path / "redacted.parquet"
    assert iaprof("archive", path, "-o", plain).code == 0
    assert folded(plain) == [f"{BY_RULES} 1", f"{BY_GUESS} 2"]
    assert iaprof("archive", path, "-o", redacted, "--redact").code == 0
    certain, guessed = (line.rpartition(" ")[0].split(";") for line in folded(redacted))
    assert [frame.endswith("_[guessed]") for frame in guessed] == [False, True, False, False]
    assert [frame.removesuffix("_[guessed]") for frame in guessed] == certain
    assert "solve" not in "".join(guessed)


def test_iaprof_text_that_is_imported_again_and_redacted(path: Path, tmp_path: Path) -> None:
    text, imported, redacted = (tmp_path / name for name in ("c.iaprof.txt", "imported.parquet", "redacted.parquet"))
    assert iaprof("report", path, "-q", "-o", text).code == 0
    assert f"\t{BY_GUESS}\n" in text.read_text()
    assert iaprof("import", text, "-o", imported).code == 0
    assert folded(imported) == [f"{BY_RULES} 1", f"{BY_GUESS} 2"]
    assert iaprof("archive", imported, "-o", redacted, "--redact").code == 0
    certain, guessed = (line.rpartition(" ")[0] for line in folded(redacted))
    assert guessed.count("_[guessed]") == 1
    assert guessed.replace("_[guessed]", "") == certain


def written(path: Path, name: str, *words: str) -> bytes:
    """The file that `report -o` writes."""
    output = path.with_name(name)
    done = iaprof("report", path, "-q", "-o", output, *words)
    assert done.code == 0, done.err
    return output.read_bytes()


def test_json(path: Path) -> None:
    launches = json.loads(written(path, "c.json"))["launches"]
    assert sorted(";".join(each["stack"]) for each in launches) == sorted([BY_RULES, BY_GUESS])


def test_speedscope_and_firefox(path: Path) -> None:
    frames = json.loads(written(path, "c.speedscope.json"))["shared"]["frames"]
    assert {"solve", "solve_[guessed]"} < {frame["name"] for frame in frames}
    names = json.loads(written(path, "c.firefox.json"))["shared"]["stringArray"]
    assert {"solve", "solve_[guessed]"} < set(names)


def test_pprof_and_otlp(path: Path) -> None:
    message = new_profile()
    message.ParseFromString(gzip.decompress(written(path, "c.pb.gz")))
    strings = message.string_table
    assert {"solve", "solve_[guessed]"} < {strings[function.name] for function in message.function}
    assert b"solve_[guessed]" in written(path, "c.otlp")


def test_flamescope(tmp_path: Path) -> None:
    ips = [SHOWN["launch_it"], APP + 0x81, SHOWN["solve"]]
    path = made(tmp_path / "c.parquet", [stack(1, ips, [NONE, GUESSED, GUESSED])])
    shown = written(path, "c.perf.txt").decode()
    assert "\t               0 solve_[guessed] (/opt/libapp.so)\n" in shown
    # FlameScope cuts names at a `+`
    assert re.search(r"^\t +80 \[unknown\]_\[guessed\] \(/opt/libapp.so\)$", shown, re.MULTILINE)


def test_traces(path: Path) -> None:
    events = json.loads(written(path, "c.trace.json"))["traceEvents"]
    stacks = {event["args"]["stack"] for event in events if "stack" in event.get("args", {})}
    assert stacks == {BY_RULES, BY_GUESS}
    assert BY_GUESS.encode() in written(path, "c.pftrace")


def test_tables(path: Path) -> None:
    written(path, "c.csv")
    table = pyarrow.csv.read_csv(path.with_name("c.csv"))
    assert set(table["stack"].to_pylist()) == {BY_RULES, BY_GUESS}
    written(path, "c.table.parquet")
    table = pyarrow.parquet.read_table(path.with_name("c.table.parquet"))
    assert set(table["stack"].to_pylist()) == {BY_RULES, BY_GUESS}
    query = "select sum(samples) as n from samples where stack like '%[guessed]%'"
    assert json.loads(iaprof("query", path, query, "--format", "json").out) == [{"n": 2}]


def test_top(tmp_path: Path, path: Path) -> None:
    found = json.loads(iaprof("top", path, "-q", "--json", "--by", "stack").out)["entries"]
    assert sorted(tuple(each["stack"][:3]) for each in found) == [
        ("launch_it", "blas", "solve"),
        ("launch_it", "blas", "solve_[guessed]"),
    ]
    found = json.loads(iaprof("top", path, "-q", "--json", "--by", "stack", "--no-mark-guesses").out)["entries"]
    assert len(found) == 1
    # what launched, if it is a guess
    driver = [{"module": 1, "address": at, "size": 16, "depth": 0, "function": name, "file": "", "line": 0}
              for at, name in {0x10: "zeCommandListAppendLaunchKernel", 0x30: "solve"}.items()]  # fmt: skip
    stacks = [stack(1, [SHOWN["launch_it"], APP + 0x81, SHOWN["solve"]], [NONE, GUESSED, GUESSED])]
    one = made(tmp_path / "one.parquet", stacks, symbol=driver)
    (entry,) = json.loads(iaprof("top", one, "-q", "--json", "--by", "launcher").out)["entries"]
    assert entry["launcher"] == "solve_[guessed]"


def test_diff(path: Path, tmp_path: Path) -> None:
    without = made(tmp_path / "without.parquet", [stack(3, INNERMOST_FIRST)])
    words = ("diff", without, path, "-q", "--normalize", "none", "--format", "folded")
    # stacks that became guesses have changed, unless guesses are not marked
    rest = "-;k_[G];[no binary]_[g];sbid_[g]"
    assert iaprof(*words).out == f"app;{BY_RULES};{rest} 3 1\napp;{BY_GUESS};{rest} 0 2\n"
    assert iaprof(*words, "--no-mark-guesses").out == f"app;{BY_RULES};{rest} 3 3\n"
