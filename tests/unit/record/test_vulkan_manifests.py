"""Mesa's drivers that manifests for Vulkan's loader name, and manifests that lead nowhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from iaprof.bpf.probes.libraries import VULKAN
from iaprof.record.kernels import drivers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of manifests, with an absolute, a relative and another driver; and a folder of the system."""
    manifests = tmp_path / "share/vulkan/icd.d"
    for path in (manifests, tmp_path / "mesa", tmp_path / "lib"):
        path.mkdir(parents=True)
        (path / VULKAN).touch()
        (path / "libvulkan_radeon.so").touch()
    for name, library in {
        "1": f"{tmp_path}/mesa/{VULKAN}",
        "2": f"./{VULKAN}",
        "3": VULKAN,  # the system's
        "4": f"{tmp_path}/mesa/libvulkan_radeon.so",
        "5": f"/nowhere/{VULKAN}",
    }.items():
        write(manifests / f"{name}.json", library)
    monkeypatch.setattr(drivers, "_MANIFESTS", (str(tmp_path / "share"),))
    monkeypatch.setattr(drivers, "SYSTEM_FOLDERS", (str(tmp_path / "lib"),))
    for name in ("XDG_DATA_DIRS", "XDG_CONFIG_DIRS", "VK_DRIVER_FILES", "VK_ADD_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return manifests


def write(path: Path, library: object) -> None:
    path.write_text(json.dumps({"ICD": {"library_path": library}}))


def test_drivers_are_found_where_the_loader_finds_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = folder.parents[2]
    installed = [base / "lib" / VULKAN, base / "mesa" / VULKAN, folder / VULKAN]
    assert list(drivers.vulkan_drivers(for_command=False)) == installed
    # and those that the command's environment names, each file once
    (base / "own").mkdir()
    (base / "own" / VULKAN).symlink_to(base / "mesa" / VULKAN)
    (base / "other").mkdir()
    (base / "other" / VULKAN).touch()
    write(base / "own.json", f"{base}/own/{VULKAN}")
    write(base / "other.json", f"other/{VULKAN}")
    monkeypatch.setenv("VK_DRIVER_FILES", f"{base}/own.json:{base}/other.json:/nowhere.json:relative.json:")
    assert list(drivers.vulkan_drivers(for_command=False)) == installed
    assert list(drivers.vulkan_drivers(for_command=True)) == [*installed, base / "other" / VULKAN]


def test_manifests_that_are_none_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given: what anybody may name in the command's environment
    base = folder.parents[2]
    bad = base / "bad"
    bad.mkdir()
    os.mkfifo(bad / "1.json")
    (bad / "2.json").write_text("[" * 100_000)
    (bad / "3.json").write_bytes(b"\xff\xfe\0")
    for number, library in enumerate((7, None, ["x"], f"a\0/{VULKAN}", f"{'x/' * 5000}{VULKAN}", f"\ud800/{VULKAN}")):
        write(bad / f"4{number}.json", library)
    (bad / "5.json").symlink_to("5.json")
    with (bad / "6.json").open("wb") as file:
        file.truncate(1 << 40)
    (bad / "7.json").mkdir()
    write(bad / "8.json", f"{base}/mesa/{VULKAN}")
    (bad / "8.json").chmod(0o666)
    monkeypatch.setenv("VK_ADD_DRIVER_FILES", f"{bad}:" + ":".join(map(str, sorted(bad.iterdir()))))
    for path in folder.iterdir():
        path.unlink()
    # then
    assert list(drivers.vulkan_drivers(for_command=True)) == [base / "lib" / VULKAN]


def test_of_many_manifests_some_are_read(folder: Path) -> None:
    base = folder.parents[2]
    for number in range(1000):
        write(folder / f"0-{number:03}.json", f"{base}/mesa/{VULKAN}")
    assert list(drivers.vulkan_drivers(for_command=False)) == [base / "lib" / VULKAN, base / "mesa" / VULKAN]
