"""Tables of groups, and what differs among them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from thorough import thorough
from unit.in_process import iaprof
from unit.report.fleet.fleets import SAMPLES, as_json, copied

pytestmark = pytest.mark.usefixtures("here")
USUAL, UNUSUAL = SAMPLES[-1], SAMPLES[0]  # of other programs


@pytest.fixture
def hosts(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six hosts with two captures each, one of which does something else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    for number in range(12):
        source = UNUSUAL if number % 6 == 3 else USUAL
        copied(source, tmp_path / "captures" / f"{number}.parquet", f"host-{number % 6}", labels={"round": str(number)})
    return tmp_path / "captures"


@thorough
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


@thorough
def test_outliers_as_a_table(hosts: Path) -> None:
    done = iaprof("top", "-q", hosts, "--group-by=host", "--outliers", "-n1")
    heads, first, more = done.out.splitlines()
    assert heads.split() == ["MEDIAN", "10", "-", "90", "%", "REASON", "OUTLIERS", "FARTHEST", "KERNEL"]
    assert "1 of 6" in first and "host-3" in first
    assert more.startswith("and ") and more.endswith(" more")


@thorough
def test_no_outliers_are_said(hosts: Path) -> None:
    for number in (3, 9):
        (hosts / f"{number}.parquet").unlink()
    done = iaprof("top", "-q", hosts, "--group-by=host", "--outliers")
    assert done.out == "no kernel stalls for a reason much more or less in some of the 5 groups\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--outliers"], "--outliers compares groups"),
        (["--outliers", "--group-by=host", "--by=line"], "--outliers compares kernels"),
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
    # of what divides captures, those with samples in the group
    groups = as_json("top", "-q", hosts, "--group-by=hash")["groups"]
    assert {each["captures"] for each in groups} <= {2, 10, 12} and len(groups) > 1
    of_hosts = Counter[str]()
    for each in as_json("top", "-q", hosts, "--group-by=host,hash")["groups"]:
        assert each["captures"] == 2
        of_hosts[each["group"]["hash"]] += each["captures"]
    assert of_hosts == {each["group"]["hash"]: each["captures"] for each in groups}


def test_groups_of_several_dimensions_are_in_their_order(hosts: Path) -> None:
    groups = as_json("top", "-q", hosts, "--group-by=label:round,device,host")["groups"]
    assert all(list(each["group"]) == ["label:round", "device", "host"] for each in groups)
    assert {(each["group"]["label:round"], each["group"]["host"]) for each in groups} == {
        (str(number), f"host-{number % 6}") for number in range(12)
    }


def test_percentiles_are_those_of_the_groups(hosts: Path) -> None:
    found = as_json("top", "-q", hosts, "--group-by=host", "--percentiles", "-n0")
    assert found["number_of_groups"] == 6
    groups = as_json("top", "-q", hosts, "--group-by=host", "-n0")["groups"]
    whole = sum(each["total"]["samples"] for each in groups)
    for each in found["entries"]:
        key = each["kernel"], each["file"]
        samples = [
            sum(entry["samples"] for entry in group["entries"] if (entry["kernel"], entry["file"]) == key)
            for group in groups
        ]
        shares = [one / group["total"]["samples"] for one, group in zip(samples, groups, strict=True)]
        assert (each["samples"], each["share"]) == (sum(samples), pytest.approx(sum(samples) / whole))
        assert [each["p50"], each["p90"], each["p99"]] == pytest.approx(np.quantile(shares, (0.5, 0.9, 0.99)).tolist())
        assert each["most"] == pytest.approx(max(shares))
        assert each["farthest"]["host"] in {
            group["group"]["host"] for group, share in zip(groups, shares, strict=True) if share == max(shares)
        }
    done = iaprof("top", "-q", hosts, "--group-by=host", "--percentiles", "--by=line", "-n1")
    heads, first, more = done.out.splitlines()
    assert heads.split() == ["SAMPLES", "SHARE", "P50", "P90", "P99", "MOST", "IN", "LINE"]
    assert "host-" in first and more.startswith("and ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--percentiles"], "--percentiles compares groups"),
        (["--percentiles", "--group-by=host", "--by=reason"], "--percentiles cannot show --by reason"),
        (["--percentiles", "--group-by=host", "--outliers"], "are two tables"),
        (["-o", "{tmp}/x.txt"], "does not determine the format"),
        (["-o", "{tmp}/x.csv", "--json"], "contradict each other"),
        (["-o", "{tmp}/captures/0.parquet", "--force"], "is the input"),
    ],
)
def test_what_contradicts_itself_is_one_sentence(hosts: Path, words: list[str], said: str) -> None:
    done = iaprof("top", hosts, *(word.format(tmp=hosts.parent) for word in words))
    assert done.code in (1, 2)
    assert said in done.err and done.out == ""


TABLES = {
    "all": [],
    "groups": ["--group-by=host,day"],
    "outliers": ["--group-by=host", "--outliers"],
    "percentiles": ["--group-by=host", "--percentiles"],
    "stacks": ["--by=stack"],
}


@pytest.mark.parametrize("table", TABLES)
def test_tables_are_files(hosts: Path, table: str) -> None:
    words: list[str | Path] = ["top", "-q", hosts, *TABLES[table]]
    document = as_json(*words, "-n0")
    outputs = {name: hosts.parent / f"out.{name}" for name in ("json", "csv", "parquet")}
    for name, output in outputs.items():
        done = iaprof(*words, "-o", output, *(["-n0"] if name == "json" else []))
        assert (done.code, done.out) == (0, ""), done.err
    assert json.loads(outputs["json"].read_text()) == document
    rows = pq.read_table(outputs["parquet"]).to_pylist()
    text = csv.read_csv(outputs["csv"]).to_pylist()
    assert [row.get("share", row.get("samples")) for row in text] == pytest.approx(
        [row.get("share", row.get("samples")) for row in rows]
    )
    match table:
        case "all" | "stacks":
            assert sum(row["samples"] for row in rows) == document["total"]["samples"]
            assert sum(row["samples_sbid"] for row in rows) == document["total"]["reasons"]["sbid"]
        case "groups":
            assert {row["host"] for row in rows} == {f"host-{number}" for number in range(6)}
            assert sum(row["samples"] for row in rows) == sum(each["total"]["samples"] for each in document["groups"])
            assert {row["group_captures"] for row in rows} == {2}
            assert all(row["day"] for row in rows)
        case "outliers":
            assert {row["host"] for row in rows} == {"host-3"}
            assert len(rows) == sum(len(each["groups"]) for each in document["outliers"])
        case "percentiles":
            assert [row["p99"] for row in rows] == [each["p99"] for each in document["entries"]]
    # what is there is not replaced
    again = iaprof(*words, "-o", outputs["csv"])
    assert (again.code, "exists" in again.err) == (1, True)


def test_tables_of_one_capture_are_files(tmp_path: Path) -> None:
    document = as_json("top", "-q", USUAL, "-n0", "--by=line")
    for extension in ("csv", "parquet"):
        output = tmp_path / f"out.{extension}"
        assert iaprof("top", "-q", USUAL, "--by=line", "-o", output).code == 0
        table = csv.read_csv(output) if extension == "csv" else pq.read_table(output)
        assert table["samples"].to_pylist() == [each["samples"] for each in document["entries"]]
        assert table["line"].to_pylist() == [each["line"] for each in document["entries"]]
    output = tmp_path / "intervals.csv"
    assert iaprof("top", "-q", USUAL, "--per-interval", "-o", output).code == 0
    assert sum(csv.read_csv(output)["samples"].to_pylist()) == document["total"]["samples"]
