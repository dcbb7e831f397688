"""Separate debug files: found where distributions and users put them, and only those of the same build."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaprof.symbols.symbolizers.binaries import Binaries, Facts
from iaprof.symbols.symbolizers.debug_files import debug_files
from unit.builds import Build, build, copied, link_name, no_descriptor_is_lost, take_out_debug_information

INSIDE = "opt/lib/libhere.so"  # the library's path below a root


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return build(tmp_path_factory.mktemp("compiled") / "libhere.so")


@pytest.fixture
def library(compiled: Build, tmp_path: Path) -> Build:
    """A copy of the library below a root of its own."""
    return copied(compiled, tmp_path / INSIDE)


@pytest.fixture
def binaries(tmp_path: Path) -> Iterator[Binaries]:
    with Binaries(tmp_path / "cache") as made:
        yield made


class Opener:
    """Opens files, and notes their paths."""

    def __init__(self) -> None:
        self.asked: list[Path] = []

    def __call__(self, path: Path) -> int | None:
        self.asked.append(path)
        return os.open(path, os.O_RDONLY) if path.is_file() else None


def facts_of(path: Path, binaries: Binaries) -> Facts:
    with path.open("rb") as file:
        return binaries.facts(file.fileno())


def debug_file_paths(library: Build, root: Path, binaries: Binaries, *symbol_dirs: Path) -> list[str]:
    """The paths of a library's debug files, relative to the root."""
    facts = facts_of(library.path, binaries)
    with no_descriptor_is_lost():
        paths = []
        for candidate in debug_files(f"/{INSIDE}", facts, [root], Opener(), binaries, symbol_dirs):
            assert os.fstat(candidate.file).st_ino == os.stat(candidate.path).st_ino
            os.close(candidate.file)
            paths.append(os.path.relpath(candidate.path, root))
    return paths


def test_debug_files_are_found_by_build_id(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    assert library.build_id is not None
    # given debug files under their build-id, in the system's folder and in the user's
    link = link_name(library.build_id, ".debug")
    take_out_debug_information(library, tmp_path / "usr/lib/debug" / link, link=False)
    (tmp_path / "dir" / link.parent).mkdir(parents=True)
    shutil.copy(tmp_path / "usr/lib/debug" / link, tmp_path / "dir" / link)
    # then
    assert debug_file_paths(library, tmp_path, binaries, tmp_path / "dir") == [f"usr/lib/debug/{link}", f"dir/{link}"]
    assert debug_file_paths(library, tmp_path / "elsewhere", binaries) == []


@pytest.mark.parametrize("place", ["opt/lib/x.debug", "opt/lib/.debug/x.debug", "usr/lib/debug/opt/lib/x.debug"])
@pytest.mark.parametrize("build_id", [True, False])
def test_debug_files_are_found_by_debuglink(
    library: Build, binaries: Binaries, tmp_path: Path, place: str, build_id: bool
) -> None:
    take_out_debug_information(library, tmp_path / place, build_id=build_id)
    assert debug_file_paths(library, tmp_path, binaries) == [place]


def test_without_a_build_id_the_checksum_must_match(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    # given
    place = "opt/lib/.debug/x.debug"
    take_out_debug_information(library, tmp_path / place, build_id=False)
    assert debug_file_paths(library, tmp_path, binaries) == [place]
    # when the debug file gets one more byte
    with (tmp_path / place).open("ab") as file:
        file.write(b"\0")
    # then
    assert debug_file_paths(library, tmp_path, binaries) == []


def test_with_the_build_id_the_checksum_is_not_checked(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    place = "opt/lib/.debug/x.debug"
    take_out_debug_information(library, tmp_path / place)
    with (tmp_path / place).open("ab") as file:
        file.write(b"\0")
    assert debug_file_paths(library, tmp_path, binaries) == [place]


def test_debug_files_of_another_build_are_skipped(library: Build, binaries: Binaries, tmp_path: Path) -> None:
    assert library.build_id is not None
    # given debug files of another build in all places but the last
    other = build(tmp_path / "other.so", "wrong")
    wrong = tmp_path / "wrong.debug"
    take_out_debug_information(other, wrong)
    take_out_debug_information(library, tmp_path / "usr/lib/debug/opt/lib/x.debug")
    link = link_name(library.build_id, ".debug")
    for place in (f"usr/lib/debug/{link}", "opt/lib/x.debug", "opt/lib/.debug/x.debug"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(wrong, tmp_path / place)
    # then
    assert debug_file_paths(library, tmp_path, binaries) == ["usr/lib/debug/opt/lib/x.debug"]


def test_a_library_without_a_build_id_takes_no_debug_file_with_one(binaries: Binaries, tmp_path: Path) -> None:
    # given a debug file with the right checksum
    library = build(tmp_path / INSIDE, build_id="none")
    assert library.build_id is None
    place = "opt/lib/x.debug"
    take_out_debug_information(library, tmp_path / place)
    assert debug_file_paths(library, tmp_path, binaries) == [place]
    # when that file is replaced by one of a build with an id
    other = build(tmp_path / "other.so")
    take_out_debug_information(other, tmp_path / place)
    # then
    assert debug_file_paths(library, tmp_path, binaries) == []


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"no ELF file at all" * 100])
def test_files_that_are_not_elf_are_skipped(library: Build, binaries: Binaries, tmp_path: Path, content: bytes) -> None:
    take_out_debug_information(library, tmp_path / "opt/lib/x.debug")
    (tmp_path / "opt/lib/x.debug").write_bytes(content)
    assert debug_file_paths(library, tmp_path, binaries) == []


def test_a_file_without_debug_information_and_symbols_is_skipped(
    library: Build, binaries: Binaries, tmp_path: Path
) -> None:
    # given a stripped library of the same build where its debug file should be
    take_out_debug_information(library, tmp_path / "opt/lib/x.debug")
    shutil.copy(library.path, tmp_path / "opt/lib/x.debug")
    assert debug_file_paths(library, tmp_path, binaries) == []


def test_only_the_opener_opens_files_and_only_below_the_roots(
    library: Build, binaries: Binaries, tmp_path: Path
) -> None:
    take_out_debug_information(library, tmp_path / "opt/lib/x.debug")
    facts = facts_of(library.path, binaries)
    opener = Opener()
    roots = [tmp_path, tmp_path / "second"]
    for candidate in debug_files(f"/{INSIDE}", facts, roots, opener, binaries):
        os.close(candidate.file)
    assert len(opener.asked) == len(set(opener.asked)) == 8
    assert all(path.is_relative_to(tmp_path) and path.is_absolute() for path in opener.asked)
    assert sum(path.is_relative_to(roots[1]) for path in opener.asked) == 4


def test_no_descriptor_stays_open_if_only_the_first_file_is_taken(
    library: Build, binaries: Binaries, tmp_path: Path
) -> None:
    assert library.build_id is not None
    take_out_debug_information(library, tmp_path / "opt/lib/x.debug")
    facts = facts_of(library.path, binaries)
    with no_descriptor_is_lost():
        for candidate in debug_files(f"/{INSIDE}", facts, [tmp_path], Opener(), binaries):
            os.close(candidate.file)
            break
