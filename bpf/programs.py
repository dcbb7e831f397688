"""The BPF programs of this version: their C files, their parameters, and the compiled programs that ship.

Parameters in _DEFINES are fixed when the programs are compiled, because the layout of records or the size of BPF's
stack depends on them. Parameters in _CONSTANTS are filled in when the programs are loaded.

The structs and enums that programs share with Python are defined in Python only, as dtypes and enums; their C
declarations are generated, and compiled before the programs. As C may add padding, the compiler checks that each struct
has its dtype's size, and `check_maps` checks the sizes of elements in the maps of compiled programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Any

import numpy as np

from iaprof.bpf import structs
from iaprof.bpf.bytecode import Bytecode, BytecodeError, from_text
from iaprof.bpf.compile.compiler import Source
from iaprof.bpf.driver_layout import MAX_GPUS, STAGES
from iaprof.bpf.structs import MAX_CLASSES, MAX_OPERATIONS, Phase
from iaprof.formats.header import waits
from iaprof.formats.wire import launches
from iaprof.formats.wire.unwind_rules import ADDRESS_BITS, BLOCK_BYTES, RuleKind, Walked

MOST_CODE_CHUNKS = 192  # of a kernel's code, sent at one launch: 3 MiB
MOST_MODULE_CHUNKS = 256  # of a kernel's module, sent at one launch: 4 MiB
SHIPPED = Path(__file__).parent / "programs.json"
_FILES = (
    *("bounds.c", "unwind.c", "misses.c", "counters.c", "python.c", "launches.c", "known_stacks.c", "waits.c"),
    *("samples.c", "handles.c", "lists.c", "copies.c", "operations.c", "messages.c"),
)
_FUNCTIONS = (
    "on_launch", "on_launched", "on_handle_launch", "on_handle_launched", "on_describe", "on_known", "on_walk",
    "on_keep", "on_miss", "on_copy", "on_state", "on_python", "on_codes", "on_compile", "on_kernel_gone",
    "on_module_gone", "on_execute", "on_executed", "on_list_event", "on_probed_execute", "on_probed_executed",
    "on_probed_list_event", "on_transfer", "on_transferred", "on_may_copy", "on_own_launch", "on_own_launches",
    "on_dispatched", "on_link_map_change", "on_wait", "on_wait_begun", "on_waited", "on_message", "on_sample",
    "on_sample_walk", "on_sample_miss", "on_sample_copy", "on_sample_state", "on_sample_python", "on_sample_codes",
    "on_sampled", "on_submit", "on_submitted", "on_shader_gone", "on_named", "on_draw", "on_drawn", "on_make",
    "on_made", "on_operation", "on_operated", "on_upload", "on_uploaded",
)  # fmt: skip
SESSION_PROGRAMS = ("on_wait", "on_wait_begun", "on_waited")
"""Programs for uprobe sessions (Linux 6.13)."""
SESSION_COPIES = {f"on_wait_{name}": f"on_{name}" for name in ("walk", "miss", "copy", "state", "python", "codes")}
"""Programs that are loaded a second time for uprobe sessions, with `wait_phases` in place of `phases`: the new name,
and the name of the original. A program can tail-call only programs for the same type of attachment."""
WAIT_PROGRAMS = (*SESSION_PROGRAMS, *SESSION_COPIES)
"""Programs that only recording of waits needs."""
SAMPLE_PROGRAMS = tuple(name for name in _FUNCTIONS if name.startswith("on_sample"))
"""Programs for perf events; all others are for uprobes."""
_OF_HANDLES = (
    "on_handle_launch", "on_handle_launched", "on_describe", "on_kernel_gone", "on_module_gone", "on_execute",
    "on_executed", "on_list_event", "on_own_launch", "on_own_launches", "on_dispatched",
)  # fmt: skip
_OF_VULKAN = (
    *_OF_HANDLES,
    *("on_shader_gone", "on_named", "on_draw", "on_drawn", "on_make", "on_made", "on_submit", "on_submitted"),
    *("on_operation", "on_operated", "on_upload", "on_uploaded"),
)
WHEN_NEEDED = dict.fromkeys(_OF_VULKAN, _OF_VULKAN) | dict.fromkeys(_OF_HANDLES, _OF_HANDLES)
"""Programs that are loaded when a driver needs one of them, as the kernel takes 0.1 s to verify them: those that are
loaded together, by the name of each."""
_WALKING = (Phase.WALK, Phase.MISS, Phase.COPY, Phase.STATE, Phase.PYTHON, Phase.CODES)
PHASES = {
    "phases": {
        **{phase: f"on_{phase.name.lower()}" for phase in _WALKING},
        Phase.KNOWN: "on_known",
        Phase.KEEP: "on_keep",
        Phase.LAUNCHED: "on_launched",
        Phase.HANDLE_LAUNCHED: "on_handle_launched",
        Phase.DESCRIBE: "on_describe",
        Phase.EXECUTED: "on_executed",
        Phase.SUBMITTED: "on_submitted",
        Phase.DRAWN: "on_drawn",
        Phase.OPERATED: "on_operated",
        Phase.PROBED_EXECUTED: "on_probed_executed",
        Phase.TRANSFERRED: "on_transferred",
        Phase.DISPATCHED: "on_dispatched",
    },
    "sample_phases": {
        **{phase: f"on_sample_{phase.name.lower()}" for phase in _WALKING},
        Phase.SAMPLED: "on_sampled",
    },
    "wait_phases": {
        **dict(zip(_WALKING, SESSION_COPIES, strict=True)),
        Phase.WAIT_BEGUN: "on_wait_begun",
        Phase.WAITED: "on_waited",
    },
}
"""The program-array maps for tail calls: the program at each phase's index."""
_DEFINES = {
    "MAX_DEPTH": launches.MAX_DEPTH,
    "MAX_STEPS": structs.MAX_STEPS,
    "MOST_MORE": launches.MOST_MORE,
    "CLASSES": MAX_CLASSES,
    "CHUNK_BYTES": launches.CHUNK_BYTES,
    "MESSAGE_BYTES": launches.MESSAGE_BYTES,
    "MOST_CODE_CHUNKS": MOST_CODE_CHUNKS,
    "MOST_MODULE_CHUNKS": MOST_MODULE_CHUNKS,
}
_CONSTANTS = (
    "FRAME_POINTERS_ONLY", "TASK_GROUP_LEADER", "TASK_START_BOOTTIME", "TASK_MM", "TASK_SAS_SS_SP", "TASK_SAS_SS_SIZE",
    "TASK_FSBASE", "TASK_SELF_EXEC_ID", "TASK_IN_EXECVE", "MM_EXEC_VM", "MM_START_STACK", "TASK_UTASK", "UTASK_VADDR",
    "UTASK_XOL_VADDR", "ASM_EXC_INT3", "ASM_EXC_INT3_BYTES", "UPROBE_EMULATION", "UPROBE_EMULATION_BYTES",
    "COPY_PAGES", "SAMPLE_COPY_PAGES", "STACK_DEPTH", "STACK_ID_BITS", "LAUNCH_WAKE_BYTES", "WAIT_SHORT_NS",
    "WAIT_WAKE_BYTES", "SAMPLE_WAKE_BYTES", "STACK_WAKE_BYTES", "PYTHON_WAKE_BYTES", "CODE_WAKE_BYTES",
    "CHUNK_WAKE_BYTES", "MODULE_WAKE_BYTES", "LIST_WAKE_BYTES", "MESSAGE_WAKE_BYTES", "PIECE_WAKE_BYTES", "ITERATES",
)  # fmt: skip
_CALLS = ("ITERATOR_NEW", "ITERATOR_NEXT", "ITERATOR_DESTROY")
WITHOUT_ITERATORS = dict.fromkeys(("ITERATES", *_CALLS), 0)
"""Constants for kernels without the iterator of numbers, or without BPF's JIT, which its functions need."""


def source() -> Source:
    """Returns the source of the programs, as it is compiled."""
    # One text, because bcc does not rewrite included files.
    first, *others = ((Path(__file__).parent / "c" / name).read_text() for name in _FILES)
    return Source("\n".join([first, declarations(), *others]), _DEFINES, _CONSTANTS, _FUNCTIONS, _CALLS)


def shipped() -> Bytecode:
    """Reads the programs that ship, compiled with Debian 12's bcc.

    Raises:
        BytecodeError: the installation is damaged.
    """
    try:
        return from_text(SHIPPED.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BytecodeError(f"the compiled BPF programs cannot be read ({error}): install iaprof again") from error


_NUMBERS = {
    "ADDRESS_BITS": ADDRESS_BITS,
    "BLOCK": BLOCK_BYTES,
    "COUNTERS": len(launches.Counter),
    "LISTS_A_RECORD": launches.LISTS_A_RECORD,
    "MAX_ARGS": structs.MAX_ARGS,
    "MAX_PYTHON": launches.MAX_PYTHON,
    "MAX_OPERATIONS": MAX_OPERATIONS,
    "MOST_GPUS": MAX_GPUS,
    "NAME_BYTES": launches.NAME_BYTES,
    "NO_REGISTER": structs.NO_REGISTER,
    "PAGE": launches.PAGE_BYTES,
    "PATH_BYTES": launches.PATH_BYTES,
    "PHASES": len(Phase),
    "STAGES": len(STAGES),
    "TABLE_BYTES": launches.CODE_TABLE_BYTES,
    "TEXT_BYTES": launches.CODE_TEXT_BYTES,
}
_ENUMS: dict[str, tuple[str, type[IntEnum | IntFlag]]] = {  # by name in C: prefix of the members' names, the enum
    "counter": ("", launches.Counter),
    "launch_flags": ("LAUNCH_", launches.LaunchFlags),
    "list_event": ("LIST_", launches.ListEvent),
    "chunk_of": ("CHUNK_OF_", launches.ChunkOf),
    "message_of": ("MESSAGE_OF_", launches.MessageOf),
    "python_state": ("PYTHON_", launches.PythonState),
    "wait_flags": ("WAIT_", waits.WaitFlags),
    "rule_kind": ("RULE_", RuleKind),
    "walked": ("", Walked),
    "arg_kind": ("ARG_", structs.ArgKind),
    "size_kind": ("", structs.SizeKind),
    "address_value": ("", structs.AddressValue),
    "description_value": ("", structs.DescriptionValue),
    "phase": ("", Phase),
}
_STRUCTS = {  # by name in C
    "arg": structs.ARG, "probe": structs.PROBE, "settings": structs.SETTINGS, "step": structs.STEP,
    "layout": structs.LAYOUT, "entry": structs.ENTRY, "wait_entry": structs.WAIT_ENTRY,
    "mapping_state": launches.MAPPING_STATE, "space": structs.SPACE, "missed_path": structs.MISSED_PATH,
    "copying": structs.COPYING, "python_layout": launches.PYTHON_LAYOUT, "python": structs.PYTHON,
    "launch": launches.LAUNCH, "compiled": launches.COMPILED, "list_record": launches.LIST_EVENT,
    "about": launches.ABOUT, "chunk": launches.CHUNK, "start": launches.REGISTERS, "copied": launches.COPIED,
    "sample": launches.CPU_SAMPLE, "message": launches.MESSAGE,
    "stack": launches.stack_dtype(0),  # STACK_DEPTH addresses follow
    "python_frame": launches.PYTHON_FRAME, "python_stack": launches.PYTHON_STACK, "code": launches.CODE,
    "path_asked": launches.PATH_ASKED, "launch_path": launches.PATH,
    "wait": waits.WAIT, "waiting": waits.WAITING, "site_key": waits.SITE_KEY, "site": waits.SITE,
}  # fmt: skip
_COUNTERS = np.dtype(("<u8", len(launches.Counter)))
_NUMBER, _LONG = np.dtype("<u4"), np.dtype("<u8")
_ELEMENTS: dict[str, tuple[np.dtype[Any], np.dtype[Any]]] = {  # key and value of maps that user space reads or writes
    "counters": (_NUMBER, _COUNTERS),
    "probes": (_NUMBER, structs.PROBE),
    "settings": (_NUMBER, structs.SETTINGS),
    "layouts": (_NUMBER, structs.LAYOUT),
    "entries": (_NUMBER, structs.ENTRY),
    "wait_entries": (_NUMBER, structs.WAIT_ENTRY),
    "others": (_NUMBER, _NUMBER),
    "spaces": (_NUMBER, structs.SPACE),
    "process_unloads": (_NUMBER, _LONG),
    "missed_paths": (_LONG, structs.MISSED_PATH),
    "copies_done": (_NUMBER, _LONG),
    "pythons": (_NUMBER, structs.PYTHON),
    "process_changes": (_NUMBER, _LONG),
    "waits": (_NUMBER, waits.WAITING),
    "wait_sites": (waits.SITE_KEY, waits.SITE),
}


def declarations() -> str:
    """Returns the declarations of all numbers, enums and structs that programs share with Python, as C text."""
    return "\n".join([*(f"#define {name} {value}" for name, value in _NUMBERS.items()), *_enums(), *_structs()])


def _enums() -> Iterator[str]:
    for name, (prefix, members) in _ENUMS.items():
        yield f"enum {name} {{ {', '.join(f'{prefix}{each.name} = {each.value}' for each in members)} }};"


def _structs() -> Iterator[str]:
    for name, dtype in _STRUCTS.items():
        members = " ".join(_member(each, dtype[each]) for each in dtype.names or ())
        yield f"struct {name} {{ {members} }};"
        yield f'_Static_assert(sizeof(struct {name}) == {dtype.itemsize}, "{name}");'


def _member(name: str, dtype: np.dtype[np.void]) -> str:
    count = ""
    if dtype.subdtype is not None:
        dtype, (length,) = dtype.subdtype
        count = f"[{length or ''}]"
    if dtype.names is not None:
        return f"struct {next(known for known, each in _STRUCTS.items() if each == dtype)} {name}{count};"
    if dtype.kind in "SV":
        return f"char {name}[{dtype.itemsize}];"
    return f"{dtype.kind.replace('i', 's')}{8 * dtype.itemsize} {name}{count};"


def check_maps(bytecode: Bytecode) -> None:
    """Checks that the elements of the programs' maps have the sizes that user space reads and writes.

    Raises:
        BytecodeError: the programs were compiled with other declarations.
    """
    for name, elements in _ELEMENTS.items():
        if (made := bytecode.maps.get(name)) is not None:
            expected = tuple(each.itemsize for each in elements)
            if (made.key_bytes, made.value_bytes) != expected:
                raise BytecodeError(
                    f"the compiled BPF programs have elements of {made.key_bytes} and {made.value_bytes} bytes in "
                    f"their map {name}, not of {expected[0]} and {expected[1]}: install iaprof again"
                )
