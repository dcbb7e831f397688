"""Which file an address belonged to, in the words of the side-band: mapped, forked, executed, covered."""

from collections.abc import Callable

import pyarrow as pa
import pytest

from iaprof.formats.capture import KINDS
from iaprof.formats.sideband import SideBand, comm_record, decode, mapping_record, running_record
from iaprof.report.address_space import AddressSpaces, Place


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


def found_in(spaces: AddressSpaces) -> Callable[[int, int, int], Place | None]:
    return lambda pid, address, time_ns: spaces.find(pid, [address], time_ns)[0]


def test_a_mapping_lasts_from_its_time_until_another_covers_it() -> None:
    found = found_in(spaces([mapping(10, 1, 0x1000, "a", offset=0x400), mapping(20, 1, 0x1800, "b")], []))
    assert found(1, 0x1010, 5) is None
    assert found(1, 0x1010, 10) == Place("a", b"a", 0x410)
    assert found(1, 0x1810, 15) == Place("a", b"a", 0xC10)
    assert found(1, 0x1810, 25) == Place("b", b"b", 0x10)
    assert found(1, 0x17FF, 25) == Place("a", b"a", 0xBFF)
    assert found(1, 0x2800, 25) is None
    assert found(2, 0x1010, 25) is None


def test_exec_begins_anew() -> None:
    found = found_in(spaces([mapping(10, 1, 0x1000, "a"), mapping(21, 1, 0x5000, "b")], [event(20, 1, "exec")]))
    assert found(1, 0x1000, 19) == Place("a", b"a", 0)
    assert found(1, 0x1000, 22) is None
    assert found(1, 0x5000, 22) == Place("b", b"b", 0)


def test_a_forked_process_has_what_its_parent_had() -> None:
    mappings = [mapping(10, 1, 0x1000, "a"), mapping(30, 1, 0x9000, "later"), mapping(25, 2, 0x5000, "own")]
    found = found_in(spaces(mappings, [event(20, 2, "fork", 1), event(40, 3, "fork", 2), event(50, 3, "exec")]))
    assert found(2, 0x1000, 26) == Place("a", b"a", 0)
    assert found(2, 0x5000, 26) == Place("own", b"own", 0)
    assert found(2, 0x9000, 35) is None  # mapped by the parent after the fork
    assert found(3, 0x1000, 45) == Place("a", b"a", 0)  # grandparent's
    assert found(3, 0x1000, 55) is None


def test_a_pid_that_is_used_again() -> None:
    events = [event(5, 2, "fork", 1), event(20, 2, "exit"), event(30, 2, "fork", 1)]
    found = found_in(spaces([mapping(10, 2, 0x1000, "a")], events))
    assert found(2, 0x1000, 15) == Place("a", b"a", 0)
    assert found(2, 0x1000, 35) is None


def test_processes_that_are_their_own_ancestors_come_to_an_end() -> None:
    events = [event(time, pid, "fork", 3 - pid) for time in range(200) for pid in (1, 2)]
    assert spaces([mapping(0, 3, 0, "a")], events).find(1, [0x1000], 500) == [None]
    assert spaces([], []).find(1, [0x1000], 500) == [None]


def test_the_last_addresses() -> None:
    last = (1 << 64) - 1
    found = spaces([mapping(1, 1, last - 0xFFF, "a", length=last, offset=last)], []).find
    assert found(1, [0, last - 0x1000, last - 0xFFF, last - 1], last) == [
        None,
        None,
        Place("a", b"a", last),
        Place("a", b"a", 0xFFD),
    ]


def test_records_that_tell_of_what_already_runs() -> None:
    # given what the recorder writes of a running process
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


def test_bytes_that_are_no_records_stop_the_reading() -> None:
    whole = comm_record(7, 42, b"python3")
    for data in (whole[:-1], whole + b"\0" * 8, whole + b"\3\0\0\0\0\0\4\0", b"\3"):
        band = SideBand()
        with pytest.raises(ValueError, match="of its bytes are no records"):
            decode(data, band)
        assert len(band.processes.time) == (len(data) >= len(whole))
