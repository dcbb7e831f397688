"""Merged captures: every row is in its part, and cannot be read as another part's."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.cli.verbs import info, merge as merge_verb
from iaprof.formats.capture import merged
from iaprof.formats.capture.limits import HEADER_KEY, PARTS_PER_GROUP, CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import FORMAT, KINDS, SCHEMA
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.registry import WRITERS
from iaprof.report.archive.archiving import archive
from iaprof.report.archive.pseudonyms import Pseudonyms
from iaprof.report.cpu_names import SymbolOptions
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.merging import merge
from iaprof.report.parts import build_parts
from iaprof.report.profile import ReportOptions
from iaprof.symbols.names.names import Frame, Module, Names, Symbolized
from unit.capturing import HEADER, capture, launch, named_by, record, stall

CAPTURES = Path(__file__).resolve().parents[2] / "data" / "captures"
A = 0x8000_0001_0000
SECOND = 1_000_000_000


def header(host: str, monotonic: int, realtime: int, **more: Any) -> dict[str, Any]:
    """The header of a recording on a host, begun at these seconds."""
    clock = {"monotonic_ns": monotonic * SECOND, "realtime_ns": realtime * SECOND}
    return HEADER | {"host": {"name": host, "boot_id": f"boot of {host}"}, "clock": clock} | more


def recorded(path: Path, about: dict[str, Any], name: str) -> Path:
    """A capture with a launch and a stall of one kernel."""
    stacks = [{"id": 11, "time_ns": 1, "pid": 7, "truncated": False, "ips": [0x1010, 0x1021]}]
    mapping = {"time_ns": 0, "pid": 7, "start": 0x1000, "length": 0x9000, "offset": 0, "path": f"/opt/{name}",
               "build_id": name.encode(), "inode": None}  # fmt: skip
    return capture(
        path,
        about,
        stall=[stall(9, record(A, sbid=3))],
        launch=[launch(2, 7, A, 11, name=name, comm=f"{name}-app")],
        stack=stacks,
        mapping=[mapping],
    )


def rows(reader: CaptureReader) -> dict[str, list[dict[str, Any]]]:
    return {kind: reader.table(kind).to_pylist() for kind in KINDS}


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    """Captures of two hosts; the first one began later."""
    later = recorded(tmp_path / "later.parquet", header("node2", 5, 200, totals={"stalls": 1, "launches": 1}), "beta")
    losses = [{"source": "stacks", "what": "lost", "count": 2, "events": 1}]
    sooner = header("node1", 900, 100, totals={"stalls": 1}, losses=losses)
    return [later, recorded(tmp_path / "sooner.parquet", sooner, "alpha")]


def test_a_merged_capture_has_all_rows_and_headers(two: list[Path], tmp_path: Path) -> None:
    # given two captures
    later, sooner = map(CaptureReader, two)
    # when
    merge(two, tmp_path / "m")
    # then
    reader = CaptureReader(tmp_path / "m")
    assert [rows(part) for part in reader.parts] == [rows(sooner), rows(later)]
    assert reader.header == {
        "iaprof": reader.header["iaprof"],
        "format": FORMAT,
        "clock": sooner.header["clock"],
        "totals": {"stalls": 2, "launches": 1},
        "losses": [{"source": "stacks", "what": "lost", "count": 2, "events": 1}],
        "parts": [{"file": "sooner.parquet", **sooner.header}, {"file": "later.parquet", **later.header}],
    }
    assert [part.header for part in reader.parts] == reader.header["parts"]
    assert [part.label for part in reader.parts] == ["node1", "node2"]
    assert [part.count("launch") for part in reader.parts] == [1, 1]


def test_rows_of_a_merged_capture_cannot_be_read_without_their_part(two: list[Path], tmp_path: Path) -> None:
    merge(two, tmp_path / "m")
    reader = CaptureReader(tmp_path / "m")
    for read in (lambda: reader.table("launch"), lambda: next(reader.tables("stall")), lambda: reader.count("stall")):
        with pytest.raises(CaptureError, match="was merged from 2 captures"):
            read()


def test_an_ordinary_capture_is_its_own_part(two: list[Path]) -> None:
    reader = CaptureReader(two[0])
    assert reader.parts == [reader]
    assert (reader.is_merged, reader.label) == (False, "")


def test_a_merged_capture_can_be_merged_again(two: list[Path], tmp_path: Path) -> None:
    third = recorded(tmp_path / "third.parquet", header("node1", 950, 150), "gamma")
    merge(two, tmp_path / "m")
    # when
    merge([third, tmp_path / "m"], tmp_path / "n")
    # then its parts are among the others, by time
    parts = CaptureReader(tmp_path / "n").parts
    assert [part.header["file"] for part in parts] == ["sooner.parquet", "third.parquet", "later.parquet"]
    assert [part.label for part in parts] == ["node1 sooner.parquet", "node1 third.parquet", "node2"]
    assert [part.table("launch")["name"].to_pylist() for part in parts] == [["alpha"], ["gamma"], ["beta"]]


def test_captures_of_every_format(tmp_path: Path) -> None:
    old = [CAPTURES / f"format-{number}.parquet" for number in (3, 2, 1)]
    merge(old, tmp_path / "m")
    parts = CaptureReader(tmp_path / "m").parts
    assert [part.header["format"] for part in parts] == [1, 2, 3]
    for part, path in zip(parts, reversed(old), strict=True):
        assert rows(part) == rows(CaptureReader(path))


def test_merged_captures_stay_readable() -> None:
    parts = CaptureReader(CAPTURES / "merged-4.parquet").parts
    assert [part.header["file"] for part in parts] == ["format-2.parquet", "format-4.parquet"]
    for part in parts:
        assert rows(part) == rows(CaptureReader(CAPTURES / part.header["file"]))


# Order, labels and sums


def test_parts_are_ordered_by_machine_and_its_monotonic_clock() -> None:
    # given a wall clock that was set back while recording, files that began at once, and no clock
    headers = [
        header("a", 30, 100, part=1),
        header("a", 30, 100, part=0),
        header("a", 20, 500),
        header("b", 1, 90),
        header("c", 1, 300),
        {"clock": 5},
    ]
    assert merged.in_time_order(headers) == [3, 2, 1, 0, 4, 5]


@pytest.mark.parametrize(
    ("about", "labels"),
    [
        ([("a", "x"), ("b", "x")], ["a", "b"]),
        ([("a", "x"), ("a", "y"), ("b", "x")], ["a x", "a y", "b"]),
        ([("a", "x"), ("a", "x")], ["a x (part 0)", "a x (part 1)"]),
        ([(None, "x"), ("b", "y"), ("", "z"), (7, None)], ["x", "b", "z", "(part 3)"]),
        ([(None, None)], ["(part 0)"]),
    ],
)
def test_labels(about: list[tuple[Any, Any]], labels: list[str]) -> None:
    assert merged.part_labels([{"host": {"name": host}, "file": file} for host, file in about]) == labels


def test_sums_of_untrusted_headers() -> None:
    loss = {"source": "stacks", "what": "lost", "count": None, "events": 1}
    headers: list[dict[str, Any]] = [
        {"totals": {"stalls": 3, "x": "y", "z": -1}, "losses": [loss, 5, {"source": 1}], "clock": []},
        {"totals": [], "losses": {}, "clock": {"realtime_ns": 7}},
        {"totals": {"stalls": 1 << 70}, "losses": [loss, loss | {"count": 4}, loss | {"what": "failed"}]},
    ]
    assert merged.merged_members(headers) == {
        "clock": {"realtime_ns": 7},
        "totals": {"stalls": 3, "x": 0, "z": 0},
        "losses": [loss | {"count": 4, "events": 3}, 5, {"source": 1}, loss | {"what": "failed"}],
        "parts": headers,
    }


# Errors


@pytest.mark.parametrize("again", ["the same path", "a copy", "an archive of it", "a merged one that has it"])
def test_merging_a_recording_twice_is_refused(two: list[Path], tmp_path: Path, again: str) -> None:
    first, other = two
    (tmp_path / "copy").write_bytes(first.read_bytes())
    nobody = named_by(lambda _: Nobody("x"))
    archive(CaptureReader(first), tmp_path / "archive", nobody, lambda *_: None, redact=None, keep_kernels=True)
    merge(two, tmp_path / "merged")
    second = {"the same path": first, "a copy": tmp_path / "copy", "an archive of it": tmp_path / "archive",
              "a merged one that has it": tmp_path / "merged"}[again]  # fmt: skip
    message = "was given twice" if second == first else f"{second} and .*{first.name} are of the same recording"
    with pytest.raises(UsageError, match=message):
        merge([first, other, second] if second.name != "merged" else [first, second], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_files_of_one_recording_and_imported_texts_are_not_the_same(tmp_path: Path) -> None:
    imported = {"imported": {"format": "x"}, "clock": {"monotonic_ns": 0, "realtime_ns": 0}, "end_ns": 1}
    headers = [header("a", 1, 1, part=0), header("a", 1, 1, part=1), imported | {"totals": {"samples": 1}},
               imported | {"totals": {"samples": 2}}]  # fmt: skip
    paths = [capture(tmp_path / f"c{number}", each) for number, each in enumerate(headers)]
    merge(paths, tmp_path / "m")
    assert len(CaptureReader(tmp_path / "m").parts) == 4


def test_a_capture_that_changes_while_merging(two: list[Path], tmp_path: Path) -> None:
    def change(done: int, rows: int) -> None:
        recorded(two[1], header("node3", 1, 1), "gamma")

    with pytest.raises(IaprofError, match=r"sooner\.parquet was changed while it was read"):
        merge(two, tmp_path / "m", change)
    assert not (tmp_path / "m").exists()


def test_headers_too_long_for_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iaprof.report.merging.MAX_HEADER_BYTES", 2000)
    paths = [capture(tmp_path / f"c{n}", header(f"n{n}", n, n, command=["x" * 400])) for n in range(3)]
    with pytest.raises(UsageError, match=r"up to that of .*c1 say is too long"):
        merge(paths, tmp_path / "m")


# How rows lie in the file


def test_many_small_captures_share_row_groups_and_are_open_one_at_a_time(tmp_path: Path) -> None:
    # given
    paths = [recorded(tmp_path / f"r{n}", header(f"n{n}", 1, n + 1), f"k{n}") for n in range(20)]
    before, most = len(os.listdir("/proc/self/fd")), 0

    def look(done: int, rows: int) -> None:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))

    # when
    merge(paths, tmp_path / "m", look)
    # then
    reader = CaptureReader(tmp_path / "m")
    assert before < most <= before + 5
    assert len(reader.parts) == 20
    assert pq.read_metadata(tmp_path / "m").num_row_groups == 4 * -(-20 // PARTS_PER_GROUP)
    for number, part in enumerate(reader.parts):
        names = part.table("launch")["name"].combine_chunks()
        assert names.dictionary.to_pylist() == [f"k{number}"]  # and none of the others
        assert part.table("stack")["ips"].combine_chunks().offsets.to_pylist() == [0, 2]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["stack", "loss"]), st.sampled_from([1, 2, 3000]))))
def test_rows_come_back_in_their_order(tmp_path_factory: pytest.TempPathFactory, writes: list[Any]) -> None:
    # given parts in any order, with few or many rows
    wanted: dict[tuple[int, str], list[int]] = {}
    path = tmp_path_factory.getbasetemp() / "m"
    with path.open("wb") as file:
        writer = CaptureWriter(file)
        for number, (part, kind, count) in enumerate(writes):
            writer.begin_part(part)
            values = np.arange(number * 10_000, number * 10_000 + count)
            wanted.setdefault((part, kind), []).extend(values.tolist())
            names = {field.name: pa.nulls(count, field.type) for field in KINDS[kind]}
            names |= {"time_ns": pa.array(values.astype(np.uint64))}
            writer.write(kind, pa.StructArray.from_arrays(list(names.values()), fields=list(KINDS[kind])))
        writer.close({"parts": [{}] * 41})
    # when, then
    reader = CaptureReader(path)
    assert len(reader.parts) == 41
    for part, view in enumerate(reader.parts):
        for kind in ("stack", "loss"):
            assert view.table(kind, ("time_ns",))["time_ns"].to_pylist() == wanted.get((part, kind), [])


def forged(path: Path, about: Any, numbers: list[int | None], **more: Any) -> Path:
    table = pa.Table.from_pylist([{"kind": "loss", "part": number} for number in numbers], SCHEMA)
    metadata = {HEADER_KEY: json.dumps({**HEADER, "format": FORMAT, "parts": about} | more).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return path


@pytest.mark.parametrize("about", [None, {}, [], 5, [{}, 5], [[]], [{"parts": []}], [{}] * 65_536], ids=str)
def test_invalid_parts_in_the_header(tmp_path: Path, about: Any) -> None:
    with pytest.raises(CaptureError, match="damaged header: what it says about its parts"):
        CaptureReader(forged(tmp_path / "c", about, [0]))


@pytest.mark.parametrize("numbers", [[2], [1, 0], [0, 1, 0], [None], [0, None], [0, 1, 2], list(range(17))], ids=str)
def test_invalid_part_numbers(tmp_path: Path, numbers: list[int | None]) -> None:
    about: list[dict[str, Any]] = [{}] * (17 if len(numbers) == 17 else 2)
    with pytest.raises(CaptureError, match="is damaged"):
        CaptureReader(forged(tmp_path / "c", about, numbers))


def test_parts_in_the_header_of_an_older_format_are_ignored(tmp_path: Path) -> None:
    reader = CaptureReader(forged(tmp_path / "c", 5, [0], format=3))
    assert reader.parts == [reader]


# Archives


class Nobody:
    """A symbolizer with one name for all addresses."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self, module: Module, addresses: np.ndarray, times: np.ndarray) -> Symbolized:
        return Symbolized(Names.of([(int(address), 1, [Frame(self._name)]) for address in addresses]))


def naming_of_part(part: CaptureReader) -> Nobody:
    return Nobody(f"function on {part.header['host']['name']}")


def test_an_archive_names_each_part(two: list[Path], tmp_path: Path) -> None:
    merge(two, tmp_path / "m")
    before = CaptureReader(tmp_path / "m")
    # when
    archive(before, tmp_path / "a", named_by(naming_of_part), lambda *_: None, redact=None, keep_kernels=True)
    # then
    after = CaptureReader(tmp_path / "a")
    for part, same in zip(after.parts, before.parts, strict=True):
        named = {f"function on {part.header['host']['name']}"}
        assert set(part.table("symbol")["function"].to_pylist()) == named
        assert rows(part) | {"module": [], "symbol": []} == rows(same)
        assert part.header["symbols"]["named"] == 2
    assert after.header["symbols"] == {"modules": 2, "addresses": 4, "named": 4, "skipped": 0}


def test_a_redacted_archive_of_a_merged_capture_has_no_names(tmp_path: Path) -> None:
    sample: dict[str, Any] = dict.fromkeys((field.name for field in KINDS["sample"]), 1)
    sample |= {"comm": "secret-app", "stack": "main;secret::run()", "kernel": "SecretKernel", "mnemonic": "send",
               "file": "/secret/k.cl"}  # fmt: skip
    about = header("secret-host", 1, 1, command=["secret-app"], libraries=[{"path": "/secret/lib.so", "probes": 1}])
    paths = [
        recorded(tmp_path / "secret.parquet", about, "secret"),
        capture(tmp_path / "secret-text.parquet", header("secret-2", 2, 2), sample=[sample]),
    ]
    merge(paths, tmp_path / "m")
    # when
    archive(CaptureReader(tmp_path / "m"), tmp_path / "a", named_by(naming_of_part), lambda *_: None,
            redact=Pseudonyms(), keep_kernels=False)  # fmt: skip
    # then
    public = CaptureReader(tmp_path / "a")
    for part in public.parts:
        assert "secret" not in (repr(rows(part)) + part.label).lower()
    assert "secret" not in json.dumps(public.header).lower()
    assert len(public.parts[1].table("sample")["stack"][0].as_py().split(";")) == 2


# The command


def test_the_command(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "m.parquet"
    merge_verb.merge(two, target, as_json=True)
    out, err = capsys.readouterr()
    assert err == (
        f"[ iaprof merge: wrote {target.stat().st_size / 1000:.1f} kB to {target}; 2 recordings; 2 stall records; "
        "1 launches; lost: 2 stacks lost ]\n"
    )
    info.info(target, as_json=True)
    assert out == capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("later.parquet", 2, "two captures or more"),
        ("later.parquet later.parquet", 2, "later.parquet was given twice"),
        ("later.parquet absent", 1, "absent cannot be opened"),
        ("later.parquet sooner.parquet -o sooner.parquet", 1, "exists"),
        ("later.parquet sooner.parquet -o sooner.parquet -f", 1, "is the input"),
        ("later.parquet cut", 1, "cut short"),
        ("later.parquet broken", 1, "broken is damaged in its launch rows"),
    ],
)
def test_errors(two: list[Path], tmp_path: Path, words: str, code: int, message: str) -> None:
    (tmp_path / "cut").write_bytes(two[0].read_bytes()[:-9])
    capture(tmp_path / "broken", header("x", 1, 1), launch=[launch(2, 7, A) | {"pid": None}])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    captures, _, options = words.partition(" -o ")
    output, _, force = options.partition(" ")
    with pytest.raises(IaprofError, match=message) as raised:
        paths = [tmp_path / word for word in captures.split()]
        merge_verb.merge(paths, tmp_path / (output or "m"), force=bool(force))
    assert raised.value.exit_code == code
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_report_of_a_merged_capture_is_that_of_its_parts(two: list[Path], tmp_path: Path) -> None:
    merge(two, tmp_path / "m")
    with GpuModuleLoader() as modules:
        reports = [
            build_parts(CaptureReader(path), modules, ReportOptions(), SymbolOptions())
            for path in (*two, tmp_path / "m")
        ]
    texts = []
    for report in reports:
        out = io.StringIO()
        WRITERS["folded"].write(Export(report.profile), StackOptions(), out)
        texts.append(out.getvalue().splitlines())
    assert texts[2] == sorted(texts[0] + texts[1])
    assert len(texts[2]) == 2


def test_cpu_samples_of_a_merged_capture_are_those_of_its_parts() -> None:
    command: list[str | Path] = [sys.executable, "-m", "iaprof", "report"]
    command += [CAPTURES / "merged-4.parquet", "--cpu-samples"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    count = sum(CaptureReader(CAPTURES / f"format-{number}.parquet").count("cpu_sample") for number in (2, 4))
    assert done.stderr == f"[ iaprof report: {count} CPU samples ]\n"
    assert sum(int(line.rpartition(" ")[2]) for line in done.stdout.splitlines()) == count > 0
