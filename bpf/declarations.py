"""The structs and enums that BPF programs share with Python, written in C: compiled before the programs.

They are made of the dtypes and enums, so that there is one definition of each. The compiler checks that a struct has
its dtype's size, as C may add padding; and `check_maps` that the maps of compiled programs have elements of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np

from iaprof.bpf.bytecode import Bytecode, BytecodeError
from iaprof.bpf.probes.driver_layout import MAX_GPUS
from iaprof.bpf.structs import (
    ARG,
    ENTRY,
    LAYOUT,
    MAX_ARGS,
    NO_REGISTER,
    PROBE,
    PYTHON,
    PYTHON_LAYOUT,
    SETTINGS,
    SPACE,
    STEP,
    WAIT_ENTRY,
    WAY,
    ArgKind,
    Phase,
    Unit,
    What,
    Where,
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
    GENERATION,
    LAUNCH,
    LIST_EVENT,
    LISTS_A_RECORD,
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
_ENUMS: dict[str, tuple[str, type[IntEnum | IntFlag]]] = {  # by name: what the names of members begin with
    "counter": ("", Counter),
    "launch_flags": ("LAUNCH_", LaunchFlags),
    "list_event": ("LIST_", ListEvent),
    "piece_of": ("PIECE_OF_", ChunkOf),
    "python_state": ("PYTHON_", PythonState),
    "wait_flags": ("WAIT_", WaitFlags),
    "rule_kind": ("RULE_", RuleKind),
    "walked": ("", Walked),
    "arg_kind": ("ARG_", ArgKind),
    "unit": ("", Unit),
    "where": ("", Where),
    "what": ("", What),
    "phase": ("", Phase),
}
_STRUCTS = {
    "arg": ARG,
    "probe": PROBE,
    "settings": SETTINGS,
    "step": STEP,
    "layout": LAYOUT,
    "entry": ENTRY,
    "wait_entry": WAIT_ENTRY,
    "generation": GENERATION,
    "space": SPACE,
    "way": WAY,
    "python_layout": PYTHON_LAYOUT,
    "python": PYTHON,
    "launch": LAUNCH,
    "compiled": COMPILED,
    "list_record": LIST_EVENT,
    "about": ABOUT,
    "piece": CHUNK,
    "start": REGISTERS,
    "copied": COPIED,
    "sample": CPU_SAMPLE,
    "stack": stack_dtype(0),  # as many addresses as STACK_DEPTH says follow
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
_ELEMENTS: dict[str, tuple[np.dtype[Any], np.dtype[Any]]] = {  # of maps that user space reads or writes
    "counters": (_NUMBER, _COUNTERS),
    "probes": (_NUMBER, PROBE),
    "settings": (_NUMBER, SETTINGS),
    "layouts": (_NUMBER, LAYOUT),
    "entries": (_NUMBER, ENTRY),
    "wait_entries": (_NUMBER, WAIT_ENTRY),
    "others": (_NUMBER, _NUMBER),
    "spaces": (_NUMBER, SPACE),
    "loads": (_NUMBER, _LONG),
    "ways": (_LONG, WAY),
    "pythons": (_NUMBER, PYTHON),
    "waits": (_NUMBER, WAITING),
    "wait_sites": (SITE_KEY, SITE),
}


def declarations() -> str:
    """All of them in C."""
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
    """Sees whether the maps of compiled programs have elements of the sizes that are read and written here.

    Raises:
        BytecodeError: they were compiled of other declarations.
    """
    for name, elements in _ELEMENTS.items():
        if (made := bytecode.maps.get(name)) is not None:
            expected = tuple(each.itemsize for each in elements)
            if (made.key_bytes, made.value_bytes) != expected:
                raise BytecodeError(
                    f"the compiled BPF programs have elements of {made.key_bytes} and {made.value_bytes} bytes in "
                    f"their map {name}, not of {expected[0]} and {expected[1]}: install iaprof again"
                )
