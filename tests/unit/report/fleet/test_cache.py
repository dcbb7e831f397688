"""Profiles that are kept: whatever a stranger, or another process, does to them, a result is right."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from iaprof.formats.profile import Code, CodeKind, Launch, Origin
from iaprof.formats.stores import StoredFile
from iaprof.gpu.intel.vendor import Intel
from iaprof.report.fleet import cache as caches
from iaprof.report.fleet.cache import options_key, usual_place
from iaprof.report.fleet.mapping import MapOptions, Mapper, _plain
from iaprof.report.fleet.segment import _KEY, Segment, SegmentError
from iaprof.report.fleet.sources import Source, find_sources
from thorough import usually
from unit.in_process import iaprof
from unit.report.fleet.fleets import SAMPLES, as_json

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(scope="module")
def mapped() -> Segment:
    """The profiles of two captures."""
    sources = find_sources([str(SAMPLES[0]), str(SAMPLES[-1])])
    return Mapper(MapOptions()).segment([(source, source.key()) for source in sources])


@pytest.fixture(scope="module")
def written(mapped: Segment) -> bytes:
    file = BytesIO()
    mapped.write(file)
    return file.getvalue()


def about(table: pa.Table, **members: Any) -> pa.Table:
    """A segment whose first capture has other members."""
    found = json.loads(table.schema.metadata[_KEY])
    found["captures"][0] |= members
    return table.replace_schema_metadata({_KEY: json.dumps(found)})


def column(table: pa.Table, name: str, values: Any) -> pa.Table:
    """A segment with another column."""
    return table.set_column(table.column_names.index(name), name, [values])


def first(table: pa.Table, name: str, value: int) -> pa.Table:
    """A segment with another number in the first row."""
    numbers = table[name].to_numpy().copy()
    numbers[0] = value
    return column(table, name, pa.array(numbers))


def lengthened(table: pa.Table, name: str, line: str) -> pa.Table:
    """A segment whose lists of texts have a line more."""
    return column(table, name, pa.array([text and f"{text}\n{line}" for text in table[name].to_pylist()]))


def of_functions(table: pa.Table, line: int) -> pa.Table:
    """A segment in which all functions are in this line of their files."""
    counts = (text and len(text.split("\n")) for text in table["functions"].to_pylist())
    return column(table, "lines", pa.array([count and "\n".join([str(line)] * count) for count in counts]))


DAMAGES: dict[str, Callable[[pa.Table], pa.Table]] = {
    "no column": lambda table: table.drop_columns(["offset"]),
    "no metadata": lambda table: table.replace_schema_metadata({}),
    "no JSON": lambda table: table.replace_schema_metadata({_KEY: b"{"}),
    "a list": lambda table: table.replace_schema_metadata({_KEY: b"[]"}),
    "deep JSON": lambda table: table.replace_schema_metadata({_KEY: b"[" * 200_000}),
    "another version": lambda table: table.replace_schema_metadata({_KEY: b'{"version": 1, "captures": []}'}),
    "no captures": lambda table: table.replace_schema_metadata({_KEY: b'{"version": 2, "captures": []}'}),
    "a problem": lambda table: about(table, problem="none"),
    "a negative figure": lambda table: about(table, records=-1),
    "a huge figure": lambda table: about(table, launched=[{"symbol": "", "file": "", "hash": "", "launches": 10**40}]),
    "a huge time": lambda table: about(table, begun_ns=10**30),
    "endless": lambda table: about(table, seconds=float("inf")),
    "no number": lambda table: about(table, seconds=float("nan")),
    "few matches": lambda table: about(table, matched=[1]),
    "other stacks": lambda table: about(table, whole={"stacks": "many"}),
    "other Python": lambda table: about(table, python={"stacks": -1}),
    "other samples": lambda table: about(table, samples=1),
    "some rows": lambda table: table.slice(1),
    "rows twice": lambda table: pa.concat_tables([table, table]),
    "a capture too many": lambda table: first(table, "capture", 2),
    "a negative capture": lambda table: first(table, "capture", -1),
    "a negative count": lambda table: first(table, "samples_sbid", -1),
    "a huge count": lambda table: first(table, "samples_sbid", 1 << 62),
    "huge energy": lambda table: first(table, "energy_nj", 1 << 62),
    "more divided than there is": lambda table: first(table, "divided", 1 << 40),
    "negative divided": lambda table: first(table, "divided", -1),
    "a negative fork": lambda table: first(table, "fork", -1),
    "texts for numbers": lambda table: column(table, "offset", pa.array(["x"] * len(table))),
    "nulls for numbers": lambda table: column(table, "offset", pa.nulls(len(table), pa.int64())),
    "numbers for texts": lambda table: column(table, "stack", pa.array([[1]] * len(table))),
    "no UTF-8": lambda table: column(table, "stack", pa.array([b"\xff"] * len(table))),
    "other kinds of code": lambda table: column(table, "origins", pa.array(["spam\teggs"] * len(table))),
    "more origins than frames": lambda table: lengthened(table, "origins", "C\tx"),
    "fewer origins than frames": lambda table: column(table, "origins", pa.array(["C\tx"] * len(table))),
    "more lines than functions": lambda table: lengthened(table, "lines", "1"),
    "more files than functions": lambda table: lengthened(table, "files", "x"),
    "a huge line": lambda table: of_functions(table, 10**30),
    "a negative line": lambda table: of_functions(table, -1),
    "more energy than was used": lambda table: first(table, "energy_nj", 1 << 52),
    "lines without numbers": lambda table: column(table, "lines", pa.array(["x"] * len(table))),
    "a foreign reason": lambda table: table.append_column("samples_rm", pa.array([0] * len(table))),
    "a column twice": lambda table: table.append_column("offset", table["offset"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_hostile_segment_is_none(written: bytes, damage: str) -> None:
    file = BytesIO()
    pq.write_table(DAMAGES[damage](pq.read_table(BytesIO(written))), file)
    with pytest.raises(SegmentError):
        Segment.read(file, "segment")


def test_a_damaged_segment_is_none_or_right(written: bytes, mapped: Segment) -> None:
    chance = np.random.default_rng(1)
    for _ in range(150):
        damaged = bytearray(written)
        for place in chance.integers(0, len(damaged), 3):
            damaged[place] = chance.integers(256)
        try:
            found = Segment.read(BytesIO(bytes(damaged)), "segment")
        except SegmentError:
            continue
        assert int(found.rows.counts.sum()) == int(mapped.rows.counts.sum())
    for length in (0, 3, 100, len(written) // 2, len(written) - 1):
        with pytest.raises(SegmentError):
            Segment.read(BytesIO(written[:length]), "segment")


def test_a_segment_keeps_all_texts(mapped: Segment) -> None:
    origin = Origin(next(iter(CodeKind)), "")
    launches = [
        Launch(comm, 0, stack, kernel_stack, "", (origin,) * len(stack), operators, _plain("c\ud800"), "p")
        for comm in ("", ";")
        for stack in ((), ("",), ("", ""), (_plain("a\n\tb"), _plain("\udcff")))
        for kernel_stack in ((), ("",))
        for operators in ((), ("", "x"))
    ]
    codes = [Code("", (), ()), Code("", ("",), (0,), ("",)), Code("x", ("", ""), (1, 2), ("", ""))]
    samples = np.zeros((len(launches), len(mapped.reasons)), np.int64)
    samples[:, 0] = 1
    some = mapped.rows.only(np.arange(len(launches)))
    number = np.arange(len(launches))
    rows = replace(
        some, capture=0 * number, launch=number, code=number % len(codes), counts=samples, divided=0 * number
    )
    captures = [replace(mapped.captures[0], samples=len(launches))]
    file = BytesIO()
    replace(mapped, captures=captures, rows=rows, launches=launches, codes=codes).write(file)
    found = Segment.read(file, "segment")
    assert [found.launches[each] for each in found.rows.launch] == launches
    assert [found.codes[each] for each in found.rows.code] == [codes[each] for each in rows.code]
    assert [asdict(each) for each in found.captures] == [asdict(each) for each in captures]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Any]:
    """A folder of captures, its only segment, and the table of the captures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "captures"
    folder.mkdir()
    shutil.copy(SAMPLES[0], folder)
    expected = as_json("top", "-q", folder)
    (segment,) = segments()
    return folder, segment, expected


def segments() -> list[Path]:
    return sorted((Path(usual_place()) / options_key(MapOptions())).glob("profiles-*.parquet"))


@pytest.mark.parametrize(
    "damage", usually(["cut", "swapped", "link"], ["cut", "rows", "swapped", "pipe", "folder", "link", "huge"])
)
def test_captures_of_a_damaged_segment_are_mapped_again(kept: tuple[Path, Path, Any], damage: str) -> None:
    folder, segment, expected = kept
    content = segment.read_bytes()
    table = pq.read_table(segment)
    segment.unlink()
    match damage:
        case "cut":
            segment.write_bytes(content[:-9])
        case "rows":  # what the captures are can be read
            segment.write_bytes(content[:4] + bytes(500) + content[504:])
        case "swapped":
            pq.write_table(table.slice(1), segment)
        case "pipe":
            os.mkfifo(segment)
        case "folder":
            segment.mkdir()
        case "link":
            segment.symlink_to("nothing")
        case "huge":  # its end, which tells its captures, is good, and terabytes of nothing are before
            with segment.open("wb") as file:
                file.seek(1 << 42)
                file.write(content)
    assert as_json("top", "-q", folder) == expected
    # and kept again
    (new,) = (path for path in segments() if path.is_file() and path.stat().st_mtime_ns and path != segment)
    assert new.read_bytes()[:4] == b"PAR1"
    assert as_json("top", "-q", folder) == expected
    assert sum(path != segment for path in segments()) == 1


def test_a_segment_that_goes_away_is_made_again(kept: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _, expected = kept
    read = caches.Cache.read

    def removed(self: caches.Cache, name: str) -> bytes:
        for each in segments():
            each.unlink()
        return read(self, name)

    monkeypatch.setattr(caches.Cache, "read", removed)
    assert as_json("top", "-q", folder) == expected
    assert len(segments()) == 1


def test_a_file_that_is_swapped_while_it_is_read_leaves_no_profile(
    kept: tuple[Path, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a folder of another user, with a copy of a capture of ours
    folder, segment, expected = kept
    segment.unlink()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    shutil.copy(SAMPLES[0], theirs / "copy.parquet")
    opened = Source.opened

    @contextlib.contextmanager
    def swapped(self: Source) -> Iterator[Path | StoredFile]:
        """Puts another capture in its place, after its content was identified, and the copy back when it was read."""
        os.rename(theirs / "copy.parquet", tmp_path / "aside")
        shutil.copy(SAMPLES[-1], theirs / "copy.parquet")
        with opened(self) as found:
            yield found
        os.rename(tmp_path / "aside", theirs / "copy.parquet")

    with monkeypatch.context() as patch:
        patch.setattr(Source, "opened", swapped)
        assert as_json("top", "-q", theirs) != expected
    # then that is not kept as the profile of ours
    assert not segments()
    assert as_json("top", "-q", folder) == expected


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o600), (0o640, 0o640), (0o666, 0o644)])
def test_who_may_not_read_a_capture_may_not_read_its_profile(
    kept: tuple[Path, Path, Any], mode: int, expected: int
) -> None:
    # given a folder of profiles in which somebody else made the folder for these options, for all
    folder, segment, _ = kept
    segment.unlink()
    segment.parent.chmod(0o777)
    (capture,) = folder.iterdir()
    capture.chmod(mode)
    before = os.umask(0)
    try:
        as_json("top", "-q", folder)
    finally:
        os.umask(before)
    (new,) = segments()
    assert new.stat().st_mode & 0o777 == expected


def test_a_folder_of_profiles_that_is_another_users_ends_no_report(
    kept: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, segment, expected = kept
    listed = os.listdir

    def refused(path: Any) -> list[str]:
        if str(path) == str(segment.parent):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return listed(path)

    monkeypatch.setattr(os, "listdir", refused)
    assert as_json("top", "-q", folder) == expected


def test_a_full_disk_ends_no_report(kept: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, segment, expected = kept
    segment.unlink()

    def full(self: Path, _: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    done = iaprof("top", folder, "--json")
    assert (done.code, json.loads(done.out)) == (0, expected)
    (warning,) = [line for line in done.err.splitlines() if "warning" in line]
    assert warning.startswith("iaprof: warning: 1 profile not kept: ")
    assert "cannot be written (No space left on device)" in warning
    assert not list(segment.parent.iterdir())


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/full", "{folder}/one.parquet"])
def test_a_cache_that_cannot_be_written_ends_no_report(tmp_path: Path, place: str) -> None:
    shutil.copy(SAMPLES[0], tmp_path / "one.parquet")
    shutil.copy(SAMPLES[-1], tmp_path / "two.parquet")
    done = iaprof("top", tmp_path, f"--cache={place.format(folder=tmp_path)}")
    assert done.code == 0
    assert "2 profiles not kept: " in done.err and "cannot be written" in done.err
    assert done.err.count("warning") == 1


def test_a_store_that_refuses_is_not_asked_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = caches.Cache(str(tmp_path), MapOptions())
    tries: list[str] = []

    def refused(self: caches.Cache, name: str, *_: object) -> None:
        tries.append(name)
        raise caches.CacheError("it is full")

    monkeypatch.setattr(caches.Cache, "_write", refused)
    for number in range(9):
        cache.add(b"", [f"{number}a", f"{number}b"])
    assert (cache.failed, cache.failure, len(tries)) == (18, "it is full", 3)
    assert cache.segments_with(["0a"]) == {}


@pytest.mark.parametrize("word", ["{folder}", "{folder}/**/*.parquet", "."])
def test_a_cache_among_the_captures_is_none_of_them(tmp_path: Path, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "captures"
    folder.mkdir()
    shutil.copy(SAMPLES[0], folder / "one.parquet")
    shutil.copy(SAMPLES[-1], folder / "profiles-0123456789abcdef.parquet")  # a name that a user may choose
    monkeypatch.chdir(folder)
    words = "top", "-q", word.format(folder=folder), f"--cache={folder / 'profiles'}"
    first = as_json(*words)
    assert list(folder.glob("profiles/*/*.parquet"))
    assert first["captures"] == 2 and not first["left_out"]
    assert as_json(*words) == first
    # a folder of a cache itself has no captures, and a profile that is named is not a capture
    profile = next(folder.glob("profiles/*/*.parquet"))
    done = iaprof("top", profile.parent)
    assert done.code == 2 and "no capture is at" in done.err
    assert iaprof("top", folder / "one.parquet", profile).code == 0


def test_files_of_the_user_leave_no_profiles(kept: tuple[Path, Path, Any], tmp_path: Path) -> None:
    folder, segment, expected = kept
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert as_json("top", "-q", folder, f"--symfs={tmp_path / name}") == expected
    assert segments() == [segment]
    assert [path.name for path in Path(usual_place()).iterdir()] == [segment.parent.name]


def test_the_decoder_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    there = options_key(MapOptions())
    monkeypatch.setattr(Intel, "installed_decoder", lambda _: "")
    assert options_key(MapOptions()) != there


def test_profiles_are_never_looked_for_in_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    for named in ("", "relative", "./relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert usual_place() == "/home/user/.cache/iaprof/profiles"


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    done = iaprof("top", SAMPLES[0].parent)
    assert (done.code, done.out) == (1, "")
    assert "this user has no home: name a place with --cache" in done.err
