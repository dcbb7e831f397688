"""Processes that map a driver before it has probes: which are counted, for how long, and what is reported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaprof.bpf import driver_layout
from iaprof.bpf.probes.libraries import Libraries, Mapped
from iaprof.formats.header.launch_warnings import Unprobed, unprobed_sentence
from unit.bpf.test_slow_launches import driver

DRIVER = "libze_intel_gpu.so.1"


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Libraries:
    """Libraries, with a driver of known layout in tmp_path."""
    driver(tmp_path, ("pushes",), monkeypatch)
    return Libraries(lambda *_: "", lambda *_: None)


MAPPING = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def mapped(tmp_path: Path, libraries: Libraries) -> Mapped:
    """The driver's mapping, which comes later."""
    return Mapped(time.monotonic_ns(), {os.fsencode(tmp_path / DRIVER)})


@pytest.fixture
def pid(tmp_path: Path, mapped: Mapped) -> Iterator[int]:
    """A process that maps the driver, and no other, as this one may for other tests."""
    words = [sys.executable, "-c", MAPPING, str(tmp_path / DRIVER)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        yield process.pid
        process.communicate()


@pytest.mark.root  # only root may open /proc/PID/map_files
@pytest.mark.beside
def test_a_process_that_maps_a_driver_before_it_has_probes_is_counted(
    libraries: Libraries, mapped: Mapped, pid: int, tmp_path: Path
) -> None:
    (outcome,) = libraries.mapped(pid, mapped)

    assert outcome.path == str(tmp_path / DRIVER)
    assert mapped.time_ns < outcome.since_ns < time.monotonic_ns()
    counted = libraries.take_unprobed()
    assert counted.to_json() == {"processes": 1, "longest_ns": outcome.since_ns - mapped.time_ns, "ended": 0}
    # a process that maps it from now on is not counted
    assert list(libraries.mapped(pid, Mapped(time.monotonic_ns(), mapped.paths))) == []
    assert libraries.take_unprobed().to_json() == {}
    # but one that had mapped it meanwhile is
    assert list(libraries.mapped(pid, Mapped(outcome.since_ns - 5, mapped.paths))) == []
    assert libraries.take_unprobed().to_json() == {"processes": 1, "longest_ns": 5, "ended": 0}


@pytest.mark.root  # only root may open /proc/PID/map_files
@pytest.mark.beside
def test_a_process_that_maps_a_probed_driver_is_not_counted(
    libraries: Libraries, mapped: Mapped, pid: int, tmp_path: Path
) -> None:
    assert [outcome.probes for outcome in libraries.take(tmp_path / DRIVER)] == [3]

    assert list(libraries.mapped(pid, Mapped(time.monotonic_ns(), mapped.paths))) == []

    assert libraries.take_unprobed().to_json() == {}


@pytest.mark.root  # only root may open /proc/PID/map_files
@pytest.mark.beside
def test_a_driver_that_cannot_be_probed_is_not_counted(
    libraries: Libraries, mapped: Mapped, pid: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(driver_layout, "CACHE", tmp_path / "nothing")

    (outcome,) = libraries.mapped(pid, mapped)

    assert outcome.problem
    assert libraries.take_unprobed().to_json() == {}


@pytest.mark.root  # only root may open /proc/PID/map_files
@pytest.mark.beside
def test_a_process_that_ran_before_the_recording_is_not_counted(libraries: Libraries, pid: int) -> None:
    assert len(list(libraries.mapped(pid))) == 1
    assert libraries.take_unprobed().to_json() == {}


def test_processes_that_end_before_their_driver_is_probed_are_counted(libraries: Libraries, tmp_path: Path) -> None:
    # given two processes that have ended: one had mapped the probed driver, one another driver
    other = tmp_path / "other" / DRIVER
    other.parent.mkdir()
    shutil.copy(tmp_path / DRIVER, other)
    assert [outcome.probes for outcome in libraries.take(tmp_path / DRIVER)] == [3]
    ended = []
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait(120)
        ended.append(process.pid)
    now = time.monotonic_ns()
    # when
    for pid, path in zip(ended, (tmp_path / DRIVER, other), strict=True):
        assert list(libraries.mapped(pid, Mapped(now, {os.fsencode(path)}))) == []
    # then
    assert libraries.take_unprobed().to_json() == {"processes": 0, "longest_ns": 0, "ended": 1}
    # and at the end of the recording: processes that still run are not counted, as their launches go on
    for pid in (*ended, os.getpid()):
        libraries.count_if_ended(pid, Mapped(now, {os.fsencode(other)}))
    assert libraries.take_unprobed().ended == 2


@pytest.mark.parametrize("is_injected", [True, False])
def test_nvidia_s_driver_needs_no_probes_where_our_library_reports_launches(
    is_injected: bool, libraries: Libraries
) -> None:
    # as nvidia-smi, which maps it for some milliseconds, maybe in a container
    libraries.cuda_is_injected = is_injected
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(120)
    ended = Mapped(time.monotonic_ns(), {b"/lib64/libcuda.so.580.159.04"})
    assert list(libraries.mapped(process.pid, ended)) == []
    libraries.count_if_ended(process.pid, ended)
    assert libraries.take_unprobed().ended == (0 if is_injected else 1)


def test_a_process_counts_once() -> None:
    unprobed = Unprobed()
    for pid, ns in ((7, 3_000_000), (7, 40_000_000), (8, 1)):
        unprobed.waited(pid, ns)
    unprobed.gone(9)
    unprobed.gone(9)
    assert unprobed.to_json() == {"processes": 2, "longest_ns": 40_000_000, "ended": 1}


@pytest.mark.parametrize(
    ("processes", "longest", "ended", "said"),
    [
        (0, 0, 0, ""),
        (1, 38_400_000, 0,
         "1 process mapped a driver 38 ms before it had probes: launches in that time, if any, are missing"),
        (3, 38_400_000, 0,
         "3 processes mapped a driver up to 38 ms before it had probes: launches in that time, if any, are missing"),
        (0, 0, 1,
         "1 process mapped a driver and ended before it had probes: what it launched, if anything, is missing"),
        (1, 2_000_000, 2,
         "1 process mapped a driver 2 ms before it had probes: launches in that time, if any, are missing; "
         "2 processes mapped a driver and ended before it had probes: what they launched, if anything, is missing"),
    ],
)  # fmt: skip
def test_the_sentence_for_users(processes: int, longest: int, ended: int, said: str) -> None:
    assert unprobed_sentence({"processes": processes, "longest_ns": longest, "ended": ended}) == said


@pytest.mark.parametrize(
    "said",
    [None, 7, [], {}, {"processes": 1}, {"processes": 1, "longest_ns": 1.5, "ended": 0},
     {"processes": -1, "longest_ns": 1, "ended": 0}, {"processes": True, "longest_ns": 1, "ended": 0},
     {"processes": 1, "longest_ns": "x", "ended": 0}, {"processes": 1 << 70, "longest_ns": 1, "ended": 0}],
)  # fmt: skip
def test_invalid_header_members_give_no_sentence(said: object) -> None:
    assert unprobed_sentence(said) == ""
