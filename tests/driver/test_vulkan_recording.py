# SPDX-License-Identifier: Apache-2.0
"""Recording Vulkan programs on Mesa: the capture and its reports say what the submitted batches say."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from driver.vulkan import (
    DEVICES,
    RELEASES,
    SHADERS,
    Mesa,
    Run,
    read_primitives,
    read_run,
    read_walkers,
    record_lines,
    walkers_of,
)
from iaprof.bpf.driver_layout import CACHE, find_layout
from iaprof.formats.capture.reader import CaptureReader
from integration.recording import BARE, IAPROF
from standin.hardware import Hardware, Ledger

pytestmark = pytest.mark.bpf

OPTIONS = ("--names", "--rounds", 3, "--submits", 2, "--dispatches", 3)
WINDOW = 0x200000000  # where both versions have the instruction base
_DISPATCH = re.compile(r";(dispatch_\d);")


@pytest.fixture(scope="session")
def calibrated(vulkan: dict[str, Mesa]) -> Iterator[dict[str, Mesa]]:
    """Both releases' drivers, whose layouts are known while the tests run."""
    devices = ",".join(DEVICES.values())
    made = []
    for mesa in vulkan.values():
        if find_layout(mesa.build_id) is None:
            environment = os.environ | {"LD_PRELOAD": str(mesa.with_devices(devices))}
            subprocess.run([*IAPROF, "calibrate", str(mesa.library)], env=environment, check=True, capture_output=True)
            made.append(CACHE / f"{mesa.build_id}.json")
    yield vulkan
    for path in made:
        path.unlink()


@dataclass(frozen=True)
class Recording:
    """A capture of the program, and the truth."""

    capture: Path
    said: str  # on stderr
    run: Run
    ledger: Ledger

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The program's rows."""
        rows = CaptureReader(self.capture).table("launch").to_pylist()
        return [row for row in rows if row["pid"] == self.run.pid]


def record_command(mesa: Mesa, device: str, folder: Path, command: list[str], *options: str) -> tuple[str, str, Ledger]:
    """Records a command in `folder`; it has to work. Returns what both printed, and the ledger of the GPU."""
    beside = folder / "driver"  # the driver alone: it is probed before the program maps it
    beside.mkdir()
    (beside / mesa.library.name).symlink_to(mesa.library)
    words = [*IAPROF, "record", "-o", str(folder / "capture"), *BARE, *options, "--", *command]
    with Hardware(folder / "gpu", device) as hardware:
        environment = os.environ | hardware.env() | {"LD_LIBRARY_PATH": str(beside)}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr, hardware.ledger()


def record(mesa: Mesa, device: str, folder: Path, *options: str | int) -> Recording:
    """Records the program in `folder`; it has to work."""
    printed, said, ledger = record_command(mesa, device, folder, mesa.command(device, folder, *options))
    return Recording(folder / "capture", said, read_run(printed, folder), ledger)


@pytest.fixture(scope="module", params=[(release, device) for release in RELEASES for device in DEVICES], ids="-".join)
def recording(
    calibrated: dict[str, Mesa], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    release, device = request.param
    return record(calibrated[release], device, tmp_path_factory.mktemp(device), *OPTIONS)


def test_every_dispatch_is_recorded_with_the_shader_that_the_walkers_have(recording: Recording) -> None:
    submits = 2
    launched = Counter(row["address"] - WINDOW for row in recording.launches)
    assert {kernel: count * submits for kernel, count in launched.items()} == walkers_of(recording.run)
    assert {(row["address"] - WINDOW, row["name"]) for row in recording.launches} == {
        (walker.kernel, f"shader_{walker.groups[0]}") for walker in recording.run.walkers
    }


def reported_launches(capture: Path) -> dict[str, int]:
    """By kernel, as `iaprof top` counts them."""
    words = [*IAPROF, "top", str(capture), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    entries = json.loads(done.stdout)["entries"]
    return {entry["kernel"]: entry["launches"] for entry in entries if entry["launches"]}


def submitted(recording: Recording) -> dict[str, int]:
    """The same, as the batches have them."""
    counts = Counter(walker.groups[0] for walker in recording.run.walkers)
    return {f"shader_{shader}": count for shader, count in counts.items()}


def test_reports_count_what_was_submitted(recording: Recording) -> None:
    assert reported_launches(recording.capture) == submitted(recording)


@pytest.mark.parametrize("release", RELEASES)
def test_secondary_command_buffers_count_with_each_submission_of_those_that_include_them(
    calibrated: dict[str, Mesa], release: str, tmp_path: Path
) -> None:
    recording = record(calibrated[release], "lnl", tmp_path, *OPTIONS, "--secondary")
    assert sum(recording.run.submitted.values()) == 4 * sum(recording.run.appended.values())
    assert reported_launches(recording.capture) == submitted(recording)


def test_every_stall_is_at_its_instruction_of_the_shader_that_its_function_dispatched(recording: Recording) -> None:
    words = [*IAPROF, "report", str(recording.capture), "--frames=cpu,function,instruction,reason,offset"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    reported: Counter[tuple[str, str, int]] = Counter()
    for text in done.stdout.splitlines():
        frames, count = text.rsplit(" ", 1)
        kernel, instruction, reason, offset = (frame.removesuffix("_[g]") for frame in frames.split(";")[-4:])
        functions = _DISPATCH.findall(frames)
        assert len(functions) == 1
        assert kernel.removesuffix("_[G]") == functions[0].replace("dispatch", "shader")
        assert not instruction.startswith("["), text
        reported[functions[0], reason, int(offset, 16)] += int(count)
    produced: Counter[tuple[str, str, int]] = Counter()
    for row in recording.ledger.rows:
        if row.captured:
            produced[row.stack, row.reason, row.offset] += row.captured
    assert recording.ledger.records_captured > 1000
    assert reported == produced


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("device", DEVICES)
def test_shaders_have_the_lanes_that_the_walkers_have(
    calibrated: dict[str, Mesa], release: str, device: str, tmp_path: Path
) -> None:
    recording = record(calibrated[release], device, tmp_path, *OPTIONS, "--lanes")
    walkers = {(f"shader_{walker.groups[0]}", walker.simd) for walker in recording.run.walkers}
    assert {simd for _, simd in walkers} == {16, 32}
    words = [*IAPROF, "annotate", str(recording.capture), "shader_.*", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert {(kernel["kernel"], kernel["simd"]) for kernel in json.loads(done.stdout)["kernels"]} == walkers


def test_no_shader_is_unreadable_and_none_unfinished(recording: Recording) -> None:
    losses = CaptureReader(recording.capture).table("loss").to_pylist()
    assert [loss for loss in losses if loss["what"] in ("unreadable", "incomplete", "unfinished")] == []


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    "options", [("--direct", "--indirect"), ("--pool",), ("--anew", "--names")], ids=lambda options: options[0]
)
def test_all_forms_of_dispatch_and_reuse_are_recorded(
    calibrated: dict[str, Mesa], release: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    # when: indirect dispatches, resets of pools, and shaders at addresses where others were
    recording = record(calibrated[release], "bmg", tmp_path, *options, "--rounds", 4, "--submits", 1)
    # then
    launched = Counter(row["address"] - WINDOW for row in recording.launches)
    assert launched == walkers_of(recording.run)
    assert sum(launched.values()) == sum(recording.run.appended.values()) > 0
    assert {entry["event"] for entry in CaptureReader(recording.capture).table("command_list").to_pylist()} == {
        *("execute", "close", "reset"),
    }


def test_a_shader_without_a_name_has_that_of_its_code(calibrated: dict[str, Mesa], tmp_path: Path) -> None:
    names = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        recording = record(calibrated["unstable"], "bmg", folder, "--rounds", 1)
        names.append({row["name"] for row in recording.launches})
    assert names[0] == names[1]
    assert len(names[0]) == len(SHADERS)
    assert all(re.fullmatch("compute [0-9a-f]{8}", name) for name in names[0])


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("device", DEVICES)
def test_shaders_without_a_name_have_that_of_their_entry_point(
    calibrated: dict[str, Mesa], release: str, device: str, tmp_path: Path
) -> None:
    # given: in each round, other shaders at the same places
    recording = record(calibrated[release], device, tmp_path, "--entries", "--anew", "--rounds", 3, "--submits", 1)
    # then
    truth = {shader: "look" if shader == SHADERS[-1] else "calc" for shader in SHADERS}
    found = {(row["name"].rsplit(" ", 1)[0], row["address"] - WINDOW) for row in recording.launches}
    assert found == {(truth[walker.groups[0]], walker.kernel) for walker in recording.run.walkers}
    assert all(re.fullmatch("(calc|look) [0-9a-f]{8}", row["name"]) for row in recording.launches)
    codes = 3 * (len(SHADERS) - 1) + 1  # the last one's does not change
    assert len({row["name"] for row in recording.launches}) == codes


@pytest.mark.parametrize("release", RELEASES)
def test_under_the_validation_layer_every_dispatch_is_recorded(
    calibrated: dict[str, Mesa], release: str, tmp_path: Path
) -> None:
    # given: the layer, between the program and the driver
    mesa = calibrated[release]
    name = "VK_LAYER_KHRONOS_validation"
    library = mesa.libraries / "libVkLayer_khronos_validation.so"
    layer = {"name": name, "type": "INSTANCE", "library_path": str(library), "api_version": "1.4.300"}
    manifest = {"file_format_version": "1.2.0", "layer": {**layer, "implementation_version": "1", "description": name}}
    (tmp_path / "layer.json").write_text(json.dumps(manifest))
    layered = {"VK_ADD_LAYER_PATH": str(tmp_path), "VK_INSTANCE_LAYERS": name, "VK_LOADER_DEBUG": "layer"}
    words, *rest = mesa.command("bmg", tmp_path, *OPTIONS)
    # when
    command = [words, *(f"{key}={value}" for key, value in layered.items()), *rest]
    printed, said, ledger = record_command(mesa, "bmg", tmp_path, command)
    # then
    (own,) = (line for line in printed.splitlines() if line.startswith("{"))  # the layer prints, too
    recording = Recording(tmp_path / "capture", said, read_run(own, tmp_path), ledger)
    assert str(library) in said, "it is loaded"
    launched = Counter(row["address"] - WINDOW for row in recording.launches)
    assert {kernel: 2 * count for kernel, count in launched.items()} == walkers_of(recording.run)
    assert reported_launches(recording.capture) == submitted(recording)


def test_names_of_pipelines_are_text_and_change_no_terminal(calibrated: dict[str, Mesa], tmp_path: Path) -> None:
    recording = record(calibrated["unstable"], "bmg", tmp_path, "--hostile-names", "--rounds", 3)
    # then: each shader is recorded under its own name, of limited length, with its code
    launched = Counter(row["address"] - WINDOW for row in recording.launches)
    assert {kernel: 2 * count for kernel, count in launched.items()} == walkers_of(recording.run)
    assert len({row["name"] for row in recording.launches}) == len(SHADERS)
    assert {len(row["name"]) for row in recording.launches} <= set(range(64))
    assert len(CaptureReader(recording.capture).table("kernel")) == len(SHADERS)
    for words in (("top",), ("report",), ("top", "--json"), ("report", "--format", "json"), ("annotate",), ("info",)):
        done = subprocess.run([*IAPROF, words[0], str(recording.capture), *words[1:]], capture_output=True, check=True)
        text = done.stdout.decode()
        assert not set(text) & {*map(chr, range(0x20)), "\x7f", "\u202e"} - {"\n"}, words
        assert words != ("top",) or len([line for line in text.splitlines() if "A" * 8 in line]) == 1


def record_running(device: str, folder: Path, command: list[str], name: str) -> tuple[CaptureReader, int]:
    """Records a program in the middle of its work, whose ledger has this name; returns the capture and its pid."""
    with (
        Hardware(folder / "gpu", device) as hardware,
        subprocess.Popen(command, env=os.environ | {"STANDIN_DIR": str(hardware.folder)}) as program,
    ):
        record_lines(os.environ | hardware.env(), folder / "capture", folder / name, program)
        program.kill()
    return CaptureReader(folder / "capture"), program.pid


@pytest.mark.parametrize("release", RELEASES)
def test_a_program_that_already_runs_is_recorded(calibrated: dict[str, Mesa], release: str, tmp_path: Path) -> None:
    # given: a program in the middle of its work, whose pipelines have names that were given before
    mesa = calibrated[release]
    command = mesa.command("bmg", tmp_path, *OPTIONS, "--seconds", 30)
    # when
    capture, pid = record_running("bmg", tmp_path, command, "walkers")
    # then: each of its shaders, and nothing else, with code and whole stacks
    rows = [row for row in capture.table("launch").to_pylist() if row["pid"] == pid]
    assert len(rows) > 100
    assert {row["address"] - WINDOW for row in rows} == {walker.kernel for walker in read_walkers(tmp_path)}
    assert all(re.fullmatch("compute [0-9a-f]{8}", row["name"]) for row in rows)
    assert [row["pid"] for row in capture.table("kernel").to_pylist()].count(pid) == len(SHADERS)


@pytest.mark.parametrize("device", DEVICES)
def test_llama_cpp_s_backend_is_recorded_with_the_names_of_its_kernels(
    calibrated: dict[str, Mesa], device: str, tmp_path: Path
) -> None:
    mesa = calibrated["unstable"]
    record_command(mesa, device, tmp_path, mesa.ggml_command(device, tmp_path, 20))
    # then: as often as the batches say, and each of the graph's seven operations once a round
    walkers = Counter(walker.kernel for walker in read_walkers(tmp_path))
    launches = reported_launches(tmp_path / "capture")
    own = {name: launches.pop(name) for name in list(launches) if name.startswith("blorp")}
    assert Counter(launches.values()) == Counter(walkers.values()) == {20: 7}
    # and what it has the driver copy
    primitives = Counter(primitive.fragment for primitive in read_primitives(tmp_path))
    assert Counter(own.values()) == Counter(primitives.values())
    assert {"soft_max_f32", "silu_f32", "rms_norm_f32"} < {re.sub(" .code .*", "", name) for name in launches}


@pytest.mark.parametrize("release", RELEASES)
def test_dispatches_of_a_thousand_threads_are_recorded(
    calibrated: dict[str, Mesa], release: str, tmp_path: Path
) -> None:
    # given: threads with command buffers of their own, which live until the end
    options = ("--names", "--threads", 1000, "--rounds", 2, "--submits", 1, "--dispatches", 2)
    recording = record(calibrated[release], "lnl", tmp_path, *options)
    # then
    assert sum(recording.run.submitted.values()) == 16_000
    assert Counter(row["address"] - WINDOW for row in recording.launches) == walkers_of(recording.run)
    assert len({row["tid"] for row in recording.launches}) == len({row["list"] for row in recording.launches}) == 1000
    assert reported_launches(recording.capture) == submitted(recording)
    assert CaptureReader(recording.capture).table("loss").to_pylist() == []


@pytest.mark.parametrize("release", RELEASES)
def test_a_million_dispatches_are_recorded_in_limited_memory(
    calibrated: dict[str, Mesa], release: str, tmp_path: Path
) -> None:
    # given: a GPU that does not stall, as a million launches would stall very often
    mesa = calibrated[release]
    command = mesa.command("bmg", tmp_path, "--rounds", 400, "--submits", 1, "--dispatches", 625)
    # when
    printed, said, ledger = record_command(mesa, "bmg", tmp_path, ["env", "-u", "STANDIN_DIR", *command])
    # then
    run = read_run(printed, tmp_path)
    recording = Recording(tmp_path / "capture", said, run, ledger)
    assert sum(run.submitted.values()) == 1_000_000
    addresses = CaptureReader(recording.capture).table("launch", ("address",))["address"].to_pylist()
    recorded, truth = Counter(address - WINDOW for address in addresses), walkers_of(run)
    # what a busy machine loses is counted exactly
    losses = CaptureReader(recording.capture).table("loss").to_pylist()
    lost = sum(loss["count"] or 0 for loss in losses if loss["source"] == "launches")
    assert not recorded - truth
    assert (truth - recorded).total() == lost < 100_000
    (megabytes,) = re.findall(r"([\d.]+) MB peak memory", said)
    assert float(megabytes) < 300


def test_what_an_unknown_build_dispatches_is_said_to_be_missing(calibrated: dict[str, Mesa], tmp_path: Path) -> None:
    # given
    mesa = calibrated["trixie"]
    layout = CACHE / f"{mesa.build_id}.json"
    hidden = layout.rename(layout.with_suffix(".hidden"))
    try:
        # when
        recording = record(mesa, "bmg", tmp_path, "--rounds", 1)
    finally:
        hidden.rename(layout)
        layout.with_suffix(".problem").unlink(missing_ok=True)
    # then: it was tried, once, and what the program does with the driver is said to be missing
    tried, told = [line for line in recording.said.splitlines() if str(mesa.library.name) in line]
    assert recording.launches == []
    assert "cannot be calibrated: it finds no GPU here that it can use" in tried
    assert "its build" in told and "sudo iaprof calibrate" in told
    assert CaptureReader(recording.capture).header["totals"]["stalls"] > 0
