"""With whose rights the end of a recording has files opened, and whose perf map it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture import KINDS
from iaprof.record import naming
from iaprof.record.naming import RecordedNaming
from iaprof.record.opener import Opener
from iaprof.symbols.address_space import AddressSpaces
from iaprof.symbols.boot import boot_id
from iaprof.symbols.modules import Module, ModuleKind

USER = 1000
GONE = (1 << 22) + 1  # pids are lower: PID_MAX_LIMIT of linux/threads.h


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the opener is asked for."""
    requests: list[dict[str, Any]] = []

    def refuse(_: Opener, request: dict[str, Any], rights: naming.Rights) -> str:
        requests.append({**request, "uid": rights.uid})
        return "it is not there"

    monkeypatch.setattr(Opener, "_ask", refuse)
    return requests


def recorded(pid: int, **described: int) -> RecordedNaming:
    process = dict.fromkeys(field.name for field in KINDS["process"])
    process |= {"time_ns": 1, "pid": pid, "tid": pid, "event": "described", "uid": USER, "gid": USER, **described}
    processes = pa.Table.from_struct_array(pa.array([process], KINDS["process"]))
    mappings = pa.Table.from_struct_array(pa.array([], KINDS["mapping"]))
    header = {"host": {"boot_id": boot_id()}}
    return RecordedNaming(header, AddressSpaces(mappings, processes), mappings, processes, everything=False)


def name(naming_: RecordedNaming, pid: int) -> str:
    one = np.ones(1, np.uint64)
    with naming_:
        return naming_.name(Module(ModuleKind.GENERATED, pid=pid), one, one).problem


def test_who_was_recorded_as_a_user_is_not_root_later(
    monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]
) -> None:
    # given a process that executed a program of root's since, or left its pid to one
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
