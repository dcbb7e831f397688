"""Tables of groups, and what differs among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from unit.in_process import iaprof
from unit.report.fleet.fleets import SAMPLES, as_json, copied

pytestmark = pytest.mark.usefixtures("here")
USUAL, UNUSUAL = SAMPLES[-1], SAMPLES[0]  # of other programs


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six hosts with two captures each, one of which does something else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for number in range(12):
        source = UNUSUAL if number % 6 == 3 else USUAL
        copied(source, tmp_path / "captures" / f"{number}.parquet", f"host-{number % 6}", labels={"round": str(number)})
    return tmp_path / "captures"


def test_outliers_are_the_groups_that_differ(hosts: Path) -> None:
    found = as_json("top", "-q", hosts, "--group-by=host", "--outliers", "-n0")["outliers"]
    assert found
    for each in found:
        assert each["groups"] == [{"host": "host-3"}]
        assert each["low"] <= each["median"] <= each["high"]
    # the shares are those of the captures' own tables
    tables = {}
    for name, source in (("usual", USUAL), ("unusual", UNUSUAL)):
        table = as_json("top", "-q", source)
        total = table["total"]["samples"]
        tables[name] = {
            (entry["kernel"], reason): count / total
            for entry in table["entries"]
            for reason, count in entry["reasons"].items()
        }
    for each in found:
        key = each["kernel"], each["reason"]
        assert each["median"] == pytest.approx(tables["usual"].get(key, 0))
        assert each["shares"] == pytest.approx([tables["unusual"].get(key, 0)])


def test_outliers_as_a_table(hosts: Path) -> None:
    done = iaprof("top", "-q", hosts, "--group-by=host", "--outliers", "-n1")
    heads, first, more = done.out.splitlines()
    assert heads.split() == ["MEDIAN", "10", "-", "90", "%", "REASON", "OUTLIERS", "FARTHEST", "KERNEL"]
    assert "1 of 6" in first and "host-3" in first
    assert more.startswith("and ") and more.endswith(" more")


def test_no_outliers_are_said(hosts: Path) -> None:
    for number in (3, 9):
        (hosts / f"{number}.parquet").unlink()
    done = iaprof("top", "-q", hosts, "--group-by=host", "--outliers")
    assert done.out == "no kernel stalls for a reason much more or less in some of the 5 groups\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--outliers"], "--outliers compares groups"),
        (["--outliers", "--group-by=host", "--by=line"], "--outliers is of kernels"),
        (["--outliers", "--group-by=day"], "outliers need 4 groups"),
    ],
)
def test_outliers_need_groups(hosts: Path, words: list[str], said: str) -> None:
    done = iaprof("top", hosts, *words)
    assert done.code in (1, 2)
    assert said in done.err


def test_a_table_for_each_group_says_how_many_captures(hosts: Path) -> None:
    done = iaprof("top", "-q", hosts, "--group-by=host", "-n1")
    headings = [line for line in done.out.splitlines() if line.startswith("host ")]
    assert len(headings) == 6
    assert all(": 2 captures, " in line for line in headings)
    groups = as_json("top", "-q", hosts, "--group-by=host")["groups"]
    assert [each["captures"] for each in groups] == [2] * 6
    # the most samples first
    samples = [each["total"]["samples"] for each in groups]
    assert samples == sorted(samples, reverse=True)
    # of what divides a capture, none is counted
    assert all("captures" not in each for each in as_json("top", "-q", hosts, "--group-by=hash")["groups"])


def test_groups_of_several_dimensions_are_in_their_order(hosts: Path) -> None:
    groups = as_json("top", "-q", hosts, "--group-by=label:round,device,host")["groups"]
    assert all(list(each["group"]) == ["label:round", "device", "host"] for each in groups)
    assert {(each["group"]["label:round"], each["group"]["host"]) for each in groups} == {
        (str(number), f"host-{number % 6}") for number in range(12)
    }
