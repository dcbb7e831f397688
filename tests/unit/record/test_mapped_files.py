"""Which mapped files without a build-id are known."""

from __future__ import annotations

import time
from typing import Any

import pytest

from iaprof.formats.wire.sideband import SideBand, decode, mapping_record
from iaprof.record.symbolize import opener
from iaprof.record.symbolize.opener import FileIdentity, MappedFiles

PATH, INODE = "/lib/x.so", 77
SECOND = 1_000_000_000


def mapped(*records: tuple[int, tuple[int, int, int]], build_id: bytes = b"") -> MappedFiles:
    """Mappings of one path: time, and device and inode."""
    band = SideBand()
    for when, inode in records:
        decode(mapping_record(when, 5, 0x1000, 0x1000, 0, PATH.encode(), build_id, inode), band)
    files = MappedFiles()
    files.add(band.mappings)
    return files


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A header with the current clocks: the wall clock 1000 s ahead, with ticks of 4 ms."""
    monkeypatch.setattr(time, "monotonic_ns", lambda: 50 * SECOND)
    monkeypatch.setattr(time, "time_ns", lambda: 1050 * SECOND)
    monkeypatch.setattr(time, "clock_getres", lambda clock: 0.004)
    return {"clock": {"monotonic_ns": 10 * SECOND, "realtime_ns": 1010 * SECOND}}


def test_a_file_is_known_by_what_it_was_when_it_was_mapped_first(clocks: dict[str, Any]) -> None:
    files = mapped((30 * SECOND, (8, 1, INODE)), (20 * SECOND, (8, 1, INODE)), (40 * SECOND, (8, 1, INODE)))
    found = files.find(PATH, INODE, clocks)
    assert found == FileIdentity(8 << 32 | 1, INODE, 1020 * SECOND - 5_000_000)


def test_a_clock_that_was_set_makes_it_stricter(clocks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    files = mapped((20 * SECOND, (8, 1, INODE)))
    for realtime in (1000 * SECOND, 1100 * SECOND):
        monkeypatch.setattr(time, "time_ns", lambda realtime=realtime: realtime)
        found = files.find(PATH, INODE, clocks)
        assert isinstance(found, FileIdentity)
        assert found.before_ns == min(realtime - 30 * SECOND, 1020 * SECOND) - 5_000_000


@pytest.mark.parametrize("clock", [None, 5, {}, {"realtime_ns": 1}, {"realtime_ns": "1", "monotonic_ns": "0"}])
def test_a_header_without_clocks_lets_nothing_be_believed(clocks: dict[str, Any], clock: object) -> None:
    found = mapped((20 * SECOND, (8, 1, INODE))).find(PATH, INODE, {"clock": clock})
    assert isinstance(found, FileIdentity)
    assert found.before_ns < 0


def test_which_of_two_devices_is_not_guessed(clocks: dict[str, Any]) -> None:
    found = mapped((1, (8, 1, INODE)), (2, (8, 2, INODE))).find(PATH, INODE, clocks)
    assert "several devices" in str(found)


def test_what_was_not_mapped_or_has_a_build_id_is_not_known(clocks: dict[str, Any]) -> None:
    for files in (mapped((1, (8, 1, INODE + 1))), mapped((1, (8, 1, INODE)), build_id=b"1234"), mapped((1, (0, 0, 0)))):
        assert "does not say which file was mapped" in str(files.find(PATH, INODE, clocks))


def test_the_clock_is_that_of_file_systems() -> None:
    assert 0 < time.clock_getres(opener._CLOCK_REALTIME_COARSE) <= 0.01
