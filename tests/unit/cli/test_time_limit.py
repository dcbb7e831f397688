"""Small captures that declare much: each verb reads them in seconds, or refuses them in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iaprof.formats.capture.limits import PARTS, CaptureError, Ratio
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.writers.registry import WRITERS
from limits import Within
from thorough import thorough, usually
from unit.capturing import HEADER, capture
from unit.formats.test_hostile_captures import rows
from unit.in_process import iaprof
from unit.memory_runs import Runs
from unit.slow_captures import (
    SLOW,
    cpu_stacks,
    deep_stacks,
    empty_parts,
    energy_names,
    mapped_files,
    processes_at_one_address,
    stack_processes,
    stalling_kernels,
    streams,
)
from unit.slow_ranks import collective_ranks, kernel_ranks, power_ranks
from unit.slow_registry import REFUSALS, SHAPES, TIME_LINES
from unit.slow_shapes import (
    gpu_modules,
    imported,
    python_frames,
    same_modules,
    stall_addresses,
)

MOST_S, MOST_BYTES = 10, 1 << 30
FEWER = 16  # times, where nobody measures how long it takes
PARTS_OF_MOST = usually([8], [1, 8])  # `make test` takes an eighth of the most that is not refused
_OF_FORMATS = (
    "cpu_samples",
    "cpu_stacks",
    "metric_names",
    "distinct_launches",
)  # what not all formats look at in the same way


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("runs")) as started:
        yield started


def commands(path: Path, other: Path, output: Path) -> dict[str, list[str | Path]]:
    """Every verb that reads captures."""
    write: list[str | Path] = ["-q", "-f", "-o", output]
    return {
        "info": ["info", path],
        "top": ["top", "-q", path],
        "annotate": ["annotate", path],
        "diff": ["diff", "-q", other, path],
        "query": ["query", path, "SELECT (SELECT count(*) FROM metrics), (SELECT count(*) FROM cpu_samples)"],
        "archive": ["archive", path, *write],
        "redact": ["archive", "--redact", path, *write],
        "merge": ["merge", path, other, *write],
        "page": ["report", "--format=html", path, *write],
        "folded": ["report", "--format=folded", path, *write],
    }


@thorough
@pytest.mark.parametrize("name", SLOW)
def test_no_verb_takes_long_for_a_small_capture(name: str, tmp_path: Path, runs: Runs, within: Within) -> None:
    make, number = SLOW[name]
    slow = make(tmp_path / "slow.parquet", number if within.measures else number // FEWER)
    header = HEADER | {"clock": {"monotonic_ns": 5, "realtime_ns": 77}}
    other = capture(tmp_path / "other.parquet", header, **rows())
    words = commands(slow, other, tmp_path / "out")
    if name in _OF_FORMATS:
        formats = [each for each in WRITERS if each not in ("html", "folded")]
        words |= {each: ["report", f"--format={each}", slow, "-q", "-f", "-o", tmp_path / "out"] for each in formats}
    _assert_bounded(name, words, runs, within)


# At a sixteenth of what they can declare, as all of it takes an hour: tests/soak/soak_small_captures.py.
@thorough
@pytest.mark.parametrize("name", SHAPES)
def test_no_verb_takes_long_for_a_smaller_capture_of_any_shape(
    name: str, tmp_path: Path, runs: Runs, within: Within
) -> None:
    make, values = SHAPES[name]
    slow = make(tmp_path / "slow.parquet", values // FEWER)
    other = capture(tmp_path / "other.parquet", HEADER | {"clock": {"monotonic_ns": 5, "realtime_ns": 77}}, **rows())
    _assert_bounded(name, words_of(name, slow, other, tmp_path / "out"), runs, within)


def words_of(name: str, path: Path, other: Path, output: Path) -> dict[str, list[str | Path]]:
    """Every verb that reads captures, and formats and tables that read more of a shape."""
    words = commands(path, other, output)
    write: list[str | Path] = ["-q", "-f", "-o", output]
    if name in TIME_LINES:
        del words["annotate"]
        return words | {"timeline": ["timeline", "-q", path], "diff": ["diff", "-q", path, path]}
    by_group = ["--group-by", "label:k0,container", "--cache=none"]
    return words | {
        "transfers": ["top", "-q", "--by=transfer", path],
        "waits": ["top", "-q", "--by=wait", path],
        "firefox": ["report", "--format=firefox", path, *write],
        "groups": ["top", "-q", *by_group, path, other],
        "percentiles": ["top", "-q", "--percentiles", *by_group, path, other],
        "outliers": ["top", "-q", "--outliers", *by_group, path, other],
        "flame": ["flame", "-q", "-f", "-o", output.with_suffix(".html"), "--", path],
    }


def _assert_bounded(name: str, words: dict[str, list[str | Path]], runs: Runs, within: Within) -> None:
    for verb, command in words.items():
        run = runs.run(*command)
        expected = REFUSALS.get((name, verb))
        if expected is None:
            assert run.code == 0, f"{verb}: {run.err}"
        else:
            assert run.code == 1, f"{verb} was answered"
            assert re.fullmatch(f"iaprof: {expected}\n", run.err), f"{verb}: {run.err}"
        within.took(run.cpu_s, MOST_S)
        assert run.peak < MOST_BYTES, verb


@pytest.mark.parametrize("part", PARTS_OF_MOST)
@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("distinct_transfers", 2_000_000, ["top", "--by=transfer"]),
        ("distinct_waits", 990_000, ["report", "--format=firefox"]),
        ("wait_functions", 990_000, ["report", "--format=html"]),
        ("deep_launches", 2_400_000, ["report", "--format=html"]),
        ("python_frames", 2_400_000, ["report", "--format=firefox"]),
        ("stall_addresses", 490_000, ["annotate", "-q"]),
        ("slice_threads", 4_900_000, ["timeline"]),
    ],
)
def test_what_is_not_refused_takes_linear_time(
    name: str, values: int, words: list[str | Path], part: int, tmp_path: Path, runs: Runs, within: Within
) -> None:
    make, _ = SHAPES[name]
    output: list[str | Path] = ["-o", tmp_path / "out"] if "report" in words else []
    run = runs.run(*words, "-q", make(tmp_path / "slow.parquet", values // part), *output)
    within.took(run.cpu_s, MOST_S / 2)
    assert (run.code, run.err) == (0, "")
    assert run.peak < MOST_BYTES


@pytest.mark.parametrize("part", PARTS_OF_MOST)
@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("distinct_texts", 600_000, ["--group-by=container"]),
        ("distinct_texts", 600_000, ["--group-by=container", "--percentiles"]),
        ("distinct_texts", 600_000, ["--group-by=container", "--outliers"]),
        ("labels_of_parts", 990_000, ["--group-by=label:k0"]),
    ],
)
def test_groups_take_linear_time(
    name: str, values: int, words: list[str | Path], part: int, tmp_path: Path, runs: Runs, within: Within
) -> None:
    make, _ = SHAPES[name]
    slow = make(tmp_path / "slow.parquet", values // part)
    run = runs.run("top", "-q", "--cache=none", *words, slow, slow)
    within.took(run.cpu_s, MOST_S / 2)
    assert (run.code, run.err) == (0, "")
    assert run.peak < MOST_BYTES


ABSURD: list[tuple[Callable[[Path], Path], str]] = [
    (empty_parts, "info"),
    (streams, "info"),
    (lambda path: energy_names(path, 5000), "top"),
    (lambda path: cpu_stacks(path, 160_000), "page"),
    (lambda path: stack_processes(path, 60_000), "archive"),
    (lambda path: stalling_kernels(path, 70_000), "top"),
    (lambda path: mapped_files(path, 17_000), "archive"),
    (lambda path: deep_stacks(path, 510), "top"),
    (lambda path: processes_at_one_address(path, 4500), "top"),
    (lambda path: gpu_modules(path, 5_000_000), "top"),
    (lambda path: same_modules(path, 700_000), "top"),
    (lambda path: python_frames(path, 1_600_000, lines=97), "top"),
    (lambda path: stall_addresses(path, 1_100_000), "top"),
    (lambda path: imported(path, 6_000_000), "top"),
    (lambda path: kernel_ranks(path, 110_000, ranks=9000), "page"),
    (lambda path: collective_ranks(path, 260_000, ranks=9000), "page"),
    (lambda path: power_ranks(path, 80_000, ranks=9000), "folded"),
]


@pytest.mark.parametrize(("make", "verb"), usually(ABSURD[::4], ABSURD))
def test_what_is_absurd_is_refused_in_one_sentence(make: Callable[[Path], Path], verb: str, tmp_path: Path) -> None:
    refused = iaprof(*commands(make(tmp_path / "slow.parquet"), tmp_path / "other", tmp_path / "out")[verb])
    assert refused.code == 1
    said = r"iaprof: .* declares [\d,]+ [\w ]+, more than [\d,]+, which is absurd .* add --large\n"
    assert re.fullmatch(said, refused.err)
    assert [each.name for each in tmp_path.iterdir()] == ["slow.parquet"]


@thorough
def test_large_allows_it(tmp_path: Path, runs: Runs) -> None:
    slow = streams(tmp_path / "slow.parquet")
    assert runs.run("info", slow).code == 1
    assert runs.run("info", "--large", slow).code == 0


def test_larger_captures_may_declare_more(tmp_path: Path) -> None:
    ratio = Ratio(10, 100, "things")
    assert (ratio.of(1), ratio.of(1000), ratio.of(5000)) == (10, 10, 50)
    reader = CaptureReader(capture(tmp_path / "c", launch=[]))
    reader.check(PARTS.most, PARTS)
    with pytest.raises(CaptureError, match=r"c declares 1,025 parts, more than 1,024, which is absurd"):
        reader.check(PARTS.most + 1, PARTS)
