"""Names that attack terminals, readers and spreadsheets, in every field, through every format and table."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from google.protobuf.message import Message
from hypothesis import given, strategies as st
from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesData
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from iaprof.basics.clean import INVISIBLE, clean
from iaprof.cli.verbs.top import ALL
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS, ROW_KINDS
from iaprof.formats.texts import clean_texts, csv_text, csv_texts, escaped_json
from iaprof.formats.writers.pprof import new_profile
from iaprof.formats.writers.registry import FORMATS
from iaprof.timelines.outputs.formats import FORMATS as TRACE_FORMATS
from thorough import usually
from unit.capturing import capture, record, stall
from unit.in_process import iaprof
from unit.report.together import runs
from unit.timelines import clock_examples as examples

SAMPLE = Path(__file__).parents[2] / "data" / "captures" / "format-9.parquet"
STARTS = ["=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t=", "\r=", "\u202e=", ""]
REST = "\x1b[31m\x1b]0;t\x07\0\n\t\r\x7f\x85\x9b2J\u200b\u2028\u2029\u202e\u2066\u3164\ufe0f\ufeff\U000e0041;,\"'<b>"
NO_PATH = {0: None, ord("/"): None}  # what no name of a file may have
ANY_KEYS = {"args", "labels", "otherData"}
KNOWN = {"name", "labels", "sort_index", "W", "Power", "Type", "Peer", "CollGroup", "Bytes", "correlation", "device",
         *(f"TS{number}" for number in range(1, 6))}  # fmt: skip
OURS = {"layout", "launches_by", "way", "rate", "ph", "s", "bp", "id", "cat", "Type", "displayTimeUnit"}  # of JSON
METADATA = ("process_name", "thread_name", "process_labels")
# Fields whose values are words of ours.
WORDS = {"event", "ended", "python_ended", "what", "source", "phase"}
NAMED = {("metric", "name"), ("wait", "function"), ("transfer", "function")}


class Hostile:
    """Makes names hostile, each in its own way; what they end in, by which events are known, stays."""

    def __init__(self) -> None:
        self._starts = itertools.cycle(STARTS)
        self._made: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        if name not in self._made:
            self._made[name] = f"{next(self._starts)}{REST}{name}"
        return self._made[name]

    def inside(self, value: Any, key: str = "") -> Any:
        """The same for all texts in JSON, and for keys of what may have any."""
        if isinstance(value, dict):
            names = {name: self(name) if key in ANY_KEYS and name not in KNOWN else name for name in value}
            return {names[name]: self.inside(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [self.inside(each, key) for each in value]
        is_ours = not isinstance(value, str) or value in METADATA or (key in OURS and value != "category")
        return value if is_ours else self(value)


def hostile_capture(path: Path, words: bool = False, reason: str = "sbid") -> Path:
    """A capture of stalls for a reason, with names that are hostile; also with words of ours that are, if wanted."""
    hostile, sample = Hostile(), CaptureReader(SAMPLE)
    rows = {kind: sample.table(kind).to_pylist() for kind in KINDS if kind != "kernel"}  # names come from launches then
    rows["loss"] = [{"begin_ns": 1, "time_ns": 2, "source": "launches", "what": "lost", "count": 3, "detail": "x"}]
    rows["cpu_sample"] = [
        {"time_ns": each["time_ns"], "pid": each["pid"], "tid": each["tid"], "cpu": 0, "stack": each["stack"],
         "kernel_stack": 0} for each in rows["launch"]
    ]  # fmt: skip
    first, address = rows["launch"][0]["time_ns"], rows["launch"][0]["address"]
    rows["stall"] += [stall(first + 10**7, record(address + 8, **{reason: 200}))]
    rows["metric"] += [
        rows["metric"][0] | {"name": "energy-card-J", "time_ns": first + at * 10**6, "value": float(at)}
        for at in range(100)
    ]
    for kind, of_kind in rows.items():
        texts = [field.name for field in KINDS[kind] if pa.types.is_string(field.type)]
        plain = set() if words else {name for name in texts if name in WORDS or (kind, name) in NAMED}
        for row in of_kind:
            row |= {name: hostile(row[name]) for name in texts if name not in plain and row.get(name) is not None}
    rows["metric"].append(rows["metric"][0] | {"name": hostile("metric")})
    header = hostile.inside(sample.header | {"labels": {"job": "x", "run": "y"}})
    header["losses"] = [{"source": hostile("source"), "what": hostile("what"), "count": 5}]
    return capture(path, header, **{kind: of_kind for kind, of_kind in rows.items() if of_kind})


def hostile_traces(folder: Path) -> list[Path]:
    """Traces of both dialects, with hostile names in all that an event or a file has, and of the files themselves."""
    hostile = Hostile()
    described = [
        {"ph": "M", "name": name, "pid": pid, "tid": 11, "args": {"labels" if "label" in name else "name": "x"}}
        for name in METADATA for pid in (0, 1)
    ]  # fmt: skip
    more = [
        {"ph": "C", "name": "counter", "pid": 0, "tid": 1, "ts": 1, "args": {"series": 1, "other": 2}},
        {"ph": "i", "name": "instant", "cat": "category", "pid": 0, "tid": 1, "ts": 1, "s": "t", "args": {"a": "b"}},
        *({"ph": ph, "name": "flow", "cat": "category", "id": 1, "pid": 0, "tid": 1, "ts": 1000} for ph in "sf"),
        {"ph": "X", "name": "own", "cat": "category", "pid": 1, "tid": 1, "ts": 5, "dur": 3, "args": {"n": {"m": []}}},
    ]  # fmt: skip
    runs.trace(folder / "torch.json", runs.calls())
    torch = json.loads((folder / "torch.json").read_text())
    power = [{"ph": "C", "name": "power", "pid": 0, "ts": ts, "args": {"W": 9}} for ts in (900, 1000, 1200)]
    documents = [[*examples.E1, *power, *more, *described], *examples.e6(), {**torch, "otherData": {"a": "b"}}]
    paths = []
    for number, document in enumerate(documents):
        paths.append(folder / hostile(f"job-{number}.json").translate(NO_PATH))
        paths[-1].write_text(json.dumps(hostile.inside(document), ensure_ascii=number % 2 == 0))
    return paths


def is_hidden(character: str) -> bool:
    """Whether JSON is to have an escape for a character."""
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") or re.match(f"[{INVISIBLE}]", character)
    return bool(hidden) and character != "\n"


def strings(value: object) -> Iterator[str]:
    """The texts in JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from strings(each)
    elif isinstance(value, dict):
        yield from strings([*value, *value.values()])


def of_message(message: Message) -> Iterator[str]:
    """The texts in a message of protobuf, but for what Perfetto's events had as arguments: these stay as they were."""
    for field, value in message.ListFields():
        for each in value if field.is_repeated else [value]:
            if isinstance(each, Message):
                yield from of_message(each) if "annotation" not in field.name else ()
            elif isinstance(each, str):
                yield each


def texts_in(content: bytes, kind: str) -> Iterator[str]:
    """The texts in a file of a kind that is none itself."""
    if kind == "html":
        (payload,) = re.findall(rb'base64">(H4sI[^<]*)<', content)
        raw = gzip.decompress(base64.b64decode(payload))
        yield from strings(json.loads(raw[4 : 4 + int.from_bytes(raw[:4], "little")]))
    elif kind == "parquet":
        yield from strings(pq.read_table(io.BytesIO(content)).to_pylist())
    else:
        made = {"perfetto": Trace, "otlp": ProfilesData, "pprof": new_profile}[kind]()
        made.ParseFromString(gzip.decompress(content) if kind == "pprof" else content)
        yield from of_message(made)


def unclean(texts: Iterable[str]) -> list[str]:
    return [text for text in set(texts) if clean(text) != text]


def check(content: bytes, kind: str) -> None:
    """Checks an output: nothing in it is hidden or steers a terminal, and no cell of a table is a formula."""
    if kind in ("html", "parquet", "perfetto", "otlp", "pprof"):
        found = list(texts_in(content, kind))
        assert found
        assert unclean(found) == []
    elif kind in ("json", "chrome"):
        text = content.decode()
        assert {character for character in set(text) if is_hidden(character)} == set()
        json.loads(text)
    else:
        text = content.decode()
        separated = text.replace("\t", "") if kind in ("iaprof", "flamescope") else text
        assert unclean(separated.split("\n")) == []
        if kind == "csv":
            check_cells(text)


def check_cells(text: str) -> None:
    rows = list(csv.reader(io.StringIO(text)))
    assert len(rows) > 1
    assert len({len(row) for row in rows}) == 1
    formulas = [cell for row in rows for cell in row if re.match(r"[=+@\t\r\uff1d\uff0b\uff0d\uff20]|-[^\d.]", cell)]
    assert formulas == []


@pytest.fixture(scope="module")
def stalls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_capture(tmp_path_factory.mktemp("stalls") / "cap.parquet")


@pytest.fixture(scope="module")
def words_too(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_capture(tmp_path_factory.mktemp("words") / "cap.parquet", words=True)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of captures, whose names are hostile, too."""
    folder, hostile = tmp_path_factory.mktemp("several"), Hostile()
    for number in range(4):
        name = hostile(f"{number}").translate(NO_PATH)
        hostile_capture(folder / f"{name}.parquet", reason="sbid" if number else "send")
    return folder


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    done = iaprof("import", *hostile_traces(folder), "-o", folder / "cap.parquet")
    assert done.code == 0, done.err
    assert unclean(done.err.split("\n")) == []
    return folder / "cap.parquet"


@pytest.mark.parametrize("name", usually(list(FORMATS)[::3], FORMATS))
def test_formats_of_stalls(name: str, stalls: Path, tmp_path: Path) -> None:
    done = iaprof("report", stalls, "--format", name, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    check((tmp_path / "out").read_bytes(), name)
    assert unclean(done.err.split("\n")) == []
    if name in ("folded", "csv", "iaprof", "flamescope", "speedscope", "firefox"):
        assert "x1b[31m" in (tmp_path / "out").read_text()  # names are there


@pytest.mark.parametrize("name", TRACE_FORMATS)
def test_formats_of_traces(name: str, traces: Path, tmp_path: Path) -> None:
    done = iaprof("report", traces, "--format", name, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    check((tmp_path / "out").read_bytes(), name)
    assert unclean(done.err.split("\n")) == []


def test_files_of_time_lines(traces: Path, tmp_path: Path) -> None:
    done = iaprof("timeline", traces, "-o", tmp_path / "out", "--html", "--pddf", "--tb", "--dump-after", "all")
    assert done.code == 0, done.err
    assert unclean((done.out + done.err).split("\n")) == []
    files = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert files.keys() >= {"trace.json", "trace.pftrace", "page.html", "imbalance.csv"}
    for name, path in files.items():
        kind = name.rpartition(".")[2]
        check(path.read_bytes(), "perfetto" if kind == "pftrace" else kind)
    for name in ("pddf.csv", "summary.csv", "energy.csv", "kernels.csv"):
        assert "x1b[31m" in files[name].read_text()


ONE = [["info"], ["annotate"], ["report", "--symbol-sources"], *(["top", "--by", by] for by in ALL)]
VIEWS = [each.view for each in ROW_KINDS if each.view]
SEVERAL = [
    ["top", "--group-by", "host,label:job,label:run,container,command,gpu,device"],
    ["top", "--group-by", "capture", "--percentiles"],
    ["top", "--group-by", "capture", "--outliers"],
    ["report", "--group-by", "host,capture"],
    ["diff"],
    ["diff", "--by", "stack"],
]


def check_answers(tmp_path: Path, *words: str | Path, files: Sequence[str] = ("json", "csv", "parquet")) -> None:
    """Checks what a verb prints, and what `top` and `diff` write into files."""
    done = iaprof(*words)
    assert done.code == 0, done.err
    assert unclean((done.out + done.err).split("\n")) == []
    for kind in files if words[0] in ("top", "diff") else ():
        done = iaprof(*words, "-o", tmp_path / f"out.{kind}", "-q")
        assert done.code == 0, done.err
        check((tmp_path / f"out.{kind}").read_bytes(), kind)


@pytest.mark.parametrize("words", usually(ONE[::3], ONE), ids=" ".join)
def test_tables_of_a_capture(words: list[str], stalls: Path, tmp_path: Path) -> None:
    check_answers(tmp_path, *words, stalls)


@pytest.mark.parametrize("words", [["info"], ["diff"], ["top", "--by", "energy"]], ids=" ".join)
def test_tables_of_traces(words: list[str], traces: Path, tmp_path: Path) -> None:
    if words == ["diff"]:
        check_answers(tmp_path, *words, traces, traces, files=())
    else:
        check_answers(tmp_path, *words, traces)


@pytest.mark.parametrize("words", [["info"], ["annotate"], ["report"], ["top", "--by", "wait"]], ids=" ".join)
def test_words_of_ours_that_are_others(words: list[str], words_too: Path, tmp_path: Path) -> None:
    check_answers(tmp_path, *words, words_too)


@pytest.mark.parametrize("words", usually(SEVERAL[-1:], SEVERAL), ids=" ".join)
def test_tables_of_several_captures(words: list[str], several: Path, tmp_path: Path) -> None:
    captures = [several] if words[0] != "diff" else sorted(several.iterdir())[:2]
    check_answers(tmp_path, *words, *captures)


@pytest.mark.parametrize("view", usually(VIEWS[::3], VIEWS))
def test_tables_of_queries(view: str, words_too: Path, traces: Path) -> None:
    for path in (words_too, traces):
        for format_ in ("table", "csv"):
            done = iaprof("query", path, f"SELECT * FROM {view}", "--format", format_)
            assert done.code == 0, done.err
            assert unclean(done.out.split("\n")) == []
            if format_ == "csv" and done.out.count("\n") > 1:
                check_cells(done.out)


TEXTS = st.lists(st.none() | st.text(st.characters(codec="utf-8") | st.sampled_from(REST + "=+-@\uff1d")))


@given(TEXTS, st.sampled_from([pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]))
def test_columns_are_what_each_text_is(texts: list[str | None], type_: pa.DataType) -> None:
    array = pa.array(texts, pa.string()).cast(type_)
    for of_all, of_one in ((clean_texts, clean), (csv_texts, csv_text)):
        expected = [None if text is None else of_one(text) for text in texts]
        assert of_all(array).type == of_all(pa.chunked_array([array])).type == type_
        assert of_all(array).to_pylist() == expected
        assert of_all(array.slice(1)).to_pylist() == expected[1:]
        assert of_all(pa.chunked_array([array, array.slice(1)])).to_pylist() == expected + expected[1:]


def test_usual_texts_are_not_even_copied() -> None:
    array = pa.array(["main", "std::vector<int, 3>::~vector()", None, "/src/a-b.cl", " 1 | 2 "])
    assert clean_texts(array) is csv_texts(array) is escaped_json(array) is array


@given(st.recursive(st.text(st.characters(codec="utf-8") | st.sampled_from(REST)), lambda inside: st.lists(inside)))
def test_json_means_the_same(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    (found,) = escaped_json(pa.array([text])).to_pylist()
    assert json.loads(found) == value
    assert not any(map(is_hidden, found))
