"""Earlier files of an output name: which are removed to make room, in which order, and which never."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.formats.header.budgets import RemovedFiles
from iaprof.record.capture.rotation import PartFiles, free_name, keep_earlier, spool_path

FIRST = 1_795_000_000.25


def part(output: Path, number: int, size: int = 100) -> Path:
    """An earlier file; `number` is its age order."""
    path = free_name(output, FIRST + number)
    path.write_bytes(b"x" * size)
    os.utime(path, (FIRST + number, FIRST + number))
    return path


def files(output: Path, most_files: int | None = None, most_bytes: int | None = None) -> tuple[PartFiles, list[str]]:
    said: list[str] = []
    return PartFiles(output, most_files, most_bytes, said.append, lambda text: said.append(f"warning: {text}")), said


@pytest.mark.parametrize("name", ["cap.parquet", "c", "a.b.parquet", "odd [name]*.parquet"])
def test_the_oldest_are_removed_those_of_earlier_recordings_too(tmp_path: Path, name: str) -> None:
    # given four files of an earlier recording, and what is none of them
    output = tmp_path / name
    old = [part(output, number) for number in range(4)]
    outside = tmp_path / "outside"
    outside.mkdir()
    others = [output, spool_path(output), spool_path(old[0]), tmp_path / "cap.20261121-055423.parquet",
              tmp_path / "cap.20261121-0554231.parquet.tmp", tmp_path / "xcap.20261121-0554231.parquet",
              outside / old[0].name]  # fmt: skip
    for path in others:
        path.write_bytes(b"x" * 1000)
        os.utime(path, (0, 0))
    # when there is room for two
    kept, said = files(output, most_bytes=250)
    kept.make_room()
    # then
    assert [path.exists() for path in old] == [False, False, True, True]
    assert all(path.exists() for path in others)
    assert kept.removed == RemovedFiles(2, 200)
    assert kept.header() == {"removed_files": {"files": 2, "bytes": 200}}
    assert said == [f"--max-total: removed {path.name}, 100 bytes" for path in old[:2]]
    # and when another one comes
    new = part(output, 9, 200)
    kept.add(new)
    assert new.exists()
    assert not old[2].exists()
    assert kept.removed.files == 4  # the 200 bytes and one of 100 are more than 250
    assert not old[3].exists()


def test_links_and_folders_are_left_alone(tmp_path: Path) -> None:
    # given what another user could put there
    output, victim = tmp_path / "c.parquet", tmp_path / "victim"
    victim.write_bytes(b"x" * 1000)
    link, folder, pipe = (free_name(output, FIRST + number) for number in range(3))
    link.symlink_to(victim)
    folder.mkdir()
    os.mkfifo(pipe)
    kept, said = files(output, most_bytes=1)
    kept.make_room()
    assert victim.exists()
    assert link.is_symlink()
    assert folder.is_dir()
    assert pipe.exists()
    assert said == []
    assert kept.removed == RemovedFiles()


def test_a_file_that_is_larger_than_all_may_be_is_removed_with_a_warning(tmp_path: Path) -> None:
    output = tmp_path / "c.parquet"
    kept, said = files(output, most_bytes=50)
    path = part(output, 1)
    kept.add(path)
    assert not path.exists()
    assert said[0].startswith(f"warning: --max-total: {path.name} alone has 100 bytes")


def test_a_number_of_files_is_that_of_this_recording(tmp_path: Path) -> None:
    # given a file of an earlier recording, and three of this one of which two may stay, the last one not among them
    output = tmp_path / "c.parquet"
    earlier = part(output, 0)
    kept, _ = files(output, most_files=3)
    own = [part(output, number) for number in range(1, 4)]
    for path in own:
        kept.add(path)
    assert [path.exists() for path in (earlier, *own)] == [True, False, True, True]
    assert kept.header() == {"removed_files": {"files": 1, "bytes": 100}}
    # and one that was moved to a store meanwhile is not counted
    own[1].unlink()
    kept.add(part(output, 5))
    assert kept.removed.files == 1


def test_without_limits_nothing_is_said(tmp_path: Path) -> None:
    kept, _ = files(tmp_path / "c.parquet")
    kept.add(part(tmp_path / "c.parquet", 1))
    assert kept.header() == {}
    assert len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_removed_is_a_warning_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "c.parquet"
    old = [part(output, number) for number in range(2)]

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("iaprof.record.capture.rotation.remove", refuse)
    kept, said = files(output, most_bytes=1)
    kept.make_room()
    kept.make_room()
    refusals = [f"warning: --max-total: {path} cannot be removed: Operation not permitted" for path in old]
    assert [text for text in said if "alone" not in text] == refusals
    assert kept.removed == RemovedFiles()


def test_a_finished_file_gets_the_name_of_an_earlier_one(tmp_path: Path) -> None:
    output = tmp_path / "cap.parquet"
    assert keep_earlier(output) is None
    output.write_text("a day's recording")
    os.utime(output, (FIRST, FIRST))
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(FIRST))
    # when
    path = keep_earlier(output)
    # then it is named by when it ended, and nothing that has this name is replaced
    assert path == tmp_path / f"cap.{stamp}2.parquet"
    assert path.read_text() == "a day's recording"
    assert not output.exists()
    output.write_text("another")
    os.utime(output, (FIRST, FIRST))
    assert keep_earlier(output) == tmp_path / f"cap.{stamp}2-2.parquet"
    # and a clock that was wrong makes a name nevertheless
    output.touch()
    os.utime(output, (1 << 60, 1 << 33))
    path = keep_earlier(output)
    assert path is not None
    assert path.name.startswith(time.strftime("cap.%Y"))


def test_a_link_that_has_the_output_name_is_refused(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("root's own")
    (tmp_path / "c").symlink_to(victim)
    with pytest.raises(IaprofError, match="is not a file"):
        keep_earlier(tmp_path / "c")
    assert (tmp_path / "c").is_symlink()


@pytest.mark.parametrize(
    "value", [None, 3, [], {"files": "3"}, {"files": -1, "bytes": 0}, {"files": 1 << 70, "bytes": 1}, {"files": 1}]
)
def test_untrusted_headers(value: object) -> None:
    assert RemovedFiles.from_header({"removed_files": value}) is None


def test_what_is_told_of_a_header() -> None:
    found = RemovedFiles.from_header({"removed_files": {"files": 2, "bytes": 3_000_000}})
    assert found is not None
    assert found.sentence() == "2 earlier files, 3.0 MB, to make room"
