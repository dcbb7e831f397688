"""Untrusted captures: a report is right, or is refused in one sentence, in limited time."""

import functools
import io
import json
import operator
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from iaprof.cli.terminal.summary import end_line, losses
from iaprof.formats.capture import reader as capture_format
from iaprof.formats.capture.limits import HEADER_KEY, CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import FORMAT, KINDS, NULLABLE, SCHEMA
from iaprof.formats.profile import StackOptions
from iaprof.formats.stacks.trees import Tree
from iaprof.formats.writers.registry import WRITERS
from iaprof.formats.writers.writer import Needs
from iaprof.report.archive.archiving import archive
from iaprof.report.archive.pseudonyms import Pseudonyms
from iaprof.report.cpu_names import SymbolOptions
from iaprof.report.exporting import build_export
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.profile import ReportOptions
from iaprof.symbols.names.names import Module, ModuleKind
from iaprof.symbols.names.rows import CaptureNames
from limits import Within
from thorough import usually
from unit.capturing import HEADER, capture, launch, named_by, record, stall

A = 0x8000_0001_0000


def reports(path: Path, names: Collection[str] = WRITERS) -> dict[str, str]:
    """Returns the text of every format, or of these; makes binary formats, too."""
    found = {}
    with GpuModuleLoader() as modules:
        everything = functools.reduce(operator.or_, Needs)
        export, _ = build_export(
            CaptureReader(path), modules, ReportOptions(interval_s=1.0), SymbolOptions(), everything
        )
    for name in names:
        writer = WRITERS[name]
        out = io.BytesIO() if writer.binary else io.StringIO()
        writer.write(export, StackOptions(), out)
        found[name] = out.getvalue() if isinstance(out, io.StringIO) else ""
    return found


def rows() -> dict[str, list[dict[str, Any]]]:
    return {
        "stall": [stall(9, record(A, sbid=3))],
        "launch": [launch(2, 7, A, 11, name="k")],
        "stack": [{"id": 11, "time_ns": 1, "pid": 7, "truncated": False, "ips": [0x1000, 0x2000]}],
        "mapping": [{"time_ns": 0, "pid": 7, "start": 0x1000, "length": 0x9000, "offset": 0, "path": "/x",
                     "build_id": None}],
        "process": [{"time_ns": 0, "pid": 7, "tid": 7, "ppid": 1, "event": "fork", "comm": None}],
        "kernel": [{"time_ns": 1, "pid": 7, "path": "/x", "digest": b"1", "size": 1, "elf": None}],
    }  # fmt: skip


MEMBERS = [(kind, member.name) for kind in rows() for member in KINDS[kind]]
INTEGERS = [member for member in MEMBERS if pa.types.is_integer(KINDS[member[0]].field(member[1]).type)]


@pytest.mark.parametrize(("kind", "name"), usually(MEMBERS[::3], MEMBERS))
def test_null_values(tmp_path: Path, kind: str, name: str) -> None:
    made = rows()
    made[kind][0][name] = None
    path = capture(tmp_path / "c", **made)
    if f"{kind}.{name}" in NULLABLE:
        assert " 3\n" in reports(path)["folded"]
    else:
        with pytest.raises(CaptureError, match=f"column '{name}' has nulls"):
            CaptureReader(path).table(kind)


@pytest.mark.parametrize("each_alone", usually([False], [False, True]))
@pytest.mark.parametrize(("kind", "name"), usually(INTEGERS[::2], INTEGERS))
def test_absurd_numbers(tmp_path: Path, kind: str, name: str, each_alone: bool) -> None:
    bits = KINDS[kind].field(name).type.bit_width
    values = 0, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits) - 1
    # what one value has refused, others must not hide
    alone = each_alone or (kind, name) in (("stall", "time_ns"), ("stall", "stream"))
    for chosen in [(value,) for value in values] if alone else [values]:
        made = rows()
        made[kind] += [made[kind][0] | {name: value} for value in chosen]
        try:
            reports(capture(tmp_path / "c", **made))
        except CaptureError as error:
            assert str(error).count("\n") == 0
            assert (kind, name) in (("stall", "time_ns"), ("stall", "stream"))


def whole_file(path: Path, kinds: pa.Array, stalls: pa.Array) -> Path:
    none = {field.name: pa.nulls(len(kinds), field.type) for field in SCHEMA}
    columns = list((none | {"kind": kinds, "stall": stalls}).values())
    table = pa.Table.from_arrays(columns, SCHEMA.names)
    metadata = {HEADER_KEY: json.dumps({**HEADER, "format": FORMAT}).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), path, compression="zstd")
    return path


STALL = pa.array([stall(9, record(A, sbid=3))], KINDS["stall"])


def test_kinds_as_dictionaries(tmp_path: Path) -> None:
    # given dictionary-encoded kinds, which mean the same to any reader
    path = whole_file(tmp_path / "c", pa.array(["stall"]).dictionary_encode(), STALL)
    assert reports(path)["folded"].endswith(" 3\n")


@pytest.mark.parametrize("kind", [None, b"\xff\xfe"])
def test_invalid_kinds(tmp_path: Path, kind: bytes | None) -> None:
    with pytest.raises(CaptureError, match="damaged"):
        CaptureReader(whole_file(tmp_path / "c", pa.array([kind], pa.binary()).view(pa.string()), STALL))


def test_a_row_without_its_struct_is_damaged(tmp_path: Path) -> None:
    path = whole_file(tmp_path / "c", pa.array(["stall"]), pa.nulls(1, KINDS["stall"]))
    with pytest.raises(CaptureError, match="a row of it has no value"):
        reports(path)


def test_a_row_group_without_rows_is_harmless(tmp_path: Path) -> None:
    with pq.ParquetWriter(tmp_path / "c", SCHEMA) as writer:
        writer.add_key_value_metadata({HEADER_KEY: json.dumps({**HEADER, "format": FORMAT}).encode()})
        writer.write_table(SCHEMA.empty_table(), row_group_size=1)
    texts = reports(tmp_path / "c")
    assert json.loads(texts.pop("json"))["rows"] == []
    assert (texts["folded"], texts["iaprof"]) == ("", "")


def test_invalid_and_overlong_texts(tmp_path: Path) -> None:
    made = rows()
    columns = pa.array(made["launch"], KINDS["launch"]).flatten()
    columns[KINDS["launch"].get_field_index("name")] = pa.array([b"\xff"]).view(pa.string())
    made["launch"] = pa.StructArray.from_arrays(columns, fields=list(KINDS["launch"]))
    with pytest.raises(CaptureError, match="damaged in its launch rows"):
        reports(capture(tmp_path / "c", **made))
    made = rows()
    made["launch"][0]["name"] = "k" * (1 << 14)
    reports(capture(tmp_path / "c", **made))
    made["launch"][0]["name"] += "k"
    with pytest.raises(CaptureError, match="a text in column 'name' has 16385 bytes"):
        reports(capture(tmp_path / "c", **made))


def test_a_small_file_of_very_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a low limit, and a million records in a few kB
    monkeypatch.setattr(capture_format, "MAX_VALUE_BYTES", 1 << 20)
    monkeypatch.setattr(capture_format, "MAX_EXPANSION", 10)
    lists = pa.array([[0] * 1_000_000], KINDS["stall"].field("w0").type)
    none = pa.nulls(1, lists.type)
    one = [pa.array([1], KINDS["stall"].field(name).type) for name in ("time_ns", "begin_ns", "stream")]
    path = whole_file(
        tmp_path / "c",
        pa.array(["stall"]),
        pa.StructArray.from_arrays([*one, lists, none, none], fields=list(KINDS["stall"])),
    )
    assert path.stat().st_size < 100_000
    with pytest.raises(CaptureError, match="absurdly many"):
        reports(path)


JUNK: list[Any] = [
    None, True, -1, 1 << 70, 1e400, float("nan"), "x", [], {}, [[]], [{}], [None], {"monotonic_ns": 1 << 64},
    {"monotonic_ns": -1}, [{"source": "a", "what": [], "count": 1}], [{"source": 1, "what": "b", "count": None}],
    [{"layout": "xe2", "ip_version": [1e400, 1]}], [{"layout": ["xe2"], "ip_version": [20, 1]}],
    {"cpu_s": "x", "peak_bytes": []}, {"stalls": "x"},
]  # fmt: skip


REFUSED_JUNK = ["streams"], ["format"]  # what these say has to be right
OTHER_JUNK = ["clock", "totals", "losses", "cost", "end_ns"]


@pytest.mark.parametrize(
    "members",
    usually([OTHER_JUNK, *REFUSED_JUNK], [OTHER_JUNK, *REFUSED_JUNK, *([member] for member in OTHER_JUNK)]),
    ids=" ".join,
)
@pytest.mark.parametrize("junk", usually(JUNK[::3], JUNK), ids=repr)
def test_junk_in_the_header(tmp_path: Path, members: list[str], junk: Any) -> None:
    path = capture(tmp_path / "c", **rows())
    header = {**HEADER, "format": FORMAT} | dict.fromkeys(members, junk)
    metadata = {HEADER_KEY: json.dumps(header).encode()}
    pq.write_table(pq.read_table(path).replace_schema_metadata(metadata), path, row_group_size=1)
    try:
        reader = CaptureReader(path)
        assert losses(reader.header).isprintable()
        assert reports(path)["folded"].endswith(" 3\n")
    except CaptureError as error:
        assert members in REFUSED_JUNK
        assert str(error)


def test_valid_parts_of_losses_are_reported() -> None:
    loss = {"source": "stacks", "what": "lost", "count": 7, "events": 2}
    assert losses({"losses": [loss, loss | {"count": None}, 5]}) == (
        "7 stacks lost, stacks lost (2 times, how much is unknown), something that the header does not describe"
    )
    assert losses({"losses": [loss] * 30}).endswith(", and 10 more")
    assert "lost: nothing" in end_line("record", Path("x"), {"totals": {}, "losses": []}, 5)


def test_times_at_the_end_of_time(tmp_path: Path) -> None:
    path = capture(tmp_path / "c", stall=[stall((1 << 64) - 1, record(A, sbid=3))])
    with pytest.raises(CaptureError, match="choose longer ones with --interval"):
        reports(path)


def launches(count: int, **columns: Any) -> pa.StructArray:
    values = launch(0, 7, 0, 1, name="k") | {"time_ns": np.arange(count, dtype=np.uint64)} | columns
    fields = list(KINDS["launch"])
    arrays = [values[f.name] if isinstance(values[f.name], np.ndarray) else [values[f.name]] * count for f in fields]
    return pa.StructArray.from_arrays([pa.array(a, f.type) for a, f in zip(arrays, fields, strict=True)], fields=fields)


def stalls(times: Any, ips: Any) -> pa.StructArray:
    type_ = KINDS["stall"].field("w0").type
    offsets = pa.array(np.arange(len(ips) + 1, dtype=np.int32))
    words = [pa.ListArray.from_arrays(offsets, pa.array(w), type=type_) for w in (ips >> 3 | 1 << 37, ips * 0)]
    columns = [pa.array(times), pa.array(times), pa.array(np.zeros(len(times), np.uint16)), *words]
    return pa.StructArray.from_arrays([*columns, pa.nulls(len(ips), type_)], fields=list(KINDS["stall"]))


@pytest.mark.parametrize(
    "what", usually(["processes", "mappings"], ["kernels over each other", "processes", "mappings", "compilations"])
)
def test_time_does_not_grow_with_the_square(tmp_path: Path, what: str, within: Within) -> None:
    # given so many of each that their square would take minutes
    count = 20_000 if within.measures else 5_000
    number = np.arange(count, dtype=np.uint64)
    kinds: dict[str, Any] = {
        "launch": launches(count, address=number * 64, stack=number + 1),
        "stall": stalls(number + count // 2, number * 64),
    }
    if what == "kernels over each other":
        kinds["launch"] = launches(count, address=number * 64, size=np.full(count, 1 << 63, np.uint64))
    elif what == "processes":
        kinds["launch"] = launches(count, address=number * 64, pid=number.astype(np.uint32))
    elif what == "mappings":
        base = rows()
        kinds["stack"] = [base["stack"][0] | {"id": n + 1, "ips": [n * 4096]} for n in range(count)]
        kinds["mapping"] = [base["mapping"][0] | {"start": n, "length": 1 << 40} for n in range(count)]
        kinds["process"] = [base["process"][0] | {"time_ns": n} for n in range(count)]
    else:
        kinds["kernel"] = [rows()["kernel"][0] | {"pid": n, "digest": b"%d" % n} for n in range(count)]
    # when
    with within(30):
        text = reports(capture(tmp_path / "c", **kinds), ("folded", "html", "perfetto"))["folded"]
        # then
        assert sum(int(line.rpartition(" ")[2]) for line in text.splitlines()) == count


def symbols(module: int, count: int, **same: int) -> list[dict[str, Any]]:
    first = {"module": module, "address": 0, "size": (1 << 64) - 1, "depth": 0, "function": "f", "file": "", "line": 0}
    return [first | {"depth": index % 256, "function": f"f{module}.{index}"} | same for index in range(count)]


def module(number: int, **more: Any) -> dict[str, Any]:
    row = {"id": number, "what": "kernel", "path": "[kernel]", "build_id": None, "inode": 0, "pid": 0, "source": "",
           "problem": "", "frame_pointers": None}  # fmt: skip
    return row | more


def test_a_range_with_endless_frames_in_the_kernel_is_redacted(tmp_path: Path) -> None:
    # given as many Linux kernel addresses as frames that each of them has
    count = 10_000
    ips = [(1 << 63) + 16 * index for index in range(count)]
    stacks = [{"id": 11, "time_ns": 1, "pid": 0, "truncated": False, "ips": ips[at : at + 500]}
              for at in range(0, count, 500)]  # fmt: skip
    path = capture(tmp_path / "c", stack=stacks, module=[module(0)], symbol=symbols(0, count))
    reader = CaptureReader(path)
    # when
    archive(
        reader, tmp_path / "public", named_by(CaptureNames), lambda *_: None, redact=Pseudonyms(), keep_kernels=False
    )
    # then the redacted capture has one name for each
    assert len(CaptureReader(tmp_path / "public").table("symbol")) == count


def test_each_of_many_modules_has_its_own_texts(tmp_path: Path) -> None:
    # given modules that must not each process the texts of all modules
    modules = [module(number, what="generated", pid=number) for number in range(300)]
    rows = [row for number in range(300) for row in symbols(number, 5)]
    names = CaptureNames(CaptureReader(capture(tmp_path / "c", module=modules, symbol=rows)))
    # when
    for number in range(300):
        asked = np.zeros(1, np.uint64)
        named = names.name(Module(ModuleKind.GENERATED, pid=number), asked, asked)
        # then
        assert named is not None
        assert [frame.function for frame in named.names.frames(0)] == [f"f{number}.{index}" for index in range(5)]
        assert len(named.names.strings) <= 6


@pytest.mark.parametrize(
    ("clock", "end"),
    [
        ({"monotonic_ns": 0, "realtime_ns": 1}, (1 << 63) - 1),
        ({"monotonic_ns": (1 << 63) - 2, "realtime_ns": (1 << 64) - 1}, (1 << 63) - 1),
        ({"monotonic_ns": float("nan"), "realtime_ns": float("inf")}, -1),
        ({"monotonic_ns": 10**400, "realtime_ns": -(10**400)}, 10**400),
    ],
    ids=["endless", "late", "no numbers", "no 64 bits"],
)
def test_absurd_times_of_a_recording(tmp_path: Path, clock: dict[str, Any], end: int) -> None:
    path = capture(tmp_path / "c", HEADER | {"clock": clock, "end_ns": end}, **rows())
    assert reports(path)["folded"].endswith(" 3\n")


def test_untrusted_stacks_may_be_deep() -> None:
    # given nested stacks, which take a minute if processed frame by frame
    count = 200_000
    none = np.zeros(1, np.int64)
    parent = np.arange(count) - 1
    tree = Tree((), parent, none, (), (), none, none, none, none, none, none)
    # then
    assert (tree.depth() == np.arange(count)).all()
