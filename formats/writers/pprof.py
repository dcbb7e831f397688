"""pprof's profile.proto, gzipped (https://github.com/google/pprof).

Most components of a stack have a place of their own in pprof: process, pid, host, device, reason, mnemonic and interval
are sample labels, the source file belongs to its function, and the offset in a kernel is the address of the innermost
location. The remaining frames are functions with lines, so that `pprof -top` lists functions, not offsets.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray

from iaprof import __version__
from iaprof.basics.clean import clean
from iaprof.formats.distinct import distinct_rows, sum_groups
from iaprof.formats.export import About, CpuSamples, Export
from iaprof.formats.profile import UNKNOWN_PROCESS, Launch, Profile, StackOptions, reason_name
from iaprof.formats.stacks.frame_lists import interval_frames
from iaprof.formats.stacks.frames import UNKNOWN_FRAME, Frame
from iaprof.formats.stacks.trees import Tree, ancestor_paths, viewer_tree, without_components
from iaprof.formats.writers.writer import Needs, Writer

_PACKAGE = "perftools.profiles"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "int64": _Field.TYPE_INT64,
    "uint64": _Field.TYPE_UINT64,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
}
_MESSAGES = {  # "*": repeated; int64 fields named like texts are indices into the string table
    "Profile": {
        "sample_type": (1, "*ValueType"),
        "sample": (2, "*Sample"),
        "mapping": (3, "*Mapping"),
        "location": (4, "*Location"),
        "function": (5, "*Function"),
        "string_table": (6, "*string"),
        "time_nanos": (9, "int64"),
        "duration_nanos": (10, "int64"),
        "comment": (13, "*int64"),
        "default_sample_type": (14, "int64"),
    },
    "ValueType": {"type": (1, "int64"), "unit": (2, "int64")},
    "Sample": {"location_id": (1, "*uint64"), "value": (2, "*int64"), "label": (3, "*Label")},
    "Label": {"key": (1, "int64"), "str": (2, "int64"), "num": (3, "int64"), "num_unit": (4, "int64")},
    "Mapping": {
        "id": (1, "uint64"),
        "filename": (5, "int64"),
        "has_functions": (7, "bool"),
        "has_filenames": (8, "bool"),
        "has_line_numbers": (9, "bool"),
        "has_inline_frames": (10, "bool"),
    },
    "Location": {"id": (1, "uint64"), "mapping_id": (2, "uint64"), "address": (3, "uint64"), "line": (4, "*Line")},
    "Line": {"function_id": (1, "uint64"), "line": (2, "int64")},
    "Function": {"id": (1, "uint64"), "name": (2, "int64"), "system_name": (3, "int64"), "filename": (4, "int64")},
}

_ELSEWHERE = ("interval", "host", "process", "pid", "file", "instruction", "reason", "offset")
GPU = "[gpu]"  # brackets keep pprof from looking for a file of this name
_SAMPLES_AT_ONCE = 1 << 16
_LEVEL = 6  # the default of gzip
_NO_ADDRESS = 0
LATEST_S = 9e9  # limits times: their ns fit into 63 bits
_Ints = NDArray[np.int64]
_Label = tuple[str, Sequence[str | int], _Ints]
"""A key, its values, of which "" and 0 mean no label, and the index of each row's value."""


def new_profile() -> Any:
    """An empty Profile message."""
    return _PROFILE()


def _profile_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="iaprof/pprof.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, type_) in fields.items():
            repeated, type_ = type_.startswith("*"), type_.removeprefix("*")
            added = message.field.add(name=field, number=number)
            added.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            if type_ in _SCALARS:
                added.type = _SCALARS[type_]
            else:
                added.type, added.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{type_}"
    pool = descriptor_pool.DescriptorPool()  # a private pool: another package may have registered pprof's types
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Profile"))


_PROFILE = _profile_class()


@dataclass(frozen=True)
class LabelledStacks:
    """Stacks as a tree, and what else is known of each row: in pprof's format and in OTLP, labels and addresses."""

    tree: Tree
    labels: list[_Label]
    addresses: list[int]  # distinct ones of innermost frames; the first is none
    address: _Ints  # of each row, as an index

    def label_sets(self) -> tuple[list[list[tuple[str, str | int]]], _Ints]:
        """Returns the distinct sets of labels, each of keys and values, and each row's set as an index: int64[rows]."""
        rows = len(self.tree.node)
        first = set_of = np.zeros(rows, np.int64)
        first = first[:1]
        columns = []
        for key, values, number in self.labels:  # equal values must get one index
            index = {value: place for place, value in enumerate(dict.fromkeys(values))}
            columns.append((key, list(index), np.array([index[value] for value in values], np.int64)[number]))
        if rows:
            first, set_of = distinct_rows(*(number for _, _, number in columns))
        known = [[(key, values[number[row]]) for key, values, number in columns] for row in first.tolist()]
        return [[(key, value) for key, value in labels if value] for labels in known], set_of


def labelled_stacks(source: Profile | CpuSamples, options: StackOptions) -> LabelledStacks:
    """Returns the stacks of stalls or CPU samples, without the components that labels and addresses say."""
    # A function has its source place beside its name.
    bare = without_components(
        replace(options, gpu_lines=False), (*_ELSEWHERE, *(["line"] if "function" in options.components else []))
    )
    tree = viewer_tree(source, bare, lambda frame: (frame.text, frame.module, frame.file, frame.line))
    labels, addresses, address = _launch_labels(tree, options), [_NO_ADDRESS], np.zeros(len(tree.node), np.int64)
    if isinstance(source, Profile):
        labels += _stall_labels(tree, source, options)
        if "offset" in options.components and not options.inverted:
            addresses, address = _addresses(tree, source)
    return LabelledStacks(tree, labels, addresses, address)


class Pprof(Writer):
    """The format of `pprof`, and of services that collect profiles."""

    needs = Needs.ABOUT
    binary = True
    readable = False

    def write(self, export: Export, options: StackOptions, out: IO[bytes]) -> None:
        """Writes the profile of the stalls, or of the CPU samples."""
        cpu = export.cpu if options.cpu_samples else None
        source: Profile | CpuSamples = cpu or export.profile
        given = labelled_stacks(source, options)
        tree = given.tree
        tables = _Tables()
        if not cpu:
            tables.module(GPU)  # pprof shows the first mapping as the profile's main binary
        sets, set_of = _label_sets(given, tables)
        leaf = _innermost(tree, given.addresses, given.address, tables)
        first, number = distinct_rows(set_of, tree.node, leaf)
        counts = sum_groups(tree.count, number)
        with gzip.GzipFile("", "wb", _LEVEL, out, mtime=0) as file:
            for begin in range(0, len(first), _SAMPLES_AT_ONCE):
                rows = first[begin : begin + _SAMPLES_AT_ONCE]
                stacks = innermost_first(tree, tree.node[rows], leaf[rows])
                message = new_profile()
                for labelled, stack, count in zip(
                    set_of[rows].tolist(), stacks, counts[begin : begin + len(rows)].tolist(), strict=True
                ):
                    sample = message.sample.add()
                    sample.MergeFrom(sets[labelled])
                    sample.location_id.extend(stack)
                    sample.value.append(count)
                file.write(message.SerializeToString())
            file.write(_tables_message(export.about, "samples" if cpu else "gpu_samples", tables).SerializeToString())


class _Tables:
    """The tables that samples refer to by number: strings, functions and mappings."""

    def __init__(self) -> None:
        self.message = new_profile()
        self._strings = {"": 0}
        self._functions: dict[tuple[int, int], int] = {}
        self._mappings: dict[int, int] = {}

    def string(self, text: str) -> int:
        return self._strings.setdefault(clean(text), len(self._strings))

    def function(self, frame: Frame) -> int:
        key = self.string(frame.text or UNKNOWN_FRAME), self.string(frame.file)
        if key not in self._functions:
            self._functions[key] = len(self._functions) + 1
            self.message.function.add(id=self._functions[key], name=key[0], system_name=key[0], filename=key[1])
        return self._functions[key]

    def module(self, path: str) -> int:
        """The number of a mapping; 0 if unknown."""
        name = self.string(path)
        if name and name not in self._mappings:
            self._mappings[name] = len(self._mappings) + 1
            # keeps pprof from symbolizing addresses itself
            flags = {"has_functions": True, "has_filenames": True, "has_line_numbers": True, "has_inline_frames": True}
            self.message.mapping.add(id=self._mappings[name], filename=name, **flags)
        return self._mappings.get(name, 0)

    def strings(self) -> list[str]:
        return list(self._strings)


def _tables_message(about: About, type_: str, tables: _Tables) -> Any:
    """The message without samples."""
    message = tables.message
    message.sample_type.add(type=tables.string(type_), unit=tables.string("count"))
    message.default_sample_type = tables.string(type_)
    message.time_nanos = round(min(about.begun, LATEST_S) * 1e9)
    message.duration_nanos = round(min(about.seconds, LATEST_S) * 1e9)
    for comment in (f"iaprof {__version__}", about.title, *about.warnings):  # pprof shows comments first
        if comment:
            message.comment.append(tables.string(comment))
    message.string_table.extend(tables.strings())
    return message


def _launch_labels(tree: Tree, options: StackOptions) -> list[_Label]:
    def label(key: str, value: Any) -> _Label:
        return key, [value(launch) for launch in tree.launches], tree.launch

    def process(launch: Launch | None) -> str:
        return (launch and launch.comm) or UNKNOWN_PROCESS

    labels = [label("host", lambda launch: launch.host if launch else ""), ("device", tree.devices, tree.device)]
    if "process" in options.components:
        labels.append(label("process", process))
    if "pid" in options.components:
        labels.append(label("pid", lambda launch: launch.pid if launch else 0))
    return labels


def _stall_labels(tree: Tree, profile: Profile, options: StackOptions) -> list[_Label]:
    row = np.nonzero(profile.counts)[0]  # in the order of the tree's rows
    labels: list[_Label] = []
    if "instruction" in options.components:
        labels.append(("instruction", [code.mnemonic for code in profile.codes], profile.code[row]))
    if "reason" in options.components:
        labels.append(("reason", [reason_name(each) for each in profile.reasons], tree.reason))
    if "interval" in options.components:
        labels.append(("interval", [frame.text for frame in interval_frames(profile.intervals)], tree.interval))
    return labels


def _addresses(tree: Tree, profile: Profile) -> tuple[list[int], _Ints]:
    """The distinct addresses, 0 first, and the index of each row's innermost frame's address."""
    offsets, number = np.unique(profile.offset[np.nonzero(profile.counts)[0]], return_inverse=True)
    on_gpu = np.array([frame.on_gpu for frame in tree.frames] + [False])
    return [_NO_ADDRESS, *offsets.tolist()], np.where(on_gpu[tree.frame[tree.node]], number + 1, 0)


def _label_sets(given: LabelledStacks, tables: _Tables) -> tuple[list[Any], _Ints]:
    """The distinct sets of labels, as Sample messages, and the index of each row's set: int64[rows]."""
    sets = []
    distinct, set_of = given.label_sets()
    for labels in distinct:
        sample = new_profile().sample.add()
        for key, value in labels:
            if isinstance(value, int):
                sample.label.add(key=tables.string(key), num=value)
            else:
                sample.label.add(key=tables.string(key), str=tables.string(value))
        sets.append(sample)
    return sets, set_of


def _innermost(tree: Tree, addresses: Sequence[int], address: _Ints, tables: _Tables) -> _Ints:
    """Adds a location per frame, then one per (frame, address); returns the number of each row's innermost location."""
    for index, frame in enumerate(tree.frames):
        module = GPU if frame.on_gpu else frame.module
        location = tables.message.location.add(id=index + 1, mapping_id=tables.module(module))
        location.line.add(function_id=tables.function(frame), line=frame.line)
    frames = tree.frame[tree.node]
    first, number = distinct_rows(frames, address)
    ids = np.zeros(len(first), np.int64)
    locations = tables.message.location
    for place, (frame, at) in enumerate(zip(frames[first].tolist(), address[first].tolist(), strict=True)):
        if at:
            location = locations.add()
            location.CopyFrom(locations[frame])
            location.id, location.address = len(locations), addresses[at]
        ids[place] = len(locations) if at else frame + 1
    return ids[number]


def innermost_first(tree: Tree, nodes: _Ints, leaf: _Ints) -> list[list[int]]:
    """The location numbers of stacks, innermost first.

    Args:
        tree: whose frames have the locations 1, 2, and so on.
        nodes: int64[n], the innermost node of each stack.
        leaf: int64[n], the location of each innermost frame.
    """
    table = ancestor_paths(tree, nodes)
    lengths = (table >= 0).sum(axis=1)
    locations = tree.frame[table] + 1
    locations[:, 0] = leaf
    return [stack[:length] for stack, length in zip(locations.tolist(), lengths.tolist(), strict=True)]
