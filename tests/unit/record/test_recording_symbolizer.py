"""With which rights the symbolizer of a recording opens files, and which perf maps it accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.wire.sideband import Mappings
from iaprof.record.symbolize import symbolizer as naming
from iaprof.record.symbolize.opener import MappedFiles, Opener, Rights
from iaprof.record.symbolize.symbolizer import RecordingSymbolizer
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.boot import boot_id
from iaprof.symbols.names.names import Module, ModuleKind

USER = 1000
GONE = (1 << 22) + 1  # pids are lower: PID_MAX_LIMIT of linux/threads.h


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The opener's requests."""
    requests: list[dict[str, Any]] = []

    def refuse(_: Opener, request: dict[str, Any], rights: Rights, root: int | None = None) -> str:
        requests.append({**request, "uid": rights.uid, "root": root})
        return "it is not there"

    monkeypatch.setattr(Opener, "_ask", refuse)
    return requests


def recorded(pid: int, roots: dict[int, int | str] | None = None, **described: int) -> RecordingSymbolizer:
    process = dict.fromkeys(field.name for field in KINDS["process"])
    process |= {"time_ns": 1, "pid": pid, "tid": pid, "event": "described", "uid": USER, "gid": USER, **described}
    processes = pa.Table.from_struct_array(pa.array([process], KINDS["process"]))
    mappings = pa.Table.from_struct_array(pa.array([], KINDS["mapping"]))
    header = {"host": {"boot_id": boot_id()}}
    spaces = AddressSpaces(mappings, processes)
    return RecordingSymbolizer(header, spaces, mappings, processes, everything=False, roots=roots)


def name(naming_: RecordingSymbolizer, pid: int) -> str:
    one = np.ones(1, np.uint64)
    with naming_:
        return naming_.name(Module(ModuleKind.GENERATED, pid=pid), one, one).problem


def test_a_process_recorded_as_a_user_s_gets_no_rights_of_root_later(
    monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]
) -> None:
    # given a process that has executed a program of root's since, or whose pid has become a root process's
    monkeypatch.setattr(naming, "describe", lambda pid: {"uid": 0, "gid": 0})
    # when
    name(recorded(1), 1)
    # then
    assert [(each["uid"], each["owner"]) for each in asked] == [(USER, USER)]


def test_a_perf_map_of_a_container_that_is_gone_is_not_looked_for_here(asked: list[dict[str, Any]]) -> None:
    assert "is gone" in name(recorded(GONE, ns_pid=7), GONE)
    assert asked == []
    name(recorded(GONE), GONE)
    assert len(asked) == 1


def test_a_perf_map_in_a_root_that_is_kept_is_looked_for_there(asked: list[dict[str, Any]]) -> None:
    name(recorded(GONE, {GONE: 44}, ns_pid=7), GONE)
    name(recorded(GONE, {GONE: "/srv/root"}), GONE)
    where = [(bytes.fromhex(each["path"]), each["root"], bytes.fromhex(each.get("below", ""))) for each in asked]
    assert where == [(b"/tmp/perf-7.map", 44, b""), (b"/tmp/perf-%d.map" % GONE, None, b"/srv/root")]
    assert [each["owner"] for each in asked] == [USER, USER]
    assert "is gone" in name(recorded(GONE, {GONE: ""}, ns_pid=7), GONE)
    assert len(asked) == 2


def file_of(*pids: int, inode: int | None = 7, build_id: bytes | None = None) -> tuple[AddressSpaces, pa.Table, Module]:
    """The mappings of one file, the latest last, and the module of an address in it."""
    row = {"start": 0x1000, "length": 0x1000, "offset": 0, "path": "/lib/x.so", "build_id": build_id, "inode": inode}
    rows = [{"time_ns": time, "pid": pid, **row} for time, pid in enumerate(pids, 5)]
    mappings = pa.Table.from_struct_array(pa.array(rows, KINDS["mapping"]))
    processes = pa.Table.from_struct_array(pa.array([], KINDS["process"]))
    spaces = AddressSpaces(mappings, processes)
    return spaces, mappings, spaces.place(pids[0], 0x1000, 6).module


def asked_for(
    header: dict[str, Any], inode: int | None, build_id: bytes | None, roots: dict[int, int | str], later: int = 0
) -> str:
    """Names an address in a file of a process that has ended, and of others `later`; returns the problem."""
    spaces, mappings, module = file_of(*range(GONE, GONE + 1 + later), inode=inode, build_id=build_id)
    files = MappedFiles()
    if build_id is None:
        files.add(Mappings(time=[5], path=["/lib/x.so"], inode=[inode], device=[3]))
    processes = pa.Table.from_struct_array(pa.array([], KINDS["process"]))
    one = np.ones(1, np.uint64)
    with RecordingSymbolizer(header, spaces, mappings, processes, False, files, roots) as naming_:
        return naming_.name(module, one, one).problem


@pytest.mark.parametrize("build_id", [None, b"12345678"])
def test_files_of_a_root_that_is_kept_are_looked_for_there_first(
    asked: list[dict[str, Any]], build_id: bytes | None
) -> None:
    header = {"host": {"boot_id": boot_id()}, "clock": {"monotonic_ns": 1, "realtime_ns": 1}}
    asked_for(header, 7 if build_id is None else None, build_id, {GONE: 44})
    asked_for(header, 7 if build_id is None else None, build_id, {GONE: "/srv/root"})
    where = [(each["root"], bytes.fromhex(each.get("below", "")).decode(), each["pid"]) for each in asked]
    assert where == [(44, "", 0), (None, "", 0), (None, "/srv/root", 0), (None, "", 0)]
    # and a file without a build-id must be the very file
    assert {None if each["same"] is None else tuple(each["same"][:2]) for each in asked} == (
        {(3, 7)} if build_id is None else {None}
    )


def test_processes_of_which_nothing_is_known_do_not_hide_one_whose_root_is_kept(asked: list[dict[str, Any]]) -> None:
    asked_for({"host": {"boot_id": boot_id()}}, None, b"12345678", {GONE: 44}, later=50)
    assert [(each["root"], each["pid"]) for each in asked] == [(44, 0), (None, 0)]


def test_a_namespace_that_could_not_be_kept_is_reported(asked: list[dict[str, Any]]) -> None:
    header = {"host": {"boot_id": boot_id()}}
    problem = asked_for(header, None, b"12345678", {GONE: ""})
    assert f"process {GONE} is gone, and its mount namespace with it" in problem
    assert [each["pid"] for each in asked] == [0]


def test_without_a_build_id_nothing_is_opened_where_it_cannot_be_known(asked: list[dict[str, Any]]) -> None:
    assert "restarted after the recording" in asked_for({"host": {"boot_id": "another"}}, 7, None, {})
    assert "does not say which file was mapped" in asked_for({"host": {"boot_id": boot_id()}}, None, None, {})
    assert asked == []
