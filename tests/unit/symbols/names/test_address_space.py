"""The module of an address at a time, by the mappings, forks and execs of the side-band."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.wire.sideband import SideBand, comm_record, decode, mapping_record, running_record
from iaprof.symbols.names.address_space import NOWHERE, AddressSpaces
from iaprof.symbols.names.names import Module, ModuleKind, Place


def mapping(time: int, pid: int, start: int, path: str, length: int = 0x1000, offset: int = 0) -> dict[str, object]:
    return {"time_ns": time, "pid": pid, "start": start, "length": length, "offset": offset, "path": path,
            "build_id": path.encode()}  # fmt: skip


def event(time: int, pid: int, what: str, ppid: int | None = None) -> dict[str, object]:
    return {"time_ns": time, "pid": pid, "tid": pid, "ppid": ppid, "event": what, "comm": None}


def spaces(mappings: list[dict[str, object]], events: list[dict[str, object]]) -> AddressSpaces:
    return AddressSpaces(
        pa.Table.from_pylist(mappings, pa.schema(list(KINDS["mapping"]))),
        pa.Table.from_pylist(events, pa.schema(list(KINDS["process"]))),
    )


def placing(spaces: AddressSpaces) -> Callable[[int, int, int], Place | None]:
    """A function that returns the place of an address; None if it is in no mapping."""

    def find(pid: int, address: int, time_ns: int) -> Place | None:
        place = spaces.place(pid, address, time_ns)
        return None if place.module.path == NOWHERE else place

    return find


def in_file(path: str, build_id: bytes, offset: int) -> Place:
    return Place(Module(ModuleKind.FILE, path, build_id), offset)


def test_a_mapping_lasts_from_its_time_until_another_covers_it() -> None:
    place = placing(spaces([mapping(10, 1, 0x1000, "a", offset=0x400), mapping(20, 1, 0x1800, "b")], []))
    assert place(1, 0x1010, 5) is None
    assert place(1, 0x1010, 10) == in_file("a", b"a", 0x410)
    assert place(1, 0x1810, 15) == in_file("a", b"a", 0xC10)
    assert place(1, 0x1810, 25) == in_file("b", b"b", 0x10)
    assert place(1, 0x17FF, 25) == in_file("a", b"a", 0xBFF)
    assert place(1, 0x2800, 25) is None
    assert place(2, 0x1010, 25) is None


HUGE = 2 << 20


@pytest.mark.parametrize("path", ["//anon", "", "[anon:text]", "/anon_hugepage (deleted)"])
def test_text_that_was_copied_into_huge_pages_is_the_files(path: str) -> None:
    whole = mapping(10, 1, HUGE - 0x1000, "a", length=HUGE + 0x3000, offset=0x5000)
    anonymous = mapping(20, 1, HUGE, path, length=HUGE) | {"build_id": None}
    # when the process did it while it was recorded
    place = placing(spaces([whole, anonymous], []))
    assert place(1, HUGE + 0x10, 15) == in_file("a", b"a", 0x6010)
    assert place(1, HUGE + 0x10, 25) == in_file("a", b"a", 0x6010)
    # or before
    parts = [mapping(10, 1, HUGE - 0x1000, "a", offset=0x5000), mapping(10, 1, 2 * HUGE, "a", offset=HUGE + 0x6000)]
    for rows in ([*parts, anonymous | {"time_ns": 10}], [anonymous | {"time_ns": 10}, parts[1]]):
        made = spaces(rows, [])
        assert placing(made)(1, HUGE + 0x10, 25) == in_file("a", b"a", 0x6010)
        assert (HUGE, 2 * HUGE, 0x6000, Module(ModuleKind.FILE, "a", b"a")) in made.mapped(1, 25)


@pytest.mark.parametrize(
    ("changes", "of_tail"),
    [
        ({"path": "//anon", "length": HUGE - 0x1000}, {}),
        ({"path": "//anon", "start": HUGE + 0x1000}, {}),
        ({"path": "[heap]"}, {}),
        ({"path": "//anon"}, {"offset": HUGE}),  # what is left on both sides was no one text
        ({"path": "//anon"}, {"path": "b"}),
        ({"path": "//anon", "pid": 2}, {}),
    ],
)
def test_other_anonymous_memory_is_generated_code(changes: dict[str, object], of_tail: dict[str, object]) -> None:
    anonymous = mapping(10, 1, HUGE, "//anon", length=HUGE) | {"build_id": None} | changes
    head = mapping(10, 1, HUGE - 0x1000, "a", offset=0x5000)
    tail = mapping(10, 1, 2 * HUGE, "a", offset=HUGE + 0x6000) | of_tail
    pid, start = anonymous["pid"], anonymous["start"]
    assert isinstance(pid, int)
    assert isinstance(start, int)
    found = spaces([head, anonymous, tail], []).place(pid, start + 0x10, 25)
    assert (found.module.kind, found.address) == (ModuleKind.GENERATED, start + 0x10)


def test_exec_ends_all_earlier_mappings() -> None:
    place = placing(spaces([mapping(10, 1, 0x1000, "a"), mapping(21, 1, 0x5000, "b")], [event(20, 1, "exec")]))
    assert place(1, 0x1000, 19) == in_file("a", b"a", 0)
    assert place(1, 0x1000, 22) is None
    assert place(1, 0x5000, 22) == in_file("b", b"b", 0)


def test_a_forked_process_inherits_its_parents_mappings() -> None:
    mappings = [mapping(10, 1, 0x1000, "a"), mapping(30, 1, 0x9000, "later"), mapping(25, 2, 0x5000, "own")]
    place = placing(spaces(mappings, [event(20, 2, "fork", 1), event(40, 3, "fork", 2), event(50, 3, "exec")]))
    assert place(2, 0x1000, 26) == in_file("a", b"a", 0)
    assert place(2, 0x5000, 26) == in_file("own", b"own", 0)
    assert place(2, 0x9000, 35) is None  # the parent mapped it after the fork
    assert place(3, 0x1000, 45) == in_file("a", b"a", 0)  # of the grandparent
    assert place(3, 0x1000, 55) is None


def test_a_reused_pid_does_not_inherit_mappings() -> None:
    events = [event(5, 2, "fork", 1), event(20, 2, "exit"), event(30, 2, "fork", 1)]
    place = placing(spaces([mapping(10, 2, 0x1000, "a")], events))
    assert place(2, 0x1000, 15) == in_file("a", b"a", 0)
    assert place(2, 0x1000, 35) is None


def test_processes_that_are_their_own_ancestors_do_not_loop() -> None:
    events = [event(time, pid, "fork", 3 - pid) for time in range(200) for pid in (1, 2)]
    assert placing(spaces([mapping(0, 3, 0, "a")], events))(1, 0x1000, 500) is None
    assert placing(spaces([], []))(1, 0x1000, 500) is None


def test_all_processes_that_mapped_a_file_are_known_before_any_address_is_located() -> None:
    # given three files at one path, of which two have no build-id, and a process that inherits one of them
    rows = [mapping(time, pid, 0x1000, "a") for time, pid in ((10, 1), (30, 2), (20, 3), (40, 1))]
    rows += [mapping(5, 4, 0x1000, "a") | {"build_id": empty, "inode": 7} for empty in (None, b"")]
    rows += [mapping(5, 5, 0x1000, "a") | {"build_id": None, "inode": 8}, mapping(5, 6, 0x1000, "b")]
    known = spaces(rows, [event(20, 9, "fork", 1)])
    # when
    with_build_id = [
        known.processes_of(Module(ModuleKind.FILE, *file)) for file in (("a", b"a"), ("a", b"b"), ("c", b"a"))
    ]
    without = [known.processes_of(Module(ModuleKind.FILE, "a", inode=inode)) for inode in (7, 8, 9)]
    # then
    assert with_build_id == [[1, 2, 3], [], []]
    assert without == [[4], [5], []]
    assert known.modules == []


def test_mappings_at_the_end_of_the_address_space() -> None:
    last = (1 << 64) - 1
    place = placing(spaces([mapping(1, 1, last - 0xFFF, "a", length=last, offset=last)], []))
    assert [place(1, address, last) for address in (0, last - 0x1000, last - 0xFFF, last - 1)] == [
        None,
        None,
        in_file("a", b"a", last),
        in_file("a", b"a", 0xFFD),
    ]


def test_the_module_of_each_kind_of_mapping() -> None:
    # given mappings of every kind, each at an address of its own
    paths = ["/lib/a.so", "/lib/no-id.so", "[vdso]", "//anon", "/tmp/jit-7.dump", "/memfd:x (deleted)", "[heap]", ""]
    rows = [mapping(1, 7, 0x1000 * (i + 1), path, offset=0x100) for i, path in enumerate(paths)]
    for row in rows[1:]:
        row["build_id"] = None
    rows[1]["inode"] = 99
    known = spaces(rows, [])
    # when
    places = [known.place(7, 0x1000 * (i + 1) + 8, 5) for i in range(len(paths))]
    # then places in files and the vDSO are offsets, places in generated code are addresses
    assert places[:3] == [
        in_file("/lib/a.so", b"/lib/a.so", 0x108),
        Place(Module(ModuleKind.FILE, "/lib/no-id.so", None, 99), 0x108),
        Place(Module(ModuleKind.VDSO, "[vdso]"), 0x108),
    ]
    assert [place.module.kind for place in places[3:]] == [ModuleKind.GENERATED] * 5
    assert [place.address for place in places[3:]] == [0x1000 * (i + 1) + 8 for i in range(3, len(paths))]
    assert {place.module.identity for place in places[3:]} == {(ModuleKind.GENERATED, 7)}
    # and process 0 is the kernel
    assert known.place(0, 0xFFFF_8000_0000_1234, 5) == Place(
        Module(ModuleKind.KERNEL, "[kernel]"), 0xFFFF_8000_0000_1234
    )


def test_many_addresses_are_located_at_different_times() -> None:
    # given a process that executes another program at the same address, and its children
    rows = [mapping(10, 1, 0x1000, "old"), mapping(20, 1, 0x1000, "new")]
    known = spaces(rows, [event(20, 1, "exec"), event(15, 2, "fork", 1), event(30, 3, "fork", 1)])
    pids = np.array([1, 1, 2, 3, 1, 4], np.uint32)
    times = np.array([15, 25, 40, 40, 5, 40], np.uint64)
    # when
    numbers, inside = known.locate(pids, np.full(6, 0x1004, np.uint64), times)
    # then
    assert [known.modules[n].path for n in numbers] == ["old", "new", "old", "new", NOWHERE, NOWHERE]
    assert inside.tolist() == [4, 4, 4, 4, 0x1004, 0x1004]


def test_records_of_a_running_process_are_decoded() -> None:
    # given the records that the recorder writes for a running process
    data = (
        running_record(7, 42, 1)
        + comm_record(7, 42, b"python3")
        + mapping_record(7, 42, 0x1000, 0x2000, 0x300, b"/usr/lib/a b.so", b"\x01\x02\x03", (8, 1, 99))
        + mapping_record(7, 42, 0x9000, 0x1000, 0, "/tmp/\udcff".encode("utf-8", "surrogateescape"), b"", (8, 1, 99))
    )
    # when
    band = SideBand()
    decode(data, band)
    # then
    assert band.processes.event == ["running", "comm"]
    assert band.processes.comm == [None, "python3"]
    assert band.processes.ppid == [1, None]
    assert band.mappings.path == ["/usr/lib/a b.so", "/tmp/\\xff"]
    assert band.mappings.build_id == [b"\x01\x02\x03", None]
    assert (band.mappings.start, band.mappings.length, band.mappings.offset) == (
        [0x1000, 0x9000],
        [0x2000, 0x1000],
        [0x300, 0],
    )


def test_invalid_records_are_an_error() -> None:
    whole = comm_record(7, 42, b"python3")
    for data in (whole[:-1], whole + b"\0" * 8, whole + b"\3\0\0\0\0\0\4\0", b"\3"):
        band = SideBand()
        with pytest.raises(ValueError, match="of its bytes are not records"):
            decode(data, band)
        assert len(band.processes.time) == (len(data) >= len(whole))


def test_as_many_mappings_as_addresses_are_located_quickly() -> None:
    # given as many mappings as addresses: comparing each with each would take many times longer
    count = 150_000
    starts = np.arange(count, dtype=np.uint64) * np.uint64(16)
    same: dict[str, Any] = {"time_ns": 1, "pid": 7, "length": 16, "offset": 0, "path": "/x"}
    arrays = [
        pa.array(starts) if field.name == "start" else pa.repeat(pa.scalar(same.get(field.name), field.type), count)
        for field in KINDS["mapping"]
    ]
    mappings = pa.Table.from_arrays(arrays, schema=pa.schema(list(KINDS["mapping"])))
    processes = pa.Table.from_struct_array(pa.array([], KINDS["process"]))
    spaces = AddressSpaces(mappings, processes)
    # when
    begun = time.process_time()
    times = np.ones(count, np.uint64)
    modules, inside = spaces.locate(np.full(count, 7, np.uint32), starts, times)
    # then
    assert time.process_time() - begun < 6
    assert {spaces.modules[number].path for number in np.unique(modules)} == {"/x"}
    assert not inside.any()
