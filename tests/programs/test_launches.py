# SPDX-License-Identifier: Apache-2.0
"""Every launch of real programs is recorded, with its kernel: Linux counts them, and their own runtimes name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from iaprof.formats.capture.reader import CaptureReader
from programs.programs import LEVEL_ZERO_V1, LEVEL_ZERO_V2, OPENCL, Programs, Run
from programs.recording import Recording, ledger, record, record_running
from programs.sycl import launched, tracing

ADAPTERS = {"level-zero-v1": LEVEL_ZERO_V1, "level-zero-v2": LEVEL_ZERO_V2, "opencl": OPENCL}
# clpeak launches 20,000 times and more; OpenVINO has kernels of its own, of oneDNN and with random names.
CLPEAK = ("--iters", "3", "--global-bandwidth", "--compute-sp", "--compute-integer", "--kernel-latency")
MOST_UNSEEN = 5  # launches, while a driver that is found when it is mapped gets its probes
SCRIPTS = {"pyopencl": "with_pyopencl.py", "openvino": "with_openvino.py"}


def started(programs: Programs, name: str, folder: Path, **settings: str) -> Run:
    """One that launches through OpenCL."""
    own = {"PROGRAMS_LEDGER": str(folder / "ledger"), **settings}
    if name == "clpeak":
        return programs.program("clpeak", *CLPEAK).with_settings(**own)
    return programs.python(SCRIPTS[name], own)


def sycl(programs: Programs, adapter: str, folder: Path, *arguments: Path) -> Run:
    """dpnp with one of SYCL's adapters, whose runtime says what it launches."""
    settings = ADAPTERS[adapter] | tracing(folder / "trace") | {"PROGRAMS_LEDGER": str(folder / "ledger")}
    return programs.python("with_dpnp.py", settings, *arguments)


def assert_complete(recording: Recording) -> None:
    """All launches are there, with the code of their kernels, and nothing was lost."""
    assert len(recording.recorded) == recording.launches
    assert "unprobed" not in CaptureReader(recording.capture).header
    assert_intact(recording)


def assert_complete_but_the_first(recording: Recording) -> None:
    """Launches are missing at most from before the driver had its probes, which is said."""
    capture = CaptureReader(recording.capture)
    assert capture.header["unprobed"]["processes"] == 1
    assert "1 process mapped a driver " in recording.said
    assert 0 <= recording.launches - len(recording.recorded) <= MOST_UNSEEN
    since = max(each["since_ns"] for each in capture.header["libraries"] if each["probes"])
    assert len(recording.recorded) == recording.launches or recording.recorded[0]["time_ns"] >= since
    assert_intact(recording)


def assert_intact(recording: Recording) -> None:
    """The recorded launches have the code of their kernels, and nothing was lost that anybody knows of."""
    assert recording.code == 0, recording.said
    assert recording.recorded
    assert recording.all_recorded_names[""] == 0
    assert recording.losses == []


def assert_launched(recording: Recording, trace: Path) -> None:
    """The names are those of SYCL's runtime, which has none for the kernels that oneMKL made itself."""
    said, recorded = launched(trace, recording.traced), recording.recorded_names
    assert said.total() == recorded.total()
    assert {name: recorded[name] for name in said if name} == {name: said[name] for name in said if name}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_dpnp(programs: Programs, adapter: str, tmp_path: Path) -> None:
    recording = record(programs, sycl(programs, adapter, tmp_path), tmp_path)

    assert_complete(recording)
    assert_launched(recording, tmp_path / "trace")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_dpnp_that_runs_already(programs: Programs, adapter: str, tmp_path: Path) -> None:
    recording = record_running(programs, sycl(programs, adapter, tmp_path, tmp_path / "go"), tmp_path)

    assert_complete(recording)
    assert_launched(recording, tmp_path / "trace")


@pytest.mark.parametrize("name", ["clpeak", *SCRIPTS])
def test_programs_that_use_opencl(programs: Programs, name: str, tmp_path: Path) -> None:
    recording = record(programs, started(programs, name, tmp_path), tmp_path)

    assert_complete(recording)
    assert recording.recorded_names == ledger(tmp_path / "ledger")


@pytest.mark.parametrize("name", ["clpeak", *SCRIPTS])
def test_programs_that_use_opencl_and_run_already(programs: Programs, name: str, tmp_path: Path) -> None:
    run = started(programs, name, tmp_path, PROGRAMS_HOLD=str(tmp_path / "go"))

    recording = record_running(programs, run, tmp_path)

    assert_complete(recording)
    assert recording.recorded_names == ledger(tmp_path / "ledger")


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_dpnp_with_a_library_put_into_it(programs: Programs, adapter: str, tmp_path: Path) -> None:
    recording = record(programs, sycl(programs, adapter, tmp_path), tmp_path, "--launches=inject")

    assert_complete(recording)
    assert_launched(recording, tmp_path / "trace")


@pytest.mark.parametrize("name", ["clpeak", *SCRIPTS])
def test_programs_that_use_opencl_with_a_library_put_into_them(programs: Programs, name: str, tmp_path: Path) -> None:
    recording = record(programs, started(programs, name, tmp_path), tmp_path, "--launches=inject")

    assert_complete(recording)
    assert recording.recorded_names == ledger(tmp_path / "ledger")


def test_dpnp_in_its_own_root(programs: Programs, tmp_path: Path) -> None:
    run = programs.in_its_own_root(tmp_path, "python3.14", script="with_dpnp.py")

    recording = record(programs, run.with_settings(**LEVEL_ZERO_V1, **tracing("/work/trace")), tmp_path)

    assert_complete_but_the_first(recording)
    if len(recording.recorded) == recording.launches:
        assert_launched(recording, tmp_path / "trace")


def test_clpeak_in_its_own_root(programs: Programs, tmp_path: Path) -> None:
    recording = record(programs, programs.in_its_own_root(tmp_path, "clpeak", *CLPEAK), tmp_path)

    assert_complete_but_the_first(recording)
