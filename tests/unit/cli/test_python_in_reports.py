"""Python frames in reports: filters, counts of incomplete stacks, archives, merged captures and other formats."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from iaprof.cli.terminal.summary import end_line
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.stack_counts import NO_CODE, NOWHERE, Completeness, PythonCounts
from iaprof.formats.profile import StackOptions
from iaprof.formats.stacks.trees import stall_tree
from iaprof.formats.writers.pprof import new_profile
from iaprof.gpu.intel.reasons import REASONS
from iaprof.report.about import about
from iaprof.report.archive.archiving import archive
from iaprof.report.archive.pseudonyms import Pseudonyms
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.merging import merge
from iaprof.report.profile import ReportOptions, build
from iaprof.symbols.cpu_frames import FrameOptions
from iaprof.symbols.names.rows import CaptureNames
from unit.capturing import HEADER, capture, launch, named_by, record, stall
from unit.in_process import Done, iaprof

REAL = Path(__file__).resolve().parents[2] / "data" / "captures" / "format-7.parquet"
SECOND = 1_000_000_000
TEXT = 0x1000  # where the file is mapped
LIBRARY, LOOP, START = (TEXT + offset for offset in (0x10, 0x20, 0x30))
CODES = {0: ("main", "/srv/train.py"), 1: ("Layer.forward", "/srv/model.py"), 2: ("Layer.<lambda>", "/srv/model.py")}
KERNEL = 0x8000_0001_0000


def frame(code: int, line: int = 0, at: int = 1) -> dict[str, int]:
    return {"code": code, "line": line, "at": at}


def stack(number: int, *frames: dict[str, int] | None, ended: str = "whole", **more: Any) -> dict[str, Any]:
    """A `stack` row: the library below the interpreter's loop."""
    row = {"id": number, "time_ns": 1, "pid": 7, "truncated": False, "ips": [LIBRARY, LOOP, START], "ended": "whole",
           "python": list(frames), "python_ended": ended}  # fmt: skip
    return row | more


STACKS = {
    "a": stack(1, frame(0, 3)),
    "b": stack(2, frame(1, 12), frame(0, 5)),
    "c": stack(3, frame(2, 14), frame(1, 13), frame(0, 6)),
    "d": stack(4, frame(NO_CODE), frame(0, 6)),
    "e": stack(5, frame(1, 0, NOWHERE), frame(0, 6), ended="deep"),
    "f": stack(6, frame(1, 7), ended="damaged"),
    "g": stack(7) | {"python": None, "python_ended": None},
}
SAMPLES = {name: 1 << number for number, name in enumerate(STACKS)}  # each sum identifies its stacks
COUNTS = PythonCounts(sum(SAMPLES.values()) - SAMPLES["g"], 7, SAMPLES["e"], SAMPLES["f"], SAMPLES["d"], SAMPLES["e"])


def rows(**more: Any) -> dict[str, list[dict[str, Any]]]:
    """A stall, a launch and a CPU sample of each stack, by as many launches and samples."""
    found: dict[str, list[dict[str, Any]]] = {
        "stall": [],
        "launch": [],
        "cpu_sample": [],
        "stack": list(STACKS.values()),
        "python_code": [{"id": n, "name": name, "file": file, "first_line": 1} for n, (name, file) in CODES.items()],
        "mapping": [{"time_ns": 0, "pid": 7, "start": TEXT, "length": 0x1000, "offset": 0,
                     "path": "/usr/bin/python3.11", "build_id": b"1" * 20, "inode": None}],
    }  # fmt: skip
    for number, (name, each) in enumerate(STACKS.items()):
        address, time = KERNEL + 0x1000 * number, (number + 2) * SECOND
        found["stall"].append(stall(time, record(address, sbid=SAMPLES[name]), begin_ns=time - 9))
        found["launch"].append(launch(time - 10, 7, address, each["id"], name=f"k{name}"))
        sample = {"time_ns": time, "pid": 7, "tid": 7, "cpu": 0, "stack": each["id"], "kernel_stack": 0}
        found["cpu_sample"] += [sample] * SAMPLES[name]
    return found | more


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return capture(tmp_path / "c.parquet", HEADER | {"end_ns": 20 * SECOND}, **rows())


def kept(done: Done) -> str:
    """Returns which of STACKS are in folded stacks, by their sum."""
    if done.code:
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(("iaprof: no stall matches --python ", "iaprof: no CPU sample matches --python "))
        return ""
    assert done.err == ""
    total = sum(int(line.rpartition(" ")[2]) for line in done.out.splitlines())
    return "".join(name for name, samples in SAMPLES.items() if total & samples)


@pytest.mark.parametrize("words", [("--frames", "reason"), ("--cpu-samples", "--frames", "pid")], ids=["stalls", "CPU"])
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", ""),
        ("main", "abcde"),
        ("^forward", ""),
        ("forward$", "bcef"),
        (r"Layer\.", "bcef"),
        ("lambda", "c"),
        ("(?i)LAYER|main", "abcdef"),
        ("train.py", ""),  # that is a file
        (".", "abcdef"),
        ("unknown", ""),  # what has no name is not called so
    ],
)
def test_the_filter_keeps_matching_stacks(path: Path, words: tuple[str, ...], pattern: str, expected: str) -> None:
    done = iaprof("report", path, "-q", *words, "--python", pattern)
    if not pattern:
        assert done.err == "iaprof: --python takes a regular expression, not an empty text\n"
    else:
        assert kept(done) == expected


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}"])
def test_an_invalid_regular_expression_is_refused(path: Path, pattern: str) -> None:
    done = iaprof("top", path, "--python", pattern)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert done.err.startswith("iaprof: --python takes a regular expression, and this is not one: ")


def test_all_verbs_have_the_filter(path: Path) -> None:
    (entry,) = json.loads(iaprof("top", path, "-q", "--json", "--python", "lambda").out)["entries"]
    assert entry["samples"] == SAMPLES["c"]
    assert "kc" in iaprof("annotate", path, "k", "-q", "--python", "lambda").out
    assert "ka" not in iaprof("diff", path, path, "-q", "--python", "lambda").out
    names = {event["name"] for event in traced(path, "--python", "lambda") if event.get("cat") == "launch"}
    assert names == {"kc"}


def traced(path: Path, *words: str) -> list[dict[str, Any]]:
    """The events of a trace, with launches as such."""
    done = iaprof("report", path, "-q", "--format", "chrome", *words)
    events = json.loads(done.out)
    return [event | {"cat": "launch"} if event.get("ph") == "X" else event for event in events["traceEvents"]]


def test_the_filter_matches_functions_of_perf_maps_and_imported_texts(tmp_path: Path) -> None:
    # given a stack whose only Python function is a name of generated code
    generated = {"time_ns": 0, "pid": 7, "start": 0x9000, "length": 0x1000, "offset": 0, "path": "//anon",
                 "build_id": None, "inode": None}  # fmt: skip
    module = {"id": 1, "what": "generated", "path": "//anon", "build_id": None, "inode": 0, "pid": 7,
              "source": "perf map", "problem": "", "frame_pointers": None, "outermost": None,
              "no_calls": None}  # fmt: skip
    symbol = {"module": 1, "address": 0x9000, "size": 64, "depth": 0, "function": "py::train:/srv/train.py", "file": "",
              "line": 0}  # fmt: skip
    made = rows(stack=[stack(1, ips=[LIBRARY, 0x9011], python=None, python_ended=None)])
    made["mapping"].append(generated)
    path = capture(tmp_path / "c.parquet", **made, module=[module], symbol=[symbol])
    # then
    assert kept(iaprof("report", path, "-q", "--python", "^train$")) == "a"
    assert kept(iaprof("report", path, "-q", "--python", "srv")) == ""
    # and when it was written as a text and read again
    text, imported = tmp_path / "c.iaprof.txt", tmp_path / "imported.parquet"
    assert iaprof("report", path, "-q", "-o", text).code == 0
    assert iaprof("import", text, "-o", imported).code == 0
    assert kept(iaprof("report", imported, "-q", "--python", "^train$")) == "a"


def test_python_frames_replace_the_interpreter_s_loop(path: Path) -> None:
    shown = iaprof("report", path, "-q", "--frames", "cpu", "--lines", "--no-hide-cpython").out
    model, train = "/srv/model.py", "/srv/train.py"
    assert (
        f"[python3.11+0x2f];py::main:{train}:6;py::Layer.forward:{model}:13;py::Layer.<lambda>:{model}:14;"
        f"[python3.11+0x10] {SAMPLES['c']}\n"
    ) in shown
    # of which it is not known, in the place of the interpreter's next; and no line where there is none
    cut = "[Python cut: too many functions]"
    assert f"{cut};py::Layer.forward:{model};py::main:{train}:6;[python3.11+0x10] {SAMPLES['e']}\n" in shown
    assert f"[python3.11+0x2f];py::main:{train}:6;py::[unknown];[python3.11+0x10] {SAMPLES['d']}\n" in shown


@pytest.mark.parametrize(
    ("ended", "mark"), [("deep", "too many functions"), ("damaged", "what follows is not a function")]
)
def test_frames_that_are_missing_are_marked_outside_of_those_that_are_there(
    tmp_path: Path, ended: str, mark: str
) -> None:
    # given a function in its loop, and one whose outer functions are missing, so that its loop is unknown
    frames = [{"code": 1, "line": 13, "at": 0}, {"code": 0, "line": 6, "at": 65535}]
    one = STACKS["a"] | {"python": frames, "python_ended": ended}
    path = capture(tmp_path / "c.parquet", HEADER | {"end_ns": 20 * SECOND}, **rows(stack=[one]))
    # then that one replaces the interpreter's next function
    shown = iaprof("report", path, "-q", "--frames", "cpu", "--no-hide-cpython").out
    assert f"[Python cut: {mark}];py::main:/srv/train.py;py::Layer.forward:/srv/model.py {SAMPLES['a']}\n" in shown


# Counts of stacks with all Python frames


def test_counting_states_of_stacks() -> None:
    some = Completeness.SOME
    found = PythonCounts.from_counts(
        {
            some: 5,
            some | Completeness.DEEP | Completeness.UNNAMED: 2,
            some | Completeness.UNPLACED: 1,
            Completeness.NONE: 9,
        },
        3,
    )
    assert found == PythonCounts(8, 5, 2, 0, 2, 1, 3)
    assert found.text("launches") == (
        "5 of 8 launches with Python functions (62.5 %) have all of them, 2 too deep, 2 without a name, "
        "1 without a place; 3 more of Python processes have none"
    )
    assert PythonCounts.from_json(found.to_json()) == found
    assert PythonCounts.total([found, found]).stacks == 16


RECORDED = {
    "launches": PythonCounts(10, 7, 1, 1, 1, 1, none=4).to_json(),
    "cpu_samples": PythonCounts(20, 20).to_json(),
}
LAUNCHES = (
    "7 of 10 launches with Python functions (70.0 %) have all of them, 1 too deep, 1 damaged, 1 without a name, "
    "1 without a place; 4 more of Python processes have none"
)
CPU = "20 of 20 CPU samples with Python functions (100.0 %) have all of them"


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A capture whose header has the counts of the recording."""
    return capture(tmp_path / "told.parquet", HEADER | {"python_stacks": RECORDED}, **rows())


def test_every_verb_reports_how_many_stacks_have_all_python_frames(told: Path) -> None:
    header = CaptureReader(told).header
    assert f"; {LAUNCHES}; {CPU}; lost: nothing ]" in end_line("record", told, header, 1)
    shown = iaprof("info", told).out
    assert "\n  launch Python  7 of 10 launches with Python functions (70.0 %) have all of\n" in shown
    assert "\n  CPU Python     20 of 20 CPU samples with Python functions (100.0 %) have all\n" in shown
    (part,) = json.loads(iaprof("info", "--json", told).out)["parts"]
    assert part["python_stacks"] == RECORDED
    assert ("launch Python", LAUNCHES) in dict(about(CaptureReader(told)).facts)["Quality"]
    for verb in ("report", "top"):
        line = iaprof(verb, told).err
        assert f"; {COUNTS.text('samples')}; recorded stacks: {LAUNCHES}; lost while recording" in line
        found = json.loads(iaprof(verb, "--json", "-q", told).out)
        assert (found["python_stacks"], found["recorded_python_stacks"]) == (COUNTS.to_json(), RECORDED)
    # and for several captures their sum
    other = capture(told.with_name("b"), HEADER | {"python_stacks": RECORDED, "host": {"boot_id": "b"}}, **rows())
    merge([told, other], told.with_name("all"))
    assert "14 of 20 launches with Python functions" in iaprof("info", told.with_name("all")).out


def test_programs_without_python_have_no_such_report(tmp_path: Path) -> None:
    none = {kind: PythonCounts().to_json() for kind in RECORDED}
    path = capture(tmp_path / "c", HEADER | {"python_stacks": none}, stall=[stall(9, record(KERNEL, sbid=3))])
    for done in (iaprof("info", path), iaprof("report", path)):
        assert "Python" not in done.out + done.err
    assert "Python" not in end_line("record", path, CaptureReader(path).header, 1)


JUNK: list[Any] = [None, 5, [], "x", {}, {"stacks": -1}, PythonCounts(1, 2).to_json(), PythonCounts(1, 1, 5).to_json(),
        {**PythonCounts(1, 1).to_json(), "none": "x"}, {**PythonCounts(1, 1).to_json(), "deep": True},
        PythonCounts(1 << 70, 1).to_json()]  # fmt: skip


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_invalid_headers_are_ignored(tmp_path: Path, junk: Any) -> None:
    for value in (junk, {"launches": junk}):
        path = capture(tmp_path / "c", HEADER | {"python_stacks": value}, **rows())
        for done in (iaprof("info", path), iaprof("report", "--json", path)):
            assert (done.code, "launch Python" in done.out) == (0, False)
        assert "Python" not in end_line("record", path, CaptureReader(path).header, 1)


def test_a_real_recording_has_its_counts() -> None:
    reader = CaptureReader(REAL)
    stacks = {row["id"]: row for row in reader.table("stack").to_pylist()}
    rows = [stacks[row["stack"]] for row in reader.table("launch").to_pylist()]
    assert {row["python_ended"] for row in rows} == {"whole"}
    counts = Counter(len(row["python"]) for row in rows)
    assert reader.header["python_stacks"]["launches"] == PythonCounts(len(rows), len(rows)).to_json()
    assert max(counts) > 5
    shown = iaprof("report", REAL, "-q", "--frames", "cpu").out
    assert ";py::train:/opt/example/train.py;py::batches:/opt/example/train.py;" in shown


# Archives and merged captures


def functions(reader: CaptureReader) -> list[tuple[str, str]]:
    return [(row["name"], row["file"]) for row in reader.table("python_code").to_pylist()]


@pytest.mark.parametrize("redact", [False, True])
def test_archives_keep_frames_of_python(tmp_path: Path, redact: bool) -> None:
    before, output = CaptureReader(REAL), tmp_path / "archive.parquet"
    archive(
        before,
        output,
        named_by(CaptureNames),
        lambda *_: None,
        redact=Pseudonyms() if redact else None,
        keep_kernels=False,
    )
    after = CaptureReader(output)
    for kind in ("launch", "stack"):
        assert [row.get("python") for row in after.table(kind).to_pylist()] == [
            row.get("python") for row in before.table(kind).to_pylist()
        ]
    assert after.header["python_stacks"] == before.header["python_stacks"]
    assert len(set(functions(after))) == len(set(functions(before))) == 18
    if not redact:
        assert functions(after) == functions(before)
        return
    assert not {text for each in functions(before) for text in each} & {
        text for each in functions(after) for text in each
    }
    shown = iaprof("report", output, "-q", "--frames", "cpu").out
    assert "train" not in shown
    assert "Layer" not in shown
    assert ";py::function-" in shown


def test_frames_of_merged_captures_have_the_names_of_their_own(tmp_path: Path) -> None:
    paths = []
    for number, name in enumerate(("first", "second")):
        header = HEADER | {"host": {"name": name, "boot_id": name}}
        codes = [{"id": 0, "name": f"{name}_main", "file": f"/{name}.py", "first_line": number}]
        paths.append(capture(tmp_path / name, header, **rows(python_code=codes)))
    merge(paths, tmp_path / "all")
    shown = iaprof("report", tmp_path / "all", "-q", "--frames", "host,cpu").out
    for name, other in (("first", "second"), ("second", "first")):
        lines = [line for line in shown.splitlines() if line.startswith(f"{name};")]
        assert any(f";py::{name}_main:/{name}.py;" in line for line in lines)
        assert not any(other in line for line in lines)
    again = iaprof("report", tmp_path / "all", "-q", "--frames", "host", "--python", "second").out
    assert again == f"second {sum(SAMPLES.values()) - SAMPLES['f'] - SAMPLES['g']}\n"


def test_queries_see_code_objects(path: Path) -> None:
    frames = "SELECT unnest(python).code AS code FROM stacks"
    asked = f"SELECT name, count(*) AS n FROM ({frames}) JOIN python_codes ON id = code GROUP BY ALL"
    found = json.loads(iaprof("query", path, asked, "--json").out)
    assert {row["name"]: row["n"] for row in found} == {"main": 5, "Layer.forward": 4, "Layer.<lambda>": 1}


# Other programs' formats


def own_lines() -> set[tuple[str, str, int]]:
    """Returns function, file and line of each frame of the real recording's stacks."""
    reader = CaptureReader(REAL)
    codes = dict(enumerate(functions(reader)))
    return {(*codes[each["code"]], each["line"]) for row in reader.table("stack").to_pylist() for each in row["python"]}


def test_viewers_get_file_and_line_of_python_frames(tmp_path: Path) -> None:
    expected = {(f"py::{name}:{file}", file, line) for name, file, line in own_lines()}
    assert len(expected) > 20
    # speedscope, where a function is one frame, and has a line where that is the same in all stacks
    frames = json.loads(iaprof("report", REAL, "-q", "--format", "speedscope").out)["shared"]["frames"]
    met = {(each["name"], each["file"], each.get("line")) for each in frames if each["name"][:4] == "py::"}
    often = Counter(name for name, _, _ in expected)
    assert met == {(name, file, line if often[name] == 1 else None) for name, file, line in expected}
    # Firefox
    shared = json.loads(iaprof("report", REAL, "-q", "--format", "firefox").out)
    categories = [each["name"] for each in shared["meta"]["categories"]]
    shared = shared["shared"]
    texts, of_functions, of_frames = shared["stringArray"], shared["funcTable"], shared["frameTable"]
    found = set()
    for function, line, category in zip(*(of_frames[name] for name in ("func", "line", "category")), strict=True):
        name = texts[of_functions["name"][function]]
        assert (categories[category] == "Python") == name.startswith("py::")
        if name.startswith("py::"):
            source = shared["sources"]["filename"][of_functions["source"][function]]
            found.add((name, texts[source], line))
    assert found == expected
    # pprof
    path = tmp_path / "c.pb.gz"
    assert iaprof("report", REAL, "-q", "-o", path).code == 0
    profile = new_profile()
    profile.ParseFromString(gzip.decompress(path.read_bytes()))
    texts = profile.string_table
    names = {each.id: (texts[each.name], texts[each.filename]) for each in profile.function}
    lines = {(*names[each.function_id], each.line) for location in profile.location for each in location.line}
    assert {each for each in lines if each[0].startswith("py::")} == expected


def test_pictures_have_a_colour_for_python_frames() -> None:
    picture = iaprof("report", REAL, "-q", "--format", "svg").out
    titles = re.findall(r'<g class="(k\d+)"[^>]*><title>(py::)?[^<]* \(([^,()]+), ', picture)
    kinds = {(css, kind) for css, python, kind in titles if python}
    assert len(kinds) == 1
    assert kinds.isdisjoint({(css, kind) for css, python, kind in titles if not python})
    assert {kind for _, kind in kinds} == {"Python"}


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_hidden_interpreter_is_unnamed_only_without_python_functions(path: Path, is_shown: bool) -> None:
    # given unnamed frames of an interpreter in all stacks, one of which has no Python function
    capture_, wanted = CaptureReader(path), ReportOptions(frame_options=FrameOptions(interpreter=is_shown))
    with GpuModuleLoader() as modules:
        facts = build(capture_, modules, wanted).facts
    # then they count as unnamed where they are shown
    (module,) = facts.cpu_modules
    assert module.names.module.path == "/usr/bin/python3.11"
    missed = 1.0 if is_shown else SAMPLES["g"] / sum(SAMPLES.values())
    assert module.share == module.unnamed == pytest.approx(missed)


def test_a_frame_of_calls_in_several_lines_has_no_line() -> None:
    with GpuModuleLoader() as modules:
        profile = build(CaptureReader(REAL), modules).profile
    found = {frame.text: frame.line for frame in stall_tree(profile, StackOptions(), lambda frame: frame.text).frames}
    lines: dict[str, set[int]] = {}
    for name, file, line in own_lines():
        lines.setdefault(f"py::{name}:{file}", set()).add(line)
    assert {1, 2} <= {len(each) for each in lines.values()}
    for name, each in lines.items():
        assert found[name] == (each.pop() if len(each) == 1 else 0)


def test_labels_of_imported_stacks_stay_when_they_are_redacted(tmp_path: Path) -> None:
    labels = ["[Python cut: too many functions]", "[Python cut: what follows is not a function]", "py::[unknown]"]
    sample = {"time_ns": 1, "comm": "app", "pid": 7, "address": 64, "kernel": "k", "file": "", "offset": 0,
              "mnemonic": "mov", **dict.fromkeys(REASONS, 1)}  # fmt: skip
    stacks = [";".join((label, "py::main:/srv/train.py", "[Python cut: main]")) for label in labels]
    header = HEADER | {"imported": {"format": "iaprof 2026.2"}}
    before = capture(tmp_path / "c", header, sample=[sample | {"stack": each} for each in stacks])
    archive(
        CaptureReader(before),
        tmp_path / "d",
        named_by(CaptureNames),
        lambda *_: None,
        redact=Pseudonyms(),
        keep_kernels=False,
    )
    after = [row["stack"].split(";") for row in CaptureReader(tmp_path / "d").table("sample").to_pylist()]
    assert [label for label, _, _ in after] == labels
    for _, function, no_label in after:
        assert re.fullmatch("py::function-[0-9a-f]{8}", function)
        assert re.fullmatch("function-[0-9a-f]{8}", no_label)


def test_labels_of_cut_stacks_name_the_code(path: Path, tmp_path: Path) -> None:
    cut = STACKS["a"] | stack(1, frame(1, 1, 2), ended="deep") | {"ended": "memory"}
    capture(tmp_path / "d.parquet", HEADER | {"end_ns": 20 * SECOND}, **rows(stack=[cut]))
    done = iaprof("report", tmp_path / "d.parquet", "-q", "--kernel", "ka")
    assert "[cut in python3.11: " in done.out
