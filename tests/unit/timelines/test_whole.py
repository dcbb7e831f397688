"""All stages and outputs on traces of any kind: nothing raises, every event is accounted for, files are valid."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings, strategies as st

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.profile import StackOptions
from iaprof.report.about import about
from iaprof.timelines.load import arguments, load
from iaprof.timelines.options import DEFAULT_TRACKS, CounterTrack, Limit, Options, Overlap
from iaprof.timelines.outputs.chrome import workers, write_chrome
from iaprof.timelines.outputs.formats import FORMATS, TimeLine, writer_of
from iaprof.timelines.outputs.pddf import write_pddf
from iaprof.timelines.outputs.tables import write_csv, write_text
from iaprof.timelines.registry import STAGES, Stage, run
from iaprof.timelines.trace import Trace
from thorough import thorough
from unit.timelines.clock_examples import E1, E9_FLEX, E9_TORCH, E12, e6
from unit.timelines.examples import launch
from unit.timelines.reading.importing import imported
from unit.timelines.test_shares import too_large

DATA = Path(__file__).with_name("data")
SAMPLE = json.loads((DATA / "sample_flex.json").read_text())

_TIMES = st.integers(-5, 3000) | st.floats(-1e3, 1e16) | st.sampled_from([0, 1e12, 4611686018427387, -(1 << 62), 1e400])
_LENGTHS = st.integers(-1, 200) | st.floats(0, 1e15) | st.sampled_from([0, 0.0005, 4e15])
_CYCLES = st.integers(0, 5000) | st.sampled_from([-1, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 63) - 1, "0x1f", "word"])
_NAMES = st.sampled_from(
    [
        "k_1 Cmpt Exec", "k_1 Cmpt Prep", "k_1 DmaI", "k_1 DmaO", "k_2 Cmpt Exec", "conv Cmpt Exec", "odd_3",
        "Flex RoundTrip", "AIU Roundtrip", "Torch-Compiled Region", "=cmd|'/c'!A1", "</script>", "\x1b[31m\u202e",
        "é,\"\n",
        "SenRdmaSend_1 [sync=AllReduce_all_reduce_3_s0_r1_0] DmaO", "AllReduce_all_reduce_3_Add_1 Cmpt Exec",
        "SenRdmaRecv_2 [4B] [sync=AllReduce_all_reduce_3_s0_r1_0] DmaI", "aiuScheduleWait", "Memcpy (HtoD)", "",
    ]
)  # fmt: skip
_ARGS = st.fixed_dictionaries(
    {},
    optional={
        **{f"TS{number}": _CYCLES for number in range(1, 6)},
        "Power": _CYCLES, "Bytes": _CYCLES, "correlation": st.integers(-1, 3), "device": st.integers(-1, 2),
        "CollGroup": st.sampled_from(["AllReduce_all_reduce_3", "G", ""]), "Peer": st.sampled_from([0, 1, "0,1", "x"]),
        "Type": st.sampled_from(["SingleCast", "MultiCast", "Set BCList", "MultiCast XSEG", "WDone Barrier", "?"]),
        "memory bandwidth (GB/s)": st.floats() | st.integers(), "External id": st.integers(0, 2),
        "Watts": st.floats() | st.integers(-(1 << 70), 1 << 70), "=1+1": st.just("x"), "é\"\n": st.lists(st.integers()),
        "nested": st.just({"a": {"b": {}}}), "jobname": st.just("{}"), "opid": st.just("x"),
    },
)  # fmt: skip
_RISING = st.lists(st.integers(0, 1 << 33), min_size=5, max_size=5).map(
    lambda counts: {f"TS{number}": str(count) for number, count in enumerate(sorted(counts), 1)}
)
_EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from("XXXXXXXBEBECsfiMbe?"), "name": _NAMES, "ts": _TIMES, "dur": _LENGTHS,
     "pid": st.sampled_from([0, 0, 1, 1000, -1, "host"]), "args": _ARGS | _RISING},
    optional={
        "tid": st.integers(0, 3) | st.just("t"), "id": st.integers(0, 3), "cat": st.sampled_from(["kernel", "x"]),
    },
)  # fmt: skip


@st.composite
def _mutated(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A real trace, or one of the specification's, with some events changed, doubled or without a member."""
    original = draw(st.sampled_from([SAMPLE, E1, e6()[0] + e6()[1], E9_FLEX[0] + E9_TORCH, launch(), E12[0] + E12[1]]))
    events = [dict(event) for event in original]
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(events) - 1))
        change = draw(st.sampled_from(["drop", "double", "event", "member"]))
        if change == "drop" and len(events) > 1:
            del events[place]
        elif change == "double":
            events.insert(place, dict(events[place]))
        elif change == "event":
            events[place] = draw(_EVENTS)
        else:
            events[place].pop(draw(st.sampled_from(["args", "attr", "ts", "dur", "name", "tid"])), None)
    return events


_LONGEST = {
    "ph": "X", "name": "k_1 DmaO", "ts": 0, "dur": 0, "pid": 0,
    "args": {"TS1": 0, "TS2": 0, "TS3": 0, "TS4": 0, "TS5": (1 << 63) - 1},
}  # fmt: skip
_WORDS = [
    {"ph": "X", "name": "k Cmpt Exec", "ts": 364, "dur": 0, "pid": 0, "args": {"TS1": "0", "TS2": "0", "Bytes": 1}},
    {"ph": "X", "name": "k Cmpt Exec", "ts": 0, "dur": 0, "pid": 0,
     "args": {"TS2": "word", "TS1": "word", "bytes": 2, "Bytes": 3, "long": "x" * 1000}},
]  # fmt: skip
_FILES = st.lists(
    st.tuples(st.booleans(), st.lists(_EVENTS, max_size=12) | _mutated(), st.sampled_from([0, 1, 5])),
    min_size=1, max_size=2,
)  # fmt: skip
_OPTIONS = st.builds(
    Options,
    soc_mhz=st.sampled_from([1000.0, 560.0, 1e-3]),
    tracks=st.sampled_from([
        frozenset(), DEFAULT_TRACKS, DEFAULT_TRACKS | {CounterTrack.BANDWIDTH},
        frozenset({CounterTrack.POWER_TS3, CounterTrack.BANDWIDTH}),
    ]),
    compiler_logs=st.sampled_from([(), (str(DATA / "sample_compiler_log.txt"),)]),
    limit=st.sampled_from([Limit(), Limit(skip=1, count=5), Limit(start_ns=0, end_ns=10**6)]),
    phases=st.sampled_from(["", "X", "XM"]),
    overlap=st.sampled_from(Overlap), most_extra_tids=st.sampled_from([-1, 0, 5]),
    align_ranks=st.booleans(), dilate_ranks=st.booleans(),
    **{name: st.booleans() for name in (
        "flows", "collectives", "merge_sends", "align_jobs", "drop_globals", "keep_preparations", "keep_names", "split",
        "power_of_first",
    )},
)  # fmt: skip


def contents(files: list[tuple[bool, list[dict[str, Any]], int]]) -> list[Any]:
    """Files as JSON: of PyTorch, with a rank, or of the runtime."""
    return [
        {"deviceProperties": [{"id": 0}], "distributedInfo": {"rank": rank}, "traceEvents": events} if torch else events
        for torch, events, rank in files
    ]


def rows(trace: Trace) -> int:
    """How many events a trace has."""
    return len(trace.slices) + len(trace.points) + len(trace.flows) + len(trace.instants)


def written(capture: CaptureReader, options: Options) -> dict[str, bytes]:
    """All files of a capture by name. Checks after each stage that every event is accounted for."""
    trace = load(capture)
    before = rows(trace)

    def check(number: int, stage: Stage) -> None:
        changed = sum(trace.made.values()) - sum(trace.dropped.values()) - sum(trace.merged.values())
        assert rows(trace) == before + changed, (number, stage.name)
        assert min([0, *trace.made.values(), *trace.dropped.values(), *trace.merged.values()]) == 0

    run(trace, options, [True] * len(STAGES), check)
    assert too_large(trace) == []
    found = {}
    with ExitStack() as opened:
        given_ = {kind: opened.enter_context(arguments(capture, kind)) for kind in ("slice", "flow", "instant")}
        for name, chosen in [("trace", None), *((f"worker {rank}", rows_) for rank, rows_ in workers(trace))]:
            output = io.BytesIO()
            write_chrome(trace, given_, {}, output, chosen)
            found[f"{name}.json"] = output.getvalue()
    for name, table in trace.tables.items():
        for write, end in ((write_csv, "csv"), (write_text, "txt")):
            output = io.BytesIO()
            write(table, output)
            found[f"{name}.{end}"] = output.getvalue()
    shown = TimeLine(trace, capture, about)
    for name, format_ in FORMATS.items():
        binary, text = io.BytesIO(), io.StringIO()
        writer_of(name)(shown, StackOptions(), binary if format_.binary else text)
        found[f"report.{name}"] = binary.getvalue() or text.getvalue().encode()
    pddf = io.BytesIO()
    write_pddf(trace, pddf)
    found["slices.csv"] = pddf.getvalue()
    found["messages"] = "\n".join(message.text for message in trace.messages.said).encode()
    return found


def no_constant(name: str) -> Any:
    """Refuses what is not JSON."""
    raise ValueError(name)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(_FILES, _OPTIONS)
@example([(False, [_LONGEST], 0)], Options())
@thorough
def test_any_events_go_through_all_stages_into_valid_files(
    files: list[tuple[bool, list[dict[str, Any]], int]], options: Options
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        capture, _ = imported(Path(folder), *contents(files))
        for name, content in written(capture, options).items():
            if name == "report.json":
                json.loads(content, parse_constant=no_constant)
            elif name.endswith(".json"):
                assert isinstance(json.loads(content, parse_constant=no_constant)["traceEvents"], list)
            elif name.endswith(".csv"):
                head, *lines = csv.reader(io.StringIO(content.decode(), newline=""), strict=True)
                assert all(len(line) == len(head) for line in lines)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(_FILES, _OPTIONS, st.sampled_from([100, 300, 1000]))
@example([(False, _WORDS, 0)], Options(), 300)
@thorough
def test_a_trace_read_whole_and_in_pieces_gives_the_same(
    files: list[tuple[bool, list[dict[str, Any]], int]], options: Options, piece_bytes: int
) -> None:
    results = []
    for size in (1 << 20, piece_bytes):
        with tempfile.TemporaryDirectory() as folder:
            capture, _ = imported(Path(folder), *contents(files), piece_bytes=size)
            results.append(written(capture, options))
    assert results[0] == results[1]
