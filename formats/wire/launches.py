"""Records of the BPF programs, as NumPy dtypes.

bpf/programs.py makes the programs' own declarations of these: a change here needs `make bytecode`.
"""

from __future__ import annotations

import functools
from enum import IntEnum, IntFlag

import numpy as np

NAME_BYTES = 64
PATH_BYTES = 4096
MAX_DEPTH = 256  # addresses per stack, a power of two
PAGE_BYTES = 4096
KEPT_SHIFT = 8
MOST_MORE = 1024  # launches that a record stands for beside its own
CHUNK_BYTES = (16 << 10) - 80  # with the fields before it and the ring buffer's header, 16 KiB

LAUNCH = np.dtype(
    [
        ("time", "<u8"),  # CLOCK_MONOTONIC, ns
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("cpu", "<u4"),
        ("flags", "<u4"),  # LaunchFlags
        ("iba", "<u8"),  # instruction base address, from the runtime
        ("address", "<u8"),  # GPU address of the kernel's first instruction
        ("size", "<u8"),  # bytes
        ("stack", "<u8"),  # stack id, 0 for none
        ("list", "<u8"),  # handle of the command list that the kernel was appended to; 0 if unknown
        ("correlation", "<u8"),  # what the vendor's library calls the launch, unique in its process; 0 if nothing does
        ("more", "<u4"),  # number of further launches that this record stands for: draws with the shaders of this one
        ("path", "<u4"),  # number of the launch's path in its process, which further launches may name; 0 for none
        ("comm", "S16"),
        ("name", f"S{NAME_BYTES}"),  # of the kernel, truncated to 63 bytes; empty if the runtime's pointer was invalid
    ]
)

COMPILED = np.dtype(
    [
        ("time", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("uid", "<u4"),  # real uid and gid, in the initial user namespace, of the thread that hit the probe
        ("gid", "<u4"),
        ("path", f"S{PATH_BYTES}"),
    ]
)

MESSAGE_BYTES = (16 << 10) - 72  # with the fields before it and the ring buffer's header, 16 KiB
MESSAGE = np.dtype(
    [
        ("time", "<u8"),  # CLOCK_MONOTONIC, ns
        ("pid", "<u4"),
        ("uid", "<u4"),  # real uid, in the initial user namespace
        # As the library in the process sends them:
        ("id", "<u8"),  # of what it is about, in its process
        ("begin", "<u8"),  # see MessageOf
        ("end", "<u8"),
        ("offset", "<u8"),  # of this piece in the whole, bytes
        ("total", "<u8"),  # size of the whole, bytes
        ("what", "<u4"),  # MessageOf
        ("bytes", "<u4"),  # number of valid bytes of `data`
        ("data", f"V{MESSAGE_BYTES}"),
    ]
)
"""What record/kernels/inject_cuda.c sends from its process, which may lie about all but the first three members. Its
addresses are below 1 GiB: the recorder adds where the process's range begins."""

LISTS_A_RECORD = 8
LIST_EVENT = np.dtype(
    [
        ("time", "<u8"),  # CLOCK_MONOTONIC, ns
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("cpu", "<u4"),
        ("flags", "<u4"),  # LaunchFlags
        ("event", "<u4"),  # ListEvent
        ("count", "<u4"),  # number of valid `lists`
        ("queue", "<u8"),  # handle of the queue or immediate command list that executes; 0 in other events
        ("stack", "<u8"),  # stack id, 0 for none
        ("comm", "S16"),
        ("lists", "<u8", (LISTS_A_RECORD,)),  # handles of command lists
    ]
)

TRANSFER_FUNCTIONS = (
    "zeCommandListAppendMemoryCopy",
    "zeCommandListAppendMemoryCopyRegion",
    "zeCommandListAppendMemoryCopyFromContext",
    "zeCommandListAppendMemoryCopyWithParameters",
    "zexCommandListAppendMemoryCopyWithParameters",
    "zeCommandListAppendMemoryFill",
    "zeCommandListAppendMemoryFillWithParameters",
    "zexCommandListAppendMemoryFillWithParameters",
    "zeCommandListAppendImageCopy",
    "zeCommandListAppendImageCopyRegion",
    "zeCommandListAppendImageCopyToMemory",
    "zeCommandListAppendImageCopyFromMemory",
    "zeCommandListAppendImageCopyToMemoryExt",
    "zeCommandListAppendImageCopyFromMemoryExt",
    "clEnqueueReadBuffer",
    "clEnqueueWriteBuffer",
    "clEnqueueCopyBuffer",
    "clEnqueueReadBufferRect",
    "clEnqueueWriteBufferRect",
    "clEnqueueCopyBufferRect",
    "clEnqueueFillBuffer",
    "clEnqueueReadImage",
    "clEnqueueWriteImage",
    "clEnqueueCopyImage",
    "clEnqueueCopyImageToBuffer",
    "clEnqueueCopyBufferToImage",
    "clEnqueueFillImage",
    "clEnqueueSVMMemcpy",
    "clEnqueueSVMMemFill",
    "clEnqueueMemcpyINTEL",
    "clEnqueueMemFillINTEL",
    "clEnqueueMemsetINTEL",
    "cuMemcpy",
    "cuMemcpyAsync",
    "cuMemcpyHtoD",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoH",
    "cuMemcpyDtoHAsync",
    "cuMemcpyDtoD",
    "cuMemcpyDtoDAsync",
    "cuMemcpyPeer",
    "cuMemcpyPeerAsync",
    "cuMemcpy2D",
    "cuMemcpy2DAsync",
    "cuMemcpy2DUnaligned",
    "cuMemcpy3D",
    "cuMemcpy3DAsync",
    "cuMemcpyBatchAsync",
    "cuMemsetD8",
    "cuMemsetD8Async",
    "cuMemsetD16",
    "cuMemsetD16Async",
    "cuMemsetD32",
    "cuMemsetD32Async",
    "cuMemsetD2D8",
    "cuMemsetD2D8Async",
    "cuMemsetD2D32",
    "cuMemsetD2D32Async",
)
"""Records have the 1-based position in this tuple: append only."""
UNKNOWN_BYTES = (1 << 64) - 1
"""In records of transfers: the size is not known."""


class ListEvent(IntEnum):
    """Events in the life of command lists."""

    EXECUTE = 0
    CLOSE = 1
    RESET = 2  # the list is empty afterwards
    DESTROY = 3  # the handle may be reused for another list afterwards
    INCLUDE = 4  # executing the list `queue` executes these lists, too, until that one is reset


ABOUT = np.dtype(
    [
        ("time", "<u8"),  # of the launch at which the kernel was dumped
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("module", "<u8"),  # its handle; 0 if unknown
        ("module_time", "<u8"),  # of the launch at which the module was dumped first, as handles are reused
        ("address", "<u8"),  # GPU address of the kernel's first instruction
        ("size", "<u8"),  # bytes of the kernel
    ]
)
"""What a CHUNK is of."""
CHUNK = np.dtype(
    [
        *((name, ABOUT[name]) for name in ABOUT.names or ()),
        ("offset", "<u8"),  # of this chunk in the whole
        ("total", "<u8"),  # size of the whole, bytes
        ("what", "<u2"),  # ChunkOf
        ("simd", "<u2"),  # lanes of a shader that dispatches, as its driver has them; 0 if unknown
        ("bytes", "<u4"),  # number of valid bytes of `data`
        ("data", f"V{CHUNK_BYTES}"),
    ]
)


class ChunkOf(IntEnum):
    """The object that a CHUNK is a chunk of."""

    NAME = 0  # the kernel's name; always a single chunk
    CODE = 1  # the kernel's instructions
    MODULE = 2  # the zebin with the kernel, as the driver keeps it
    SHADER = 3  # the instructions of a compute shader, which may have no name
    VERTEX = 4  # these, too, with TASK and MESH in the order of bpf.driver_layout.STAGES
    CONTROL = 5
    EVALUATION = 6
    GEOMETRY = 7
    FRAGMENT = 8
    ENTRY = 9  # the name of a shader's entry point; always a single chunk
    TASK = 10
    MESH = 11


MAPPING_STATE = np.dtype(
    [
        ("born", "<u8"),  # start of the process, CLOCK_BOOTTIME ns, as pids are reused
        # Address of the kernel's mm_struct, xor the number of programs that the thread has executed << 48
        ("mm", "<u8"),
        ("exec_vm", "<u8"),  # number of mapped pages of code
        ("unloads", "<u8"),  # 1 + how often the dynamic linker unmapped libraries; 0 if nobody counts it
    ]
)
"""Identifies a state of a process's mappings."""
REGISTERS = np.dtype(
    [(name, "<u8") for name in ("ax", "dx", "cx", "bx", "si", "di", "bp", "sp", *(f"r{n}" for n in range(8, 16)), "ip")]
)
"""The registers of a thread, in the order of DWARF's numbers."""
COPIED = np.dtype(
    [
        ("id", "<u8"),  # of the stack
        ("time", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("of", MAPPING_STATE),
        ("missed_path", "<u8"),  # key in the map `missed_paths`
        ("start", REGISTERS),  # where the walk began
        ("ip", "<u8"),  # where it ended
        ("sp", "<u8"),
        ("bp", "<u8"),
        ("start_stack", "<u8"),  # where the stack of the process's first thread starts
        ("depth", "<u4"),  # number of addresses, including that of the end
        ("is_exact", "<u2"),  # the end is the address of an instruction, not a return address
        ("is_sample", "u1"),  # of a CPU sample instead of a launch
        ("has_python", "u1"),  # the stack has Python frames
        ("address", "<u8"),  # of the page; 0 in the last record, which has no page
    ]
)
COPY_PAGES = 16  # maximum number of pages in a copy of a stack,
SAMPLE_COPY_PAGES = 32  # and of a CPU sample's: libraries of linear algebra have frames of 64 KiB
COPY = np.dtype([*((name, COPIED[name]) for name in COPIED.names or ()), ("page", f"V{PAGE_BYTES}")])


CPU_SAMPLE = np.dtype(
    [
        ("time", "<u8"),  # CLOCK_MONOTONIC, ns
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("stack", "<u8"),  # stack ids, 0 for none
        ("kernel_stack", "<u8"),
        ("cpu", "<u4"),
        ("flags", "<u4"),  # LaunchFlags
    ]
)


@functools.cache
def stack_dtype(depth: int) -> np.dtype[np.void]:
    """The dtype of a stack record of programs loaded with STACK_DEPTH = `depth`."""
    return np.dtype(
        [
            ("id", "<u8"),
            ("time", "<u8"),
            ("pid", "<u4"),
            ("depth", "<u4"),
            # wire.unwind_rules.Walked; from KEPT_SHIFT on, the number of addresses, sent by BPF with the same id, that
            # precede
            ("walked", "<u8"),
            ("guessed", "<u8", (MAX_DEPTH // 64,)),  # bitmap of addresses found without call frame information
            ("interrupted", "<u8", (MAX_DEPTH // 64,)),  # bitmap of addresses where a signal came, no return addresses
            ("ips", "<u8", (depth,)),  # innermost first
        ]
    )


MAX_PYTHON = 256  # Python frames per stack, including the ends of evaluation loops
CODE_TEXT_BYTES, CODE_TABLE_BYTES = 320, 3104
PYTHON_FRAME = np.dtype([("code", "<u8"), ("instruction", "<u8")])
PYTHON_STACK = np.dtype(
    [
        ("id", "<u8"),  # of the stack
        ("time", "<u8"),
        ("pid", "<u4"),
        ("depth", "<u4"),  # number of addresses in the C stack that BPF walked
        ("count", "<u4"),  # number of valid `frames`
        ("state", "<u2"),  # PythonState
        ("kept", "<u2"),  # in records of user space: number of addresses of the BPF walk that precede these
        ("sp", "<u8"),  # of the innermost C frame
        ("cfas", "<u8", (MAX_DEPTH,)),  # the canonical frame address of the caller of each address
        # Innermost first. An entry whose code is 0 ends an evaluation loop; `instruction` is the loop's place on the C
        # stack.
        ("frames", PYTHON_FRAME, (MAX_PYTHON,)),
    ]
)
"""The Python frames of a stack, which BPF sends separately from it."""
PYTHON_OFFSETS = (  # symbols.python.layout.Layout; members that a version lacks are 0
    *("interpreters_head", "threads_head", "interpreter_next", "thread_next", "thread_id", "thread_frame"),
    *("thread_cframe", "cframe_previous", "frame_code", "frame_previous", "frame_instruction", "frame_owner"),
    *("frame_is_entry", "code_filename", "code_qualname", "code_linetable", "code_first_line", "code_version"),
    *("bytes_length", "bytes_data", "frame_bytes"),
)
PYTHON_LAYOUT = np.dtype([*((name, "<u2") for name in PYTHON_OFFSETS), ("pad", "V6")])
PATH_ASKED = np.dtype(
    [
        ("path", "<u8"),  # its number, unique in the process
        ("offset", "<u8"),  # of its slot in the process's shared memory
        ("inode", "<u8"),  # of that memory
        ("descriptor", "<u4"),  # of that memory, in the process
        # 0: the words are asked for. 1: they are in the slot, and the process was not known to be Python; 2: it was.
        ("is_known", "<u4"),
    ]
)
"""What a library of ours asks with a launch: for the words of the process's memory from which its stack was found."""
PATH = np.dtype(
    [
        ("asked", PATH_ASKED),
        ("pid", "<u4"),
        ("depth", "<u4"),
        ("born", "<u8"),  # see MAPPING_STATE
        ("ends_at_zero", "<u8"),  # the return address above the outermost frame is 0
        ("state", "<u8"),  # address of the thread's Python state; 0 if it runs no Python code
        ("cframe", "<u8"),  # address of its innermost _PyCFrame, in Python 3.11 and 3.12
        ("has_layout", "<u8"),  # the process has an interpreter, with this
        ("layout", PYTHON_LAYOUT),
        ("count", "<u8"),  # number of valid `frames`
        ("ips", "<u8", (MAX_DEPTH,)),
        ("cfas", "<u8", (MAX_DEPTH,)),
        # Where the frame pointer was read that gave the CFA of each address's caller, and what it was; 0 for none.
        ("bases", "<u8", (MAX_DEPTH,)),
        ("base_values", "<u8", (MAX_DEPTH,)),
        ("kept_at", "<u8", (MAX_DEPTH,)),  # where code that aligns its stack has kept that CFA; 0 for none
        ("frames", PYTHON_FRAME, (MAX_PYTHON,)),
        # Addresses of these frames; their low bits are those of the word that points to the code object. 0: see frames.
        ("frames_at", "<u8", (MAX_PYTHON,)),
    ]
)
"""A launch's path: what a walk has read. While the words are the same, a launch from there has the same stack."""
CODE = np.dtype(
    [
        ("time", "<u8"),
        ("pid", "<u4"),
        ("first_line", "<i4"),
        ("code", "<u8"),  # address of the code object
        ("identity", "<u8"),  # distinguishes code objects that had the same address
        ("offset", "<u8"),  # of `table` in the bytes object; the texts are valid only if this is 0
        ("filename", "u1", (CODE_TEXT_BYTES,)),  # the beginning of the str object
        ("qualname", "u1", (CODE_TEXT_BYTES,)),
        ("table", "u1", (CODE_TABLE_BYTES,)),  # part of the bytes object with the line table
    ]
)
"""A Python code object."""


INTERPRETER = b"python  "
"""The start of the learner's JSON messages about interpreters; never the id of a stack."""


EXECUTION = np.dtype(
    [
        ("begin", "<u8"),  # CLOCK_MONOTONIC, ns
        ("end", "<u8"),
        ("correlation", "<u8"),  # of its launch, in its process
        ("address", "<u8"),  # of the kernel; 0: its launch has it
        ("queue", "<u8"),
        ("pid", "<u4"),
        ("stream", "<u4"),  # index into the header's `streams`: the GPU
    ]
)
"""An execution of a kernel, as the vendor's library timed it."""


class MessageOf(IntEnum):
    """What a MESSAGE is, with the numbers of inject_cuda.c."""

    CONTEXT = 1  # a context was created and is sampled; `id` is its number
    SAMPLES = 2  # rows of samples of a context, taken between `begin` and `end`
    SUMS = 3  # what a drain of a context counted besides
    MODULE = 4  # a piece of a cubin that was loaded at `begin`, or none; `end` is the address of the cubin's first byte
    KERNEL = 5  # the name of a kernel; `id` is its address, `end` its size
    EXECUTIONS = 6  # rows of executions
    PROBLEM = 7  # a sentence
    LAUNCHES = 8  # rows of launches on known paths; `id` is the thread's number, `begin` the number of the first row


class PythonState(IntEnum):
    """How the walk through Python frames ended."""

    NONE = 0  # no interpreter is known, or the thread runs no Python code
    WHOLE = 1
    DEEP = 2  # more than MAX_PYTHON frames
    DAMAGED = 3  # some memory was unreadable


class LaunchFlags(IntFlag):
    """Properties of a launch, and what could not be read of it."""

    BAD_ARGS = 1
    NO_STACK = 2
    NO_NAME = 4
    OTHER = 8  # of a process outside -p: without stack, name and comm
    PRESUMED = 32  # the stack is presumed to be that of another launch, whose copy was in progress, as both end alike
    TRANSFER = 64  # a copy or fill, not a kernel: gives no row of kind `launch`
    OWN = 128  # of one of the driver's own kernels for copies and fills
    CARRIED = 16  # happened before this output file was begun, and is also in the previous file


class Counter(IntEnum):
    """Index into the programs' per-CPU counters. Problems of a launch's data are counted only if the launch is sent."""

    LAUNCHES = 0  # the probe fired
    LAUNCHES_LOST = 1  # ring buffer full, or too many launches in one call
    BAD_ARGS = 2  # launches whose arguments could not be read
    STACKS = 3  # sent
    STACKS_LOST = 4  # launches without a stack: ring buffer full; sent with the next launch that has this stack
    STACKS_FAILED = 5  # launches without a stack: other programs used the scratch, too
    STACKS_COLLIDED = 6  # sent with an id of their own, as another stack had their id
    COMPILED = 7  # the probe fired
    COMPILED_LOST = 8  # ring buffer full, or the path could not be read
    PROBE_NS = 9  # time spent in programs for launches
    OTHERS = 10  # launches of processes that are not recorded
    STACKS_TRUNCATED = 11  # launches whose stack has the maximum depth, and so may be incomplete
    HANDLES_UNREADABLE = 12  # launches with an unreadable pointer
    HANDLES_UNKNOWN = 13  # launches whose handle has no virtual table that the driver's layout knows
    HANDLES_ASTRAY = 14  # launches whose code address is invalid, or outside the allocation for code
    HANDLES_CHANGED = 15  # launches whose handle had another code address before
    KERNELS = 16  # described
    CHUNKS_LOST = 17  # of names, code and modules: ring buffer full, or unreadable
    STACKS_MISSED = 18  # launches whose stack lacked a rule, and was copied
    STACKS_PRESUMED = 19  # launches that get the stack of such a copy, as they lack the same rule
    COPIES_LOST = 20  # ring buffer full, so that a copy is incomplete
    SAMPLES = 21  # CPU samples
    SAMPLES_LOST = 22  # ring buffer full
    SAMPLE_NS = 23  # time spent in programs for CPU samples
    CODES_SENT = 24  # Python code objects
    CODES_LOST = 25  # ring buffer full, or unreadable; tried again
    PYTHON_LOST = 26  # stacks without their Python frames: ring buffer full
    EXECUTIONS = 27  # calls that execute command lists
    LIST_EVENTS = 28  # command lists that were closed, reset or destroyed
    LISTS_LOST = 29  # executions of lists, or events: ring buffer full, or unreadable
    TRANSFERS = 30  # calls that copy or fill
    WAITS = 31  # that have begun and are followed
    WAITS_LOST = 32  # a map or ring buffer is full, or the beginning is unknown
    WAITS_INSIDE = 33  # inside other waits, which include their time
    WAITS_ASTRAY = 34  # without a valid return address
    WAIT_POLLS = 35  # calls with a timeout of 0, which do not wait
    WAIT_NS = 36  # time spent in programs for waits
    MESSAGES = 37  # of libraries in processes
    MESSAGES_LOST = 38  # ring buffer full, or unreadable
    SAMPLE_STACKS_LOST = 39  # CPU samples without a stack, or the kernel's: ring buffer full


def transfer_function_number(function: str) -> int:
    """The number of a function in records; 0 if it transfers nothing."""
    return TRANSFER_FUNCTIONS.index(function) + 1 if function in TRANSFER_FUNCTIONS else 0
