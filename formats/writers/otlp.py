"""OpenTelemetry's profiles: a ProfilesData message, which is also what a collector takes as an export request.

The messages are those of the package opentelemetry-proto (opentelemetry/proto/profiles/v1development/profiles.proto),
which the extra `otlp` installs. Stacks and labels are those of pprof.
"""

from __future__ import annotations

import hashlib
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from iaprof import __version__
from iaprof.basics.clean import clean
from iaprof.basics.errors import UsageError
from iaprof.formats.distinct import distinct_rows, sum_groups
from iaprof.formats.export import About, CpuSamples, Export
from iaprof.formats.profile import Profile, StackOptions
from iaprof.formats.stacks.frames import UNKNOWN_FRAME
from iaprof.formats.stacks.trees import Tree
from iaprof.formats.writers.pprof import GPU, LATEST_S, LabelledStacks, innermost_first, labelled_stacks
from iaprof.formats.writers.writer import Needs, Writer

if TYPE_CHECKING:
    from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesData

_KEYS = {"host": "host.name", "process": "process.executable.name", "pid": "process.pid"}
"""The names that OpenTelemetry's conventions have for labels; others begin with `iaprof.`."""
_STACKS_AT_ONCE = 1 << 16
_Ints = NDArray[np.int64]


class Otlp(Writer):
    """OpenTelemetry's profiles."""

    needs = Needs.ABOUT
    binary = True
    readable = False

    def __init__(self) -> None:
        """Loads the messages.

        Raises:
            UsageError: opentelemetry-proto is not installed, or is of a version without these messages.
        """
        try:
            from opentelemetry.proto.profiles.v1development import profiles_pb2
        except ImportError:
            raise UsageError("--format=otlp needs opentelemetry-proto: pip install 'iaprof[otlp]'") from None
        self._messages = profiles_pb2

    def write(self, export: Export, options: StackOptions, out: IO[bytes]) -> None:
        """Writes the profile of the stalls, or of the CPU samples."""
        cpu = export.cpu if options.cpu_samples else None
        source: Profile | CpuSamples = cpu or export.profile
        given = labelled_stacks(source, options)
        message = self._messages.ProfilesData()
        tables = _Tables(message)
        resource = message.resource_profiles.add()
        resource.resource.attributes.add(key="service.name").value.string_value = "iaprof"
        scope = resource.scope_profiles.add()
        scope.scope.name, scope.scope.version = "iaprof", __version__
        profile = scope.profiles.add()
        kind = "samples" if cpu else "gpu_samples"
        profile.sample_type.type_strindex = tables.string(kind)
        profile.sample_type.unit_strindex = tables.string("count")
        _describe(profile, export.about, tables)
        tree = given.tree
        distinct, set_of = given.label_sets()
        sets = [[tables.attribute(key, value) for key, value in labels] for labels in distinct]
        leaf = _innermost(given, tables)
        first, number = distinct_rows(set_of, tree.node, leaf)
        counts = sum_groups(tree.count, number).tolist()
        stack_first, stack_of = distinct_rows(tree.node[first], leaf[first])
        for begin in range(0, len(stack_first), _STACKS_AT_ONCE):
            rows = first[stack_first[begin : begin + _STACKS_AT_ONCE]]
            for stack in innermost_first(tree, tree.node[rows], leaf[rows]):
                message.dictionary.stack_table.add(location_indices=stack)
        labels = set_of[first].tolist()
        for stack_index, label, count in zip((stack_of + 1).tolist(), labels, counts, strict=True):
            profile.samples.add(stack_index=stack_index, attribute_indices=sets[label], values=[count])
        tables.write_strings()
        # Two exports of one capture are one profile for a backend.
        profile.profile_id = hashlib.sha256(profile.SerializeToString(deterministic=True)).digest()[:16]
        out.write(message.SerializeToString(deterministic=True))


class _Tables:
    """The tables that samples refer to by number; the first entry of each means that there is none."""

    def __init__(self, message: ProfilesData) -> None:
        self.message = message.dictionary
        for table in ("mapping", "location", "function", "link", "attribute", "stack"):
            getattr(self.message, f"{table}_table").add()
        self._strings = {"": 0}
        self._functions: dict[tuple[int, int], int] = {}
        self._mappings: dict[int, int] = {0: 0}
        self._attributes: dict[tuple[str, str | int], int] = {}

    def string(self, text: str) -> int:
        return self._strings.setdefault(clean(text), len(self._strings))

    def function(self, name: str, file: str) -> int:
        key = self.string(name), self.string(file)
        if key not in self._functions:
            self._functions[key] = len(self.message.function_table)
            self.message.function_table.add(name_strindex=key[0], system_name_strindex=key[0], filename_strindex=key[1])
        return self._functions[key]

    def module(self, path: str) -> int:
        name = self.string(path)
        if name not in self._mappings:
            self._mappings[name] = len(self.message.mapping_table)
            self.message.mapping_table.add(filename_strindex=name)
        return self._mappings[name]

    def attribute(self, key: str, value: str | int) -> int:
        known = (key, value)
        if known not in self._attributes:
            self._attributes[known] = len(self.message.attribute_table)
            added = self.message.attribute_table.add(key_strindex=self.string(_KEYS.get(key, f"iaprof.{key}")))
            if isinstance(value, int):
                added.value.int_value = value
            else:
                added.value.string_value = clean(value)
        return self._attributes[known]

    def write_strings(self) -> None:
        self.message.string_table.extend(self._strings)


def _describe(profile: Any, about: About, tables: _Tables) -> None:
    profile.time_unix_nano = round(min(max(about.begun, 0), LATEST_S) * 1e9)
    profile.duration_nano = round(min(max(about.seconds, 0), LATEST_S) * 1e9)
    for key, text in (("title", about.title), ("warnings", "; ".join(about.warnings))):
        if text:
            profile.attribute_indices.append(tables.attribute(key, text))


def _innermost(given: LabelledStacks, tables: _Tables) -> _Ints:
    """Adds a location per frame, then one per (frame, address); returns the number of each row's innermost location."""
    tree: Tree = given.tree
    locations = tables.message.location_table
    for frame in tree.frames:
        location = locations.add(mapping_index=tables.module(GPU if frame.on_gpu else frame.module))
        location.lines.add(function_index=tables.function(frame.text or UNKNOWN_FRAME, frame.file), line=frame.line)
    frames = tree.frame[tree.node]
    first, number = distinct_rows(frames, given.address)
    ids = np.zeros(len(first), np.int64)
    for place, (frame_number, at) in enumerate(zip(frames[first].tolist(), given.address[first].tolist(), strict=True)):
        ids[place] = frame_number + 1
        if at:
            ids[place] = len(locations)
            location = locations.add()
            location.CopyFrom(locations[frame_number + 1])
            location.address = given.addresses[at]
    return ids[number]
