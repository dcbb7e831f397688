"""OpenTelemetry's profiles, read back with the generated classes of opentelemetry-proto."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import ExportProfilesServiceRequest
from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesData

from iaprof.basics.errors import UsageError
from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.otlp import Otlp
from iaprof.formats.writers.registry import WRITERS
from unit import stalled
from unit.writers import test_pprof


def written(export: Export, options: StackOptions | None = None) -> ProfilesData:
    out = io.BytesIO()
    Otlp().write(export, options or StackOptions(), out)
    message = ProfilesData()
    message.ParseFromString(out.getvalue())
    return message


def text(message: ProfilesData) -> list[str]:
    """A line per sample, as in the tests of pprof: frames from the innermost, labels and values."""
    tables = message.dictionary
    string = tables.string_table
    lines = []
    (resource,) = message.resource_profiles
    (scope,) = resource.scope_profiles
    (profile,) = scope.profiles
    for sample in profile.samples:
        frames = []
        assert sample.stack_index > 0
        for number in tables.stack_table[sample.stack_index].location_indices:
            assert number > 0
            location = tables.location_table[number]
            (line,) = location.lines
            function = tables.function_table[line.function_index]
            file = string[function.filename_strindex]
            address = f"{location.address:#x} " if location.address else ""
            place = f" {file}:{line.line}" if file else ""
            module = string[tables.mapping_table[location.mapping_index].filename_strindex] or "?"
            frames.append(f"{address}{string[function.name_strindex]}{place} in {module}")
        labels = []
        for index in sample.attribute_indices:
            attribute = tables.attribute_table[index]
            key = string[attribute.key_strindex]
            key = {"host.name": "host", "process.executable.name": "process", "process.pid": "pid"}.get(key, key)
            value = attribute.value.string_value or attribute.value.int_value
            labels.append(f"{key.removeprefix('iaprof.')}={value}")
        lines.append(f"{' < '.join(frames)} | {' '.join(labels)} | {list(sample.values)}")
    return lines


@pytest.mark.parametrize(
    "options",
    [
        StackOptions(),
        StackOptions(components=("function", "reason")),
        StackOptions(components=("interval", "line", "offset")),
        StackOptions(components=("function",), inverted=True, percent_limit=50),
        StackOptions(cpu_samples=True),
    ],
)
@pytest.mark.parametrize("given", ["export", "hostile"])
def test_stacks_labels_and_counts_are_those_of_pprof(given: str, options: StackOptions) -> None:
    export = getattr(stalled, given)()
    assert sorted(text(written(export, options))) == sorted(test_pprof.text(test_pprof.written(export, options)))


def test_what_it_is_a_profile_of() -> None:
    message = written(stalled.export())
    (resource,) = message.resource_profiles
    assert [(each.key, each.value.string_value) for each in resource.resource.attributes] == [
        ("service.name", "iaprof")
    ]
    (profile,) = resource.scope_profiles[0].profiles
    string = message.dictionary.string_table
    kind = profile.sample_type
    assert (string[kind.type_strindex], string[kind.unit_strindex]) == ("gpu_samples", "count")
    assert (profile.time_unix_nano, profile.duration_nano) == (1_700_000_000_500_000_000, 80_000_000)
    about = [message.dictionary.attribute_table[number] for number in profile.attribute_indices]
    assert {string[each.key_strindex]: each.value.string_value for each in about} == {
        "iaprof.title": "app --fast · Battlemage · north",
        "iaprof.warnings": "loss",
    }
    assert len(profile.profile_id) == 16
    assert written(stalled.export()) == message


def test_a_collector_takes_the_file_as_it_is() -> None:
    """An export request has the same fields as the file, by number."""
    message = written(stalled.export())
    request = ExportProfilesServiceRequest()
    request.ParseFromString(message.SerializeToString())
    assert request.resource_profiles == message.resource_profiles
    assert request.dictionary == message.dictionary


def test_the_first_entry_of_each_table_is_none() -> None:
    """As the protocol demands: 0 means that there is none."""
    for export in (stalled.export(), stalled.export([]), stalled.hostile()):
        tables = written(export).dictionary
        assert tables.string_table[0] == ""
        for name in ("mapping", "location", "function", "link", "attribute", "stack"):
            table = getattr(tables, f"{name}_table")
            assert table[0] == type(table[0])(), name
        assert all(each.isprintable() for each in tables.string_table)


def test_an_empty_profile_is_written() -> None:
    message = written(stalled.export([]))
    assert text(message) == []


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.profiles.v1development", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.profiles", None)
    with pytest.raises(UsageError, match=r"pip install 'iaprof\[otlp\]'"):
        WRITERS["otlp"]


def otlp_total(file: Path) -> int:
    message = ProfilesData()
    message.ParseFromString(file.read_bytes())
    profiles = [each for resource in message.resource_profiles for scope in resource.scope_profiles
                for each in scope.profiles]  # fmt: skip
    return sum(sample.values[0] for profile in profiles for sample in profile.samples)


TOTALS = {"otlp": otlp_total}
