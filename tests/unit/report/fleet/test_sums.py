"""Sums of what is selected, redacted, recovered or rare: what single reports say, added up."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.profile import Launch
from iaprof.report.fleet.cache import Cache
from iaprof.report.fleet.fleet import ask
from iaprof.report.fleet.mapping import MapOptions, Mapper
from iaprof.report.fleet.partial import Partial, profile_of
from iaprof.report.fleet.rare import RARE_KERNELS, RARE_STACKS
from iaprof.report.fleet.samples import Prefixes, fork_of
from iaprof.report.fleet.segment import Segment
from iaprof.report.fleet.sources import Source, find_sources
from iaprof.report.fleet.tasks import Question
from thorough import thorough, usually
from unit.in_process import iaprof
from unit.report.fleet.conftest import Here
from unit.report.fleet.fleets import SAMPLES, WITHOUT_PIDS, as_json, copied, folded, sum_of_single

pytestmark = pytest.mark.usefixtures("here")
ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def values_of(option: str) -> list[str]:
    """What an option can select in the samples."""
    found = Counter[str]()
    for path in SAMPLES:
        reader = CaptureReader(path)
        if option == "--device":
            found.update(str(each["card"]) for each in reader.header.get("streams", ()) if each.get("card"))
            continue
        name = option.removeprefix("--")
        for table in reader.tables("launch", (name,)):
            found.update(map(str, table[name].to_pylist()))
    return [value for value, _ in found.most_common(2)]


@pytest.mark.parametrize(
    "words",
    usually(
        [["--pid", "{pid}"]],
        [
            ["--attribution=latest"],
            ["--attribution=none"],
            ["--split-ambiguous"],
            ["--stack-of=execute"],
            ["--horizon=0.01"],
            ["--pid", "{pid}"],
            ["--comm", "{comm}"],
            ["--device", "{device}"],
            ["--python", "."],
            ["--cgroup", "*"],
            ["--kernel", "l"],
            ["--time", "20%-60%"],
            ["--no-inlines"],
        ],
    ),
    ids=lambda words: words[0],
)
def test_what_is_selected_adds_up(words: list[str]) -> None:
    """A capture that lacks what it names is left out of a sum; one in which it selects nothing adds nothing."""
    fields = {name: ",".join(values_of(f"--{name}")) for name in ("pid", "comm", "device")}
    chosen = [word.format(**fields) for word in words]
    expected = Counter[str]()
    refused = []
    for path in SAMPLES:
        done = iaprof("report", "-q", WITHOUT_PIDS, path, *chosen)
        if done.code:
            refused += [path] if "no stall matches" not in done.err else []
            continue
        for line in done.out.splitlines():
            stack, count = line.rsplit(" ", 1)
            expected[stack] += int(count)
    assert len(refused) < len(SAMPLES)
    assert folded(*SAMPLES, *chosen) == expected
    found = as_json("top", "-q", *SAMPLES, *chosen)
    assert sorted(each["file"] for each in found["left_out"]) == sorted(map(str, refused))


@thorough
def test_redacted_captures_add_up(tmp_path: Path) -> None:
    folder = tmp_path / "captures"
    folder.mkdir()
    for source in SAMPLES:
        assert iaprof("archive", "-q", source, "-o", folder / source.name, "--redact").code == 0
    paths = sorted(folder.iterdir())
    assert folded(folder) == sum_of_single(paths)
    assert folded(folder, SAMPLES[0]) == sum_of_single([*paths, SAMPLES[0]])
    groups = as_json("top", "-q", folder, "--group-by=host,day")["groups"]
    assert sum(each["captures"] for each in groups) == len(paths)


@thorough
def test_recovered_captures_add_up(tmp_path: Path) -> None:
    """Their header says that the recording did not end, and may lack what is written last."""
    folder = tmp_path / "captures"
    for number, source in enumerate(SAMPLES):
        copied(source, folder / f"{number}.parquet", recovered=True, totals={}, cost={})
    paths = sorted(folder.iterdir())
    assert folded(folder) == sum_of_single(paths)
    assert as_json("top", "-q", folder)["left_out"] == []


@thorough
def test_two_processes_write_one_cache_at_once(tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "captures"
    folder.mkdir()
    for source in SAMPLES:
        shutil.copy(source, folder)
    command = [sys.executable, "-m", "iaprof", "top", "-q", "--json", "--by=reason", str(folder)]
    environment = os.environ | {"XDG_CACHE_HOME": str(home)}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=ROOT) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]
    # each left profiles, which count once
    assert folded(folder) == sum_of_single(sorted(folder.iterdir()))


def rare(limit: float, *paths: Path, cache: str = "none") -> Partial:
    question = Question(frozenset({"launch", "kernel", "code", "device", "offset"}))
    sources = find_sources(list(map(str, paths)))
    return ask(sources, question, MapOptions(), Cache(cache, MapOptions()), Here(), percent_limit=limit)


@thorough
def test_what_is_rare_is_folded_whatever_the_order(tmp_path: Path) -> None:
    cache = str(tmp_path)
    whole = rare(0, *SAMPLES, cache=cache)
    samples = int(whole.rows.counts.sum())
    some = rare(2, *SAMPLES)
    assert int(some.rows.counts.sum()) == samples
    assert some.rows.counts.sum(axis=0).tolist() == [
        int(whole.rows.counts[:, whole.reasons.index(reason)].sum()) for reason in some.reasons
    ]
    assert len(some.launches) < len(whole.launches) and len(some.rows) < len(whole.rows) / 3
    # each stack that goes on has its share; what is folded is counted
    counts = some.rows.counts.sum(axis=1)
    ended = [
        number
        for number, launch in enumerate(some.launches)
        if launch and (RARE_STACKS in (launch.stack or ("",))[-1] or launch.comm == "[rarer processes]")
    ]
    assert some.totals.folded.stacks == int(counts[[each in ended for each in some.rows.launch.tolist()]].sum()) > 0
    kernels = [number for number, kernel in enumerate(some.kernels) if kernel and kernel.symbol == RARE_KERNELS]
    assert some.totals.folded.kernels == int(counts[[each in kernels for each in some.rows.kernel.tolist()]].sum())
    assert some.totals.folded.instructions > 0
    for other in (
        rare(2, *SAMPLES[::-1], cache=cache),
        rare(2, *SAMPLES, cache=cache),
    ):
        assert other.totals.folded == some.totals.folded
        assert stacks(other) == stacks(some)
    everything = rare(100, *SAMPLES, cache=cache)
    assert int(everything.rows.counts.sum()) == samples and len(everything.launches) < 4


def stacks(total: Partial) -> Counter[object]:
    profile = profile_of(total)
    found: Counter[object] = Counter()
    rows = zip(
        profile.launch.tolist(), profile.kernel.tolist(), profile.offset.tolist(), profile.counts.sum(axis=1).tolist(),
        strict=True,
    )  # fmt: skip
    for launch, kernel, offset, count in rows:
        found[profile.launches[launch], profile.kernels[kernel], offset] += count
    return found


@thorough
def test_memory_depends_on_the_limit_not_on_the_number_of_stacks(tmp_path: Path) -> None:
    tables = []
    for limit in (0, 0.5, 5):
        total = rare(limit, *SAMPLES, cache=str(tmp_path))
        tables.append(len(total.rows))
    assert tables == sorted(tables, reverse=True)
    assert tables[2] < tables[0] / 5


@pytest.mark.parametrize("place", ["none", "/proc/nowhere", "full disk", "bad disk"])
def test_captures_are_read_once_to_count_and_to_fold(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = rare(2, SAMPLES[0], cache=str(tmp_path))
    mapped: list[str] = []
    segment = Mapper.segment

    def counted(self: Mapper, sources: Sequence[tuple[Source, str]]) -> Segment:
        mapped.extend(source.name for source, _ in sources)
        return segment(self, sources)

    class Full(io.FileIO):
        def write(self, written: Any) -> int:
            return super().write(written[:100])

    monkeypatch.setattr(Mapper, "segment", counted)
    spilled = tmp_path / "spilled"
    with Full(spilled, "w+") if place == "full disk" else io.FileIO(spilled, "w") as file:
        if "disk" in place:  # that of a bad one cannot be read
            monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: file)
        found = rare(2, SAMPLES[0], cache=place if place.startswith("/") else "none")
    assert (stacks(found), found.totals.folded) == (stacks(expected), expected.totals.folded)
    # only where there is no other way are they read twice; nothing stays of what could not be written
    assert mapped == [str(SAMPLES[0])] * (2 if "disk" in place else 1)
    assert bool(spilled.stat().st_size) == (place == "bad disk")


def test_prefixes_of_stacks_have_numbers() -> None:
    def numbers(*frames: str) -> list[int]:
        found: list[int] = Prefixes().of(Launch("app", 1, frames)).tolist()
        return found

    assert numbers("a", "b", "c")[:3] == numbers("a", "b", "d")[:3]
    assert len({*numbers("a", "b", "c"), *numbers("a", "b", "d")}) == 5
    # the order counts, and how often a function calls itself
    assert numbers("a", "b")[-1] != numbers("b", "a")[-1]
    assert len(set(numbers(*"a" * 1000))) == 1001
    assert (
        fork_of([Prefixes().of(Launch("app", 1, tuple(frames))) for frames in ("abc", "abd")]) == numbers("a", "b")[-1]
    )


def test_a_limit_is_told(tmp_path: Path) -> None:
    done = iaprof("report", SAMPLES[0].parent, "--percent-limit=2", "-o", tmp_path / "page.html")
    assert done.code == 0
    (line,) = [line for line in done.err.splitlines() if "--percent-limit" in line]
    assert line.startswith("iaprof: --percent-limit folded samples: ") and RARE_STACKS in line
    # without one, nothing is folded
    assert "--percent-limit" not in iaprof("report", SAMPLES[0].parent, "-o", tmp_path / "other.html").err
