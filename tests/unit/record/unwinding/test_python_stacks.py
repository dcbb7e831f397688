"""Python frames of stacks: their places among C frames, and the names and lines of their code objects."""

from __future__ import annotations

import random
import sys
import tracemalloc
from types import CodeType
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.header.stack_counts import NO_CODE, NOWHERE, PythonCounts
from iaprof.formats.wire.launches import CODE, PYTHON_FRAME, PYTHON_STACK, PythonState
from iaprof.record.stacks.python_stacks import Interpreter, PythonCounting, PythonStacks
from iaprof.symbols.python.layout import Layout, layout_of

Records: TypeAlias = np.ndarray[Any, Any]
PID, OTHER = 7, 8
LAYOUT: Layout = layout_of(11, 0x030B0000, lambda _: b"")
SP, CFAS = 1000, (1100, 1200, 1300)
TYPES = 0x7000, 0x8000  # of str and bytes objects
TABLE, TEXT = CODE["table"].shape[0], CODE["qualname"].shape[0]
END = 0  # in place of a code object
FIRST, SECOND, THIRD = 0x100000, 0x200000, 0x300000


def text(value: str) -> bytes:
    """The first bytes of a str object of 3.11."""
    is_ascii, kind = value.isascii(), 1 if max(map(ord, value), default=0) < 256 else 4
    state = kind << 2 | 1 << 5 | is_ascii << 6
    head = bytearray(LAYOUT.string_ascii_data if is_ascii else LAYOUT.string_other_data)
    head[8:16] = TYPES[0].to_bytes(8, "little")
    head[16:24], head[32:36] = len(value).to_bytes(8, "little"), state.to_bytes(4, "little")
    return bytes(head) + value.encode("latin-1" if kind == 1 else "utf-32-le")


def content(value: bytes) -> bytes:
    """The first bytes of a bytes object."""
    return bytes(8) + TYPES[1].to_bytes(8, "little") + len(value).to_bytes(8, "little") + bytes(8) + value


def code(address: int, name: str, time: int = 1, of: CodeType | None = None, file: str = "/a.py") -> Records:
    """CODE[n], as many as the line table needs."""
    table = content(of.co_linetable if of else b"")
    record = np.zeros(-(-len(table) // TABLE), CODE)
    record["time"], record["pid"], record["code"], record["identity"] = time, PID, address, time
    record["first_line"] = of.co_firstlineno if of else 10
    for member, data in (("qualname", text(name)), ("filename", text(file))):
        record[member][0, : len(data)] = np.frombuffer(data[:TEXT], np.uint8)
    record["offset"] = np.arange(len(record)) * TABLE
    record["table"] = np.frombuffer(table.ljust(TABLE * len(record), b"\0"), np.uint8).reshape(len(record), TABLE)
    return record


def walked(number: int, *frames: tuple[int, int], cfas: tuple[int, ...] = CFAS, **members: int) -> Records:
    """PYTHON_STACK[1], of frames: code object, or END; and instruction, or the end's address."""
    record = np.zeros(1, PYTHON_STACK)
    given = {"id": number, "time": 5, "pid": PID, "state": PythonState.WHOLE, "sp": SP, "count": len(frames)}
    for name, value in {**given, "depth": len(cfas), **members}.items():
        record[name] = value
    record["cfas"][0, : len(cfas)] = cfas
    record["frames"][0, : len(frames)] = np.array(list(frames), record["frames"].dtype)
    return record


def in_no_spool(position: int) -> bytes:
    raise AssertionError(f"the records are not in the spool, at {position}")


def columns(stacks: PythonStacks, *numbers: int) -> tuple[pa.Array, pa.Array]:
    """The columns of these stacks."""
    return stacks.columns(stacks.frames(np.array(numbers, np.uint64)), np.ones(len(numbers), bool))


def frames_of(stacks: PythonStacks, number: int) -> list[tuple[str, int, int]]:
    """Name, line and C frame of each Python frame."""
    frames, _ = columns(stacks, number)
    names = {row["id"]: row["name"] for row in stacks.code_rows().to_pylist()} | {NO_CODE: "?"}
    return [(names[frame["code"]], frame["line"], frame["at"]) for frame in frames.to_pylist()[0]]


@pytest.fixture
def stacks() -> PythonStacks:
    made = PythonStacks(in_no_spool)
    made.add_interpreter(PID, Interpreter(TYPES, LAYOUT))
    for address, name in ((FIRST, "first"), (SECOND, "second"), (THIRD, "third")):
        made.add_codes(code(address, name))
    return made


def test_frames_stand_where_their_loop_is(stacks: PythonStacks) -> None:
    stacks.add(walked(1, (FIRST, 0), (SECOND, 0), (END, 1150), (THIRD, 0), (END, 1200)))
    assert frames_of(stacks, 1) == [("first", 0, 1), ("second", 0, 1), ("third", 0, 2)]


@pytest.mark.parametrize("end", [SP - 1, CFAS[-1], 0, (1 << 64) - 1])
def test_a_loop_that_is_in_no_frame_of_c_is_marked(stacks: PythonStacks, end: int) -> None:
    stacks.add(walked(1, (FIRST, 0), (END, end), (SECOND, 0)))
    assert frames_of(stacks, 1) == [("first", 0, NOWHERE), ("second", 0, NOWHERE)]


def test_the_learner_s_cfas_place_frames(stacks: PythonStacks) -> None:
    # given a stack of which BPF walked one frame, and another that the learner continued from the second frame
    stacks.add(walked(1, (FIRST, 0), (END, 1250), cfas=(0,)))
    stacks.add(walked(1, state=PythonState.NONE))
    stacks.add(walked(2, (FIRST, 0), (END, 1250), cfas=(1100, 0)))
    stacks.add(walked(2, state=PythonState.NONE, cfas=CFAS[1:], kept=1))
    # then
    assert frames_of(stacks, 1) == frames_of(stacks, 2) == [("first", 0, 2)]


def test_a_stack_takes_a_few_hundred_bytes_until_its_row_is_made() -> None:
    # given records of 6 KB each, of stacks of 20 frames, behind which there is something else
    frames = [(FIRST, n) for n in range(20)]
    count = 1000
    records = np.concatenate([walked(number, *frames, (END, 1150)) for number in range(1, count + 1)])
    records["frames"][:, 21:] = np.frombuffer(random.Random(1).randbytes(16 * 235), PYTHON_FRAME)
    stacks = PythonStacks(in_no_spool)
    stacks.add_interpreter(PID, Interpreter(TYPES, LAYOUT))
    stacks.add_codes(code(FIRST, "first"))
    # when
    tracemalloc.start()
    stacks.add(records)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # then
    assert taken / count < 400
    assert frames_of(stacks, 1) == frames_of(stacks, count) == [("first", 0, 1)] * 20


def test_records_of_the_spool_stay_there() -> None:
    # given two frames of the spool, with stacks of BPF and of the learner, one of them sent twice
    finished = walked(2, state=PythonState.NONE, cfas=CFAS[1:], kept=1)
    spool = {
        40: np.concatenate([walked(1, (FIRST, 0), (END, 1150)), walked(2, (SECOND, 0), (END, 1250), cfas=(1100, 0))]),
        1 << 40: np.concatenate([finished, walked(1, (THIRD, 0), (END, 1150)), walked(3, (THIRD, 0), (END, 1000))]),
    }
    stacks = PythonStacks(lambda position: spool[position].tobytes())
    stacks.add_interpreter(PID, Interpreter(TYPES, LAYOUT))
    for address, name in ((FIRST, "first"), (SECOND, "second"), (THIRD, "third")):
        stacks.add_codes(code(address, name))
    for position, records in spool.items():
        stacks.add(records, position)
    stacks.add(walked(4, (FIRST, 0), (END, 1200)))
    # when the rows of some of them are made, in another order
    ids = np.array([4, 3, 9, 2, 1], np.uint64)
    frames, ended = stacks.columns(stacks.frames(ids), np.array([True, False, True, True, True]))
    # then
    names = {row["id"]: row["name"] for row in stacks.code_rows().to_pylist()}
    told = [each and [(names[frame["code"]], frame["at"]) for frame in each] for each in frames.to_pylist()]
    assert told == [[("first", 2)], None, [("second", 2)], [("first", 1)]]
    assert ended.to_pylist() == ["whole", None, "whole", "whole"]


def test_more_records_than_are_sent_at_once_are_damage(stacks: PythonStacks) -> None:
    with pytest.raises(ValueError, match="more stacks"):
        stacks.add(np.zeros((1 << 16) + 1, PYTHON_STACK), 0)


def test_lines_are_those_of_the_instruction(stacks: PythonStacks) -> None:
    of = frames_of.__code__
    stacks.add_codes(code(0x400000, "here", of=of))
    wanted = [(start, line) for start, _, line in of.co_lines() if line is not None]
    bytecode = 0x400000 + LAYOUT.code_bytecode
    stacks.add(walked(1, *((0x400000, bytecode + start) for start, _ in wanted), (END, 1000)))
    assert [line for _, line, _ in frames_of(stacks, 1)] == [line for _, line in wanted]
    assert sys.version_info >= (3, 11)


def test_of_two_code_objects_at_one_address_it_is_the_one_of_that_time(stacks: PythonStacks) -> None:
    stacks.add_codes(code(FIRST, "later", time=100))
    for number, time in ((1, 50), (2, 100), (3, 0)):
        stacks.add(walked(number, (FIRST, 0), (END, 1000), time=time))
    assert [frames_of(stacks, 1)[0][0]] == ["first"]
    frames, _ = columns(stacks, 1, 2, 3)
    numbers = [each[0]["code"] for each in frames.to_pylist()]
    assert numbers[0] != numbers[1]
    assert numbers[2] == numbers[0]


def test_a_code_object_that_did_not_come_has_no_name(stacks: PythonStacks) -> None:
    of_other = code(0x500000, "of nobody")
    of_other["pid"] = OTHER
    stacks.add_codes(of_other)
    stacks.add(walked(1, (0x500000, 0), (END, 1000), pid=OTHER))
    stacks.add(walked(2, (0x600000, 0), (END, 1000)))
    assert frames_of(stacks, 1) == frames_of(stacks, 2) == [("?", 0, 0)]
    assert list(stacks.losses()) == []


@pytest.mark.parametrize(
    ("member", "byte", "value"), [("qualname", 32, 0xFF), ("qualname", 8, 1), ("filename", 9, 1), ("table", 10, 1)]
)
def test_where_a_frame_has_no_code_object_python_ends(stacks: PythonStacks, member: str, byte: int, value: int) -> None:
    # given memory with objects of other types, or with invalid content
    damaged = code(0x400000, "x")
    damaged[member][0, byte] = value
    stacks.add_codes(damaged)
    # when
    stacks.add(walked(1, (FIRST, 0), (0x400000, 0), (SECOND, 0), (END, 1000)))
    # then this frame and all after it are dropped
    assert frames_of(stacks, 1) == [("first", 0, 0)]
    assert columns(stacks, 1)[1].to_pylist() == ["damaged"]
    [(damaged_stacks, why)] = stacks.losses()
    assert (damaged_stacks, why.split(":")[0]) == (2, "frames of Python")


def test_interpreters_on_one_stack_are_sorted_by_their_loops(stacks: PythonStacks) -> None:
    # given the outer interpreter's frames, and then those of the one inside; 0 is between them
    stacks.add(walked(1, (SECOND, 0), (END, 1250), (END, 0), (FIRST, 0), (END, 1050)))
    assert [(name, at) for name, _, at in frames_of(stacks, 1)] == [("first", 0), ("second", 2)]
    assert columns(stacks, 1)[1].to_pylist() == ["whole"]


def test_after_exec_code_objects_are_of_another_interpreter(stacks: PythonStacks) -> None:
    stacks.add_interpreter(PID, Interpreter((1, 2), LAYOUT))
    stacks.add_codes(code(0x400000, "of the first"))
    stacks.add(walked(1, (0x400000, 0), (END, 1000)))
    assert [name for name, _, _ in frames_of(stacks, 1)] == ["of the first"]


def test_names_that_were_cut_are_marked(stacks: PythonStacks) -> None:
    stacks.add_codes(code(0x400000, "n" * 200 + "\N{GREEK SMALL LETTER ALPHA}", file="/" + "d" * 1000))
    stacks.add(walked(1, (0x400000, 0), (END, 1000)))
    assert frames_of(stacks, 1)[0][0] == "n" * ((TEXT - LAYOUT.string_other_data) // 4) + "…"
    files = [row["file"] for row in stacks.code_rows().to_pylist()]
    assert "/" + "d" * (TEXT - LAYOUT.string_ascii_data - 1) + "…" in files


@pytest.mark.parametrize("is_sent_twice", [False, True])
def test_a_long_table_of_lines_comes_in_parts(stacks: PythonStacks, is_sent_twice: bool) -> None:
    source = "".join(f"x_{n} = {n}\n\n" for n in range(2000))
    of = compile(source, "/long.py", "exec")
    records = code(0x400000, "long", of=of)
    assert len(records) > 3
    stacks.add_codes(np.repeat(records, 1 + is_sent_twice))
    wanted = [(start, line) for start, _, line in of.co_lines() if line is not None]
    bytecode = 0x400000 + LAYOUT.code_bytecode
    stacks.add(walked(1, *((0x400000, bytecode + start) for start, _ in wanted[::100]), (END, 1000)))
    assert [line for _, line, _ in frames_of(stacks, 1)] == [line for _, line in wanted[::100]]


def test_launches_are_counted_by_what_their_stacks_tell(stacks: PythonStacks) -> None:
    # given stacks: whole; with an unknown code object; deep and without a place; damaged; and without frames
    stacks.add(walked(1, (FIRST, 0), (END, 1150)))
    stacks.add(walked(2, (0x700000, 0), (END, 1150)))
    stacks.add(walked(3, (FIRST, 0), (END, 5), state=PythonState.DEEP))
    stacks.add(walked(4, state=PythonState.DAMAGED))
    columns(stacks, *range(1, 6))
    # when launches have these, some of another process or without a stack
    counting = PythonCounting(stacks)
    ids = np.repeat(np.array([1, 2, 3, 4, 5, 0, 6], np.uint64), [10, 1, 2, 4, 8, 16, 32])
    pids = np.repeat(np.array([PID, PID, PID, PID, PID, PID, OTHER], np.uint32), [10, 1, 2, 4, 8, 16, 32])
    for part in (slice(0, 20), slice(20, None)):
        counting.add("launches", ids[part], pids[part])
    # then
    told = counting.header()
    assert told["launches"] == PythonCounts(17, 10, 2, 4, 1, 2, none=8).to_json()
    assert told["cpu_samples"] == PythonCounts().to_json()


def test_hostile_numbers_are_bounded(stacks: PythonStacks) -> None:
    record = walked(1, (FIRST, (1 << 64) - 1), (END, 1000))
    for name in ("count", "depth", "state"):
        record[name] = np.iinfo(record.dtype[name]).max
    stacks.add(record)
    frames, ended = columns(stacks, 1)
    assert ended.to_pylist() == ["damaged"]
    assert len(frames.to_pylist()[0]) < 300


def test_equal_frames_have_equal_contents_wherever_their_loops_are(stacks: PythonStacks) -> None:
    def hashes(*numbers: int) -> list[int]:
        found: list[int] = stacks.content_hashes(stacks.frames(np.array(numbers, np.uint64))).tolist()
        return found

    stacks.add(walked(1, (FIRST, 4), (END, 1150)))
    stacks.add(walked(2, (FIRST, 4), (END, 1151)))
    stacks.add(walked(3, (FIRST, 6), (END, 1150)))
    # another function at the same address
    stacks.add(walked(5, (FIRST, 4), (END, 1150), time=20))
    stacks.add_codes(code(FIRST, "made later", time=10))
    assert len(set(hashes(1, 5))) == 2
    one, same, other, none = hashes(1, 2, 3, 4)
    assert one == same != other
    assert none == 0
