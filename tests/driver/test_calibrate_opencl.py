# SPDX-License-Identifier: Apache-2.0
"""`iaprof calibrate` for OpenCL's driver: what it finds is what ships, and recordings use it."""

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from driver import test_copies_opencl
from driver.copies import read_copies
from driver.driver import DEVICES, compile_workload
from driver.opencl import OpenCL
from driver.test_calibrate import LARGE, build_id_of
from driver.test_copies_opencl import BY_KERNELS
from driver.test_opencl_recording import placed, record
from iaprof.bpf.driver_layout import CACHE, Action, Layout, find_layout
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.gpu.code import canonical
from iaprof.record.calibrate import calibrate
from iaprof.record.calibrate.calibrate import CalibrationError
from integration.recording import IAPROF
from programs.counting import Calls, Place
from unit.in_process import iaprof


@pytest.fixture(scope="module")
def known(opencl: OpenCL) -> Layout:
    layout = find_layout(build_id_of(opencl.library))
    assert layout
    return layout


def without_own_kernels(layout: Layout) -> Layout:
    """The same where it is not known from where the driver launches kernels of its own."""
    actions = (Action.OWN_LAUNCHES, Action.MAY_COPY)
    entries = tuple(entry for entry in layout.entries if entry.action not in actions)
    assert layout.has_own_kernels and len(entries) < len(layout.entries)
    return replace(layout, entries=entries, dispatch=None)


def launching(known: Layout, found: Layout) -> Layout:
    """What ships without places that launch nothing.

    For each of three families of GPUs these are those for clEnqueueSVMMap and clEnqueueSVMUnmap of memory that needs no
    copy; and for Xe-HPC, such as PVC, those for images, which it has not.
    """
    own = {entry.address for entry in found.entries if entry.action is Action.OWN_LAUNCHES}
    shipped = {entry.address for entry in known.entries if entry.action is Action.OWN_LAUNCHES}
    assert own < shipped and len(shipped - own) == 3 * 2 + 6
    entries = (entry for entry in known.entries if entry.action is not Action.OWN_LAUNCHES or entry.address in own)
    return replace(known, entries=tuple(entries))


def test_finds_what_ships_for_the_real_driver(opencl: OpenCL, known: Layout, tmp_path: Path) -> None:
    output = tmp_path / "layout.json"

    done = iaprof("calibrate", opencl.library, "-o", output, "--json")

    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert (told["devices"], told["left_out"]) == (list(calibrate.DEVICES), {})
    found = Layout.from_json(output.read_text())
    # What people call the driver is not what it says of itself.
    assert replace(found, version=known.version) == launching(known, found)
    assert found.version == "26.27.039122"
    assert told["single_stepped"] == []


def of_unknown_build(opencl: OpenCL, known: Layout, folder: Path, largest: int) -> OpenCL:
    """A copy of the driver where packages have it, with those of its system's libraries that are not larger."""
    folder.chmod(0o755)  # who is nobody must find what lies beside the driver
    own = folder / opencl.library.parent.name
    own.mkdir()
    for path in opencl.library.parent.parent.iterdir():
        if path.is_file() and path.stat().st_size < largest:
            shutil.copy(path, folder)
    library = own / opencl.library.name
    unknown = os.urandom(len(known.build_id) // 2).hex()
    content = opencl.library.read_bytes()
    library.write_bytes(content.replace(bytes.fromhex(known.build_id), bytes.fromhex(unknown), 1))
    assert build_id_of(library) == unknown and find_layout(unknown) is None
    return replace(opencl, library=library)


@pytest.fixture(scope="module")
def calibrated(opencl: OpenCL, known: Layout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenCL]:
    """The driver as a build that nobody knew; what recordings then know of it is gone again afterwards."""
    unknown = of_unknown_build(opencl, known, tmp_path_factory.mktemp("unknown"), 1 << 40)
    try:
        subprocess.run([*IAPROF, "calibrate", unknown.library], check=True, capture_output=True)
        yield unknown
    finally:
        (CACHE / f"{build_id_of(unknown.library)}.json").unlink(missing_ok=True)


@pytest.mark.root  # what is found is kept for later recordings
def test_finds_the_same_for_a_build_that_nobody_knows(calibrated: OpenCL, known: Layout) -> None:
    found = find_layout(build_id_of(calibrated.library))

    assert found
    assert found == replace(launching(known, found), build_id=found.build_id, version=found.version)


@pytest.mark.bpf
@pytest.mark.parametrize("device", ["bmg", "ptl"])
def test_launches_are_recorded_by_what_was_found(calibrated: OpenCL, device: str, tmp_path: Path) -> None:
    recording = record(calibrated, device, tmp_path, calibrated.programs(device), "--launches", 5)

    launched: Counter[tuple[int, str]] = Counter()
    for kernel in recording.kernels:
        launched[kernel.gpu_address, kernel.name] += sum(kernel.launches.values())
    assert Counter((canonical(row["address"]), row["name"]) for row in recording.launches) == launched
    assert len(launched) == 10
    assert placed(recording.modules) == placed(kernel.debug_elf.read_bytes() for kernel in recording.kernels)


@pytest.mark.bpf
@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_recorded_as_by_the_layout_that_ships(
    opencl: OpenCL, calibrated: OpenCL, device: str, tmp_path: Path
) -> None:
    program = compile_workload("copies_opencl.c", "libOpenCL.so.1", opencl.driver.folder, tmp_path / "copies")

    by_shipped, by_calibrated = (
        copied(driver, program, device, made(tmp_path / name))
        for name, driver in (("shipped", opencl), ("calibrated", calibrated))
    )

    assert by_calibrated == by_shipped and len(by_shipped) > 50


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def copied(opencl: OpenCL, program: Path, device: str, folder: Path) -> list[tuple[object, ...]]:
    """Records a program that copies: transfers and launches of kernels in order, and whether these are the driver's."""
    ledger = read_copies(test_copies_opencl.record(opencl, device, folder, [program], BY_KERNELS))
    recording = test_copies_opencl.Recording(CaptureReader(folder / "capture"), ledger, {})
    transfers = [(int(row["time_ns"]), row["function"], row["bytes"], 0) for row in recording.rows("transfer")]
    own = LaunchFlags.OWN
    launches = [(int(row["time_ns"]), row["name"], row["size"], row["flags"] & own) for row in recording.rows("launch")]
    return [each[1:] for each in sorted(transfers + launches)]


def test_without_the_compiler_all_but_the_driver_s_own_kernels_are_found(
    opencl: OpenCL, known: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = of_unknown_build(opencl, known, tmp_path, LARGE).library
    monkeypatch.setattr(calibrate, "DEVICES", {device: calibrate.DEVICES[device] for device in ("lnl", "ptl-h")})

    found = calibrate.calibrate(library)

    expected = replace(known, build_id=build_id_of(library), version=found.layout.version)
    assert found.layout == without_own_kernels(expected)
    assert "libigc2" in found.no_own_kernels


@pytest.mark.bpf
def test_probes_of_others_are_not_in_the_way(opencl: OpenCL, known: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    # given probes where a recording has them for the driver's own kernels
    monkeypatch.setattr(calibrate, "DEVICES", {device: calibrate.DEVICES[device] for device in ("lnl", "pvc")})
    with opencl.library.open("rb") as file:
        elf = LibraryFile(file)
        places = [
            Place(entry.name, opencl.library, elf.offset(entry.address, executable=True))
            for entry in known.entries
            if entry.action is Action.OWN_LAUNCHES
        ]

    with Calls(places[:2]):
        found = calibrate.calibrate(opencl.library)

    assert found.no_own_kernels == ""
    assert sum(entry.action is Action.OWN_LAUNCHES for entry in found.layout.entries) == 15 + 9


def test_what_is_no_driver_of_opencl_is_one_sentence(tmp_path: Path) -> None:
    library = tmp_path / "libigdrcl.so"
    (tmp_path / "source.c").write_text(
        "int clIcdGetPlatformIDsKHR(void) { return -1001; }\nvoid *clGetExtensionFunctionAddress(void) { return 0; }\n"
    )
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,--build-id=sha1", "source.c", "-o", library], cwd=tmp_path, check=True
    )

    with pytest.raises(CalibrationError) as refused:
        calibrate.calibrate(library)

    assert "as 0 of 4 devices (its clIcdGetPlatformIDsKHR fails with -1001)" in str(refused.value)
    assert str(refused.value).endswith("--launches=inject -- COMMAND'")
