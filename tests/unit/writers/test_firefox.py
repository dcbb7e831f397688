"""The Firefox Profiler's format, checked against the published description of version 63."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions, reason_name
from iaprof.formats.writers.firefox import Firefox
from iaprof.gpu.intel.reasons import REASONS
from unit import made_timelines, stalled
from unit.profiles import Row, counts

SHARED = {  # columns by table: src/types/profile.ts of firefox-devtools/profiler at that version
    "stackTable": "frame prefix",
    "frameTable": "address inlineDepth category subcategory func nativeSymbol innerWindowID line column",
    "funcTable": "name isJS relevantForJS resource source lineNumber columnNumber",
    "resourceTable": "lib name host type",
    "nativeSymbols": "libIndex address name functionSize",
    "sources": "id filename startLine startColumn sourceMapURL",
}
THREAD = (
    "name processName processType isMainThread pid tid processStartupTime processShutdownTime registerTime"
    " unregisterTime pausedRanges samples markers"
)


def written(export: Export, options: StackOptions | None = None) -> Any:
    out = io.StringIO()
    Firefox().write(export, options or StackOptions(), out)
    return json.loads(out.getvalue())


def stack(document: Any, number: int | None) -> str:
    """The frames of a stack from the root, each with category, source place and library."""
    shared = document["shared"]
    strings, frames, functions = shared["stringArray"], shared["frameTable"], shared["funcTable"]
    categories = document["meta"]["categories"]
    found = []
    while number is not None:
        frame = shared["stackTable"]["frame"][number]
        function = frames["func"][frame]
        source, resource = functions["source"][function], functions["resource"][function]
        text = strings[functions["name"][function]]
        if source is not None:
            text += f" {strings[shared['sources']['filename'][source]]}:{frames['line'][frame]}"
        if resource >= 0:
            text += f" in {strings[shared['resourceTable']['name'][resource]]}"
        if (category := frames["category"][frame]) is not None:
            category = categories[category]
            text += f" ({category['name']}, {category['subcategories'][frames['subcategory'][frame]]})"
        found.append(text)
        prefix = shared["stackTable"]["prefix"][number]
        assert prefix is None or prefix < number
        number = prefix
    return "; ".join(reversed(found))


def samples(document: Any, thread: dict[str, Any]) -> list[str]:
    """A line per sample: time, stack, weight and CPU use."""
    lines = []
    before = 0.0
    columns = (thread["samples"][name] for name in ("stack", "time", "weight", "threadCPUDelta"))
    for number, time, weight, used in zip(*columns, strict=True):
        busy = round(100 * used / 1e9 / (time - before)) if time > before else 0
        lines.append(f"{time:g} ms: {weight} of {stack(document, number) or 'nothing'}, {busy} %")
        before = time
    return lines


def test_each_process_has_threads_of_stalls_and_cpu_samples() -> None:
    document = written(stalled.export())
    threads = document["threads"]
    assert [(each["processName"], each["pid"], each["name"], each["isMainThread"]) for each in threads] == [
        ("app", "42", "GPU samples", True),
        ("app", "42", "CPU samples", False),
        ("Web Content on north", "7 on north", "GPU samples", True),
        ("[unknown process]", "[unknown process]", "GPU samples", True),
        ("swapper", "swapper", "CPU samples", True),
    ]
    assert len({each["tid"] for each in threads}) == len(threads)
    assert document["meta"]["initialVisibleThreads"] == [0, 1, 2, 3]
    assert sum(sum(each["samples"]["weight"]) for each in threads if each["name"] == "GPU samples") == stalled.SAMPLES
    assert sum(sum(each["samples"]["weight"]) for each in threads if each["name"] == "CPU samples") == 6


def test_stacks_share_an_interval_by_their_samples() -> None:
    document = written(stalled.export(), StackOptions(components=("process", "cpu", "function", "reason")))
    main, run = "main src/main.c:12 in app (C, Other)", "nn::run(int) nn/run.cpp:40 in libnn so.1 (C++, Other)"
    cpu = f"{main}; {run}; do_syscall_64 in [kernel] (OS kernel, Other)"
    gpu = "matmul src/matmul.cl:4 in GPU (GPU source, Other); dot(float) src/vec.h:9 in GPU (GPU source, Other)"
    app, _, other, unknown, _ = document["threads"]
    found = samples(document, app)
    assert found[0] == "0 ms: 0 of nothing, 0 %"
    # of an interval of 20 ms, the busiest, which the others relate to
    assert sorted(line.split(": ", 1)[1] for line in found[1:4]) == sorted(
        [
            f"10 of {cpu}; {gpu}; active in GPU (GPU instruction, active), 100 %",
            f"70 of {cpu}; {gpu}; stall: sbid in GPU (GPU instruction, stall: sbid), 100 %",
            "20 of main src/main.c:15 in app (C, Other); matmul src/matmul.cl:5 in GPU (GPU source, Other);"
            " stall: tdr in GPU (GPU instruction, stall: tdr), 100 %",
        ]
    )
    assert found[4:] == [
        "60 ms: 0 of nothing, 0 %",
        f"80 ms: 2 of {cpu}; {gpu}; stall: sbid in GPU (GPU instruction, stall: sbid), 2 %",
    ]
    assert samples(document, other) == [
        "20 ms: 0 of nothing, 0 %",
        f"40 ms: 5 of [libfoo.so+0x1f0] (unknown, Other); {gpu};"
        " stall: send in GPU (GPU instruction, stall: send), 5 %",
    ]
    assert samples(document, unknown)[1:] == [
        "80 ms: 3 of [unknown process] (process, Other); [unknown kernel] (unknown, Other);"
        " stall: control in GPU (GPU instruction, stall: control), 3 %"
    ]


def test_consecutive_intervals_have_no_gap() -> None:
    rows = [
        Row(interval, stalled.APP, stalled.MATMUL, stalled.SEND, 0, counts(sbid=9 - interval)) for interval in (1, 2)
    ]
    document = written(stalled.export(rows, cpu=False), StackOptions(components=("reason",)))
    assert samples(document, document["threads"][0]) == [
        "20 ms: 0 of nothing, 0 %",
        "40 ms: 8 of stall: sbid in GPU (GPU instruction, stall: sbid), 100 %",
        "60 ms: 7 of stall: sbid in GPU (GPU instruction, stall: sbid), 88 %",
    ]


@pytest.mark.parametrize("export", [stalled.export(), stalled.hostile(), stalled.export([], cpu=False)])
def test_the_published_tables_as_the_profiler_itself_cannot_be_had_offline(export: Export) -> None:
    document = written(export, StackOptions(components=("cpu", "function", "reason", "offset")))
    assert document.keys() == {"meta", "libs", "shared", "threads", "counters"}
    assert document["meta"]["preprocessedProfileVersion"] == 63
    assert {
        "interval",
        "startTime",
        "processType",
        "product",
        "stackwalk",
        "version",
        "categories",
        "markerSchema",
    } <= set(document["meta"])
    assert [each["color"] for each in document["meta"]["categories"]].count("grey") == 1
    shared = document["shared"]
    for table, columns in SHARED.items():
        assert shared[table].keys() == {*columns.split(), "length"}
        assert {len(shared[table][column]) for column in columns.split()} == {shared[table]["length"]}
    assert shared.keys() == {*SHARED, "stringArray"}
    assert len(set(shared["stringArray"])) == len(shared["stringArray"])
    assert all(text.isprintable() for text in shared["stringArray"])
    for thread in document["threads"]:
        assert thread.keys() == set(THREAD.split())
        table = thread["samples"]
        assert {len(table[name]) for name in ("stack", "time", "weight", "threadCPUDelta")} == {table["length"]}
        assert table["time"] == sorted(table["time"])
        assert all(stack(document, number) for number in set(table["stack"]) if number is not None)
    totals = Counter[str]()
    for thread in document["threads"]:
        totals[thread["name"]] += sum(thread["samples"]["weight"])
    assert totals["GPU samples"] == int(export.profile.counts.sum())


def test_an_offset_has_the_category_of_its_reason() -> None:
    document = written(stalled.export(), StackOptions(components=("reason", "offset")))
    last = stack(document, document["threads"][0]["samples"]["stack"][1])
    assert last.split("; ")[1] in ("0x10 in GPU", "0x20 in GPU")
    assert document["meta"]["categories"][-1]["subcategories"] == ["Other", *map(reason_name, REASONS)]


def marks(document: Any) -> list[str]:
    """A line per marker: process, name, times and what is told of it, by the schema of its type."""
    strings, schemas = document["shared"]["stringArray"], document["meta"]["markerSchema"]
    fields = {each["name"]: {field["key"]: field["format"] for field in each["fields"]} for each in schemas}
    lines = []
    for thread in document["threads"]:
        table = thread["markers"]
        columns = (table[name] for name in ("name", "startTime", "endTime", "phase", "data"))
        assert table["length"] == len(table["category"]) == len(table["name"])
        for name, start, end, phase, data in zip(*columns, strict=True):
            assert phase == 1
            of = fields[data["type"]]
            assert data.keys() == {"type", *of}
            told = [strings[data[key]] if of[key] == "unique-string" else str(data[key]) for key in of]
            lines.append(f"{thread['processName']}: {strings[name]}, {start:g} to {end:g} ms, {data['type']} {told}")
    return lines


def test_launches_and_when_kernels_were_seen_are_markers_of_their_processes() -> None:
    found = marks(written(made_timelines.executed()))
    assert found[:3] == [
        "app: matmul \u00d7100, 0 to 300 ms, Launches ['matmul', '100', '7']",
        "app: matmul, 50 to 400 ms, Execution ['matmul', '6', 'card0', 'main']",
        "app: matmul, 60 to 60 ms, Execution ['matmul', '2', 'card0', 'main;a\\\\x1b[2J\\\\x0a\"]}</script>\\\\u202e']",
    ]
    assert (
        "[unknown process]: [unknown kernel], 900 to 1000 ms, Execution ['[unknown kernel]', '1', 'card1', '']" in found
    )
    assert len(found) == 5 + 4


def test_metrics_are_counters_by_what_they_change() -> None:
    document = written(made_timelines.export())
    of = {each["name"]: each for each in document["counters"]}
    frequency = of["frequency actual, MHz"]
    assert frequency["samples"] == {"time": [50.0, 150.0], "count": [400.0, 2000.5], "length": 2}
    assert frequency["pid"] == document["threads"][frequency["mainThreadIndex"]]["pid"]
    assert frequency["display"]["graphType"] == "line-accumulated"


def test_cpu_samples_alone() -> None:
    document = written(stalled.export(), StackOptions(cpu_samples=True))
    assert {each["name"] for each in document["threads"]} == {"CPU samples"}
    assert sum(sum(each["samples"]["weight"]) for each in document["threads"]) == 6


def test_a_large_capture_is_written_from_its_profile_by_interval() -> None:
    export = stalled.export(stalled.ROWS[:1])
    document = written(Export(export.profile, export.about, 0.02, by_time=stalled.export().profile))
    assert sum(sum(each["samples"]["weight"]) for each in document["threads"]) == stalled.SAMPLES


def firefox_total(file: Path) -> int:
    threads = json.loads(file.read_text())["threads"]
    return sum(sum(thread["samples"]["weight"]) for thread in threads if "GPU" in thread["name"])


TOTALS = {"firefox": firefox_total}
