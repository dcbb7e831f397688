# SPDX-License-Identifier: Apache-2.0
"""`iaprof calibrate`: that it finds what ships, and paths of another shape, and believes nothing else."""

import _ctypes
import ctypes
import dataclasses
import json
import os
import select
import shutil
import subprocess
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

import elf_sections
from conftest import descendants
from driver.driver import HERE, Driver
from iaprof.bpf.driver_layout import Action, Field, Layout, find_layout
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.record.calibrate import calibrate
from iaprof.record.calibrate.calibrate import CalibrationError
from integration.recording import IAPROF
from unit.in_process import iaprof
from waiting import until

# Bytes: of the libraries beside the driver, the compiler's are larger. Native modules need none of it.
LARGE = 5 << 20


def build_id_of(library: Path) -> str:
    with library.open("rb") as file:
        return LibraryFile(file).build_id()


def compiled(folder: Path, source: str | Path, *options: str) -> Path:
    """A library that has the driver's name."""
    if isinstance(source, str):
        (folder / "source.c").write_text(source)
        source = folder / "source.c"
    library = folder / "libze_intel_gpu.so.1"
    command = (os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-z,now")
    subprocess.run([*command, "-Wl,--build-id=sha1", *options, source, "-o", library], check=True)
    return library


def processes_with(word: str) -> list[str]:
    """Command lines of running processes that have a word."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except OSError:
            continue  # it ended
    return [line for line in lines if word in line]


def test_finds_what_ships_for_the_real_driver(driver: Driver, tmp_path: Path) -> None:
    output = tmp_path / "layout.json"

    done = iaprof("calibrate", driver.library, "-o", output, "--json")

    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["devices"] == list(calibrate.DEVICES)
    assert output.read_text() == find_layout(build_id_of(driver.library)).to_json()  # type: ignore[union-attr]
    assert told["layout"] == json.loads(output.read_text())
    assert told["single_stepped"] == []


def of_unknown_build(driver: Driver, known: Layout, folder: Path, largest: int) -> tuple[Path, str]:
    """A copy of the driver in `folder`, and its build-id, with those of the libraries beside it that are not larger."""
    folder.chmod(0o755)  # who is nobody must find what lies beside the driver
    for path in driver.library.parent.iterdir():
        if path.is_file() and path.stat().st_size < largest:
            shutil.copy(path, folder)
    library = folder / driver.library.name
    content = driver.library.read_bytes()
    unknown = known.build_id[::-1]
    library.write_bytes(content.replace(bytes.fromhex(known.build_id), bytes.fromhex(unknown), 1))
    assert find_layout(unknown) is None
    return library, unknown


def test_finds_the_same_for_a_build_that_nobody_knows(driver: Driver, tmp_path: Path) -> None:
    known = find_layout(build_id_of(driver.library))
    assert known
    library, unknown = of_unknown_build(driver, known, tmp_path, 1 << 40)

    found = calibrate.calibrate(library)

    assert found.layout == dataclasses.replace(known, build_id=unknown)
    assert found.no_own_kernels == ""


def test_without_the_compiler_all_but_the_driver_s_own_kernels_are_found(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = find_layout(build_id_of(driver.library))
    assert known
    library, unknown = of_unknown_build(driver, known, tmp_path, LARGE)
    monkeypatch.setattr(calibrate, "DEVICES", {device: calibrate.DEVICES[device] for device in ("lnl", "pvc")})

    found = calibrate.calibrate(library)

    entries = tuple(entry for entry in known.entries if entry.action is not Action.OWN_LAUNCH)
    assert known.has_own_kernels and len(entries) < len(known.entries)
    assert found.layout == dataclasses.replace(known, build_id=unknown, entries=entries)
    assert "libigc2" in found.no_own_kernels


def test_finds_paths_through_objects_of_another_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compiled(tmp_path, HERE / "other_driver.c")
    monkeypatch.setattr("iaprof.bpf.driver_layout.CACHE", tmp_path / "cache")
    monkeypatch.setattr(calibrate, "CACHE", tmp_path / "cache")

    found = calibrate.calibrate(library)
    layout = found.layout
    calibrate.store(layout, None)

    driver = ctypes.CDLL(str(library))
    where = list((ctypes.c_uint32 * 11).in_dll(driver, "where"))
    _ctypes.dlclose(
        driver._handle
    )  # recorders of later tests would say that this process has a driver they do not know
    immutable, module, code, size, allocation, name, address, of, binary, length, bias = where
    assert layout.address == (Field((immutable, allocation, address)),)
    assert layout.allocation == (*layout.address, Field((immutable, allocation, of)))
    assert (layout.code, layout.size) == (Field((immutable, code)), Field((immutable, size), bits=32))
    assert (layout.name, layout.kernel_class) == (Field((immutable, name)), Field((immutable, 0)))
    assert (layout.module, layout.module_bias) == (Field((module,)), bias)
    assert (layout.binary, layout.binary_size) == (Field((module, binary)), Field((module, length)))
    with library.open("rb") as file:
        at = {symbol.name: symbol["st_value"] for symbol in elf_sections.symbols(ELFFile(file)).iter_symbols()}
    assert layout.classes == (at["of_immutables"],)
    # push and je are emulated, with an endbr64 of 4 bytes and a test of 3 before them; sub and xor are not.
    assert {(entry.action, entry.address) for entry in layout.entries} == {
        (Action.LAUNCH, at["launch"] + 4),
        (Action.LAUNCH, at["launch_indirect"]),
        (Action.KERNEL_GONE, at["kernel_gone"] + 7),
        (Action.MODULE_GONE, at["module_gone"]),
    }
    assert find_layout(layout.build_id) == layout
    assert found.single_stepped == ("zeCommandListAppendLaunchKernelIndirect",)


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ('-DONLY="bmg"', "it runs as 1 of 4 devices (its zeInit fails with 0x78000001"),
        ("-DRESTLESS", "no way from a kernel's handle leads to its address in all modules on all devices"),
    ],
)
def test_believes_nothing_that_does_not_hold_on_all_devices(tmp_path: Path, option: str, why: str) -> None:
    library = compiled(tmp_path, HERE / "other_driver.c", option)

    with pytest.raises(CalibrationError) as refused:
        calibrate.calibrate(library)

    assert why in str(refused.value)


def test_what_was_found_before_it_hangs_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SECONDS", 4.0)
    (tmp_path / "hangs").mkdir()
    expected = calibrate.calibrate(compiled(tmp_path, HERE / "other_driver.c"))

    found = calibrate.calibrate(compiled(tmp_path / "hangs", HERE / "other_driver.c", "-DHANGS"))

    assert expected.no_own_kernels != found.no_own_kernels == "as bmg, it has not ended after 4 s"
    assert [entry.action for entry in found.layout.entries] == [entry.action for entry in expected.layout.entries]


STAYS = """
#include <unistd.h>
__attribute__((constructor)) static void stay(void)
{
    while (1)
        pause();
}
"""


def has_mapped(library: Path, pid: int) -> bool:
    return str(library) in Path(f"/proc/{pid}/maps").read_text()


def test_no_process_outlives_the_command(tmp_path: Path) -> None:
    library = compiled(tmp_path, STAYS)
    with subprocess.Popen(
        [*IAPROF, "calibrate", library, "-o", tmp_path / "layout.json"], stderr=subprocess.DEVNULL
    ) as command:
        until(
            lambda: sum(has_mapped(library, pid) for pid in descendants(command.pid)) >= len(calibrate.DEVICES), command
        )
        children = [os.pidfd_open(pid) for pid in descendants(command.pid)]
        command.kill()
    for child in children:
        assert select.select([child], [], [], 30)[0]
        os.close(child)


HANGS = """
#include <unistd.h>
__attribute__((constructor)) static void hang(void)
{
    if (!fork())
        execlp("sleep", "sleep", "12345.6789", NULL);
    pause();
}
"""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("int nothing;", "it has no function zeInit"),
        ("__attribute__((constructor)) static void end(void) { __builtin_trap(); }", "ends without an answer"),
        ("#include <unistd.h>\n__attribute__((constructor)) static void end(void) { _exit(0); }", "without an answer"),
        (HANGS, "it has not ended after 1 s"),
    ],
    ids=["empty", "crashes", "exits", "hangs"],
)
def test_a_library_that_is_no_driver_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    library = compiled(tmp_path, source)
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(private))
    if source is HANGS:
        monkeypatch.setattr(calibrate, "SECONDS", 1.0)

    with pytest.raises(CalibrationError) as refused:
        calibrate.calibrate(library)

    assert why in str(refused.value)
    assert "--launches=inject" in str(refused.value)
    assert not list(private.iterdir())
    until(lambda: not processes_with("calibrate.child") and not processes_with("12345.6789"))


def test_what_is_no_library_is_one_sentence_and_writes_nothing(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("int main;")
    os.mkfifo(tmp_path / "fifo")
    refused = compiled(tmp_path, "int nothing;")
    refused.chmod(0o777)
    before = sorted(tmp_path.iterdir())

    for path in (text, tmp_path, tmp_path / "fifo", tmp_path / "none", refused):
        done = iaprof("calibrate", path, "-o", tmp_path / "layout.json")

        assert (done.code, done.out) == (1, "")
        last = done.err.splitlines()[-1]
        assert last.startswith(f"iaprof: {path} cannot be calibrated: ") and "inject" in last
    assert sorted(tmp_path.iterdir()) == before
