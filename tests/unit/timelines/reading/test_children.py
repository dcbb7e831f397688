"""Pieces of every size give the same rows as the whole file, and damage costs only what is damaged."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from iaprof.basics.errors import IaprofError
from iaprof.sandbox.parent import SandboxDied
from iaprof.timelines.reading import answer
from iaprof.timelines.reading.answer import Columns
from iaprof.timelines.reading.children import Children, End, _end_of_piece, events
from iaprof.timelines.reading.event_decoding import read as read_piece
from iaprof.timelines.reading.source import Source
from thorough import thorough
from unit.timelines.reading.importing import HERE, AtOnce, rows_without_file

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.sampled_from(['}, {"', "]", "[{", 'a"b', "\\", "é", "0x1f", "12"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["TS1", "a", "ph", "{"]), inner),
    max_leaves=6,
)  # fmt: skip
_EVENTS = st.fixed_dictionaries(
    {
        "ph": st.sampled_from("XXXBEBECsfiM?"), "name": st.sampled_from(["a", "b", "RDMA }, {"]),
        "ts": st.integers(0, 10**6) | st.floats(0, 1e6, width=32), "pid": st.sampled_from([0, 1, "x"]),
    },
    optional={
        "dur": st.integers(-2, 100), "tid": st.integers(0, 2), "id": st.integers(0, 5) | st.just("0x1"),
        "args": st.dictionaries(st.sampled_from(["TS1", "Power", "bytes", "Peer", "x", "y"]), _VALUES, max_size=4),
        "cat": st.just("kernel"), "tts": st.integers(0, 5),
    },
)  # fmt: skip


def everything(text: str | bytes, piece_bytes: int) -> Any:
    rows, facts = rows_without_file(text.encode() if isinstance(text, str) else text, piece_bytes)
    return rows, facts.as_dict()


@settings(max_examples=60, deadline=None)
@given(st.lists(_EVENTS, max_size=8), st.sampled_from([None, 1]), st.booleans(), st.randoms(use_true_random=False))
@thorough
def test_pieces_of_any_size(events: list[Any], indent: int | None, is_list: bool, choice: random.Random) -> None:
    around = {"a": {"b": ["}]"]}, "traceEvents": events, "otherData": [{"ph": "X"}, {"c": 1}]}
    text = json.dumps(events if is_list else around, indent=indent)
    whole = everything(text, len(text) + 10)
    assert whole[1]["counts"]["events"] == len(events)
    for size in {1, 7, *(choice.randrange(1, len(text) + 1) for _ in range(3))}:
        assert everything(text, size) == whole


@thorough
def test_every_size_of_one_file() -> None:
    event = {"ph": "X", "name": 'a},{"', "pid": 0, "ts": 1.5, "dur": 2, "args": {"list": [{"ph": "X"}, {"ph": "X"}]}}
    text = json.dumps({"traceEvents": [event, {"ph": "B", **{k: event[k] for k in ("name", "pid", "ts")}}] * 2, "x": 1})
    whole = everything(text, 1 << 20)
    for size in range(1, len(text) + 1):
        assert everything(text, size) == whole, size


def test_a_healthy_file_is_read_as_json_reads_it() -> None:
    make = random.Random(5)
    events = [
        {"ph": "X", "name": f"n{make.randrange(9)}", "pid": make.randrange(3), "tid": 0,
         "ts": make.randrange(10**9) / 8, "dur": make.randrange(1000) / 8,
         "args": {"TS1": hex(number), "deep": {"list": [{}, {"a": [number]}]}}}
        for number in range(3000)
    ]  # fmt: skip
    rows, _ = everything(json.dumps(events), 5000)
    expected = [
        (each["name"], each["pid"], round(each["ts"] * 1000), round(each["dur"] * 1000), int(each["args"]["TS1"], 16),
         {"deep": each["args"]["deep"]})
        for each in json.loads(json.dumps(events))
    ]  # fmt: skip
    found = [(r["name"], r["pid"], r["time_ns"], r["duration_ns"], r["ts1"], r["args"]) for r in rows["slice"]]
    assert found == expected


@thorough
@settings(max_examples=100, deadline=None)
@given(st.lists(_EVENTS, min_size=1, max_size=6), st.data())
def test_random_damage_never_ends_in_a_traceback(events: list[Any], data: st.DataObject) -> None:
    text = bytearray(json.dumps({"traceEvents": events, "deviceProperties": []}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        damage = data.draw(
            st.sampled_from([b"", b"\0", b"\xff", b'"', b"}", b"]", b"{", b",", b"\\", b"NaN", b"[" * 1100])
        )
        text[at : at + data.draw(st.integers(0, 3))] = damage
        text = text or bytearray(b" ")
    size = data.draw(st.sampled_from([3, 50, 1 << 20]))
    try:
        rows_without_file(bytes(text), size)  # checks that counts add up
    except IaprofError as error:
        assert "trace" in str(error)


@pytest.mark.parametrize("bad", [b'{"name": tru', b'{"ph": "X", "name": "no end', b"}}}]", b"@"])
def test_one_damaged_event_of_many_costs_only_itself(bad: bytes) -> None:
    good = json.dumps({"ph": "X", "name": "a", "pid": 0, "ts": 1, "dur": 1}).encode()
    events = [good] * 500
    events[250] = bad
    rows, facts = everything(b'{"traceEvents": [' + b",\n".join(events) + b'], "x": 1}', 1000)
    assert len(rows["slice"]) >= 498
    assert sum(facts["counts"]["dropped"].values()) <= 2


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("length", [1, 70_000, 300_000])
def test_a_piece_that_is_larger_than_the_file_ends_with_it(
    tmp_path: Path, pack: Callable[[bytes], bytes], length: int
) -> None:
    (tmp_path / "x.json").write_bytes(pack(b"x" * length))
    for size in (1 << 16, 200_000, 1 << 20):
        with (tmp_path / "x.json").open("rb") as file:
            stop, is_last = _end_of_piece(Source(file.fileno(), "x.json", HERE), 1, size)
        assert stop <= length
        assert is_last == (stop == length)


class _AnyAnswers:
    """A child that consumes some of a piece, or fails, as it likes."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self._choose, self.calls = choose, 0

    def call(
        self, operation: str, parameters: Any = None, data: bytes = b"", fds: Any = (), seconds: float | None = None
    ) -> Any:
        self.calls += 1
        length = len(data) or parameters["end"] - parameters["start"]
        chosen = self._choose(3 * (length + 1))
        if chosen % 3 == 2:
            raise SandboxDied("died")
        written = answer.write(Columns(), fds[-1])
        facts = {"events": 0, "dropped": {}, "ended": False, "bad_bytes": 0}
        return {**written, **facts, "consumed": min(chosen // 3, length), "lost": chosen % 3 == 1}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2_000_000), st.sampled_from([1, 100, 1 << 16, 1 << 20]), st.data())
def test_whatever_children_answer_reading_ends(length: int, piece_bytes: int, data: st.DataObject) -> None:
    # given
    random_ = data.draw(st.randoms(use_true_random=False))
    share = data.draw(st.sampled_from([0.0, 0.1, 0.5]))  # of answers that are any; the others consume nothing
    dead = data.draw(st.sampled_from([0, 2]))
    child = _AnyAnswers(lambda most: random_.randrange(most) if random_.random() < share else dead)
    # when
    with tempfile.TemporaryFile() as file:
        file.write(b" " * length)
        file.flush()
        source, end = Source(file.fileno(), "x.json", child), End()
        children = Children(1, [child], AtOnce())
        consumed = sum(read.consumed for read in events(source, 0, children, end, piece_bytes))
    # then: at each place that was reached, a few dozens of pieces are tried
    assert consumed == length == end.at
    assert child.calls <= 64 * (1 + length // piece_bytes + length // (1 << 16)) or share


def test_an_event_that_goes_on_behind_its_piece_is_not_damaged() -> None:
    """Given a bracket in a text, and objects in the event behind which the piece may end."""
    event = b'{"name": "a", "args": {"bytes": "]", "y": [1, {"z": 2}, {"z": 3}]}, "ph": "X", "ts": 9}'
    read = [read_piece(event[:end], is_last=False) for end in range(1, len(event))]
    assert {(piece.consumed, len(piece.events), len(piece.dropped)) for piece in read} == {(0, 0, 0)}
