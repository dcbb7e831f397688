"""The rule about CAPTURE that all verbs share, and what is said where there is none."""

from pathlib import Path

import pytest

from unit.capturing import capture, launch, record, stall
from unit.in_process import iaprof

ADDRESS = 0x10000
FIRST = "iaprof: iaprof.parquet does not exist: run 'iaprof record' first, or name a capture\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recorded(name: str) -> None:
    """A capture of two kernels, of which `hot` stalls most."""
    capture(
        Path(name),
        stall=[stall(9, record(ADDRESS, sbid=9), record(ADDRESS + 0x1000, send=2))],
        launch=[launch(2, 7, ADDRESS, 11, name="hot"), launch(3, 7, ADDRESS + 0x1000, 11, name="cold")],
    )


WITHOUT = [
    "report",
    "top",
    "info",
    "annotate",
    "annotate hot",
    "query",
    "query SELECT",
    "archive -o x.parquet",
    "timeline",
]


@pytest.mark.parametrize("words", WITHOUT)
def test_without_a_capture_record_comes_first(words: str) -> None:
    assert iaprof(*words.split()) == (1, "", FIRST)


@pytest.mark.parametrize("words", ["report", "top", "info", "annotate", "query", "archive -o x.parquet"])
def test_the_default_is_what_record_writes(words: str) -> None:
    recorded("iaprof.parquet")
    assert iaprof(*words.split()).code == 0


@pytest.mark.parametrize("words", ["report a", "top a", "info a", "annotate a hot", "query a.parquet", "diff a b"])
def test_a_capture_that_is_absent(words: str) -> None:
    name = words.split()[1]
    message = f"iaprof: {name} does not exist: name a file that 'iaprof record' wrote\n"
    assert iaprof(*words.split()) == (1, "", message)


def test_a_recording_that_has_not_ended(folder: Path) -> None:
    (folder / "iaprof.parquet.spool").touch()
    assert iaprof("report") == (
        1,
        "",
        "iaprof: iaprof.parquet does not exist, but iaprof.parquet.spool does: wait until the recording has ended, or, "
        "if its recorder died, run 'sudo iaprof recover iaprof.parquet.spool'\n",
    )


def test_annotate_tells_captures_from_kernels() -> None:
    recorded("iaprof.parquet")
    recorded("other")  # an existing file is a capture, whatever its name
    assert iaprof("annotate", "-q").out == iaprof("annotate", "hot", "-q").out == iaprof("annotate", "other", "-q").out
    assert iaprof("annotate", "cold", "-q").out == iaprof("annotate", "other", "cold", "-q").out
    assert iaprof("annotate", "-q").out.startswith("hot\n9 samples, 81.8 % of all")
    assert iaprof("annotate", "cald") == (
        1,
        "",
        "iaprof: no kernel with stalls is called 'cald': did you mean cold?\n",
    )


def test_query_tells_captures_from_queries() -> None:
    recorded("iaprof.parquet")
    asked = "SELECT 12 // 5 AS two"
    assert iaprof("query", asked, "--format=csv") == iaprof("query", "iaprof.parquet", asked, "--format=csv")
    assert iaprof("query", asked, "--format=csv").out == "two\n2\n"


def test_one_capture_is_compared_with_the_default() -> None:
    recorded("iaprof.parquet")
    recorded("before.parquet")
    assert iaprof("diff", "before.parquet", "-q") == iaprof("diff", "before.parquet", "iaprof.parquet", "-q")


def test_a_spool_that_is_absent(folder: Path) -> None:
    begin = "does not exist: name the spool that a recording left; "
    assert iaprof("recover") == (1, "", f"iaprof: iaprof.parquet.spool {begin}it is called CAPTURE.spool\n")
    (folder / "run.parquet.spool").touch()
    assert iaprof("recover", "nospool") == (1, "", f"iaprof: nospool {begin}its folder has run.parquet.spool\n")
    said = "run.parquet does not exist: run 'iaprof recover run.parquet.spool'"
    assert iaprof("recover", "run.parquet") == (1, "", f"iaprof: {said}\n")


@pytest.mark.parametrize(
    ("words", "begin"),
    [
        ("diff iaprof.parquet -o x.svg", b"<svg "),
        ("diff iaprof.parquet -o x.html", b"<!DOCTYPE html>"),
        ("diff iaprof.parquet -o x.csv", b'"kernel",'),
        ("top -o x.csv", b'"kernel",'),
        ("annotate -o x.txt", b"hot\n"),
        ("annotate -o x.json", b'{\n  "kernels"'),
        ("query SELECT_1_AS_n -o x.csv", b"n\n1\n"),
        ("query SELECT_1_AS_n -o x.json", b'[\n{"n": 1}\n]\n'),
        ("query SELECT_1_AS_n -o x.parquet", b"PAR1"),
        ("query -o x.json", b'{\n  "tables"'),
        ("report -o x.svg", b"<svg "),
    ],
)
def test_the_extension_chooses_the_format(words: str, begin: bytes, folder: Path) -> None:
    recorded("iaprof.parquet")
    split = [word.replace("_", " ") for word in words.split()]
    done = iaprof(*split, *(["-q"] if split[0] != "query" else []))
    assert done == (0, "", "")
    assert (folder / split[-1]).read_bytes().startswith(begin)
    again = iaprof(*split)
    assert (again.code, again.out) == (1, "")
    assert again.err == f"iaprof: {split[-1]} exists: name another file with -o, or overwrite it with --force\n"
    assert iaprof(*split, "--force").code == 0
