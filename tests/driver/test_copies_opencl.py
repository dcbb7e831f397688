# SPDX-License-Identifier: Apache-2.0
"""Copies and fills on Intel's real OpenCL runtime: they are recorded, and so are its own kernels that do them."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

import elf_sections
from driver.copies import Copies, Functions, injected_library, read_copies
from driver.driver import DEVICES, LIBRARIES, compile_workload
from driver.opencl import OpenCL
from iaprof.bpf.driver_layout import Action, Layout, find_layout
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.gpu.code import canonical
from iaprof.gpu.intel.zebin import read_zebin
from iaprof.record.kernels.drivers import built_library
from integration.recording import BARE, IAPROF
from programs.counting import Calls, Place
from standin.hardware import Hardware, LedgerRow

pytestmark = pytest.mark.bpf

CALLS = 3
BY_KERNELS = {"EnableBlitterForEnqueueOperations": "0"}  # not by copy engines


@dataclass(frozen=True)
class Recording:
    """A capture, what the program printed, and how often others saw each function of the loader called."""

    capture: CaptureReader
    ledger: list[Copies]
    calls: dict[str, int]

    @property
    def pid(self) -> int:
        return self.ledger[0].pid

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Those of the program, in order of time."""
        rows = [row for row in self.capture.table(kind).to_pylist() if row["pid"] == self.pid]
        return sorted(rows, key=lambda row: int(row["time_ns"]))


@pytest.fixture(scope="module")
def copies(opencl: OpenCL, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies_opencl")
    return compile_workload("copies_opencl.c", "libOpenCL.so.1", opencl.driver.folder, folder / "copies")


@pytest.fixture(scope="module")
def layout(opencl: OpenCL) -> Layout:
    with opencl.library.open("rb") as file:
        layout = find_layout(LibraryFile(file).build_id())
    assert layout is not None
    return layout


def record(
    opencl: OpenCL, device: str, folder: Path, command: Sequence[object], settings: dict[str, str], way: str = "auto"
) -> str:
    """Records a command into `folder`/capture; gives what it prints."""
    return record_with_gpu(opencl, device, folder, command, settings, way)[0]


def record_with_gpu(
    opencl: OpenCL, device: str, folder: Path, command: Sequence[object], settings: dict[str, str], way: str = "auto"
) -> tuple[str, list[LedgerRow]]:
    """Likewise; and the stalls that the stand-in's GPU produced."""
    words = [*IAPROF, "record", "-o", "capture", *BARE, f"--launches={way}", "--", *map(str, command)]
    with Hardware(folder / "gpu", device) as hardware:
        # The library is probed before it is mapped: its probes come too late for a short program otherwise.
        environment = opencl.environment(device) | hardware.env() | settings
        environment["LD_LIBRARY_PATH"] = str(opencl.library.parent)
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        ledger = hardware.ledger()
    assert done.returncode == 0, done.stderr
    return done.stdout, [row for row in ledger.rows if row.captured]


def places(loader: Path) -> Iterator[Place]:
    """The loader's own functions that enqueue: each call of one passes there once."""
    with loader.open("rb") as file:
        elf = ELFFile(file)
        (code,) = [each for each in elf.iter_segments("PT_LOAD") if each["p_flags"] & 1]
        for symbol in elf_sections.symbols(elf).iter_symbols():
            if symbol.name.startswith("clEnqueue") and symbol["st_value"]:
                yield Place(symbol.name, loader, symbol["st_value"] - code["p_vaddr"] + code["p_offset"])


def record_copies(
    opencl: OpenCL, copies: Path, device: str, folder: Path, settings: dict[str, str], way: str = "auto"
) -> Recording:
    # A loader that nobody else uses: Linux counts the calls of all processes.
    loader = folder / "libOpenCL.so.1"
    shutil.copy((opencl.driver.folder / LIBRARIES / "libOpenCL.so.1").resolve(), loader)
    command = ["env", f"LD_PRELOAD={loader}", copies, "--calls", CALLS]
    with Calls(places(loader)) as calls:
        printed = record(opencl, device, folder, command, settings, way)
    ledger = read_copies(printed)
    called = {line.function for line in ledger}
    counted = {place.name: count for place, count in calls.by_place().items() if place.name in called}
    return Recording(CaptureReader(folder / "capture"), ledger, counted)


@pytest.fixture(scope="module", params=DEVICES)
def recording(
    opencl: OpenCL, copies: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    return record_copies(opencl, copies, request.param, tmp_path_factory.mktemp(request.param), BY_KERNELS)


def calls_of(ledger: list[Copies]) -> list[tuple[str, int | None]]:
    """Function and bytes of each call that is a transfer, in order."""
    return [(line.function, line.bytes) for line in ledger if line.function for _ in range(line.calls)]


def test_each_copy_and_fill_is_a_row_with_its_bytes(recording: Recording) -> None:
    rows = recording.rows("transfer")
    assert [(row["function"], row["bytes"]) for row in rows] == calls_of(recording.ledger)
    assert {line.function for line in recording.ledger} >= {"clEnqueueMemcpyINTEL", "clEnqueueSVMMemcpy"}
    assert recording.capture.header["totals"]["transfers"] == len(recording.capture.table("transfer"))


def test_each_function_was_called_as_often_as_others_counted(recording: Recording) -> None:
    found = Counter(row["function"] for row in recording.rows("transfer"))
    # (programs get Intel's functions from the driver, not from the loader)
    of_intel = {name: count for name, count in found.items() if name.endswith("INTEL")}
    assert len(of_intel) == 3 and set(of_intel.values()) == {2 * CALLS}
    assert len(recording.calls) >= 9
    assert {name: count for name, count in found.items() if name not in of_intel} == recording.calls


def test_copies_and_their_kernels_have_the_stack_of_the_call(recording: Recording, copies: Path) -> None:
    named = Functions(copies, recording.rows("mapping"))
    paths = {row["id"]: [named.at(ip) for ip in row["ips"]] for row in recording.rows("stack")}
    transfers = recording.rows("transfer")
    ways = [line.way for line in recording.ledger if line.function for _ in range(line.calls)]
    for way, row in zip(ways, transfers, strict=True):
        assert [name for name in paths[row["stack"]] if name] == [way, "copy_all", "use", "main", "_start"]
    launches = recording.rows("launch")
    assert len(launches) > len(transfers)
    assert {row["flags"] & ~LaunchFlags.PRESUMED for row in launches} == {int(LaunchFlags.OWN)}
    stacks = {row["stack"] for row in transfers}
    others = {paths[row["stack"]].index("copy_all") for row in launches if row["stack"] not in stacks}
    assert not others or min(others) > 2  # through the runtime: mapping memory is not a transfer


def test_nothing_is_lost_or_strange(recording: Recording) -> None:
    lost = [row for row in recording.capture.table("loss").to_pylist() if row["source"] != "recorder"]
    assert [row for row in lost if row["what"] != "library"] == []  # which is of other tests' drivers


def test_what_a_copy_engine_does_is_a_row_without_kernels(opencl: OpenCL, copies: Path, tmp_path: Path) -> None:
    # given copy engines that the runtime uses between the program's memory and the device's
    settings = {"EnableBlitterForEnqueueOperations": "1"}

    recording = record_copies(opencl, copies, "bmg", tmp_path, settings)

    rows = recording.rows("transfer")
    assert [(row["function"], row["bytes"]) for row in rows] == calls_of(recording.ledger)
    with_kernels = {row["stack"] for row in recording.rows("launch")}
    functions = {row["function"] for row in rows if row["stack"] in with_kernels}
    assert "clEnqueueFillBuffer" in functions
    assert not functions & {"clEnqueueReadBuffer", "clEnqueueWriteBuffer", "clEnqueueReadBufferRect"}


def test_kernels_of_what_is_no_transfer_have_stacks_of_their_own(opencl: OpenCL, copies: Path, tmp_path: Path) -> None:
    # given memory that the runtime copies where a program maps it
    recording = record_copies(opencl, copies, "lnl", tmp_path, BY_KERNELS | {"EnableLocalMemory": "1"})

    named = Functions(copies, recording.rows("mapping"))
    paths = {row["id"]: [name for name in map(named.at, row["ips"]) if name] for row in recording.rows("stack")}
    launches = Counter(paths[row["stack"]][0] for row in recording.rows("launch"))
    assert launches["svm_map"] >= 2 and launches["svm_unmap"] == launches["svm_map"]
    assert launches["fill"] == 2 * CALLS
    assert [(row["function"], row["bytes"]) for row in recording.rows("transfer")] == calls_of(recording.ledger)


def targets(library: Path, layout: Layout) -> list[int]:
    """The functions that are called at the probes for the runtime's own kernels: virtual addresses."""
    found = set()
    with library.open("rb") as file:
        elf = LibraryFile(file)
        for entry in layout.entries:
            if entry.action is Action.OWN_LAUNCHES:
                offset = elf.offset(entry.address, executable=True)
                file.seek(offset)
                opcode, distance = struct.unpack("<Bi", file.read(5))
                assert opcode == 0xE8
                found.add(entry.address + 5 + distance)
    return sorted(found)


@dataclass(frozen=True)
class Told:
    """A recording of the program on one GPU, and what the runtime said of each kernel of its own, in order."""

    device: str
    gpu: int
    recording: Recording
    kernels: list[dict[str, Any]]


ASKED = [*((device, 0) for device in DEVICES), ("bmg", 1)]


@pytest.fixture(scope="module", params=ASKED, ids=str)
def told(
    opencl: OpenCL,
    copies: Path,
    layout: Layout,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Told:
    """The program stops at each launch, wherever it is from, and asks the runtime (dispatched.h)."""
    device, gpu = request.param
    folder = tmp_path_factory.mktemp(f"{device}-{gpu}")
    dispatch = layout.dispatch
    assert dispatch
    places = [f"place {opencl.library.resolve()} {address}" for address in targets(opencl.library, layout)]
    inside = f"kernels {dispatch.first} {dispatch.many} {dispatch.size} {dispatch.kernel[0]} {dispatch.kernel[1]} 16"
    (folder / "dispatched").write_text("\n".join([*places, inside, ""]))
    command = [copies, "--gpu", gpu, "--dispatched", folder / "dispatched", "--output", folder / "told"]
    settings = {"CreateMultipleRootDevices": str(gpu + 1)}
    ledger = read_copies(record(opencl, device, folder, command, settings | BY_KERNELS))
    kernels = [json.loads(line) for line in (folder / "told").read_text().splitlines()]
    return Told(device, gpu, Recording(CaptureReader(folder / "capture"), ledger, {}), kernels)


def test_name_address_and_code_are_what_the_runtime_says(told: Told) -> None:
    launches = told.recording.rows("launch")
    assert len(told.kernels) > 25
    assert [(row["name"], canonical(row["address"]), row["size"]) for row in launches] == [
        (kernel["name"], canonical(kernel["address"]), len(kernel["code"]) // 2) for kernel in told.kernels
    ]
    codes = {(kernel["name"], canonical(kernel["address"]), kernel["code"]) for kernel in told.kernels}
    elfs = [row["elf"] for row in told.recording.rows("kernel")]
    recorded = [kernel for elf in elfs for kernel in read_zebin(elf).kernels]
    assert {(kernel.name, kernel.address, kernel.code.hex()) for kernel in recorded} == codes


def test_stalls_of_the_runtime_s_own_kernels_are_at_the_calls(
    opencl: OpenCL, copies: Path, told: Told, tmp_path: Path
) -> None:
    # given a GPU that executes the runtime's own kernels, where the runtime says that they lie
    lines = []
    by_name = {kernel["name"]: kernel for kernel in told.kernels}
    for name, kernel in by_name.items():
        (tmp_path / name).write_bytes(bytes.fromhex(kernel["code"]))
        lines.append(f"kernel {name} {kernel['address']} {tmp_path / name}")
    for way in {kernel["way"]: None for kernel in told.kernels}:
        names = [kernel["name"] for kernel in told.kernels if kernel["way"] == way]
        lines += [f"way {queue} {way} {' '.join(names[: len(names) // 2])}" for queue in ("in-order", "out-of-order")]
    (tmp_path / "own").write_text("\n".join([*lines, ""]))
    command = [copies, "--calls", CALLS, "--gpu", told.gpu, "--own", tmp_path / "own"]
    settings = BY_KERNELS | {"CreateMultipleRootDevices": str(told.gpu + 1)}

    _, rows = record_with_gpu(opencl, told.device, tmp_path, command, settings)

    produced: Counter[tuple[str, int]] = Counter()
    for row in rows:
        produced[row.kernel, row.offset] += row.captured
    words = [*IAPROF, "report", str(tmp_path / "capture"), "--frames=cpu,function,offset"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    reported: Counter[tuple[str, int]] = Counter()
    paths = set()
    for text in done.stdout.splitlines():
        frames, count = text.rsplit(" ", 1)
        cpu, gpu = frames.split(";-;")
        function, offset = (frame.removesuffix("_[g]").removesuffix("_[G]") for frame in gpu.split(";"))
        reported[function, int(offset, 16)] += int(count)
        paths.add((cpu[cpu.index("main;use;copy_all;") :].split(";")[3], function))
    assert len({kernel for kernel, _ in produced}) >= 7
    assert reported == produced
    assert paths <= {(kernel["way"], kernel["name"]) for kernel in told.kernels}


# --- by a library in the command


@pytest.mark.parametrize("device", DEVICES)
def test_injected_commands_tell_of_each_copy_and_fill(
    opencl: OpenCL, copies: Path, device: str, tmp_path: Path
) -> None:
    recording = record_copies(opencl, copies, device, tmp_path, BY_KERNELS, way="inject")

    test_each_copy_and_fill_is_a_row_with_its_bytes(recording)
    test_each_function_was_called_as_often_as_others_counted(recording)
    test_nothing_is_lost_or_strange(recording)
    # and from where: through the function that was called to the program's
    mappings = recording.rows("mapping")
    *_of_env, ours = (row for row in mappings if Path(row["path"]).name == built_library().name)
    named, called = Functions(copies, mappings), Functions(built_library(), [ours | {"path": str(built_library())}])
    stacks = {row["id"]: row["ips"] for row in recording.rows("stack")}
    transfers = iter(recording.rows("transfer"))
    for line in recording.ledger:
        for _ in range(line.calls if line.function else 0):
            ips = stacks[next(transfers)["stack"]]
            assert called.at(ips[0]).removeprefix("iaprof_") == line.function  # both names are there
            assert [name for ip in ips if (name := named.at(ip))] == [line.way, "copy_all", "use", "main", "_start"]
    # but of the runtime's own kernels nothing, which is told
    assert recording.rows("launch") == []
    library = injected_library(recording.capture, recording.pid)
    assert (library["copies"], library["own_kernels"]) == (True, False)
