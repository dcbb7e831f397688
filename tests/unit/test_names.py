"""Names by address: found, joined, written into a capture and read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.symbols.names.calls import Needed, calls
from iaprof.symbols.names.in_turn import InTurn
from iaprof.symbols.names.modules import Module, ModuleKind
from iaprof.symbols.names.names import LONGEST_NAME, Frame, Named, Names
from iaprof.symbols.names.rows import CaptureNames
from iaprof.symbols.names.write_names import Patience, write_names
from unit.test_address_space import event, mapping, spaces

MODULE = Module(ModuleKind.FILE, "/lib/a.so", b"\x01\x02")
LONG_ODD = "f;\n<b>\udcff" + "x" * 100_000
OTHER = Module(ModuleKind.GENERATED, pid=7)


def addresses(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


class Known:
    """A Naming that knows some names, and what it was asked for."""

    def __init__(self, names: dict[Module, Named | None]) -> None:
        self.names = names
        self.asked: list[tuple[Module, list[int]]] = []

    def name(self, module: Module, addresses: np.ndarray, times: np.ndarray) -> Named | None:
        assert len(addresses) == len(times)
        self.asked.append((module, addresses.tolist()))
        return self.names.get(module)


def test_the_innermost_range_names_an_address() -> None:
    names = Names.of([(0x100, 0x100, [Frame("whole")]), (0x150, 1, [Frame("outer"), Frame("inlined", "a.h", 3)]),
                      (0x300, 0x10, [Frame("far")]), (0x200, 8, [])])  # fmt: skip
    rows = names.find(addresses(0xFF, 0x100, 0x150, 0x151, 0x1FF, 0x200, 0x30F, 0x310, (1 << 64) - 1))
    found = [[frame.function for frame in names.frames(row)] if row >= 0 else None for row in rows]
    assert found == [None, ["whole"], ["outer", "inlined"], ["whole"], ["whole"], None, ["far"], None, None]
    assert names.frames(int(rows[2]))[1] == Frame("inlined", "a.h", 3)
    assert Names.of([]).find(addresses(1)).tolist() == [-1]


def test_names_joined_and_cut_out() -> None:
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


def test_sources_are_asked_in_turn_for_what_is_left() -> None:
    # given
    first = Known({MODULE: Named(Names.of([(1, 1, [Frame("one")])]), "first", "one part was missing", True)})
    second = Known({MODULE: Named(Names.of([(2, 1, [Frame("two")])]), "second")})
    nobody = Known({})
    last = Known({MODULE: Named(Names.of([(1, 1, [Frame("never")])]), "last")})
    # when
    named = InTurn([first, nobody, second, last]).name(MODULE, addresses(1, 2), addresses(9, 9))
    # then
    assert [named.names.frames(row)[0].function for row in named.names.find(addresses(1, 2))] == ["one", "two"]
    assert (named.source, named.problem, named.frame_pointers) == ("first; second", "", True)
    assert second.asked == [(MODULE, [2])]
    assert last.asked == []


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    # given names of two modules, with hostile texts
    odd = Named(
        Names.of([(0x10, 1, [Frame(LONG_ODD, "a\0b", 7), Frame("g")]), (0x20, 16, [Frame("h")])]),
        "debug information", "half of it is damaged", False,
    )  # fmt: skip
    known = Known({MODULE: odd, OTHER: None})
    told: list[tuple[int, int]] = []
    with (tmp_path / "c").open("wb") as file:
        writer = CaptureWriter(file)
        wanted = [(MODULE, addresses(0x10, 0x21, 0x99), addresses(1, 1, 1)), (OTHER, addresses(5), addresses(1))]
        # when
        counts = write_names(writer, wanted, known, lambda *progress: told.append(progress))
        writer.close({})
    # then
    assert counts == {"modules": 2, "addresses": 4, "named": 2, "skipped": 0}
    assert told == [(0, 2), (1, 2)]
    named = CaptureNames(CaptureReader(tmp_path / "c")).name(MODULE, addresses(0x10), addresses(1))
    assert named is not None
    assert (named.source, named.problem, named.frame_pointers) == (odd.source, odd.problem, False)
    outer, inner = named.names.frames(int(named.names.find(addresses(0x10))[0]))
    assert (outer.file, outer.line, inner) == ("a\0b", 7, Frame("g"))
    assert outer.function.startswith("f;\n<b>\\udcffxxx")
    assert len(outer.function) <= LONGEST_NAME
    assert named.names.frames(int(named.names.find(addresses(0x2F))[0])) == (Frame("h"),)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_naming_that_is_cut_short_keeps_what_it_has(tmp_path: Path, when: str) -> None:
    # given somebody whose patience ends at the second of three modules
    patience = Patience()
    modules = [Module(ModuleKind.GENERATED, pid=pid) for pid in (1, 2, 3)]

    class Slow(Known):
        def name(self, module: Module, addresses: np.ndarray, times: np.ndarray) -> Named | None:
            if module.pid == 2 and when == "meanwhile":
                patience.end()
            return Named(Names.of([(5, 1, [Frame("f")])]))

    def progress(done: int, _: int) -> None:
        if done == 1 and when == "before":
            patience.end()

    with (tmp_path / "c").open("wb") as file:
        writer = CaptureWriter(file)
        # when
        counts = write_names(writer, [(m, addresses(5), addresses(1)) for m in modules], Slow({}), progress, patience)
        writer.close({})
    # then
    assert (counts["named"], counts["skipped"]) == (1, 2)
    rows = CaptureReader(tmp_path / "c").table("module").to_pylist()
    assert [bool(row["problem"]) for row in rows] == [False, True, True]


def test_the_calls_of_stacks() -> None:
    rows = [
        {"id": 1, "time_ns": 50, "pid": 7, "truncated": False, "ips": [0x1000, 0x1101, 0x9001]},
        {"id": 2, "time_ns": 60, "pid": 7, "truncated": False, "ips": []},
        {"id": 3, "time_ns": 70, "pid": 8, "truncated": False, "ips": [0, 0x1101]},
    ]
    found = calls(pa.Table.from_pylist(rows, pa.schema(list(KINDS["stack"]))))
    assert found.stacks.tolist() == [0, 0, 0, 2]
    assert found.addresses.tolist() == [0x1000, 0x1100, 0x9000, 0x1100]
    assert found.pids.tolist() == [7, 7, 7, 8]
    assert found.times.tolist() == [50, 50, 50, 70]


def test_what_many_stacks_need() -> None:
    # given two processes with one library at different addresses, and one that executed something else there
    known = spaces(
        [mapping(1, 7, 0x1000, "lib"), mapping(1, 8, 0x5000, "lib"), mapping(60, 7, 0x1000, "new")],
        [event(60, 7, "exec")],
    )
    schema = pa.schema(list(KINDS["stack"]))
    needed = Needed()
    for time, pid, ips in ((50, 7, [0x1010, 0x1021]), (55, 8, [0x5010]), (65, 7, [0x1010, 0x1021])):
        row = {"id": time, "time_ns": time, "pid": pid, "truncated": False, "ips": ips}
        needed.add(pa.Table.from_pylist([row], schema))
    # when
    found = {module.path: (a.tolist(), t.tolist()) for module, a, t in needed.modules(known)}
    # then each place once, with the time of its first stack
    assert found == {"lib": ([0x10, 0x20], [50, 50]), "new": ([0x10, 0x20], [65, 65])}
    assert list(Needed().modules(known)) == []
