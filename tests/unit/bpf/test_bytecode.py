"""Compiled BPF programs: read from a compiler's output, stored in a file, and linked when they are loaded."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iaprof.bpf import bytecode, programs
from iaprof.bpf.bytecode import Bytecode, BytecodeError, Map, call_placeholder, from_compiled, placeholder
from iaprof.bpf.loader import kind_of
from iaprof.bpf.sizes import map_entries, program_constants
from iaprof.bpf.uprobe import ProgramFor

ROOT = Path(__file__).parents[3]
EXIT = struct.pack("<BBhI", 0x95, 0, 0, 0)
CALL = struct.pack("<BBhI", 0x85, 0, 0, 14)


def load(register: int, value: int, source: int = 0) -> bytes:
    """A 64-bit immediate load."""
    low, high = value & 0xFFFFFFFF, value >> 32
    return struct.pack("<BBhI", 0x18, source << 4 | register, 0, low) + struct.pack("<BBhI", 0, 0, 0, high)


def test_maps_and_constants_are_found_and_filled_in() -> None:
    # given code with two maps, one constant twice, and a number that only looks like a map
    depth = placeholder("DEPTH")
    code = load(1, 7, 1) + load(2, depth) + CALL + load(3, 7) + load(1, 9, 1) + load(4, depth) + EXIT
    # when
    program = from_compiled(code, {7: "stacks", 9: "launches"}, ("DEPTH", "UNUSED"))
    # then
    assert program.maps == ((0, "stacks"), (7, "launches"))
    assert program.constants == ((2, "DEPTH"), (9, "DEPTH"))
    assert program.code == load(1, 0, 1) + load(2, 0) + CALL + load(3, 7) + load(1, 0, 1) + load(4, 0) + EXIT
    filled = program.linked({"stacks": 20, "launches": 21}, {"DEPTH": 0x123456789A, "UNUSED": 1})
    value = 0x123456789A
    assert filled == load(1, 20, 1) + load(2, value) + CALL + load(3, 7) + load(1, 21, 1) + load(4, value) + EXIT


def call(function: int, source: int = 0) -> bytes:
    return struct.pack("<BBhI", 0x85, source << 4, 0, function)


def test_calls_of_the_kernel_s_functions_get_their_numbers() -> None:
    code = call(14) + call(call_placeholder("NEXT")) + load(1, placeholder("NEXT")) + EXIT
    program = from_compiled(code, {}, (), ("NEXT", "UNUSED"))
    assert program.calls == ((1, "NEXT"),)
    assert program.code == call(14) + call(0) + load(1, placeholder("NEXT")) + EXIT
    # when the kernel has the function, and when it has not
    found, missing = program.linked({}, {"NEXT": 64236}), program.linked({}, {"NEXT": 0})
    # then it is called, or its result is 1
    assert found == call(14) + call(64236, source=2) + load(1, placeholder("NEXT")) + EXIT
    assert missing == call(14) + struct.pack("<BBhI", 0xB7, 0, 0, 1) + load(1, placeholder("NEXT")) + EXIT


@pytest.mark.parametrize(
    "code",
    [
        load(1, 8, 1) + EXIT,  # an unknown map
        load(1, 7, 2) + EXIT,  # a map's value
        load(1, 7, 4) + EXIT,  # a function
        struct.pack("<BBhI", 0x85, 1 << 4, 0, 3) + EXIT,  # a call of a function of the program's own
        struct.pack("<BBhI", 0x85, 2 << 4, 0, 3) + EXIT,  # a call of a function of the kernel's
    ],
)
def test_code_that_refers_to_the_compiling_process_is_refused(code: bytes) -> None:
    with pytest.raises(BytecodeError, match="instruction 0 "):
        from_compiled(code, {7: "stacks"}, ())


def some() -> Bytecode:
    code = load(1, 7, 1) + load(2, placeholder("DEPTH")) + call(call_placeholder("NEXT")) + EXIT
    program = from_compiled(code, {7: "stacks"}, ("DEPTH",), ("NEXT",))
    return Bytecode("digest", "bcc 0.26.0", {"stacks": Map(27, 0, 0, 4096, 0)}, {"on_launch": program})


def test_a_file_is_read_as_it_was_written() -> None:
    assert bytecode.from_text(some().to_text()) == some()


def remove(*path: str) -> Callable[[Any], object]:
    def change(content: Any) -> None:
        for name in path[:-1]:
            content = content[name]
        del content[path[-1]]

    return change


@pytest.mark.parametrize(
    "damage",
    [
        remove("maps"),
        remove("maps", "stacks"),
        remove("maps", "stacks", "flags"),
        remove("programs", "on_launch", "code"),
        lambda content: content["programs"]["on_launch"].update(code=["95"]),
        lambda content: content["programs"]["on_launch"].update(code=[]),
        lambda content: content["programs"]["on_launch"].update(code=["no digits"]),
        lambda content: content["programs"]["on_launch"].update(maps=["1 stacks"]),
        lambda content: content["programs"]["on_launch"].update(maps=["4 stacks"]),
        lambda content: content["programs"]["on_launch"].update(maps=["-5 stacks"]),
        lambda content: content["programs"]["on_launch"].update(maps=["0 others"]),
        lambda content: content["programs"]["on_launch"].update(constants=[7]),
        lambda content: content["programs"]["on_launch"].update(calls=["0 NEXT"]),
        lambda content: content["programs"]["on_launch"].update(calls=["6 NEXT"]),
        remove("programs", "on_launch", "calls"),
        lambda content: content.update(programs=[]),
    ],
)
def test_a_damaged_file_is_refused(damage: Callable[[Any], object]) -> None:
    content = json.loads(some().to_text())
    damage(content)
    with pytest.raises(BytecodeError, match="cannot be read"):
        bytecode.from_text(json.dumps(content))


@pytest.mark.parametrize("text", ["", "[]", "<<<<<<< HEAD\n", "{}", "null"])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(BytecodeError, match="cannot be read"):
        bytecode.from_text(text)


def test_programs_that_may_be_preempted_keep_the_kernels_stack() -> None:
    """Linux 6.13 and later gives a program without a tail call a stack of the CPU, and lets uprobes' be preempted."""
    call_tail = b"\x85\x00\x00\x00" + struct.pack("<i", 12)  # BPF_CALL, BPF_FUNC_tail_call
    without = [
        name
        for name, program in programs.shipped().programs.items()
        if kind_of(name) is not ProgramFor.PERF_EVENTS
        and not any(program.code[at : at + 8] == call_tail for at in range(0, len(program.code), 8))
    ]
    assert without == []


def test_maps_are_those_of_old_kernels() -> None:
    """Before Linux 6.1 a program of a perf event may use no hash map that allocates its elements as they come."""
    without_elements = 1  # BPF_F_NO_PREALLOC
    assert [name for name, each in programs.shipped().maps.items() if each.flags & without_elements] == []


def test_the_loader_has_all_that_the_shipped_programs_need() -> None:
    shipped = programs.shipped()
    assert set(shipped.programs) == set(programs.source().functions)
    source, constants = programs.source(), set(program_constants(127))
    used = {name for program in shipped.programs.values() for _, name in program.constants}
    called = {name for program in shipped.programs.values() for _, name in program.calls}
    assert (used, called) == (set(source.constants), set(source.calls))
    assert used | called == constants > set(programs.WITHOUT_ITERATORS)
    assert set(map_entries()) <= set(shipped.maps)


def test_the_digest_changes_with_every_part_of_the_source() -> None:
    source = programs.source()
    others = [
        replace(source, text=source.text + " "),
        replace(source, defines={**source.defines, "MAX_PIECES": 1}),
        replace(source, constants=source.constants[1:]),
        replace(source, functions=source.functions[1:]),
        replace(source, calls=source.calls[1:]),
    ]
    assert len({each.digest() for each in (source, *others)}) == 6


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ("pass", 0, ""),
        (
            "programs._DEFINES['MAX_PIECES'] = 1",
            1,
            "bpf/programs.json: it was not made from the current C files and numbers; run 'make bytecode'\n",
        ),
    ],
)
def test_lint_reports_programs_that_do_not_match_the_sources(change: str, code: int, said: str) -> None:
    run = f"runpy.run_path({str(ROOT / 'scripts' / 'bytecode.py')!r}, run_name='__main__')"
    check = f"import runpy, sys; from iaprof.bpf import programs; sys.argv[1:] = ['--check']; {change}; {run}"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, said)


SLEEPING = {148: "copy_from_user", 191: "copy_from_user_task"}  # include/uapi/linux/bpf.h: they may wait for a page


def test_no_program_that_ships_may_sleep() -> None:
    """A thread that sleeps with a record of a ring buffer reserved holds up all other records."""
    shipped = bytecode.from_text((ROOT / "bpf" / "programs.json").read_text())
    called = set()
    for program in shipped.programs.values():
        for opcode, registers, _, number in struct.iter_unpack("<BBhI", program.code):
            if opcode == CALL[0] and registers >> 4 == 0:
                called.add(number)
    assert 131 in called  # ringbuf_reserve
    assert called.isdisjoint(SLEEPING)
