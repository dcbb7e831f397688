"""Source files: found by the last components of their paths, and only below the user's folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from iaprof.basics.errors import UsageError
from iaprof.report.gpu.source_files import SourceFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret.h").write_text("secret\n")
    (tmp_path / "src" / "lib").mkdir(parents=True)
    (tmp_path / "src" / "tile.h").write_text("outer 1\nouter 2\n")
    (tmp_path / "src" / "lib" / "tile.h").write_text("inner 1\n\tif (x)\x1b[31m // \u202e red  \r\n")
    return tmp_path / "src"


def test_the_longest_end_of_a_path_wins(folder: Path) -> None:
    sources = SourceFiles([folder])
    assert sources.line("/build/app/lib/tile.h", 1) == "inner 1"
    assert sources.line("/build/app/other/tile.h", 2) == "outer 2"
    assert sources.line("/build/app/./lib/../lib/tile.h", 1) == "inner 1"
    assert sources.line("../../lib/tile.h", 1) == "inner 1"
    assert sources.line("tile.h", 1) == "outer 1"


def test_lines_have_no_control_characters(folder: Path) -> None:
    assert SourceFiles([folder]).line("lib/tile.h", 2) == "    if (x)\\x1b[31m // \\u202e red"


def test_missing_lines_and_files(folder: Path) -> None:
    sources = SourceFiles([folder])
    for path, number in (("tile.h", 0), ("tile.h", -1), ("tile.h", 99), ("none.h", 1), ("", 1), ("/", 1), ("..", 1)):
        assert sources.line(path, number) is None, path
    assert SourceFiles([]).line("tile.h", 1) is None


def test_the_first_folder_takes_precedence(folder: Path) -> None:
    assert SourceFiles([folder / "lib", folder]).line("/x/tile.h", 1) == "inner 1"
    assert SourceFiles([folder, folder / "lib"]).line("/x/tile.h", 1) == "outer 1"


@pytest.mark.parametrize(
    "path", ["../secret.h", "/x/../../secret.h", "lib/../../secret.h", "lib/./../../../secret.h", "/etc/passwd"]
)
def test_paths_do_not_lead_outside(folder: Path, path: str) -> None:
    assert SourceFiles([folder]).file(path) is None


def test_links_are_followed_only_inside(folder: Path) -> None:
    (folder / "inside.h").symlink_to("lib/tile.h")
    (folder / "linked").symlink_to(folder / "lib")
    (folder / "relative.h").symlink_to("../secret.h")
    (folder / "absolute.h").symlink_to(folder.parent / "secret.h")
    (folder / "above").symlink_to("..")
    (folder / "loop.h").symlink_to("loop.h")
    sources = SourceFiles([folder])
    assert sources.line("inside.h", 1) == "inner 1"
    assert sources.line("linked/tile.h", 1) == "inner 1"
    for path in ("relative.h", "absolute.h", "above/secret.h", "loop.h"):
        assert sources.file(path) is None, path


def test_a_folder_can_be_a_link(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert SourceFiles([link]).line("tile.h", 1) == "outer 1"


def test_a_file_replaced_by_a_link_is_not_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is replaced by a link after its path was resolved: the link is not opened."""
    real = os.path.realpath

    def swapped(path: str, *, strict: bool = False) -> str:
        found = real(path, strict=strict)
        if found.endswith("/src/tile.h"):
            os.unlink(found)
            os.symlink("../secret.h", found)
        return found

    sources = SourceFiles([folder])
    monkeypatch.setattr(os.path, "realpath", swapped)
    assert sources.file("tile.h") is None


def test_only_regular_files_of_limited_size_that_are_not_hidden(folder: Path) -> None:
    os.mkfifo(folder / "pipe.h")
    (folder / "huge.h").touch()
    os.truncate(folder / "huge.h", 1 << 40)
    (folder / ".ssh").mkdir()
    (folder / ".ssh" / "id").write_text("secret")
    (folder / ".env").write_text("secret")
    (folder / "seen.h").symlink_to(".ssh/id")
    sources = SourceFiles([folder])
    for path in ("pipe.h", "huge.h", "lib", ".ssh/id", ".env", "seen.h"):
        assert sources.file(path) is None, path
    assert sources.line("/home/me/.cache/lib/tile.h", 1) == "inner 1"


def test_bytes_that_are_not_text(folder: Path) -> None:
    (folder / "binary.h").write_bytes(b"\xff\xfe\0x\n\xc3\xa9")
    sources = SourceFiles([folder])
    assert [sources.line("binary.h", number) for number in (1, 2)] == ["��\\x00x", "é"]


def test_files_changed_since(folder: Path) -> None:
    os.utime(folder / "tile.h", (1000, 1000))
    os.utime(folder / "lib" / "tile.h", (3000, 3000))
    sources = SourceFiles([folder])
    assert sources.newer_than(2000) == []
    sources.file("tile.h")
    sources.file("lib/tile.h")
    assert sources.newer_than(2000) == [str(folder / "lib" / "tile.h")]


def test_a_source_dir_that_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, why in (("none", "No such file or directory"), ("file", "Not a directory")):
        with pytest.raises(UsageError, match=f"--source-dir .*/{name} is not a folder that can be read: {why}"):
            SourceFiles([tmp_path / name])


def test_the_number_of_paths_is_limited(folder: Path) -> None:
    sources = SourceFiles([folder])
    for number in range(5_000):
        sources.file(f"{number}.h")
    assert sources.file("tile.h") is None
