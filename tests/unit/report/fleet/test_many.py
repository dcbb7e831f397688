"""Several captures reported together: the sum of their single reports, exactly."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from iaprof.report.fleet import cluster, engines, processes
from iaprof.report.fleet.groups import Grouping
from iaprof.report.fleet.totals import Summary
from thorough import thorough, usually
from unit.capturing import capture, launch, record, stall
from unit.in_process import iaprof
from unit.report.fleet.fleets import SAMPLES, as_json, copied, folded, sum_of_single

TEXT = Path(__file__).parents[3] / "data" / "iaprof-text" / "0.5.txt"
pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def folder(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of captures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    found = tmp_path / "captures"
    for number, source in enumerate(SAMPLES):
        target = found / f"date=2026-11-{20 + number % 2}" / f"host=h{number % 3}" / f"{source.stem}.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return found


def all_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


@thorough
def test_processes_give_the_sum(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "open_engine", lambda *_: processes.Processes(2))
    assert folded(folder, "--cache=none") == sum_of_single(all_of(folder))


@pytest.mark.parametrize("cache", usually([[]], [[], ["--cache=none"]]), ids=["kept", "none"])
def test_it_is_the_sum_of_the_single_reports(folder: Path, cache: list[str]) -> None:
    expected = sum_of_single(all_of(folder))
    assert len(expected) > 1000
    assert folded(folder, *cache) == expected
    assert folded(folder, *cache) == expected  # from the profiles that were kept
    assert folded(*all_of(folder)[:4], *cache) == sum_of_single(all_of(folder)[:4])  # some of these
    pattern = f"{folder}/date=2026-11-20/**/*.parquet"
    assert folded(pattern, *cache) == sum_of_single(sorted(folder.glob("date=2026-11-20/**/*.parquet")))


def test_a_second_question_reads_no_captures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = folded(folder)

    def refused(*_: object) -> None:
        raise AssertionError("a capture is mapped")

    monkeypatch.setattr("iaprof.report.fleet.fleet.MapTask", refused)
    assert folded(folder) == expected
    # and another question finds the same profiles
    assert as_json("top", "-q", folder, "--by=reason")["total"]["samples"] == expected.total()


@thorough
def test_another_selection_makes_other_profiles(folder: Path) -> None:
    whole = folded(folder)
    some = folded(folder, "--reason=sbid")
    single: Counter[str] = Counter()
    for path in all_of(folder):
        single += folded(path, "--reason=sbid")
    assert some == single
    assert 0 < some.total() < whole.total()


def test_copies_of_a_capture_count_each(folder: Path) -> None:
    shutil.copy(SAMPLES[0], folder / "again.parquet")
    once = folded(SAMPLES[0])
    assert folded(folder) == sum_of_single(all_of(folder))
    assert folded(folder / "again.parquet", SAMPLES[0]) == once + once


@thorough
def test_parts_of_a_merged_capture_are_captures(folder: Path, tmp_path: Path) -> None:
    merged = tmp_path / "merged.parquet"
    sources = [copied(SAMPLES[-1], tmp_path / f"{host}.parquet", host) for host in ("one", "two")]
    assert iaprof("merge", "-q", "-o", merged, *sources).code == 0
    groups = as_json("top", "-q", merged, SAMPLES[0], "--group-by=host")["groups"]
    assert {each["group"]["host"] for each in groups} == {"one", "two", "vm"}
    assert sum(each["total"]["samples"] for each in groups) == sum_of_single([*sources, SAMPLES[0]]).total()


@thorough
def test_groups_add_up_to_the_whole(folder: Path, tmp_path: Path) -> None:
    for number in range(6):
        copied(SAMPLES[-1], folder / f"{number}.parquet", f"a{number % 2}", labels={"job": f"train-{number % 3}"})
    whole = as_json("top", "-q", folder)
    for group in (
        "host",
        "day",
        "hour",
        "capture",
        "command",
        "gpu",
        "container",
        "pod",
        "device",
        "hash",
        "label:job",
    ):
        groups = as_json("top", "-q", folder, f"--group-by={group}")["groups"]
        assert sum(each["total"]["samples"] for each in groups) == whole["total"]["samples"], group
        assert sum(each["share"] for each in groups) == pytest.approx(1), group
        counts = [each["captures"] for each in groups]
        within = group in ("container", "device", "hash")  # of which a capture may have several
        assert sum(counts) >= whole["captures"] if within else sum(counts) == whole["captures"], group
        assert all(1 <= count <= whole["captures"] for count in counts), group
    groups = as_json("top", "-q", folder, "--group-by=label:job,host")["groups"]
    names = {(each["group"]["label:job"], each["group"]["host"]) for each in groups}
    assert {("train-0", "a0"), ("train-1", "a1"), ("train-2", "a0")} < names


def test_pods_are_known_by_their_cgroups(tmp_path: Path) -> None:
    uid = "2b801b7a-8f4f-4b23-8b44-d1c3e4a0c7c5"
    copied(SAMPLES[-1], tmp_path / "a.parquet", "a", f"/kubepods/burstable/pod{uid}/{'0' * 64}")
    copied(SAMPLES[-1], tmp_path / "b.parquet", "b", f"/evil/pod{uid}")
    groups = as_json("top", "-q", tmp_path, "--group-by=pod")["groups"]
    half = as_json("top", "-q", tmp_path)["total"]["samples"] // 2
    found = {each["group"]["pod"]: each["total"]["samples"] for each in groups}
    assert found.keys() == {uid, "[unknown]"}
    assert half >= found[uid] > 0


def test_folders_of_a_store_are_labels(folder: Path) -> None:
    groups = as_json("top", "-q", folder, "--group-by=label:date")["groups"]
    expected = {
        date: sum_of_single(sorted(folder.glob(f"date={date}/**/*.parquet"))).total()
        for date in ("2026-11-20", "2026-11-21")
    }
    assert {each["group"]["label:date"]: each["total"]["samples"] for each in groups} == expected


def test_several_keys_divide_at_once(folder: Path) -> None:
    for keys in ("label:host", "label:host,label:date", "hash,label:date,label:host"):
        groups = as_json("top", "-q", folder, f"--group-by={keys}")["groups"]
        assert {each["group"]["label:host"] for each in groups} == {"h0", "h1", "h2"}, keys
        assert all(list(each["group"]) == keys.split(",") for each in groups)


def test_a_host_is_that_of_the_folder_where_the_capture_names_none() -> None:
    place = "s3://bucket/date=2026-11-20/host=node-7/1.parquet"
    assert Grouping.host_of(Summary(place, "")) == "node-7"
    assert Grouping.host_of(Summary(place, "", host="a")) == "a"
    assert Grouping.host_of(Summary("1.parquet", "")) == "[unknown]"


def test_groups_are_the_root_of_stacks(folder: Path) -> None:
    stacks = folded(folder, "--group-by=label:date")
    roots = Counter[str]()
    for stack, count in stacks.items():
        roots[stack.split(";")[0]] += count
    assert set(roots) == {"2026-11-20", "2026-11-21"}
    assert roots.total() == folded(folder).total()


@pytest.mark.parametrize("format_", ["folded", "json", "html", "svg", "speedscope", "pprof", "otlp", "firefox", "csv"])
def test_formats_take_the_sum(folder: Path, format_: str, tmp_path: Path) -> None:
    done = iaprof("report", folder, f"--format={format_}", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert (tmp_path / "out").stat().st_size > 1000
    assert f"{len(SAMPLES)} captures" in done.err


def test_what_is_broken_is_named_and_the_rest_reported(folder: Path) -> None:
    expected = folded(folder)
    whole = SAMPLES[0].read_bytes()
    newest = SAMPLES[-1].read_bytes()
    assert newest.count(b'"format": 9') == 1
    (folder / "newer.parquet").write_bytes(newest.replace(b'"format": 9', b'"format":99'))
    (folder / "cut.parquet").write_bytes(whole[:-100])
    (folder / "foreign.parquet").write_bytes(b"PK\x03\x04" * 100)
    (folder / "empty.parquet").write_bytes(b"")
    damaged = bytearray(whole)
    damaged[len(whole) // 4 : len(whole) // 2] = bytes(len(whole) // 2 - len(whole) // 4)
    (folder / "damaged.parquet").write_bytes(damaged)
    done = iaprof("report", folder, "--frames=function,reason")
    assert done.code == 0
    for name in ("newer", "cut", "foreign", "empty", "damaged"):
        (line,) = [line for line in done.err.splitlines() if f"{name}.parquet" in line]
        assert line.startswith("iaprof: warning: left out: ")
    assert f"{len(SAMPLES) + 5} captures (5 left out)" in done.err
    assert folded(folder) == expected
    assert len(as_json("top", "-q", folder)["left_out"]) == 5
    # with --strict nothing is reported
    strict = iaprof("top", folder, "--strict")
    assert (strict.code, strict.out) == (1, "")
    assert strict.err.startswith("iaprof: ") and strict.err.endswith("and 4 more\n")
    # and one that was mended is read
    shutil.copy(SAMPLES[0], folder / "cut.parquet")
    assert folded(folder) == expected + folded(SAMPLES[0])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["top", "{tmp}/*.nothing"], 2, "no capture is at"),
        (["top", "{tmp}/none", "{tmp}/nothing"], 1, "does not exist"),
        (["top", "{tmp}"], 2, "no capture is at"),
        (["top", "nosuch://bucket/x"], 1, "there are no URLs with nosuch://"),
        (["top", "{samples}", "--group-by=colour"], 2, "--group-by does not know 'colour'"),
        (["top", "{sample}", "--group-by=host"], 2, "--group-by is for several captures"),
        (["top", "{samples}", "--by=wait"], 2, "is for one capture"),
        (["report", "{samples}", "--cpu-samples"], 2, "--cpu-samples is for one capture: leave it out"),
        (["report", "{samples}", "--frames=pid"], 2, "--frames pid is for one capture"),
        (["top", "{samples}", "--cluster=local:many"], 2, "a number of processes"),
        (["top", "{samples}", "--cluster=tcp://127.0.0.1:1"], 1, "no scheduler answers"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    words: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_CONNECT_S", 1)
    places = {"tmp": str(tmp_path), "samples": str(SAMPLES[0].parent), "sample": str(SAMPLES[0])}
    done = iaprof(*(word.format(**places) for word in words))
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert done.err.count("\n") == 1 or code == 2
    assert "Traceback" not in done.err


@thorough
def test_sets_are_compared_beyond_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    # given two sets that differ, each of captures that differ little
    for number in range(6):
        copied(SAMPLES[-1], tmp_path / "old" / f"{number}.parquet", f"h{number}")
        copied(SAMPLES[0], tmp_path / "new" / f"{number}.parquet", f"h{number}")
        copied(SAMPLES[-1], tmp_path / "same" / f"{number}.parquet", f"g{number}")
    changed = as_json("diff", "-q", tmp_path / "old", tmp_path / "new")
    assert min(each["by_chance"] for each in changed["entries"] if abs(each["change"]) > 1) < 0.01
    same = as_json("diff", "-q", tmp_path / "old", tmp_path / "same")
    assert all(each["change"] == 0 and each["by_chance"] == 1 for each in same["entries"])
    single = as_json("diff", "-q", SAMPLES[-1], SAMPLES[0])
    assert [each["change"] for each in changed["entries"]] == pytest.approx(
        [each["change"] for each in single["entries"]]
    )


def test_profiles_answer_sql(folder: Path, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    expected: Counter[tuple[str, str]] = Counter()
    cache = tmp_path / "profiles"
    for stack, count in folded(folder, f"--cache={cache}", "--frames=function,reason").items():
        function, *_, reason = (frame[: frame.rindex("_[")] for frame in stack.split(";"))
        expected[function, reason] += count
    reasons = ", ".join(f"sum(samples_{reason}) AS {reason}" for reason in {reason for _, reason in expected})
    table = duckdb.sql(f"SELECT kernel, {reasons} FROM '{cache}/*/*.parquet' GROUP BY kernel")
    names = table.columns[1:]
    rows = table.fetchall()
    found = {(kernel, name): count for kernel, *counts in rows for name, count in zip(names, counts, strict=True)}
    found = {key: count for key, count in found.items() if count}
    assert found == expected


def test_intervals_are_those_of_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1.001 s, which floats have as less; the captures begin hours apart, and of one it is not known when."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    clocks = [
        {"monotonic_ns": 10**9, "realtime_ns": wall} for wall in (1_795_219_200 * 10**9, 1_795_230_000 * 10**9, 0)
    ]
    rows = [stall((1 + second) * 10**9 + 1, record(0x1000, sbid=7)) for second in range(4)]
    for number, clock in enumerate(clocks):
        path = capture(tmp_path / "rows.parquet", stall=rows, launch=[launch(10**9, 5, 0x1000)])
        copied(path, tmp_path / "captures" / f"{number}.parquet", clock=clock, end_ns=6 * 10**9)
    done = iaprof("report", "-q", tmp_path / "captures", "--frames=interval", "--interval=1.001")
    assert done.code == 0, done.err
    length = int(1.001 * 1e9)
    walls = [clock["realtime_ns"] + second * 10**9 + 1 for clock in clocks for second in range(4)]
    starts = Counter(wall // length * length / 1e9 for wall in walls)
    found = {float(line.split()[0]): int(line.split()[-1]) for line in done.out.splitlines()}
    assert sorted(found) == pytest.approx(sorted(starts), abs=1e-3)
    assert [found[each] for each in sorted(found)] == [7 * starts[each] for each in sorted(starts)]


def test_imported_intervals_are_those_of_the_other_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "captures").mkdir()
    imported = tmp_path / "captures" / "one.parquet"
    assert iaprof("import", "-q", TEXT, "-o", imported).code == 0
    shutil.copy(imported, tmp_path / "captures" / "two.parquet")
    words = "report", "-q", "--frames=interval,reason", "--interval=1"
    one, two = (iaprof(*words, path).out.splitlines() for path in (imported, imported.parent))
    assert len(one) == len(two) > 4
    for single, both in zip(one, two, strict=True):
        (begun, reason, samples), (of_both, *rest) = split(single), split(both)
        assert rest == [reason, 2 * samples]
        assert 0 <= begun - of_both < 1


def split(line: str) -> tuple[float, str, int]:
    """The second, the reason and the samples of a folded stack."""
    stack, count = line.rsplit(" ", 1)
    interval, reason = stack.split(";")
    return float(interval.split()[0]), reason, int(count)
