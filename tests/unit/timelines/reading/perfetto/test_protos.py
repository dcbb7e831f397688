"""Numbers of fields, compared with the definitions in the `perfetto` package."""

from __future__ import annotations

import inspect

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from iaprof.timelines.reading.perfetto import protos

INSIDE = {
    "LegacyEvent": pb.TrackEvent.LegacyEvent, "NestedValue": pb.DebugAnnotation.NestedValue,
    "Clock": pb.ClockSnapshot.Clock, "ExtraData": pb.GpuRenderStageEvent.ExtraData,
    "Launch": pb.GpuRenderStageEvent.ComputeKernelLaunch, "Dim3": pb.GpuRenderStageEvent.Dim3,
    "Specification": pb.GpuRenderStageEvent.Specifications,
}  # fmt: skip
OURS = {
    "IID": 1,
    "TEXT": 2,
    "STAGE_CATEGORY": 4,
    "COMPUTE": 2,
    "NAME": 1,
    "FIRST_OF_SEQUENCE": 64,
    "LAST_OF_SEQUENCE": 127,
}
"""Of interned texts, whose messages differ; and the bounds that clock_snapshot.proto has in words."""


def test_fields_and_values_have_the_numbers_of_perfettos_definitions() -> None:
    compared = 0
    for name, ours in inspect.getmembers(protos, inspect.isclass):
        message = INSIDE.get(name) or getattr(pb, name)
        theirs = {field.name.upper(): field.number for field in message.DESCRIPTOR.fields}
        theirs |= {value.name: value.number for enum in message.DESCRIPTOR.enum_types for value in enum.values}
        theirs |= {
            value.name.removeprefix("BUILTIN_CLOCK_"): value.number for value in pb.BuiltinClock.DESCRIPTOR.values
        }
        for member, number in vars(ours).items():
            if member.isupper() and isinstance(number, int):
                assert number == (OURS | theirs)[member], (name, member)
                compared += 1
    assert compared > 80


def test_kinds_of_packets_have_the_names_of_perfettos_definitions() -> None:
    theirs = pb.TracePacket.DESCRIPTOR.fields_by_number
    assert {number: theirs[number].name for number in protos.KINDS} == protos.KINDS
    assert {*theirs} >= (protos.ABOUT_TRACE | protos.ENVELOPE)


def test_units_and_types_of_counters_are_in_the_order_of_their_values() -> None:
    counter = pb.CounterDescriptor
    units = [counter.UNIT_UNSPECIFIED, counter.UNIT_TIME_NS, counter.UNIT_COUNT, counter.UNIT_SIZE_BYTES]
    assert units == [*range(len(protos.CounterDescriptor.UNITS))]
    assert protos.CounterDescriptor.NAMES.index("thread_time") == counter.COUNTER_THREAD_TIME_NS
    assert protos.CounterDescriptor.NAMES.index("thread_instruction_count") == counter.COUNTER_THREAD_INSTRUCTION_COUNT
