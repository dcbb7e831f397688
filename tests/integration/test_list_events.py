"""Executions of command lists, by a driver's layout: each list of each call is told of once, or counted as lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.bpf.driver_layout import Action
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.sizes import Sizes
from iaprof.formats.wire.launches import LISTS_A_RECORD, Counter, LaunchFlags, ListEvent
from integration.handles.driver import Built, build, copied
from integration.test_handles import NOWHERE, Attached

pytestmark = pytest.mark.bpf
MOST = 512 * LISTS_A_RECORD  # lists of one call, as lists.c has it


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("played") / "build")


@pytest.fixture(scope="module")
def loaded() -> Iterator[LaunchProbes]:
    probes = LaunchProbes(cpu_samples=False)
    yield probes
    probes.close()


@pytest.fixture
def attached(loaded: LaunchProbes, built: Built, tmp_path: Path) -> Iterator[Attached]:
    loaded.list_events.read()
    yield Attached(loaded, copied(built, tmp_path / "copy"))
    loaded.detach()


def lists_of(records: NDArray[np.void]) -> list[int]:
    """All that records name, in order."""
    inside = np.arange(LISTS_A_RECORD) < records["count"][:, None]
    return [int(each) for each in records["lists"][inside]]


@pytest.mark.parametrize("many", [1, 2, LISTS_A_RECORD, LISTS_A_RECORD + 1, 100, MOST, MOST + 1, 3 * MOST])
def test_all_lists_of_a_call_are_told_of_in_order(many: int, attached: Attached) -> None:
    lists = [0x1000 + 16 * n for n in range(many)]
    # when
    attached.driver.execute(lists, queue=0x77)
    # then
    counted = attached.counted()
    records = attached.probes.list_events.read()
    told = min(many, MOST)
    assert lists_of(records) == lists[:told]
    assert (counted[Counter.EXECUTIONS], counted[Counter.LISTS_LOST]) == (1, many - told)
    assert counted[Counter.LAUNCHES] == counted[Counter.LAUNCHES_LOST] == 0
    # and each record says who executed, where and from where
    assert {each.item() for each in records[["pid", "event", "queue"]]} == {(os.getpid(), ListEvent.EXECUTE, 0x77)}
    assert len(set(records["time"].tolist())) == len(set(records["stack"].tolist())) == 1
    assert records["stack"][0] != 0
    assert int(records["stack"][0]) in attached.probes.stacks.read()["id"].tolist()


def test_a_call_without_lists_is_none(attached: Attached) -> None:
    attached.driver.execute([], 0, 0)
    assert len(attached.probes.list_events.read()) == 0
    assert attached.counted()[Counter.EXECUTIONS] == 0


def test_lists_that_cannot_be_read_are_counted(attached: Attached) -> None:
    for where in NOWHERE:
        attached.driver.execute([], 3, where)
    attached.driver.execute([], (1 << 32) - 1, 0x10)
    assert lists_of(attached.probes.list_events.read()) == []
    assert attached.counted()[Counter.LISTS_LOST] == 3 * len(NOWHERE) + (1 << 32) - 1
    # and others of later calls are there
    attached.driver.execute([1, 2])
    assert lists_of(attached.probes.list_events.read()) == [1, 2]


def test_what_has_no_room_is_counted(built: Built, tmp_path: Path) -> None:
    # given room for 28 records, and nobody who reads
    probes = LaunchProbes(Sizes(list_pages=1), cpu_samples=False)
    try:
        attached = Attached(probes, copied(built, tmp_path / "copy"))
        # when
        for _ in range(40):
            attached.driver.execute([1, 2, 3])
            attached.driver.list_event("list_reset", 1)
        # then
        records = probes.list_events.read()
        counted = attached.counted()
        assert (counted[Counter.EXECUTIONS], len(records) < 40) == (40, True)
        assert len(lists_of(records)) + counted[Counter.LISTS_LOST] == 40 * 3 + 40
    finally:
        probes.close()


def test_what_else_happens_to_lists(attached: Attached) -> None:
    for what in ("list_closed", "list_reset", "list_gone"):
        attached.driver.list_event(what, 0x1234)
    records = attached.probes.list_events.read()
    assert [ListEvent(each) for each in records["event"]] == [ListEvent.CLOSE, ListEvent.RESET, ListEvent.DESTROY]
    assert lists_of(records) == [0x1234] * 3
    assert (np.diff(records["time"].astype(np.int64)) > 0).all()
    assert attached.counted()[Counter.LIST_EVENTS] == 3


def test_a_launch_says_its_list_where_executions_are_seen(loaded: LaunchProbes, built: Built, tmp_path: Path) -> None:
    for name, told in (("with", 0x5555), ("without", 0)):
        entries = built.layout.entries
        if name == "without":  # a layout that was calibrated before
            entries = tuple(entry for entry in entries if entry.action is not Action.EXECUTE)
        attached = Attached(loaded, copied(built, tmp_path / name), replace(built.layout, entries=entries))
        kernel = attached.driver.kernel(b"k", b"code")
        attached.driver.launch(kernel.value, 0x5555)
        assert attached.launches()["list"].tolist() == [told]
        loaded.detach()


def test_threads_execute_and_launch_at_the_same_time(attached: Attached) -> None:
    kernel = attached.driver.kernel(b"k", b"code")

    def run(number: int) -> None:
        for _ in range(500):
            attached.driver.launch(kernel.value, number)
            attached.driver.execute([number, number])

    threads = [Thread(target=run, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = attached.probes.list_events.read()
    counted = attached.counted()
    assert counted[Counter.EXECUTIONS] == 2000
    assert len(lists_of(records)) + counted[Counter.LISTS_LOST] == 4000
    assert sum(attached.launches()["list"] > 0) + counted[Counter.LAUNCHES_LOST] == 2000


def test_of_processes_that_are_not_recorded_there_is_no_stack(attached: Attached) -> None:
    attached.probes.exclude([os.getpid()])
    attached.driver.execute([7])
    attached.probes.include([os.getpid()])
    (record,) = attached.probes.list_events.read()
    assert (int(record["flags"]), int(record["stack"]), bytes(record["comm"])) == (LaunchFlags.OTHER, 0, b"")
    assert lists_of(np.array([record])) == [7]
