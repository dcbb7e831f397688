"""Blocks of usual events become the same rows as when they are read event by event."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from iaprof.timelines.reading import block_columns, blocks, event_columns, event_decoding, piece_columns
from iaprof.timelines.reading.answer import Columns
from iaprof.timelines.reading.blocks import Block, NotPlain
from iaprof.timelines.reading.imported_file import TableMaker
from thorough import thorough

_NUMBERS = st.sampled_from(
    ["0", "-0", "7", "-12", "1.5", "-0.25", "12.125", "3.1234", "1e3", "123456789012345.999", "1234567890123456789012",
     '"12"', '"0x1F"', '"0Xdeadbeef01"', '"-0x1"', '"0x"', '"1.5"', '" 5 "', "null", "true", '"x"', "1E400", '"+5"',
     '"007"', '"0x123456789abcdef0"', "0.0005", "9007199254740993", "[1]", "{}"]
)  # fmt: skip
_PIDS = st.sampled_from(["0", "12", "-3", '"x"', "1.0", '"0"', '"-12"', '"007"', '" 7"', '"1.5"', '""'])
_TEXTS = st.sampled_from(['"a"', '"b Cmpt Exec"', '"}, {"', '"é"', '"a\\"b"', '"\\u0041"', '"\\\\"', '"\\ud800"', '""'])
_KEYS = st.sampled_from(
    ["TS1", "TS5", "Power", "Bytes", "bytes", "correlation", "device", "External id", "Python id", "CollGroup", "Type",
     "Peer", "Peers", "memory bandwidth (GB/s)", "memory bandwidth {GB/s}", "x", "bp", "id", "TS\\u0031", "T", "é"]
)  # fmt: skip
_VALUES = _NUMBERS | _TEXTS | st.sampled_from(["[]", '[1, {"a": "}"}]', '{"a" : [ 1,2 ] }'])
_BLANKS = st.sampled_from(["", "", " ", "\n\t "])


@st.composite
def _objects(draw: st.DrawFn, members: st.SearchStrategy[list[tuple[str, str]]]) -> str:
    inside = [
        f'{draw(_BLANKS)}"{key}"{draw(_BLANKS)}:{draw(_BLANKS)}{value}{draw(_BLANKS)}' for key, value in draw(members)
    ]
    return "{" + ",".join(inside) + "}"


_ARGS = _objects(st.lists(st.tuples(_KEYS, _VALUES), max_size=4))


@st.composite
def _events(draw: st.DrawFn) -> str:
    usual = [
        ("ph", draw(st.sampled_from(['"X"', '"X"', '"B"', '"E"', '"C"', '"s"', '"f"', '"i"', '"M"', '"XX"', '""']))),
        ("name", draw(_TEXTS)), ("pid", draw(_PIDS)),
        ("ts", draw(_NUMBERS)), ("dur", draw(_NUMBERS)),
    ]  # fmt: skip
    rare = [
        ("tid", draw(_NUMBERS)), ("cat", draw(_TEXTS)), ("id", draw(_NUMBERS)), ("args", draw(_ARGS)),
        ("attr", draw(_ARGS)), ("bp", '"e"'), ("s", '"g"'), ("name", '"twice"'), ("tts", "5"), ("args", "null"),
    ]  # fmt: skip
    chosen = [each for each in usual if draw(st.integers(0, 19))]
    chosen += [each for each in rare if not draw(st.integers(0, 3))]
    return draw(_objects(st.just(draw(st.permutations(chosen)))))


def rows(found: Columns) -> Any:
    """All rows, and the counts of what was odd in them."""
    tables = TableMaker(0, renames=True).tables(found)
    lists = {}
    for kind, table in tables.items():
        names = [name for name in table.column_names if table[name].null_count < len(table)]
        lists[kind] = table.select(names).to_pylist()
    event = found.counters.get("event")
    return lists, None if event is None else event.tolist(), found.cut_args, found.bad_values, found.cut_texts


def carefully(data: bytes) -> Any:
    piece = event_decoding.read(data, is_last=True)
    found = event_columns.columns_of(piece.events, piece.dropped)
    return rows(found), +piece.dropped, piece.consumed


def quickly(data: bytes, block_bytes: int) -> Any:
    found, piece, _ = piece_columns.read(data, True, block_bytes=block_bytes)
    return rows(found), +piece.dropped, piece.consumed


@settings(max_examples=400, deadline=None)
@example(['{"ph":"X","name":"a","pid":0,"ts":1,"dur":1,"s":"t","bp":"e","id":5,"args":{}}'], 4096)
@example(['{"ph":"C","name":"a","pid":0,"ts":1,"args":{"a":1,"a":2}}'], 4096)
@given(st.lists(_events(), min_size=1, max_size=6), st.sampled_from([64, 300, 4096]))
@thorough
def test_any_events_give_the_same_rows(texts: list[str], block_bytes: int) -> None:
    data = ",\n".join(texts).encode()

    assert quickly(data, block_bytes) == carefully(data)


@settings(max_examples=200, deadline=None)
@given(st.lists(_events(), min_size=1, max_size=3), st.data())
@thorough
def test_damage_gives_the_same_rows(texts: list[str], choice: st.DataObject) -> None:
    data = bytearray(",".join(texts).encode())
    for _ in range(choice.draw(st.integers(1, 3))):
        data[choice.draw(st.integers(0, len(data) - 1))] = choice.draw(st.sampled_from(b'"\\{}[]:,x\xff\x00'))

    assert quickly(bytes(data), 4096) == carefully(bytes(data))


def test_what_runtimes_write_is_never_read_event_by_event() -> None:
    slices = [
        {"name": f"mm_{n} Cmpt Exec", "ph": "X", "pid": 0, "tid": 71, "ts": 1.7e12 + n / 8, "dur": 5.25,
         "args": {**{f"TS{k}": str(1000 * n + k) for k in range(1, 6)}, "Power": hex(n), "size": n}}
        for n in range(100)
    ]  # fmt: skip
    torch = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 4000, "tid": 4000, "ts": 4824381735614.123, "dur": 2,
         "args": {"External id": 3, "Input Dims": [[1, 2], []], "Input type": ["float", "\\"]}},
        {"ph": "s", "id": 3, "cat": "ac2g", "name": "ac2g", "pid": 4000, "tid": 4000, "ts": 4824381735614.5},
        {"ph": "f", "id": 3, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 4824381735615.5, "bp": "e"},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (a -> b)", "pid": 0, "tid": 7, "ts": 4824381735616.0,
         "dur": 1.5, "args": {"memory bandwidth (GB/s)": 2.5, "bytes": 128, "correlation": 3, "device": 0}},
        {"ph": "C", "name": "Power", "pid": 0, "ts": 5, "args": {"Watts": 16.5, "cap": 75}},
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 5.0, "args": {"name": "python"}},
    ]  # fmt: skip
    for made in (slices, torch):
        for separators in ((",", ":"), (", ", ": ")):
            data = json.dumps(made, separators=separators)[1:-1].encode()
            expected = carefully(data)
            with mock.patch.object(event_columns, "columns_of", side_effect=AssertionError):
                assert quickly(data, 4096) == expected


def test_values_worked_out_by_hand() -> None:
    data = (
        b'{"name":"a Cmpt Exec","ph":"X","pid":3,"tid":-4,"ts":1000.5,"dur":"2.25","id":9,"bp":"e",'
        b'"args":{"TS1":"0xfF","x": [1, "a b"],"Power":12,"Type":"t"}}'
    )

    found = block_columns.columns_of(Block(data), event_columns.Texts())

    wanted = {"time_ns": 1_000_500, "duration_ns": 2250, "pid": 3, "tid": -4, "name": 0, "ts1": 255, "power": 12}
    assert {name: found.slices[name].tolist() for name in wanted} == {name: [each] for name, each in wanted.items()}
    assert found.slices["args"].tobytes() == b'{"id":9,"bp":"e","x":[1,"a b"]}'


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.integers(-(10**20), 10**20).map(str) | st.integers(0, 1 << 65).map(hex) | st.text("0x9fG.-", min_size=1)
    )
)
def test_integers_are_pythons(texts: list[str]) -> None:
    def value(text: str) -> int | None:
        digits = text.removeprefix("-")
        if digits[:2] == "0x" and text == digits and digits[2:].isalnum():
            base = 16
        elif digits.isdigit():
            base = 10
        else:
            return None
        try:
            return int(text, base)
        except ValueError:
            return None

    expected = [value(text) for text in texts]
    for text, number in zip(texts, expected, strict=True):
        starts, ends, block = _placed([text])
        if number is not None and -(1 << 63) < number < 1 << 63:
            assert blocks.integers(block, starts, ends).tolist() == [number]
        elif number is not None or not set(text) & set(".x-"):
            with pytest.raises(NotPlain):
                blocks.integers(block, starts, ends)
    good = [text for text, number in zip(texts, expected, strict=True) if number is not None and abs(number) < 1 << 62]
    starts, ends, block = _placed(good)
    assert blocks.integers(block, starts, ends).tolist() == [value(text) for text in good]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(-(10**18), 10**18), st.integers(0, 4))))
def test_times_are_exact(times: list[tuple[int, int]]) -> None:
    texts, expected = [], []
    for ns, zeros in times:
        whole, rest = divmod(abs(ns), 1000)
        texts.append(f"{'-' if ns < 0 else ''}{whole}.{rest:03}{'0' * zeros}")
        expected.append(ns)

    starts, ends, block = _placed(texts)

    assert blocks.nanoseconds(block, starts, ends).tolist() == expected


def _placed(texts: list[str]) -> tuple[Any, Any, Block]:
    """A block with texts, and where they are."""
    block = Block(json.dumps({"a": texts}, separators=(",", ":")).encode())
    lengths = np.array([len(text) for text in texts], np.int64)
    starts = block.text.index(b"[", 20) + 2 + np.cumsum(lengths + 3) - lengths - 3
    return starts, starts + lengths, block


def test_an_object_with_a_key_twice_needs_more_care() -> None:
    event = '{"name":"a","ph":"X","pid":0,"ts":1,"dur":1,"args":{"x":1,"y":2,"%s":3}}'
    block_columns.columns_of(Block((event % "z").encode()), event_columns.Texts())

    with pytest.raises(NotPlain):
        block_columns.columns_of(Block((event % "x").encode()), event_columns.Texts())


def test_dropped_events_of_all_blocks_are_counted() -> None:
    event = '{"name":"a","ph":"X","pid":0,"ts":1,"dur":%d}'
    data = ",".join(event % duration for duration in (1, -1, 1, -1)).encode()

    found, piece, count = piece_columns.read(data, True, block_bytes=60)

    assert (len(found.slices["time_ns"]), +piece.dropped, count) == (2, Counter({"negative duration": 2}), 4)


_PARTS = [b'{"a":1}', b'{"a":"' + b"x" * 100 + b'"}', b'{"a":"' + b"x" * 900, b"{", b"}", b'"', b",", b"]", b" " * 70]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(_PARTS), max_size=60))
def test_reading_takes_time_that_is_linear_in_any_input(parts: list[bytes]) -> None:
    # given
    data, looked_at = b",".join(parts), []

    def counting(part: bytes) -> Block:
        looked_at.append(len(part))
        return Block(part)

    # when
    with mock.patch.object(piece_columns, "Block", counting):
        piece_columns.read(data, is_last=True, block_bytes=64)
    # then
    assert sum(looked_at) <= 16 * len(data) + 1024
    assert len(looked_at) <= 2 * len(data) // 64 + len(parts) + 2
