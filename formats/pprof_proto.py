"""The messages of pprof's profile.proto, built from field numbers (google/pprof, proto/profile.proto)."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
