# SPDX-License-Identifier: Apache-2.0
"""Recording draws on Mesa: the capture and its reports say what the 3DPRIMITIVEs in the submitted batches say."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from driver.test_vulkan_recording import WINDOW, calibrated, record_command, record_running
from driver.vulkan import DEVICES, RELEASES, Mesa, Primitive, Walker, read_primitives, read_walkers
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from integration.recording import IAPROF
from standin.hardware import Ledger

pytestmark = pytest.mark.bpf
__all__ = ["calibrated"]  # a fixture

STAGES = ("vertex", "tessellation control", "tessellation evaluation", "geometry", "fragment", "task", "mesh")
WITHOUT_MESH = STAGES[:5]
_DRAW = re.compile(";(draw_\\d+|dispatch_7);")


@dataclass(frozen=True)
class Drawing:
    """A capture of draw.c, and the truth."""

    capture: Path
    said: str  # on stderr
    told: dict[str, Any]  # what the program printed
    primitives: list[Primitive]
    walkers: list[Walker]
    ledger: Ledger

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The program's rows, without the driver's own."""
        return [row for row in self.rows if not row["flags"] & LaunchFlags.OWN]

    @property
    def own(self) -> list[dict[str, Any]]:
        """The driver's own rows."""
        return [row for row in self.rows if row["flags"] & LaunchFlags.OWN]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows."""
        rows = CaptureReader(self.capture).table("launch").to_pylist()
        return [row for row in rows if row["pid"] == self.told["pid"]]

    @property
    def program_s(self) -> list[Primitive]:
        """Those primitives that the program asked for: the driver's own have no vertex shader."""
        return [primitive for primitive in self.primitives if not primitive.is_own]


def record(mesa: Mesa, device: str, folder: Path, *options: str | int) -> Drawing:
    """Records draw.c in `folder`; it has to work."""
    printed, said, ledger = record_command(mesa, device, folder, mesa.draw_command(device, folder, *options))
    drawn = Drawing(
        folder / "capture", said, json.loads(printed), read_primitives(folder), read_walkers(folder), ledger
    )
    assert len(drawn.program_s) == sum(drawn.told["submitted"][:-1]), "what is asked for is submitted"
    assert len(drawn.walkers) == drawn.told["submitted"][-1]
    return drawn


def in_batches(primitives: Iterable[Primitive], walkers: Iterable[Walker]) -> Counter[tuple[str, int]]:
    """How often each shader was submitted, by stage and offset."""
    counts = Counter(("compute", walker.kernel) for walker in walkers)
    for primitive in primitives:
        counts.update(
            (stage, kernel) for stage, kernel in zip(STAGES, primitive.kernels, strict=True) if kernel is not None
        )
    return counts


def in_capture(rows: Iterable[dict[str, Any]]) -> Counter[tuple[str, int]]:
    """How often each shader was launched, by stage and offset."""
    return Counter((row["name"].rsplit(" ", 1)[0], row["address"] - WINDOW) for row in rows)


def by_stage(counts: Counter[tuple[str, int]]) -> Counter[str]:
    """The sums of `in_batches`."""
    sums: Counter[str] = Counter()
    for (stage, _), count in counts.items():
        sums[stage] += count
    return sums


def reported_by_stage(capture: Path) -> Counter[str]:
    """The same, as `iaprof top` counts launches, without the driver's own."""
    done = subprocess.run(
        [*IAPROF, "top", str(capture), "--json", "--limit=0"], capture_output=True, text=True, check=True
    )
    sums: Counter[str] = Counter()
    for entry in json.loads(done.stdout)["entries"]:
        if not entry["kernel"].startswith("blorp"):
            sums[re.sub(" [^ ]*( .code .*)?$", "", entry["kernel"])] += entry["launches"]
    return +sums


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        *[
            ("--names",),
            ("--anew", "--indirect"),
            ("--bind",),
            ("--mesh", "--names"),
            ("--mesh", "--anew", "--indirect"),
        ],
    ],
    ids="".join,
)
def test_every_draw_is_recorded_with_each_of_its_shaders(
    calibrated: dict[str, Mesa], release: str, device: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    drawn = record(calibrated[release], device, tmp_path, *options, "--rounds", 3, "--submits", 2, "--draws", 5)
    # then: rows are what was recorded once, and executed twice
    found = in_capture(drawn.launches)
    assert {key: 2 * count for key, count in found.items()} == in_batches(drawn.program_s, drawn.walkers)
    assert {stage for stage, _ in found} == {*(STAGES if "--mesh" in options else WITHOUT_MESH), "compute"}
    # and reports have as many
    reported = reported_by_stage(drawn.capture)
    assert reported == by_stage(in_batches(drawn.program_s, drawn.walkers))
    assert {row["what"] for row in CaptureReader(drawn.capture).table("loss").to_pylist()} == set()
    if "--names" in options:
        names = {
            (stage, kernel, primitive.vertices)
            for primitive in drawn.program_s
            for stage, kernel in zip(STAGES, primitive.kernels, strict=True)
            if kernel is not None
        }
        assert {(row["name"], row["address"] - WINDOW) for row in drawn.launches if "pipeline" in row["name"]} == {
            (f"{stage} pipeline_{vertices}", kernel) for stage, kernel, vertices in names
        }


@pytest.mark.parametrize("release", RELEASES)
def test_stages_have_the_names_of_their_entry_points(calibrated: dict[str, Mesa], release: str, tmp_path: Path) -> None:
    drawn = record(calibrated[release], "ptl", tmp_path, "--entries", "--mesh")
    names = ("vert", "ctrl", "eval", "geom", "frag", "task", "mesh", "disp")
    entries = dict(zip((*STAGES, "compute"), names, strict=True))
    expected = {
        (f"{stage} {entries[stage]}" if stage != "compute" else "disp", kernel)
        for stage, kernel in in_batches(drawn.program_s, drawn.walkers)
    }
    assert {(row["name"].rsplit(" ", 1)[0], row["address"] - WINDOW) for row in drawn.launches} == expected


@pytest.mark.parametrize("release", RELEASES)
def test_secondary_command_buffers_draw_with_each_submission(
    calibrated: dict[str, Mesa], release: str, tmp_path: Path
) -> None:
    drawn = record(calibrated[release], "bmg", tmp_path, "--names", "--secondary", "--submits", 3)
    assert reported_by_stage(drawn.capture) == by_stage(in_batches(drawn.program_s, drawn.walkers))


@pytest.mark.parametrize("release", RELEASES)
def test_a_program_that_already_draws_is_recorded(calibrated: dict[str, Mesa], release: str, tmp_path: Path) -> None:
    # given: a program in the middle of its work
    mesa = calibrated[release]
    command = mesa.draw_command("lnl", tmp_path, "--names", "--seconds", 30)
    # when
    capture, pid = record_running("lnl", tmp_path, command, "draws")
    # then: each shader of each stage, and nothing else, with code, whole stacks, and the name of its code
    launches = capture.table("launch").to_pylist()
    rows = [row for row in launches if row["pid"] == pid and not row["flags"] & LaunchFlags.OWN]
    drawn = [primitive for primitive in read_primitives(tmp_path) if not primitive.is_own]
    shaders = in_batches(drawn, read_walkers(tmp_path))
    assert in_capture(rows).keys() == shaders.keys()
    assert all(re.fullmatch(".* [0-9a-f]{8}", row["name"]) for row in rows)
    assert [row["pid"] for row in capture.table("kernel").to_pylist()].count(pid) == len(shaders)
    stacks = {row["id"]: row["ended"] for row in capture.table("stack").to_pylist()}
    assert {stacks[row["stack"]] for row in rows} == {"whole"}
    # and those of the one pipeline with all stages equally often
    (count,) = {count for (stage, _), count in in_capture(rows).items() if stage in STAGES[1:4]}
    assert count > 10


def test_stalls_are_at_the_shaders_with_which_their_function_drew(calibrated: dict[str, Mesa], tmp_path: Path) -> None:
    # given: a submission of one draw of each pipeline at a time, so that a stall has one stack
    drawn = record(calibrated["unstable"], "bmg", tmp_path, "--names", "--rounds", 1, "--submits", 1, "--draws", 1)
    words = [*IAPROF, "report", str(drawn.capture), "--frames=cpu,function,reason,offset"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    # then: as many as the GPU had there, by function, reason and offset
    reported: Counter[tuple[str, str, int]] = Counter()
    for text in done.stdout.splitlines():
        frames, count = text.rsplit(" ", 1)
        kernel, reason, offset = (frame.removesuffix("_[g]").removesuffix("_[G]") for frame in frames.split(";")[-3:])
        for function in _DRAW.findall(frames):
            assert kernel.endswith(function.replace("draw", "pipeline")) or function == "dispatch_7"
            reported[function, reason, int(offset, 16)] += int(count)
    produced: Counter[tuple[str, str, int]] = Counter()
    for row in drawn.ledger.rows:
        if row.captured and row.stack != "draw_3":  # the driver's own, which clears
            produced[row.stack, row.reason, row.offset] += row.captured
    assert sum(produced.values()) > 1000
    assert reported == produced


@pytest.mark.parametrize("release", RELEASES)
def test_a_hundred_thousand_draws_are_counted_and_few_are_walked(
    calibrated: dict[str, Mesa], release: str, tmp_path: Path
) -> None:
    options = ("--rounds", 1, "--submits", 1, "--draws", 10_000)
    drawn = record(calibrated[release], "lnl", tmp_path, *options)
    assert sum(drawn.told["appended"][:-1]) == 120_000
    assert in_capture(drawn.launches) == in_batches(drawn.program_s, drawn.walkers)
    assert drawn.told["ns"] < 5_000


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("device", DEVICES)
def test_what_the_driver_draws_itself_is_recorded_as_its_own(
    calibrated: dict[str, Mesa], release: str, device: str, tmp_path: Path
) -> None:
    drawn = record(calibrated[release], device, tmp_path, "--rounds", 3, "--submits", 2)
    own = Counter(primitive.fragment for primitive in drawn.primitives if primitive.is_own)
    assert own.total() == 6, "it clears once a round"
    assert {row["name"] for row in drawn.own} == {"blorp clear"}
    assert {
        address: 2 * count for address, count in Counter(row["address"] - WINDOW for row in drawn.own).items()
    } == own
