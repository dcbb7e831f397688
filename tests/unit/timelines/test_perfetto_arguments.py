"""Imported arguments in Perfetto's format are what Python's own JSON reads, also where a capture holds damaged ones."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from iaprof.formats.perfetto.packets import PacketWriter
from iaprof.timelines.outputs.perfetto_arguments import ImportedArguments

MANY = 100  # texts, which are read as columns; few are read one by one
VALUES: tuple[Any, ...] = (
    0, -1, 300, -(10**15), 10**16, -(10**17), (1 << 64) - 1, -(1 << 63), 1 << 70, 0.5, -1.25e-7, 1e300, True, False,
    None, "", "text", "ü\n\"\\", "\u2028", [1, [2, {"a": "}"}]], {}, {"b": [1.5]},
)  # fmt: skip


def read(texts: list[str | None]) -> list[list[tuple[str, str, Any]] | None]:
    """What events' annotations are: names, types and values."""
    written = io.BytesIO()
    out = PacketWriter(written, pb.BUILTIN_CLOCK_BOOTTIME)
    found = ImportedArguments(out).annotations(pa.array(texts, pa.string())).to_pylist()
    interned = [packet.interned_data for packet in pb.Trace.FromString(written.getvalue()).packet]
    names = {each.iid: each.name for data in interned for each in data.debug_annotation_names}
    events = [None if each is None else pb.TrackEvent.FromString(each) for each in found]
    return [
        None
        if event is None
        else [
            (names[each.name_iid], each.WhichOneof("value"), getattr(each, each.WhichOneof("value")))
            for each in event.debug_annotations
        ]
        for event in events
    ]


def expected(text: str) -> list[tuple[str, str, Any]]:
    found: list[tuple[str, str, Any]] = []
    for name, value in json.loads(f"{{{text}}}").items():
        match value:
            case None:
                continue
            case bool():
                found.append((name, "bool_value", value))
            case int() if -(1 << 63) <= value < 1 << 64:
                found.append((name, "int_value" if value < 1 << 63 else "uint_value", value))
            case int() | float():
                found.append((name, "double_value", float(value)))
            case str():
                found.append((name, "string_value", value))
            case _:
                found.append((name, "legacy_json_value", json.dumps(value, separators=(",", ":"))))
    return found


@pytest.mark.parametrize("count", [3, MANY])
def test_values_of_all_types_come_back(count: int) -> None:
    texts = []
    for number in range(count):
        for value in VALUES:
            members = {f"n{number % 7}": number, "v": value, "ü": -number / 8}
            texts.append(json.dumps(members, separators=(",", ":"), ensure_ascii=number % 2 == 0)[1:-1])
    assert read([None, *texts]) == [None, *map(expected, texts)]


def test_of_a_name_that_comes_twice_the_last_value_counts() -> None:
    texts = [f'"a":{number},"a":{number + 1}' for number in range(MANY)]
    assert read([*texts]) == [[("a", "int_value", number + 1)] for number in range(MANY)]


@pytest.mark.parametrize(
    "odd",
    [
        ['"a":"', '"'],  # which make one object together
        ['"a":1},{"b":2'],
        ['"x":', "1]", "nonsense", '"a" 1'],
        ['"a":1},{"b":"', '"'],  # two objects, but others
    ],
)
def test_texts_that_are_no_members_change_no_other_events(odd: list[str]) -> None:
    # given the arguments of a hostile capture
    texts = [f'"n":{number}' for number in range(MANY)]
    given: list[str | None] = [*texts[:50], *odd, *texts[50:]]

    # when they are written, then those of all other events are their own, and these are texts
    found = read(given)
    assert found[:50] + found[50 + len(odd) :] == [*map(expected, texts)]
    assert found[50 : 50 + len(odd)] == [[("args", "string_value", f"{{{text}}}")] for text in odd]
