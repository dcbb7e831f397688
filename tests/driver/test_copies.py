# SPDX-License-Identifier: Apache-2.0
"""Copies and fills on Intel's real runtime: that they are recorded, and the runtime's own kernels that do them."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from driver import copies as program
from driver.copies import PRINTS_KERNELS, Copies, Functions, injected_library, read_copies
from driver.counters import counted, counting
from driver.driver import DEVICES, HERE, LIBRARIES, Driver, of_an_unknown_build, run_workload
from driver.recording import run_recorder
from iaprof.bpf.driver_layout import CACHE, TRANSFERS, find_layout
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.launch_warnings import OWN_KERNELS_UNRECORDED
from iaprof.formats.wire.launches import TRANSFER_FUNCTIONS as FUNCTIONS, LaunchFlags
from iaprof.gpu.code import canonical
from iaprof.gpu.intel.zebin import read_zebin
from iaprof.record.kernels.drivers import built_library
from iaprof.report.join.executions import read_launches
from integration.recording import IAPROF
from standin.hardware import Hardware, LedgerRow

pytestmark = pytest.mark.bpf

CALLS = 3
EXECUTIONS = 4


@dataclass(frozen=True)
class Recording:
    """A capture, and what program and runtime said meanwhile."""

    capture: CaptureReader
    printed: str

    def rows(self, kind: str, pid: int) -> list[dict[str, Any]]:
        """Those of a process, in order of time."""
        rows = [row for row in self.capture.table(kind).to_pylist() if row["pid"] == pid]
        return sorted(rows, key=lambda row: int(row["time_ns"]))


@pytest.fixture(scope="module")
def known(driver: Driver) -> Driver:
    """The driver that there is, which may be newer than the layouts that ship: Debian unstable goes on."""
    if find_layout(driver.build_id) is None:
        subprocess.run([*IAPROF, "calibrate", driver.library], check=True)
    return driver


@pytest.fixture(scope="module")
def copies(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.build(driver, tmp_path_factory.mktemp("copies"))


def record(
    driver: Driver, device: str, folder: Path, *command: object, way: str = "attach", **settings: str
) -> Recording:
    with Hardware(folder / "gpu", device) as hardware:
        environment = driver.environment(device) | hardware.env() | PRINTS_KERNELS | settings
        done = run_recorder(folder, environment, way, [str(word) for word in command])
    return Recording(CaptureReader(folder / "capture"), done.stdout)


@pytest.fixture(scope="module", params=DEVICES)
def recording(
    known: Driver, copies: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    folder = tmp_path_factory.mktemp(request.param)
    return record(known, request.param, folder, copies, "--calls", CALLS, "--executions", EXECUTIONS)


@pytest.fixture
def stalling(
    known: Driver,
    copies: Path,
    recording: Recording,
    ledger: list[Copies],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> tuple[Path, list[LedgerRow]]:
    """The same with a GPU that executes the runtime's own kernels, where the first recording says that they lie."""
    pid = ledger[0].pid
    elfs = [read_zebin(row["elf"]) for row in recording.rows("kernel", pid)]
    codes = {kernel.address: kernel.code for elf in elfs for kernel in elf.kernels}
    lines = []
    for row in {row["address"]: row for row in recording.rows("launch", pid)}.values():
        path = tmp_path / row["name"]
        path.write_bytes(codes[canonical(row["address"])])
        lines.append(f"kernel {row['name']} {row['address']} {path}")
    for line in ledger:
        lines.append(f"way {line.list} {line.way} {' '.join(line.kernels[: len(line.kernels) // line.calls])}")
    (tmp_path / "own").write_text("\n".join([*lines, ""]))
    device = request.node.callspec.params["recording"]
    with Hardware(tmp_path / "gpu", device) as hardware:
        environment = known.environment(device) | hardware.env()
        run_recorder(tmp_path, environment, "attach", [str(copies), "--own", str(tmp_path / "own")])
    return tmp_path / "capture", [row for row in hardware.ledger().rows if row.captured]


@pytest.fixture(scope="module")
def ledger(recording: Recording) -> list[Copies]:
    return read_copies(recording.printed)


def calls_of(ledger: list[Copies]) -> Iterator[tuple[str, int | None]]:
    """Function and bytes of each call, in order."""
    for line in ledger:
        for _ in range(line.calls):
            yield line.function, line.bytes


def test_the_program_copies_in_every_way(ledger: list[Copies]) -> None:
    lists = {name: [line for line in ledger if line.list == name] for name in ("regular", "immediate", "engine")}
    for name in ("regular", "immediate"):
        assert len(lists[name]) >= 12
        assert all(line.calls == CALLS and len(line.kernels) % CALLS == 0 < len(line.kernels) for line in lists[name])
    assert len(lists["engine"]) >= 12
    assert not any(line.kernels for line in lists["engine"])


def test_each_copy_and_fill_is_a_row_with_its_bytes(recording: Recording, ledger: list[Copies]) -> None:
    rows = recording.rows("transfer", ledger[0].pid)
    assert [(row["function"], row["bytes"]) for row in rows] == list(calls_of(ledger))
    assert recording.capture.header["totals"]["transfers"] == len(recording.capture.table("transfer"))
    assert recording.capture.header["probes"]["transfers"] >= len(rows)


def test_each_kernel_of_the_runtime_s_own_is_a_launch(recording: Recording, ledger: list[Copies]) -> None:
    rows = recording.rows("launch", ledger[0].pid)
    assert [row["name"] for row in rows] == [kernel for line in ledger for kernel in line.kernels]
    assert {row["flags"] & ~LaunchFlags.PRESUMED for row in rows} == {int(LaunchFlags.OWN)}


def test_kernels_of_a_closed_list_count_by_execution(recording: Recording, ledger: list[Copies]) -> None:
    pid = ledger[0].pid
    regular, immediate = (
        Counter(kernel for line in ledger if line.list == name for kernel in line.kernels)
        for name in ("regular", "immediate")
    )
    assert regular and immediate

    executed = Counter(row["list"] for row in recording.rows("command_list", pid) if row["event"] == "execute")
    launches = recording.rows("launch", pid)
    assert Counter(row["name"] for row in launches if row["list"] in executed) == regular
    (of_them,) = {row["list"] for row in launches if row["list"] in executed}
    assert executed[of_them] == EXECUTIONS

    ran: Counter[str] = Counter()
    for row in read_launches(recording.capture, ("time_ns", "pid", "list", "name")).to_pylist():
        if row["pid"] == pid:
            ran[row["name"]] += row["count"]
    assert ran == Counter({name: regular[name] * EXECUTIONS for name in regular}) + immediate


def test_copies_and_their_kernels_have_the_stack_of_the_call(
    recording: Recording, ledger: list[Copies], copies: Path
) -> None:
    pid = ledger[0].pid
    named = Functions(copies, recording.rows("mapping", pid))
    paths = {row["id"]: [named.at(ip) for ip in row["ips"]] for row in recording.rows("stack", pid)}
    transfers = iter(recording.rows("transfer", pid))
    launches = iter(recording.rows("launch", pid))
    for line in ledger:
        stacks = {next(transfers)["stack"] for _ in range(line.calls)}
        assert {next(launches)["stack"] for _ in line.kernels} <= stacks
        for stack in stacks:
            assert [name for name in paths[stack] if name] == [line.way, "copy_all", "use", "main", "_start"]


def test_stalls_of_the_runtime_s_own_kernels_are_at_the_calls(stalling: tuple[Path, list[LedgerRow]]) -> None:
    capture, rows = stalling
    produced: Counter[tuple[str, int]] = Counter()
    for row in rows:
        produced[row.kernel, row.offset] += row.captured

    words = [*IAPROF, "report", str(capture), "--frames=cpu,function,offset"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    reported: Counter[tuple[str, int]] = Counter()
    paths = set()
    for text in done.stdout.splitlines():
        frames, count = text.rsplit(" ", 1)
        cpu, gpu = frames.split(";-;")
        kernel, offset = (frame.removesuffix("_[g]").removesuffix("_[G]") for frame in gpu.split(";"))
        reported[kernel, int(offset, 16)] += int(count)
        *_, main, use, every, way, _of_the_runtime = cpu.split(";")
        paths.add((f"{main};{use};{every};{way}", kernel))
    assert len({kernel for kernel, _ in produced}) >= 7
    assert reported == produced
    # and from where: that a kernel which several calls launch ran for just one of them cannot be known
    assert paths <= {(row.stack, row.kernel) for row in rows}
    assert {kernel for _, kernel in paths} == {row.kernel for row in rows}


def test_nothing_is_lost_or_strange(recording: Recording) -> None:
    lost = [row for row in recording.capture.table("loss").to_pylist() if row["source"] != "recorder"]
    assert [row for row in lost if row["what"] != "library"] == []  # which is of other tests' drivers


# --- by a library in the command


@pytest.fixture(scope="module")
def driver_of_ours(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """A copy: Linux counts by file what the whole machine does."""
    return replace(driver, library=Path(shutil.copy(driver.library, tmp_path_factory.mktemp("counted"))))


@pytest.mark.parametrize("device", DEVICES)
def test_injected_commands_tell_of_each_copy_and_fill(
    driver_of_ours: Driver, copies: Path, device: str, tmp_path: Path
) -> None:
    """As often as the program says, and as Linux counts at the runtime's own functions."""
    # given
    with driver_of_ours.library.open("rb") as file:
        library = LibraryFile(file)
        places = program.places(driver_of_ours, copies, tmp_path)
        offsets = {name: library.offset(address, executable=True) for name, address in places.items()}
    # when
    with contextlib.ExitStack() as counters:
        by_linux = {name: counters.enter_context(counting(driver_of_ours.library, at)) for name, at in offsets.items()}
        recording = record(driver_of_ours, device, tmp_path, copies, "--calls", CALLS, way="inject")
        seen = {name: count for name, fds in by_linux.items() if (count := counted(fds))}
    # then
    ledger = read_copies(recording.printed)
    rows = recording.rows("transfer", ledger[0].pid)
    assert [(row["function"], row["bytes"]) for row in rows] == list(calls_of(ledger))
    assert Counter(row["function"] for row in rows) == seen
    assert set(seen) >= {name for name in FUNCTIONS if name.startswith("ze") and "Image" not in name}
    assert {(row["comm"], row["tid"]) for row in rows} == {(copies.name, ledger[0].pid)}
    test_nothing_is_lost_or_strange(recording)
    # and from where: through the function that was called to the program's
    (ours,) = (
        row for row in recording.rows("mapping", ledger[0].pid) if Path(row["path"]).name == built_library().name
    )
    mappings = recording.rows("mapping", ledger[0].pid)
    named, called = Functions(copies, mappings), Functions(built_library(), [ours | {"path": str(built_library())}])
    stacks = {row["id"]: row["ips"] for row in recording.rows("stack", ledger[0].pid)}
    transfers = iter(rows)
    for line in ledger:
        for _ in range(line.calls):
            ips = stacks[next(transfers)["stack"]]
            assert called.at(ips[0]) == line.function
            assert [name for ip in ips if (name := named.at(ip))] == [line.way, "copy_all", "use", "main", "_start"]


def test_injected_commands_copy_as_without(driver: Driver, copies: Path, tmp_path: Path) -> None:
    """Each argument reaches the runtime, which launches the same kernels."""
    words = [str(copies), "--calls", "2", "--executions", "2"]
    alone = read_copies(run_workload(words, driver.environment("lnl") | PRINTS_KERNELS, tmp_path))
    recording = record(driver, "lnl", tmp_path, *words, way="inject")
    injected = read_copies(recording.printed)
    assert [replace(line, pid=0, ns=0) for line in injected] == [replace(line, pid=0, ns=0) for line in alone]
    assert len(recording.rows("transfer", injected[0].pid)) == sum(line.calls for line in injected)


@pytest.mark.parametrize(
    "setting", ["ZE_ENABLE_LOADER_DRIVER_DDI_PATH=0", "ZE_ENABLE_LOADER_INTERCEPT=1", "ZE_ENABLE_TRACING_LAYER=1"]
)
def test_each_copy_is_told_of_on_every_path_through_the_loader(
    driver: Driver, copies: Path, setting: str, tmp_path: Path
) -> None:
    name, value = setting.split("=")
    recording = record(driver, "bmg", tmp_path, copies, way="inject", **{name: value})
    ledger = read_copies(recording.printed)
    rows = recording.rows("transfer", ledger[0].pid)
    assert [(row["function"], row["bytes"]) for row in rows] == list(calls_of(ledger))


def test_that_the_runtime_s_own_kernels_of_an_injected_command_are_not_recorded_is_told(
    driver: Driver, copies: Path, tmp_path: Path
) -> None:
    recording = record(driver, "bmg", tmp_path, copies, way="inject")

    ledger = read_copies(recording.printed)
    assert any(line.kernels for line in ledger)
    assert recording.rows("launch", ledger[0].pid) == []
    ours = injected_library(recording.capture, ledger[0].pid)
    assert (ours["copies"], ours["own_kernels"]) == (True, False)
    done = subprocess.run([*IAPROF, "info", str(tmp_path / "capture")], capture_output=True, text=True, check=True)
    assert f"{ours['path']}: {OWN_KERNELS_UNRECORDED}" in " ".join(done.stdout.split())


@pytest.fixture
def without_calls(known: Driver, tmp_path: Path) -> Iterator[Driver]:
    """A driver whose layout leads to its own kernels, but not to the functions that copy."""
    layout = find_layout(known.build_id)
    assert layout is not None
    driver = of_an_unknown_build(known, tmp_path)
    entries = tuple(entry for entry in layout.entries if entry.action not in TRANSFERS)
    file = CACHE / f"{driver.build_id}.json"
    CACHE.mkdir(parents=True, exist_ok=True)
    file.write_text(replace(layout, build_id=driver.build_id, entries=entries).to_json())
    yield driver
    file.unlink()


def test_kernels_of_no_known_call_have_stacks_of_their_own(without_calls: Driver, copies: Path, tmp_path: Path) -> None:
    recording = record(without_calls, "bmg", tmp_path, copies)

    ledger = read_copies(recording.printed)
    pid = ledger[0].pid
    launches = recording.rows("launch", pid)
    assert recording.rows("transfer", pid) == []
    assert [row["name"] for row in launches] == [kernel for line in ledger for kernel in line.kernels]
    # and these go through the driver's functions to the program's
    named = Functions(copies, recording.rows("mapping", pid))
    paths = {row["id"]: [named.at(ip) for ip in row["ips"]] for row in recording.rows("stack", pid)}
    found = [paths[row["stack"]] for row in launches]
    assert [[name for name in path if name] for path in found] == [
        [line.way, "copy_all", "use", "main", "_start"] for line in ledger for _ in line.kernels
    ]
    assert all(path.index("copy_all") >= 3 for path in found)


@pytest.mark.parametrize("device", DEVICES)
def test_name_address_and_code_are_what_the_runtime_says(known: Driver, device: str, tmp_path: Path) -> None:
    # given a program that has the handles of the runtime's own kernels
    libraries = known.folder / LIBRARIES
    linker = [libraries / "ld-linux-x86-64.so.2", "--library-path", libraries]
    script = [sys.executable, HERE / "own_kernels.py", known.library, DEVICES[device][0]]
    # when
    recording = record(known, device, tmp_path, *linker, *script)
    # then
    told = [json.loads(line) for line in recording.printed.splitlines() if line.startswith("{")]
    expected = [(kernel["name"], canonical(kernel["address"]), len(kernel["code"]) // 2) for kernel in told]
    launches = recording.rows("launch", told[0]["pid"])
    assert len(expected) > 50
    assert [(row["name"], canonical(row["address"]), row["size"]) for row in launches] == expected
    codes = {(kernel["name"], canonical(kernel["address"]), kernel["code"]) for kernel in told}
    elfs = [row["elf"] for row in recording.rows("kernel", told[0]["pid"])]
    recorded = [kernel for elf in elfs for kernel in read_zebin(elf).kernels]
    assert {(kernel.name, kernel.address, kernel.code.hex()) for kernel in recorded} == codes
    # and each is from the call that came before it, of a function that the runtime exports
    transfers = recording.rows("transfer", told[0]["pid"])
    times = [row["time_ns"] for row in transfers]
    assert [transfers[bisect_right(times, row["time_ns"]) - 1]["stack"] for row in launches] == [
        row["stack"] for row in launches
    ]
    assert len({row["stack"] for row in launches}) >= 4
