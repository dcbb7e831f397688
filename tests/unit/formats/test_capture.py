"""Captures: written rows are read back, and invalid files are refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from iaprof.formats.capture.limits import HEADER_KEY, CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import FORMAT, KINDS, SCHEMA
from iaprof.formats.capture.writer import CaptureWriter
from thorough import usually
from unit.capturing import HEADER, capture, launch, record, stall


def test_written_rows_are_read_back(tmp_path: Path) -> None:
    # given
    stalls = [stall(5, record(64, sbid=3), record(72, send=1)), stall(9), stall(11, record(0, active=255))]
    path = capture(tmp_path / "c", stall=stalls, launch=[launch(1, 2, 3)], loss=[])
    # when
    reader = CaptureReader(path)
    # then
    assert reader.header == {"format": FORMAT, **HEADER}
    assert reader.table("stall").to_pylist() == stalls
    assert reader.table("launch").to_pylist() == [launch(1, 2, 3)]
    assert reader.table("launch", ("pid",)).to_pylist() == [{"pid": 2}]
    for kind in KINDS:
        assert reader.table(kind).schema.names == [field.name for field in KINDS[kind]]


def test_kinds_without_rows_have_no_columns_and_cost_nothing(tmp_path: Path) -> None:
    # given
    stalls = [stall(5, record(64, sbid=3))]
    few = capture(tmp_path / "few", stall=stalls)
    with (tmp_path / "all").open("wb") as file:
        writer = CaptureWriter(file)
        writer.write("stall", pa.array(stalls, KINDS["stall"]))
        writer.close(HEADER)
    # when
    reader = CaptureReader(few)
    # then
    assert pq.read_schema(few).names == ["kind", "part", "stall"]
    assert few.stat().st_size < (tmp_path / "all").stat().st_size / 5
    assert [reader.table(kind).num_rows for kind in KINDS] == [kind == "stall" for kind in KINDS]
    assert [reader.count(kind) for kind in KINDS] == [kind == "stall" for kind in KINDS]


def test_a_writer_refuses_rows_of_a_kind_that_it_has_no_column_for(tmp_path: Path) -> None:
    with (tmp_path / "c").open("wb") as file:
        writer = CaptureWriter(file, ("stall",))
        with pytest.raises(ValueError, match="without launch rows"):
            writer.write("launch", pa.array([launch(1, 2, 3)], KINDS["launch"]))
        writer.close(HEADER)


def test_rows_of_a_kind_without_its_column_are_damage(tmp_path: Path) -> None:
    table = pq.read_table(capture(tmp_path / "c", stall=[stall(5)]))
    kinds = pa.array(["launch"], pa.string())
    header = {HEADER_KEY: json.dumps({"format": FORMAT, **HEADER}).encode()}
    table = table.set_column(0, pa.field("kind", pa.string(), nullable=False), kinds).replace_schema_metadata(header)
    pq.write_table(table, tmp_path / "damaged")

    with pytest.raises(CaptureError, match="no column 'launch'"):
        CaptureReader(tmp_path / "damaged")


def test_any_parquet_reader_sees_the_rows_of_a_kind(tmp_path: Path) -> None:
    # given
    path = capture(tmp_path / "c", stall=[stall(5, record(64, sbid=3))], launch=[launch(1, 2, 3)])
    # when
    table = pq.read_table(path, filters=[("kind", "=", "launch")])
    # then
    assert table["launch"].to_pylist() == [launch(1, 2, 3)]
    assert table["stall"].to_pylist() == [None]


def written(tmp_path: Path, schema: pa.Schema = SCHEMA, metadata: dict[bytes, bytes] | None = None) -> Path:
    metadata = {HEADER_KEY: json.dumps({"format": FORMAT, **HEADER}).encode()} if metadata is None else metadata
    pq.write_table(schema.with_metadata(metadata).empty_table(), tmp_path / "p")
    return tmp_path / "p"


def header_of(value: Any) -> dict[bytes, bytes]:
    return {HEADER_KEY: json.dumps(value).encode()}


def test_refusals(tmp_path: Path) -> None:
    whole = capture(tmp_path / "whole", stall=[stall(5, record(64, sbid=3))]).read_bytes()

    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    no_column = pa.schema([field for field in SCHEMA if field.name != "part"])
    no_member = SCHEMA.set(2, pa.field("stall", pa.struct([("time_ns", pa.uint64())])))
    mistyped = SCHEMA.set(2, pa.field("stall", pa.struct([*list(KINDS["stall"])[:-1], ("w2", pa.string())])))
    for make, message in [
        (lambda: tmp_path / "absent", "cannot be opened: No such file"),
        (lambda: tmp_path, "is not a file"),
        (lambda: file("empty", b""), "is empty"),
        (
            lambda: file("text", b"hello, world, this is text"),
            r"\(not a Parquet file\): name a file that 'iaprof record' wrote",
        ),
        (lambda: file("short", b"PAR1"), "cut short"),
        (lambda: file("cut", whole[: len(whole) // 2]), "cut short"),
        (lambda: file("spool", b"IAPS\1\0\0\0"), "iaprof recover"),
        (lambda: file("holes", whole[:4] + bytes(len(whole) - 8) + whole[-4:]), "damaged"),
        (lambda: written(tmp_path, metadata={}), r"\(another Parquet file\): name a file that 'iaprof record' wrote"),
        (lambda: written(tmp_path, metadata={HEADER_KEY: b"{"}), "damaged header"),
        (lambda: written(tmp_path, metadata=header_of([1])), "damaged header"),
        (lambda: written(tmp_path, metadata=header_of({"format": FORMAT + 1})), "install a newer iaprof"),
        (lambda: written(tmp_path, no_column), "no column 'part'"),
        (lambda: written(tmp_path, no_member), "no column 'stall.begin_ns'"),
        (lambda: written(tmp_path, mistyped), "column 'stall.w2' is of string"),
        (
            lambda: written(tmp_path, SCHEMA.set(SCHEMA.get_field_index("launch"), pa.field("launch", pa.int8()))),
            "column 'launch' is of type int8",
        ),
    ]:
        with pytest.raises(CaptureError, match=message):
            CaptureReader(make())  # type: ignore[no-untyped-call]


def test_a_row_group_of_two_kinds_is_damaged(tmp_path: Path) -> None:
    rows = pa.Table.from_pylist([{"kind": "stall"}, {"kind": "launch"}], SCHEMA)
    pq.write_table(rows.replace_schema_metadata(header_of({"format": FORMAT, **HEADER})), tmp_path / "p")
    with pytest.raises(CaptureError, match="has rows of several kinds"):
        CaptureReader(tmp_path / "p")


@pytest.mark.parametrize("step", usually([67], [67, 13]))
def test_flipped_bytes_raise_only_capture_errors(tmp_path: Path, step: int) -> None:
    # given a capture with one wrong byte
    rows = [stall(n, record(64 * n, sbid=3)) for n in range(300)]
    data = capture(tmp_path / "c", stall=rows, launch=[launch(n, 2, 3) for n in range(300)]).read_bytes()
    positions, refused = range(4, len(data), step), 0
    for position in positions:
        changed = bytearray(data)
        changed[position] ^= 0x55
        (tmp_path / "d").write_bytes(changed)
        # when, then it is read, or refused with a CaptureError
        try:
            reader = CaptureReader(tmp_path / "d")
            for kind in KINDS:
                for _ in reader.tables(kind):
                    pass
        except CaptureError:
            refused += 1
    assert len(positions) / 10 < refused < len(positions)
