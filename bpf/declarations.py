"""Generates C declarations of the structs and enums that BPF programs share with Python; compiled before the programs.

The dtypes and Python enums are the only definitions. As C may add padding, the compiler checks that each struct has
its dtype's size, and `check_maps` checks the sizes of elements in the maps of compiled programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np

from iaprof.bpf.bytecode import Bytecode, BytecodeError
from iaprof.bpf.driver_layout import MAX_GPUS
from iaprof.bpf.structs import (
    ARG,
    COPYING,
    ENTRY,
    LAYOUT,
    MAX_ARGS,
    MISSED_PATH,
    NO_REGISTER,
    PROBE,
    PYTHON,
    PYTHON_LAYOUT,
    SETTINGS,
    SPACE,
    STEP,
    WAIT_ENTRY,
    AddressValue,
    ArgKind,
    DescriptionValue,
    Phase,
    SizeKind,
)
from iaprof.formats.header.waits import SITE, SITE_KEY, WAIT, WAITING, WaitFlags
from iaprof.formats.wire.launches import (
    ABOUT,
    CHUNK,
    CODE,
    CODE_TABLE_BYTES,
    CODE_TEXT_BYTES,
    COMPILED,
    COPIED,
    CPU_SAMPLE,
    LAUNCH,
    LIST_EVENT,
    LISTS_A_RECORD,
    MAPPING_STATE,
    MAX_PYTHON,
    NAME_BYTES,
    PAGE_BYTES,
    PATH_BYTES,
    PYTHON_FRAME,
    PYTHON_STACK,
    REGISTERS,
    ChunkOf,
    Counter,
    LaunchFlags,
    ListEvent,
    PythonState,
    stack_dtype,
)
from iaprof.formats.wire.unwind_rules import ADDRESS_BITS, BLOCK_BYTES, RuleKind, Walked

_NUMBERS = {
    "ADDRESS_BITS": ADDRESS_BITS,
    "BLOCK": BLOCK_BYTES,
    "COUNTERS": len(Counter),
    "LISTS_A_RECORD": LISTS_A_RECORD,
    "MAX_ARGS": MAX_ARGS,
    "MAX_PYTHON": MAX_PYTHON,
    "MOST_GPUS": MAX_GPUS,
    "NAME_BYTES": NAME_BYTES,
    "NO_REGISTER": NO_REGISTER,
    "PAGE": PAGE_BYTES,
    "PATH_BYTES": PATH_BYTES,
    "PHASES": len(Phase),
    "TABLE_BYTES": CODE_TABLE_BYTES,
    "TEXT_BYTES": CODE_TEXT_BYTES,
}
_ENUMS: dict[str, tuple[str, type[IntEnum | IntFlag]]] = {  # by name in C: prefix of the members' names, the enum
    "counter": ("", Counter),
    "launch_flags": ("LAUNCH_", LaunchFlags),
    "list_event": ("LIST_", ListEvent),
    "chunk_of": ("CHUNK_OF_", ChunkOf),
    "python_state": ("PYTHON_", PythonState),
    "wait_flags": ("WAIT_", WaitFlags),
    "rule_kind": ("RULE_", RuleKind),
    "walked": ("", Walked),
    "arg_kind": ("ARG_", ArgKind),
    "size_kind": ("", SizeKind),
    "address_value": ("", AddressValue),
    "description_value": ("", DescriptionValue),
    "phase": ("", Phase),
}
_STRUCTS = {  # by name in C
    "arg": ARG,
    "probe": PROBE,
    "settings": SETTINGS,
    "step": STEP,
    "layout": LAYOUT,
    "entry": ENTRY,
    "wait_entry": WAIT_ENTRY,
    "mapping_state": MAPPING_STATE,
    "space": SPACE,
    "missed_path": MISSED_PATH,
    "copying": COPYING,
    "python_layout": PYTHON_LAYOUT,
    "python": PYTHON,
    "launch": LAUNCH,
    "compiled": COMPILED,
    "list_record": LIST_EVENT,
    "about": ABOUT,
    "chunk": CHUNK,
    "start": REGISTERS,
    "copied": COPIED,
    "sample": CPU_SAMPLE,
    "stack": stack_dtype(0),  # STACK_DEPTH addresses follow
    "python_frame": PYTHON_FRAME,
    "python_stack": PYTHON_STACK,
    "code": CODE,
    "wait": WAIT,
    "waiting": WAITING,
    "site_key": SITE_KEY,
    "site": SITE,
}
_COUNTERS = np.dtype(("<u8", len(Counter)))
_NUMBER, _LONG = np.dtype("<u4"), np.dtype("<u8")
_ELEMENTS: dict[str, tuple[np.dtype[Any], np.dtype[Any]]] = {  # key and value of maps that user space reads or writes
    "counters": (_NUMBER, _COUNTERS),
    "probes": (_NUMBER, PROBE),
    "settings": (_NUMBER, SETTINGS),
    "layouts": (_NUMBER, LAYOUT),
    "entries": (_NUMBER, ENTRY),
    "wait_entries": (_NUMBER, WAIT_ENTRY),
    "others": (_NUMBER, _NUMBER),
    "spaces": (_NUMBER, SPACE),
    "process_unloads": (_NUMBER, _LONG),
    "missed_paths": (_LONG, MISSED_PATH),
    "copies_done": (_NUMBER, _LONG),
    "pythons": (_NUMBER, PYTHON),
    "waits": (_NUMBER, WAITING),
    "wait_sites": (SITE_KEY, SITE),
}


def declarations() -> str:
    """Returns the declarations of all numbers, enums and structs as C text."""
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
