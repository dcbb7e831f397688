"""Names of captures and outputs: whatever files are called, and whatever they are instead of captures."""

from __future__ import annotations

import glob
import os
import shutil
from pathlib import Path

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.formats.stores import within
from iaprof.report.fleet.fleet import _keys
from iaprof.report.fleet.sources import Source, _matches, find_sources
from unit.in_process import iaprof
from unit.report.fleet.fleets import SAMPLES, as_json, copied, folded, sum_of_single
from waiting import LONGEST_WAIT_S

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for captures, in which the user is, and a home of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    found = tmp_path / "captures"
    found.mkdir()
    monkeypatch.chdir(found)
    return found


def captures_of(*words: str | Path) -> list[str]:
    groups = as_json("top", "-q", *words, "--group-by=capture")["groups"]
    return [each["group"]["capture"] for each in groups]


def test_a_name_may_have_any_characters(folder: Path) -> None:
    names = ["a b", "a#b", "50%", "a[1]", "*", "a?b", "-q", "ä", "a\nb"]
    for name in names:
        shutil.copy(SAMPLES[0], folder / f"{name}.parquet")
    shown = sorted(f"{folder}/{name}.parquet".replace("\n", "\\x0a") for name in names)
    assert sorted(captures_of(folder)) == shown
    assert sorted(captures_of(folder)) == shown  # of the profile that was kept
    assert sorted(captures_of(*(f"{folder}/{name}.parquet" for name in names))) == shown


def test_a_name_may_have_any_bytes(folder: Path) -> None:
    shutil.copy(SAMPLES[0], os.fsdecode(os.fsencode(folder) + b"/a\xff.parquet"))
    assert captures_of(folder) == [f"{folder}/a\\xff.parquet"]
    assert folded(folder) == sum_of_single(SAMPLES[:1])


def test_parts_of_a_merged_capture_keep_their_names(folder: Path, tmp_path: Path) -> None:
    sources = [copied(SAMPLES[-1], tmp_path / f"{host}.parquet", host) for host in ("one", "two")]
    assert iaprof("merge", "-q", "-o", folder / "a#b.parquet", *sources).code == 0
    assert sorted(captures_of("./")) == [f"./a#b.parquet#{part}" for part in ("one", "two")]


def test_a_file_counts_once(folder: Path, tmp_path: Path) -> None:
    shutil.copy(SAMPLES[0], folder / "a.parquet")
    (folder / "link.parquet").symlink_to("a.parquet")
    (folder / "loop").symlink_to(".")
    (tmp_path / "other").symlink_to(folder)
    names = ["a.parquet", "./a.parquet", str(folder / "a.parquet"), "loop/a.parquet", f"{tmp_path}/other"]
    assert [each.name for each in find_sources([*names, ".", "**/*.parquet"])] == ["a.parquet"]
    # while a copy is another capture
    shutil.copy(SAMPLES[0], folder / "copy.parquet")
    assert len(find_sources([".", "**/*.parquet"])) == 2


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "table"])
def test_what_is_no_file_is_named_and_the_rest_reported(folder: Path, kind: str) -> None:
    shutil.copy(SAMPLES[0], folder / "a.parquet")
    path = folder / "other.parquet"
    match kind:
        case "pipe":
            os.mkfifo(path)  # opening it would block
        case "link":
            path.symlink_to("nothing")
        case "folder":
            path.mkdir()
        case "table":
            assert iaprof("report", "-q", SAMPLES[0], "-o", path).code == 0
    done = iaprof("top", folder)
    assert done.code == 0
    assert [line.count("other.parquet") for line in done.err.splitlines()] == [0] if kind == "folder" else [1, 0]
    assert folded(folder) == sum_of_single(SAMPLES[:1])


def test_a_folder_that_may_not_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # root may read all folders: the refusal is made here
    (folder / "secret").mkdir()
    shutil.copy(SAMPLES[0], folder / "a.parquet")
    scan = os.scandir

    def refused(path: str) -> object:
        if path.endswith("secret"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    done = iaprof("top", folder)
    assert (done.code, done.out) == (1, "")
    assert done.err == f"iaprof: {folder} cannot be read: Permission denied\n"


def test_an_input_is_not_overwritten(folder: Path) -> None:
    for name in ("a", "b"):
        shutil.copy(SAMPLES[0], folder / f"{name}.parquet")
    for output in ("a.parquet", "./b.parquet"):
        done = iaprof("report", folder, "--force", "-o", output)
        assert (done.code, done.out) == (1, "")
        assert "is the input" in done.err
    assert (folder / "a.parquet").read_bytes() == SAMPLES[0].read_bytes()


def test_names_have_no_signatures() -> None:
    source = Source("https://someone:word@example.com/a.parquet?X-Amz-Signature=secret#part", 1)
    assert source.shown == "https://example.com/a.parquet"


@pytest.mark.parametrize("format_", ["chrome", "perfetto", "flamescope"])
def test_formats_of_times_are_for_one_capture(folder: Path, format_: str) -> None:
    for name in ("a", "b"):
        shutil.copy(SAMPLES[0], folder / f"{name}.parquet")
    done = iaprof("report", folder, f"--format={format_}")
    assert (done.code, done.out) == (2, "")
    assert f"{format_} is for one capture" in done.err


def test_a_missing_file_that_is_named_is_an_error(folder: Path) -> None:
    shutil.copy(SAMPLES[0], folder / "a.parquet")
    with pytest.raises(IaprofError, match=r"nothing\.parquet does not exist"):
        find_sources(["a.parquet", "nothing.parquet"])


def test_links_to_their_own_folder_do_not_lead_in_circles(folder: Path) -> None:
    # given a folder of another user, in which each name has 2^40 others
    shutil.copy(SAMPLES[0], folder / "a.parquet")
    for name in "xy":
        (folder / name).symlink_to(".")
    assert [each.name for each in within(LONGEST_WAIT_S, "", lambda: find_sources(["**/*.parquet"]))] == ["a.parquet"]


@pytest.mark.parametrize("top", ["", "{}/", "./", "../captures/"])
@pytest.mark.parametrize(
    "pattern", ["**", "**/*", "**/*.parquet", "b/**/*.parquet", "*/**/c/*", "**/c/**", "*", "b*/?.p*"]
)
def test_a_pattern_matches_what_it_matches_in_a_shell(folder: Path, top: str, pattern: str) -> None:
    for name in ("a.parquet", "b/a.parquet", "b/c/a.parquet", "b/c/d/a.parquet", ".x/a.parquet", "b/.a.parquet"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    word = top.format(folder) + pattern
    files = [
        {name for name in found if os.path.isfile(name)} for found in (_matches(word), glob.glob(word, recursive=True))
    ]
    assert files[0] == files[1] and files[0]


def test_a_file_of_terabytes_of_nothing_takes_no_longer_than_allowed(folder: Path) -> None:
    shutil.copy(SAMPLES[0], folder / "a.parquet")
    with (folder / "b.parquet").open("wb") as file:
        file.truncate(8 << 40)
    sources = find_sources(["."])
    (total,) = within(LONGEST_WAIT_S, "", lambda: [_keys(sources, 0.1)])
    assert total[0] == sources[0].key()
    assert str(total[1]).endswith("b.parquet takes too long to read (--timeout)")
