"""What the source of drivers' libraries does with a process that maps one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from iaprof.bpf import processes
from iaprof.record.sources import libraries as module
from iaprof.record.sources.libraries import MappedLibraries


def test_files_are_opened_and_stacks_prepared_for_processes_in_scope_only() -> None:
    # given two processes that have mapped a driver, one of them out of scope
    kept: list[int] = []
    prepared: list[int] = []
    probed: list[tuple[int, bool]] = []

    def probe(pid: int, mapped: object) -> tuple[()]:
        probed.append((pid, mapped is not None))
        return ()

    probes = SimpleNamespace(libraries=SimpleNamespace(mapped=probe))
    scope, roots = SimpleNamespace(others={8}), SimpleNamespace(keep=kept.append)
    stacks = SimpleNamespace(prepare=prepared.append)
    libraries = MappedLibraries(*(cast(Any, each) for each in (probes, (), scope, roots, stacks, None)))
    libraries._loop = cast(Any, SimpleNamespace(keep_calling=lambda *_: None, stop_calling=lambda *_: None))
    for pid in (7, 8):
        libraries.mapped(5, pid, b"/usr/lib/libze_intel_gpu.so.1")
    # when their turn comes
    libraries._probe_mapped()
    # then both are probed, but only the launches of one count, which is also the only one with stacks
    assert probed == [(7, True), (8, False)]
    assert kept == [7, 8]  # Roots leaves out processes out of scope
    assert prepared == [7]


def test_the_files_of_chosen_processes_are_opened_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a chosen process and two others, of which one runs Python
    monkeypatch.setattr(processes, "running_pids", lambda: [7, 8, 9])
    monkeypatch.setattr(module, "maps_of", lambda pid: b"/usr/bin/python3" if pid == 9 else b"/bin/true")
    prepared: list[int] = []
    searched: list[int] = []
    probes = SimpleNamespace(libraries=SimpleNamespace(running=lambda: ()))
    stacks = SimpleNamespace(prepare=prepared.append, look_for_python=searched.append)
    scope, calibrator = SimpleNamespace(running=[7]), SimpleNamespace(told=[])
    libraries = MappedLibraries(*(cast(Any, each) for each in (probes, (), scope, None, stacks, calibrator)))
    # when
    libraries.start(cast(Any, None), cast(Any, SimpleNamespace(forget=None)))
    # then
    assert (prepared, searched) == ([7], [9])
