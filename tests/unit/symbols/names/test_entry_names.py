"""Drivers' entry points get names from layouts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from iaprof.bpf import driver_layout
from iaprof.record.symbolize.symbolizer import with_entry_names
from iaprof.symbols.names.names import Frame, Names, Symbolized
from iaprof.symbols.symbolizers.binaries import Binaries, BinaryError

BUILD_ID = bytes.fromhex("ab" * 20)
STRIPPED = "it is stripped"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stripped library, and a layout with one of its functions, at a few bytes past its beginning."""
    source, library = tmp_path / "driver.c", tmp_path / "libdriver.so"
    source.write_text("int launch(int n) { return n * 3; }\n")
    # Offsets and addresses differ, as some linkers make them.
    flags = ["-shared", "-fPIC", "-O2", "-Wl,-Ttext-segment=0x100000", f"-Wl,--build-id=0x{BUILD_ID.hex()}"]
    subprocess.run(["cc", *flags, "-o", library, source], check=True)
    symbols = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
    address = next(int(line.split()[0], 16) for line in symbols.splitlines() if line.endswith(" launch"))
    shipped = next(driver_layout.SHIPPED.glob("*.json"))
    layout = json.loads(shipped.read_text())
    layout["build_id"], layout["version"] = BUILD_ID.hex(), "1.2.3"
    launch = next(entry for entry in layout["entries"] if entry["action"] == "launch")
    launch |= {"address": address + 2, "name": "zeLaunchIt"}
    for entry in layout["entries"]:
        entry["address"] = launch["address"] + (0 if entry is launch else 1)
    monkeypatch.setattr(driver_layout, "SHIPPED", tmp_path)
    (tmp_path / f"{BUILD_ID.hex()}.json").write_text(json.dumps(layout))
    return library


@pytest.fixture
def binaries(tmp_path: Path) -> Iterator[Binaries]:
    with Binaries(tmp_path / "cache") as opened:
        yield opened


def entry_offset(driver: Path) -> int:
    """Where in the file the probe is, as a disassembler says."""
    code = subprocess.run(
        ["objdump", "-d", "-F", "--disassemble=launch", driver], capture_output=True, text=True, check=True
    ).stdout
    return int(code.split("File Offset: 0x", 1)[1].split(")")[0], 16) + 2


def test_an_entry_point_without_a_symbol_gets_the_layouts_name(driver: Path, binaries: Binaries) -> None:
    offset = entry_offset(driver)
    asked = np.array([offset, offset + 100], np.uint64)
    with driver.open("rb") as file:
        named = with_entry_names(Symbolized(problem=STRIPPED), binaries, file.fileno(), BUILD_ID, asked)
        only = with_entry_names(Symbolized(problem=STRIPPED), binaries, file.fileno(), BUILD_ID, asked[:1])
    assert named.names.find(asked).tolist() == [0, -1]
    assert named.names.frames(0) == (Frame("zeLaunchIt"),)
    assert named.source == "iaprof's layout of this driver (1.2.3)"
    assert named.problem == STRIPPED  # of the other address
    assert only.problem == ""


def test_a_symbol_of_the_file_is_better(driver: Path, binaries: Binaries) -> None:
    offset = entry_offset(driver)
    asked = np.array([offset, offset + 1], np.uint64)
    own = Symbolized(Names.of([(offset, 1, [Frame("L0::launch", "a.cpp", 3)])]), "symbol table")
    with driver.open("rb") as file:
        named = with_entry_names(own, binaries, file.fileno(), BUILD_ID, asked)
    assert named.names.frames(int(named.names.find(asked)[0])) == (Frame("L0::launch", "a.cpp", 3),)
    assert named.source == "symbol table and iaprof's layout of this driver (1.2.3)"


@pytest.mark.parametrize("build_id", [None, bytes(20)])
def test_another_build_has_no_names(driver: Path, binaries: Binaries, build_id: bytes | None) -> None:
    asked = np.array([entry_offset(driver)], np.uint64)
    with driver.open("rb") as file:
        assert with_entry_names(Symbolized(problem=STRIPPED), binaries, file.fileno(), build_id, asked) == Symbolized(
            problem=STRIPPED
        )


def test_a_file_that_only_claims_the_build_id(driver: Path, binaries: Binaries, tmp_path: Path) -> None:
    asked = np.array([entry_offset(driver)], np.uint64)
    for content in (b"", b"\x7fELF" + bytes(60), driver.read_bytes()[:200]):
        (tmp_path / "fake").write_bytes(content)
        with (tmp_path / "fake").open("rb") as file:
            assert not len(with_entry_names(Symbolized(), binaries, file.fileno(), BUILD_ID, asked).names)


def test_only_the_sandbox_reads_the_file(driver: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a file that this process cannot read, as of a file system that never answers
    asked, nothing = np.array([entry_offset(driver)], np.uint64), -1
    with driver.open("rb") as file:
        found = binaries.addresses(file.fileno(), asked)
    monkeypatch.setattr(binaries, "addresses", lambda *_: found)
    # then
    assert with_entry_names(Symbolized(), binaries, nothing, BUILD_ID, asked).names.find(asked).tolist() == [0]


def test_a_file_that_takes_too_long_to_read_has_no_names(
    driver: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise BinaryError("the reader process took longer than 1 s")

    monkeypatch.setattr(binaries, "addresses", never)
    asked = np.array([entry_offset(driver)], np.uint64)
    with driver.open("rb") as file:
        assert with_entry_names(Symbolized(problem=STRIPPED), binaries, file.fileno(), BUILD_ID, asked) == Symbolized(
            problem=STRIPPED
        )
