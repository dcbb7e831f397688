"""Numbers of fields in Perfetto's messages, as protos/perfetto/trace/ of its sources defines them (v59.1).

    trace_packet.proto, track_event/{track_event,track_descriptor,counter_descriptor,thread_descriptor,
    process_descriptor,debug_annotation}.proto, interned_data/interned_data.proto, clock_snapshot.proto,
    trace_packet_defaults.proto, profiling/profile_common.proto (InternedString), gpu/gpu_render_stage_event.proto

A test compares them with the `perfetto` package. Each message is a class, so that code names it with each number.
"""

from __future__ import annotations

SYNCHRONIZATION = bytes.fromhex("82477a76b28d42ba81dc33326d57a079")
"""The marker that Perfetto's service writes into a trace every few seconds (trace_packet.proto)."""


class TracePacket:
    """A packet of a trace."""

    CLOCK_SNAPSHOT = 6
    TIMESTAMP = 8
    TRUSTED_PACKET_SEQUENCE_ID = 10
    TRACK_EVENT = 11
    INTERNED_DATA = 12
    SEQUENCE_FLAGS = 13
    INCREMENTAL_STATE_CLEARED = 41
    PREVIOUS_PACKET_DROPPED = 42
    PROCESS_DESCRIPTOR = 43
    THREAD_DESCRIPTOR = 44
    GPU_RENDER_STAGE_EVENT = 53
    COMPRESSED_PACKETS = 50
    TIMESTAMP_CLOCK_ID = 58
    TRACE_PACKET_DEFAULTS = 59
    TRACK_DESCRIPTOR = 60
    ZSTD_COMPRESSED_PACKETS = 133

    SEQ_INCREMENTAL_STATE_CLEARED = 1
    SEQ_NEEDS_INCREMENTAL_STATE = 2


ENVELOPE = frozenset({3, 8, 10, 12, 13, 41, 42, 58, 59, 79, 87, 98})
"""Fields of any packet, beside its content: its writer, its time, and the state of its sequence."""

ABOUT_TRACE = frozenset({6, 33, 35, 36, 43, 44, 45, 46, 60, 69, 72, 89, 90, 124, 126, 127, 138})
"""Packets that describe a trace: clocks, tracks, the configuration, statistics of the service, markers."""

KINDS = {
    1: "ftrace_events", 2: "process_tree", 4: "inode_file_map", 5: "chrome_events", 7: "sys_stats", 9: "process_stats",
    34: "ftrace_stats", 37: "profile_packet", 38: "battery", 39: "android_log", 40: "power_rails",
    49: "perfetto_metatrace", 51: "chrome_metadata", 52: "gpu_counter_event",
    54: "streaming_profile_packet", 57: "graphics_frame_event", 62: "vulkan_memory_event", 66: "perf_sample",
    67: "cpu_info", 71: "gpu_mem_total_event", 128: "gpu_info", 132: "journald_event",
}  # fmt: skip
"""Names of packets that are not read, for messages."""


class TrackEvent:
    """An event of a track."""

    TIMESTAMP_DELTA_US = 1
    CATEGORY_IIDS = 3
    DEBUG_ANNOTATIONS = 4
    LEGACY_EVENT = 6
    TYPE = 9
    NAME_IID = 10
    TRACK_UUID = 11
    EXTRA_COUNTER_VALUES = 12
    TIMESTAMP_ABSOLUTE_US = 16
    CATEGORIES = 22
    NAME = 23
    COUNTER_VALUE = 30
    EXTRA_COUNTER_TRACK_UUIDS = 31
    FLOW_IDS_OLD = 36
    TERMINATING_FLOW_IDS_OLD = 42
    DOUBLE_COUNTER_VALUE = 44
    EXTRA_DOUBLE_COUNTER_TRACK_UUIDS = 45
    EXTRA_DOUBLE_COUNTER_VALUES = 46
    FLOW_IDS = 47
    TERMINATING_FLOW_IDS = 48

    TYPE_SLICE_BEGIN = 1
    TYPE_SLICE_END = 2
    TYPE_INSTANT = 3
    TYPE_COUNTER = 4


class LegacyEvent:
    """Fields of events that were written for Chrome's format."""

    NAME_IID = 1
    PHASE = 2
    DURATION_US = 3
    UNSCOPED_ID = 6
    BIND_ID = 8
    LOCAL_ID = 10
    GLOBAL_ID = 11
    FLOW_DIRECTION = 13
    PID_OVERRIDE = 18
    TID_OVERRIDE = 19

    FLOW_IN = 1
    FLOW_OUT = 2
    FLOW_INOUT = 3


class DebugAnnotation:
    """An argument of an event."""

    NAME_IID = 1
    BOOL_VALUE = 2
    UINT_VALUE = 3
    INT_VALUE = 4
    DOUBLE_VALUE = 5
    STRING_VALUE = 6
    POINTER_VALUE = 7
    NESTED_VALUE = 8
    LEGACY_JSON_VALUE = 9
    NAME = 10
    DICT_ENTRIES = 11
    ARRAY_VALUES = 12
    STRING_VALUE_IID = 17


class NestedValue:
    """The older form of nested arguments."""

    NESTED_TYPE = 1
    DICT_KEYS = 2
    DICT_VALUES = 3
    ARRAY_VALUES = 4
    INT_VALUE = 5
    DOUBLE_VALUE = 6
    BOOL_VALUE = 7
    STRING_VALUE = 8

    DICT = 1
    ARRAY = 2


class InternedData:
    """Texts that packets of a sequence refer to by number: iid 1, text 2 in each."""

    EVENT_CATEGORIES = 1
    EVENT_NAMES = 2
    DEBUG_ANNOTATION_NAMES = 3
    GPU_SPECIFICATIONS = 24
    DEBUG_ANNOTATION_STRING_VALUES = 29

    IID = 1
    TEXT = 2
    STAGE_CATEGORY = 4  # of GPU_SPECIFICATIONS
    COMPUTE = 2  # such a category


class TracePacketDefaults:
    """Defaults for the packets of a sequence."""

    TRACK_EVENT_DEFAULTS = 11
    TIMESTAMP_CLOCK_ID = 58


class TrackEventDefaults:
    """Defaults for their events."""

    TRACK_UUID = 11
    EXTRA_COUNTER_TRACK_UUIDS = 31
    EXTRA_DOUBLE_COUNTER_TRACK_UUIDS = 45


class TrackDescriptor:
    """A track."""

    UUID = 1
    NAME = 2
    PROCESS = 3
    THREAD = 4
    PARENT_UUID = 5
    COUNTER = 8
    STATIC_NAME = 10
    CHILD_ORDERING = 11
    SIBLING_ORDER_RANK = 12
    ATRACE_NAME = 13

    EXPLICIT = 3


class ProcessDescriptor:
    """The process of a track."""

    PID = 1
    PROCESS_NAME = 6


class ThreadDescriptor:
    """The thread of a track."""

    PID = 1
    TID = 2
    THREAD_NAME = 5
    REFERENCE_TIMESTAMP_US = 6


class CounterDescriptor:
    """The counter of a track."""

    TYPE = 1
    CATEGORIES = 2
    UNIT = 3
    UNIT_MULTIPLIER = 4
    IS_INCREMENTAL = 5
    UNIT_NAME = 6
    Y_AXIS_SHARE_KEY = 7

    UNITS = ("", "ns", "count", "bytes")
    NAMES = ("", "thread_time", "thread_instruction_count")


class ClockSnapshot:
    """The times of several clocks at one instant."""

    CLOCKS = 1
    PRIMARY_TRACE_CLOCK = 2


class Clock:
    """The time of one of them."""

    CLOCK_ID = 1
    TIMESTAMP = 2
    IS_INCREMENTAL = 3
    UNIT_MULTIPLIER_NS = 4

    REALTIME = 1
    MONOTONIC = 3
    BOOTTIME = 6
    FIRST_OF_SEQUENCE = 64  # ids from here to 127 are a sequence's own
    LAST_OF_SEQUENCE = 127


class GpuRenderStageEvent:
    """Work that a queue of a GPU did."""

    EVENT_ID = 1
    DURATION = 2
    HW_QUEUE_ID = 3
    STAGE_ID = 4
    CONTEXT = 5
    EXTRA_DATA = 6
    SPECIFICATIONS = 7
    RENDER_TARGET_HANDLE = 8
    RENDER_PASS_HANDLE = 9
    SUBMISSION_ID = 10
    GPU_ID = 11
    COMMAND_BUFFER_HANDLE = 12
    HW_QUEUE_IID = 13
    STAGE_IID = 14
    RENDER_PASS_INSTANCE_ID = 16
    NAME = 17
    NAME_IID = 20
    LAUNCH = 21


class ExtraData:
    """A name and a value that a driver adds to it."""

    NAME = 1
    VALUE = 2


class Launch:
    """ComputeKernelLaunch: the sizes of a launch."""

    GRID_SIZE = 1
    WORKGROUP_SIZE = 2


class Dim3:
    """A size."""

    X = 1
    Y = 2
    Z = 3


class Specification:
    """The older form of queues and stages; NAME of each of them."""

    NAME = 1
    HW_QUEUE = 2
    STAGE = 3
