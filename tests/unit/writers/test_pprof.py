"""pprof's format, read back with the protobuf library."""

import gzip
import io
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.pprof import Pprof, new_profile
from unit import stalled

PUBLISHED = {  # proto/profile.proto of google/pprof
    "Profile": "1 sample_type 2 sample 3 mapping 4 location 5 function 6 string_table 9 time_nanos 10 duration_nanos"
    " 13 comment 14 default_sample_type",
    "ValueType": "1 type 2 unit",
    "Sample": "1 location_id 2 value 3 label",
    "Label": "1 key 2 str 3 num 4 num_unit",
    "Mapping": "1 id 5 filename 7 has_functions 8 has_filenames 9 has_line_numbers 10 has_inline_frames",
    "Location": "1 id 2 mapping_id 3 address 4 line",
    "Line": "1 function_id 2 line",
    "Function": "1 id 2 name 3 system_name 4 filename",
}


def written(export: Export, options: StackOptions | None = None) -> Any:
    out = io.BytesIO()
    Pprof().write(export, options or StackOptions(), out)
    message = new_profile()
    message.ParseFromString(gzip.decompress(out.getvalue()))
    return message


DOT = "dot(float)_[G] src/vec.h:9 in [gpu]"
MATMUL = "matmul_[G] src/matmul.cl:4 in [gpu]"


def text(message: Any) -> list[str]:
    """A line per sample: frames from the innermost, labels and values, with all numbers resolved."""
    string = message.string_table
    functions = {each.id: each for each in message.function}
    locations = {each.id: each for each in message.location}
    mappings = {each.id: string[each.filename] for each in message.mapping} | {0: "?"}
    lines = []
    for sample in message.sample:
        frames = []
        for number in sample.location_id:
            location = locations[number]
            (line,) = location.line
            function = functions[line.function_id]
            address = f"{location.address:#x} " if location.address else ""
            place = f" {string[function.filename]}:{line.line}" if function.filename else ""
            frames.append(f"{address}{string[function.name]}{place} in {mappings[location.mapping_id]}")
        labels = [f"{string[label.key]}={string[label.str] or label.num}" for label in sample.label]
        lines.append(f"{' < '.join(frames)} | {' '.join(labels)} | {list(sample.value)}")
    return lines


def test_functions_are_frames_by_pprofs_definitions_as_it_cannot_be_had_offline() -> None:
    message = written(stalled.export())
    cpu = (
        "do_syscall_64_[k] in [kernel] < nn::run(int) nn/run.cpp:40 in /usr/lib/libnn so.1"
        " < main src/main.c:12 in /usr/bin/app"
    )
    gpu = "dot(float)_[G] src/vec.h:9 in [gpu] < matmul_[G] src/matmul.cl:4 in [gpu]"
    app = "device=card0 process=app pid=42"
    assert sorted(text(message)) == sorted(
        [
            f"0x10 {gpu} < {cpu} | {app} instruction=send reason=active | [10]",
            f"0x10 {gpu} < {cpu} | {app} instruction=send reason=stall: sbid | [70]",
            f"0x30 {gpu} < {cpu} | {app} instruction=send reason=stall: sbid | [2]",
            "0x20 matmul_[G] src/matmul.cl:5 in [gpu] < main src/main.c:15 in /usr/bin/app"
            f" | {app} instruction=mov reason=stall: tdr | [20]",
            f"0x10 {gpu} < [libfoo.so+0x1f0] in ?"
            " | host=north device=card1 process=Web Content pid=7 instruction=send reason=stall: send | [5]",
            "0x8000000000000001 [unknown kernel]_[G] in [gpu] < [unknown process] in ?"
            " | device=card1 process=[unknown process] instruction=[no binary] reason=stall: control | [3]",
        ]
    )
    string = message.string_table
    assert string[0] == ""
    assert [(string[each.type], string[each.unit]) for each in message.sample_type] == [("gpu_samples", "count")]
    assert string[message.default_sample_type] == "gpu_samples"
    assert (message.time_nanos, message.duration_nanos) == (1_700_000_000_500_000_000, 80_000_000)
    assert [string[each] for each in message.comment][1:] == ["app --fast · Battlemage · north", "loss"]


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            StackOptions(components=("function", "reason")),
            [
                f"{DOT} < {MATMUL} | device=card0 reason=active | [10]",
                f"{DOT} < {MATMUL} | device=card0 reason=stall: sbid | [72]",
                f"{DOT} < {MATMUL} | host=north device=card1 reason=stall: send | [5]",
                "matmul_[G] src/matmul.cl:5 in [gpu] | device=card0 reason=stall: tdr | [20]",
                "[unknown kernel]_[G] in [gpu] | device=card1 reason=stall: control | [3]",
            ],
        ),
        (
            StackOptions(components=("interval", "line", "offset")),
            [
                "0x10 vec.h line 9_[G] src/vec.h:9 in [gpu] | device=card0 interval=0.000 s | [80]",
                "0x10 vec.h line 9_[G] src/vec.h:9 in [gpu] | host=north device=card1 interval=0.020 s | [5]",
                "0x20 line 5_[G] src/matmul.cl:5 in [gpu] | device=card0 interval=0.000 s | [20]",
                "0x30 vec.h line 9_[G] src/vec.h:9 in [gpu] | device=card0 interval=0.060 s | [2]",
                "[unknown] in ? | device=card1 interval=0.060 s | [3]",
            ],
        ),
        (
            StackOptions(components=("function",), inverted=True, percent_limit=50),
            [
                "[below 50 %] in ? | device=card0 | [20]",
                "[below 50 %] in ? | device=card1 | [3]",
                f"{MATMUL} < {DOT} | device=card0 | [82]",
                f"{MATMUL} < {DOT} | host=north device=card1 | [5]",
            ],
        ),
        (
            StackOptions(cpu_samples=True),
            [
                "wait nn/run.cpp:40 in /usr/lib/libnn so.1 < main src/main.c:12 in /usr/bin/app"
                " | process=app pid=42 | [4]",
                "cpu_idle_[k] in [kernel] | process=swapper | [2]",
            ],
        ),
    ],
)
def test_chosen_components(options: StackOptions, lines: list[str]) -> None:
    assert sorted(text(written(stalled.export(), options))) == sorted(lines)


def test_fields_have_the_numbers_that_pprof_publishes() -> None:
    messages = new_profile().DESCRIPTOR.file.message_types_by_name
    found = {
        name: " ".join(f"{each.number} {each.name}" for each in message.fields) for name, message in messages.items()
    }
    assert found == PUBLISHED


def test_an_empty_profile_is_written() -> None:
    message = written(stalled.export([]))
    assert list(message.sample) == []
    assert [message.string_table[each.type] for each in message.sample_type] == ["gpu_samples"]


def test_hostile_names_stay_strings() -> None:
    message = written(stalled.hostile())
    assert sum(sample.value[0] for sample in message.sample) == sum(range(1, len(stalled.HOSTILE) + 1))
    assert all(each.isprintable() for each in message.string_table)
    assert {len(sample.location_id) for sample in message.sample} == {4}


def test_every_id_refers_to_a_table_entry() -> None:
    message = written(stalled.hostile())
    strings = range(len(message.string_table))
    assert message.function
    assert {label.key for each in message.sample for label in each.label}
    used = {number for each in message.sample for number in each.location_id}
    assert len(used) > len(stalled.HOSTILE)
    assert used <= {each.id for each in message.location}
    functions = {line.function_id for each in message.location for line in each.line}
    assert functions == {each.id for each in message.function}
    assert [each.id for each in message.location] == list(range(1, len(message.location) + 1))
    assert [each.id for each in message.function] == list(range(1, len(message.function) + 1))
    assert {each.mapping_id for each in message.location} <= {0, *(each.id for each in message.mapping)}
    assert all(each.name in strings and each.filename in strings for each in message.function)
    assert all(label.key in strings and label.str in strings for each in message.sample for label in each.label)


def pprof_total(file: Path) -> int:
    message = new_profile()
    message.ParseFromString(gzip.decompress(file.read_bytes()))
    return sum(sample.value[0] for sample in message.sample)


TOTALS = {"pprof": pprof_total}
