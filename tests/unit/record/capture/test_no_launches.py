"""A recording with stalls and without launches: when that is told, where, and what is advised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.cli.terminal.summary import say_end
from iaprof.cli.verbs import info as info_verb
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.launch_warnings import no_launches_sentence
from iaprof.formats.wire.launches import LAUNCH, LaunchFlags
from iaprof.formats.wire.sideband import mapping_record
from iaprof.record.capture.finish import finish
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from iaprof.report.about import about
from iaprof.report.archive.pseudonyms import Pseudonyms
from iaprof.report.archive.redaction import redacted_header

LEVEL_ZERO = "/opt/intel/lib/libze_intel_gpu.so.1.6"
OPENCL = "/usr/lib/x86_64-linux-gnu/intel-opencl/libigdrcl.so"
BEGINS = "no launch was seen, though process 7 mapped libze_intel_gpu.so and 4,200 stall records came: "


def library(path: str, way: str | None, probes: int = 2) -> dict[str, object]:
    return {"path": path, "probes": probes if way else 0, "since_ns": 1, "way": way}


def recorded(
    folder: Path,
    by: str = "inject",
    libraries: list[dict[str, object]] | None = None,
    mapped: tuple[str, ...] = ("/usr/lib/libc.so.6", LEVEL_ZERO),
    stalls: int = 4200,
    launches: int = 0,
    fired: int = 0,
    flags: int = 0,
) -> dict[str, Any]:
    """The header of the capture `capture` of such a recording."""
    spool = Spool(folder / "spool")
    header = {"launches_by": by, "libraries": libraries or [], "streams": [{"layout": "xe2", "ip_version": [20, 1, 0]}]}
    spool.write(FrameKind.HEADER, json.dumps(header).encode(), time=1)
    for number, path in enumerate(mapped):
        record = mapping_record(2, 6 + number, 0x1000, 0x1000, 0, path.encode(), b"", (0, 1, 2))
        spool.write(FrameKind.SIDEBAND, record, time=2)
    if stalls:
        spool.write(FrameKind.STALLS, bytes(16 * stalls), time=3, shape=2)
    if launches:
        rows = np.zeros(launches, LAUNCH)
        rows["flags"] = flags
        spool.write(FrameKind.LAUNCHES, rows.tobytes(), time=3)
    spool.write(FrameKind.END, json.dumps({"end_ns": 4, "probes": {"launches": fired}}).encode(), time=4)
    spool.close()
    return finish(SpoolReader(folder / "spool"), folder / "capture").header


def warned(header: dict[str, Any]) -> str:
    return no_launches_sentence(header.get("no_launches"), header["totals"].get("stalls"))


INSTALLED = library(LEVEL_ZERO, None)
INJECTED = library("/var/cache/iaprof/injected/inject-1/libiaprof_inject.so", "inject")


@pytest.mark.parametrize(
    ("by", "libraries", "advice"),
    [
        ("inject", [INSTALLED, INJECTED], "try --launches=attach, after 'sudo iaprof calibrate'"),
        ("auto", [INSTALLED, INJECTED], "try --launches=attach, after 'sudo iaprof calibrate'"),
        ("inject", [], "try --launches=attach, after 'sudo iaprof calibrate'"),
        ("auto", [library(LEVEL_ZERO, "attach", 8)], "start the program with 'sudo iaprof record -- COMMAND'"),
        ("attach", [library(LEVEL_ZERO, "attach", 8)], "start the program with 'sudo iaprof record -- COMMAND'"),
        ("probes", [library(LEVEL_ZERO, "probes")], "start the program with 'sudo iaprof record -- COMMAND'"),
        ("auto", [INSTALLED], "this build of the driver is not known; run 'sudo iaprof calibrate'"),
        ("attach", [INSTALLED, library(OPENCL, "attach", 8)], "this build of the driver is not known; run"),
        ("probes", [INSTALLED], "try --launches=auto"),
    ],
)
def test_what_is_advised_goes_by_how_launches_were_to_be_had(
    tmp_path: Path, by: str, libraries: list[dict[str, object]], advice: str
) -> None:
    said = warned(recorded(tmp_path, by, libraries))
    assert said.startswith(BEGINS)
    assert advice in said


@pytest.mark.parametrize(
    ("by", "libraries", "advice"),
    [
        ("inject", [INJECTED], "does not call the driver through the OpenCL loader; try --launches=attach"),
        ("auto", [library(OPENCL, "attach", 8)], "start the program with"),
        ("auto", [library(LEVEL_ZERO, "attach", 8)], "run 'sudo iaprof calibrate LIBRARY' with the path of its libigd"),
    ],
)
def test_of_opencl_too(tmp_path: Path, by: str, libraries: list[dict[str, object]], advice: str) -> None:
    said = warned(recorded(tmp_path, by, libraries, mapped=(OPENCL,)))
    assert said.startswith("no launch was seen, though process 6 mapped libigdrcl.so and 4,200 stall records came: ")
    assert advice in said


def test_kernels_that_copy_are_a_reason_too(tmp_path: Path) -> None:
    said = warned(recorded(tmp_path, "auto", [library(OPENCL, "attach", 8)], mapped=(OPENCL,)))
    assert "or be the driver's own, which copy and fill ('iaprof check' says whether these are recorded)" in said


def test_opencl_is_named_where_both_drivers_are_mapped(tmp_path: Path) -> None:
    """OpenCL's driver maps Level Zero's."""
    said = warned(recorded(tmp_path, "inject", [INJECTED], mapped=(LEVEL_ZERO, OPENCL)))
    assert "process 7 mapped libigdrcl.so" in said
    assert "through the OpenCL loader; try --launches=attach, after 'sudo iaprof calibrate LIBRARY'" in said


@pytest.mark.parametrize(("attached", "named"), [(LEVEL_ZERO, "libigdrcl.so"), (OPENCL, "libze_intel_gpu.so")])
def test_the_driver_is_named_whose_launches_only_the_library_sees(tmp_path: Path, attached: str, named: str) -> None:
    libraries = [library(attached, "attach", 8), INJECTED]
    said = warned(recorded(tmp_path, "auto", libraries, mapped=(LEVEL_ZERO, OPENCL)))
    assert f" mapped {named} " in said
    assert "the library that iaprof puts into it" in said


@pytest.mark.parametrize(
    "more",
    [
        {"stalls": 0},
        {"mapped": ("/usr/lib/libc.so.6", "/opt/libze_loader.so.1")},
        {"launches": 1},
        {"launches": 1, "flags": LaunchFlags.CARRIED},
        {"fired": 3},
    ],
    ids=["no stalls", "no driver", "a launch", "one from before", "lost ones"],
)
def test_else_nothing_is_told(tmp_path: Path, more: dict[str, Any]) -> None:
    header = recorded(tmp_path, **more)
    assert "no_launches" not in header
    assert warned(header) == ""


def test_it_is_told_at_the_end_in_info_and_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = recorded(tmp_path, "inject", [INSTALLED, INJECTED])
    said = warned(header)
    say_end("record", tmp_path / "capture", header, 1)
    assert capsys.readouterr().err.splitlines()[1:] == [f"iaprof: {said}"]
    info_verb.info(tmp_path / "capture")
    assert said in " ".join(capsys.readouterr().out.split())
    assert about(CaptureReader(tmp_path / "capture")).warnings[0] == said
    # and of a redacted capture
    assert warned(redacted_header(CaptureReader(tmp_path / "capture").header, Pseudonyms())) == said


@pytest.mark.parametrize(
    "said",
    [None, 7, [], {}, {"driver": 1}, {"driver": "\x1b[0m", "pid": 1, "by": "auto", "way": None},
     {"driver": "libigdrcl.so", "pid": "1", "by": "auto", "way": None}],
)  # fmt: skip
def test_a_header_may_be_anyones(said: object) -> None:
    assert no_launches_sentence(said, 1) == ""
