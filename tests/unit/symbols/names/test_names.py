"""Names of addresses: looked up, joined, written into a capture and read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.report.cpu_names import SymbolizerChain
from iaprof.symbols.names.calls import StackAddresses, calls
from iaprof.symbols.names.names import LONGEST_NAME, Frame, Module, ModuleKind, Names, Symbolized, is_shortened
from iaprof.symbols.names.rows import Cancellation, CaptureNames, write_names
from unit.symbols.names.test_address_space import event, mapping, spaces

MODULE = Module(ModuleKind.FILE, "/lib/a.so", b"\x01\x02")
LONG_ODD = "f;\n<b>\udcff" + "x" * 100_000
OTHER = Module(ModuleKind.GENERATED, pid=7)


def addresses(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


class Known:
    """A Symbolizer that knows some names, and notes what it is asked for."""

    def __init__(self, names: dict[Module, Symbolized | None]) -> None:
        self.names = names
        self.asked: list[tuple[Module, list[int]]] = []

    def name(self, module: Module, addresses: np.ndarray, times: np.ndarray) -> Symbolized | None:
        assert len(addresses) == len(times)
        self.asked.append((module, addresses.tolist()))
        return self.names.get(module)


def test_the_innermost_range_names_an_address() -> None:
    names = Names.of([(0x100, 0x100, [Frame("whole")]), (0x150, 1, [Frame("outer"), Frame("inlined", "a.h", 3)]),
                      (0x300, 0x10, [Frame("far")]), (0x200, 8, [])])  # fmt: skip
    rows = names.find(addresses(0xFF, 0x100, 0x150, 0x151, 0x1FF, 0x200, 0x30F, 0x310, (1 << 64) - 1))
    functions = [[frame.function for frame in names.frames(row)] if row >= 0 else None for row in rows]
    assert functions == [None, ["whole"], ["outer", "inlined"], ["whole"], ["whole"], None, ["far"], None, None]
    assert names.frames(int(rows[2]))[1] == Frame("inlined", "a.h", 3)
    assert Names.of([]).find(addresses(1)).tolist() == [-1]


def test_names_are_joined_and_taken_for_single_addresses() -> None:
    one = Names.of([(0x10, 4, [Frame("a", "f", 1)]), (0x40, 1, [Frame("b"), Frame("c")])])
    two = Names.of([(0x20, 8, [Frame("d", "f", 2)]), (0x41, 1, [Frame("a")])])
    both = Names.joined([one, two])
    asked = addresses(0x12, 0x24, 0x40, 0x41)
    expected = [(Frame("a", "f", 1),), (Frame("d", "f", 2),), (Frame("b"), Frame("c")), (Frame("a"),)]
    assert [both.frames(row) for row in both.find(asked)] == expected
    cut = both.at(addresses(0x12, 0x24, 0x41, 0x99))
    assert cut.addresses.tolist() == [0x12, 0x24, 0x41]
    assert cut.sizes.tolist() == [1, 1, 1]
    assert [cut.frames(row) for row in range(3)] == [expected[0], expected[1], expected[3]]


def test_a_symbolizer_chain_asks_each_symbolizer_for_the_addresses_left() -> None:
    # given
    first = Known({MODULE: Symbolized(Names.of([(1, 1, [Frame("one")])]), "first", "one part was missing", True)})
    second = Known({MODULE: Symbolized(Names.of([(2, 1, [Frame("two")])]), "second")})
    nobody = Known({})
    last = Known({MODULE: Symbolized(Names.of([(1, 1, [Frame("never")])]), "last")})
    # when
    chain = SymbolizerChain([first, nobody, second, last])
    symbolized = chain.name(MODULE, addresses(1, 2), addresses(9, 9))
    # then
    rows = symbolized.names.find(addresses(1, 2))
    assert [symbolized.names.frames(row)[0].function for row in rows] == ["one", "two"]
    assert (symbolized.source, symbolized.problem, symbolized.frame_pointers) == ("first; second", "", True)
    assert second.asked == [(MODULE, [2])]
    assert last.asked == []


def test_written_names_are_read_back(tmp_path: Path) -> None:
    # given names of two modules, with hostile texts
    odd = Symbolized(
        Names.of([(0x10, 1, [Frame(LONG_ODD, "a\0b", 7), Frame("g")]), (0x20, 16, [Frame("h")])]),
        "debug information", "half of it is damaged", False,
    )  # fmt: skip
    known = Known({MODULE: odd, OTHER: None})
    progress: list[tuple[int, int]] = []
    with (tmp_path / "c").open("wb") as file:
        writer = CaptureWriter(file)
        modules = [(MODULE, addresses(0x10, 0x21, 0x99), addresses(1, 1, 1)), (OTHER, addresses(5), addresses(1))]
        # when
        counts = write_names(writer, modules, known, lambda *counts: progress.append(counts))
        writer.close({})
    # then
    assert counts == {"modules": 2, "addresses": 4, "named": 2, "skipped": 0}
    assert progress == [(0, 2), (1, 2)]
    symbolized = CaptureNames(CaptureReader(tmp_path / "c")).name(MODULE, addresses(0x10), addresses(1))
    assert symbolized is not None
    assert (symbolized.source, symbolized.problem, symbolized.frame_pointers) == (odd.source, odd.problem, False)
    outer, inner = symbolized.names.frames(int(symbolized.names.find(addresses(0x10))[0]))
    assert (outer.file, outer.line, inner) == ("a\0b", 7, Frame("g"))
    assert outer.function.startswith("f;\n<b>\\udcffxxx")
    assert len(outer.function.encode()) <= LONGEST_NAME
    assert is_shortened(outer.function)
    assert symbolized.names.frames(int(symbolized.names.find(addresses(0x2F))[0])) == (Frame("h"),)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_cancelled_symbolizing_keeps_the_names_it_has(tmp_path: Path, when: str) -> None:
    # given a user who cancels at the second of three modules
    cancellation = Cancellation()
    modules = [Module(ModuleKind.GENERATED, pid=pid) for pid in (1, 2, 3)]

    class Slow(Known):
        def name(self, module: Module, addresses: np.ndarray, times: np.ndarray) -> Symbolized | None:
            if module.pid == 2 and when == "meanwhile":
                cancellation.cancel()
            return Symbolized(Names.of([(5, 1, [Frame("f")])]))

    def progress(done: int, _: int) -> None:
        if done == 1 and when == "before":
            cancellation.cancel()

    with (tmp_path / "c").open("wb") as file:
        writer = CaptureWriter(file)
        # when
        requests = [(module, addresses(5), addresses(1)) for module in modules]
        counts = write_names(writer, requests, Slow({}), progress, cancellation)
        writer.close({})
    # then
    assert (counts["named"], counts["skipped"]) == (1, 2)
    rows = CaptureReader(tmp_path / "c").table("module").to_pylist()
    assert [bool(row["problem"]) for row in rows] == [False, True, True]


def test_calls_turn_return_addresses_into_call_addresses() -> None:
    rows = [
        {"id": 1, "time_ns": 50, "pid": 7, "truncated": False, "ips": [0x1000, 0x1101, 0x9001]},
        {"id": 2, "time_ns": 60, "pid": 7, "truncated": False, "ips": []},
        {"id": 3, "time_ns": 70, "pid": 8, "truncated": False, "ips": [0, 0x1101]},
    ]
    frames = calls(pa.Table.from_pylist(rows, pa.schema(list(KINDS["stack"]))))
    assert frames.stacks.tolist() == [0, 0, 0, 2]
    assert frames.addresses.tolist() == [0x1000, 0x1100, 0x9000, 0x1100]
    assert frames.pids.tolist() == [7, 7, 7, 8]
    assert frames.times.tolist() == [50, 50, 50, 70]


def test_stack_addresses_have_each_address_once_with_its_first_time() -> None:
    # given two processes with the same library at different addresses; one later executes another program there
    known = spaces(
        [mapping(1, 7, 0x1000, "lib"), mapping(1, 8, 0x5000, "lib"), mapping(60, 7, 0x1000, "new")],
        [event(60, 7, "exec")],
    )
    schema = pa.schema(list(KINDS["stack"]))
    stack_addresses = StackAddresses()
    for time, pid, ips in ((50, 7, [0x1010, 0x1021]), (55, 8, [0x5010]), (65, 7, [0x1010, 0x1021])):
        row = {"id": time, "time_ns": time, "pid": pid, "truncated": False, "ips": ips}
        stack_addresses.add(pa.Table.from_pylist([row], schema))
    # when
    by_path = {module.path: (a.tolist(), t.tolist()) for module, a, t in stack_addresses.modules(known)}
    # then each place once, with the time of its first stack
    assert by_path == {"lib": ([0x10, 0x20], [50, 50]), "new": ([0x10, 0x20], [65, 65])}
    assert list(StackAddresses().modules(known)) == []
