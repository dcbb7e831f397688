"""Reports of merged and imported captures: parts are not mixed, and no verb loses samples."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.imports.iaprof_import import import_text
from iaprof.formats.profile import Launch, Profile
from iaprof.report.cpu_names import SymbolOptions
from iaprof.report.exporting import fitting_interval
from iaprof.report.facts import Report
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.merging import merge
from iaprof.report.parts import build_parts
from iaprof.report.profile import ANY_INSTRUCTION, ReportOptions
from iaprof.symbols.names.names import Symbolizer
from iaprof.symbols.names.rows import CaptureNames
from unit.capturing import HEADER, capture, launch, record, stall
from unit.in_process import Done, iaprof

TEXT = Path(__file__).resolve().parents[2] / "data" / "iaprof-text" / "2026.2.txt"
A, S = 0x8000_0001_0000, 1_000_000_000
SHORT = "--frames=function,reason"
NODE1 = ["alpha_[G];sbid_[g] 3"]
NODE2 = ["beta_[G];inst_fetch_[g] 7", "beta_[G];send_[g] 5"]
COPY = ["copy_[G];inst_fetch_[g] 7"]
PYTHON = [
    "0x8000ffd00000_[G];control_[g] 2",
    "matmul(float const*, float*)_[G];active_[g] 9",
    "matmul(float const*, float*)_[G];control_[g] 1",
    "matmul(float const*, float*)_[G];dist_acc_[g] 4",
    "matmul(float const*, float*)_[G];other_[g] 5",
    "matmul(float const*, float*)_[G];pipestall_[g] 2",
    "matmul(float const*, float*)_[G];sbid_[g] 51",
    "matmul(float const*, float*)_[G];send_[g] 3",
    "matmul(float const*, float*)_[G];tdr_[g] 1",
]
IMPORTED = COPY + PYTHON
SAMPLES = 3 + 12 + 85


@pytest.fixture(autouse=True)
def _no_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the captures' names only: other symbolizers start processes, which takes long."""

    def of_the_capture(part: CaptureReader, *_: object, **__: object) -> AbstractContextManager[Symbolizer]:
        return nullcontext(CaptureNames(part))

    monkeypatch.setattr("iaprof.report.parts.open_symbolizer", of_the_capture)
    monkeypatch.setattr("iaprof.report.cpu_names.open_symbolizer", of_the_capture)


def recorded(path: Path, name: str, host: str, begun_s: tuple[int, int], *stalls: dict[str, Any], **more: Any) -> Path:
    """A capture of process 7 with a kernel at A, launched from stack 11: ids that are equal on several hosts."""
    monotonic, wall = begun_s
    header = HEADER | {
        "host": {"name": host, "boot_id": host},
        "clock": {"monotonic_ns": monotonic * S, "realtime_ns": wall * S},
        "totals": {"stalls": sum(len(each["w0"]) for each in stalls)},
    }
    mapping = {"time_ns": 0, "pid": 7, "start": 0x1000, "length": 0x9000, "offset": 0, "path": f"/opt/{name}",
               "build_id": name.encode(), "inode": None}  # fmt: skip
    process: dict[str, Any] = {"time_ns": 0, "pid": 7, "tid": 7, "ppid": 1, "event": "described", "comm": name}
    return capture(
        path,
        header | more,
        stall=[each | {"time_ns": monotonic * S + each["time_ns"]} for each in stalls],
        launch=[launch(monotonic * S + 1, 7, A, 11, name=name, comm=f"{name}-app", tid=70 + monotonic)],
        stack=[{"id": 11, "time_ns": monotonic * S + 1, "pid": 7, "truncated": False, "ips": [0x1010, 0x1021]}],
        mapping=[mapping],
        process=[process | {"cgroup": f"/{name}"}],
    )


def stream(card: str) -> dict[str, Any]:
    return {"layout": "xe2", "ip_version": [20, 1, 0], "card": card, "device": f"/dev/dri/{card}"}


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captures of two hosts, one of which has a second GPU and began 10 s later; an imported text; and all merged."""
    tmp_path = tmp_path_factory.mktemp("captures")
    node1 = recorded(tmp_path / "node1", "alpha", "node1", (900, 100), stall(S, record(A + 8, sbid=3)),
                     streams=[stream("card0")], end_ns=902 * S)  # fmt: skip
    stalls = [
        stall(S // 2, record(A + 8, send=5)),
        stall(3 * S, record(A + 8, inst_fetch=4), record(A + 16, inst_fetch=3)),
    ]
    node2 = recorded(tmp_path / "node2", "beta", "node2", (5, 110), *stalls, streams=[stream("card1")], end_ns=9 * S)
    with TEXT.open("rb") as text, (tmp_path / "text").open("wb") as output:
        import_text(text, "x", output, lambda done: None)
    merge([node2, tmp_path / "text", node1], tmp_path / "all")
    return tmp_path


@pytest.fixture
def folder(captures: Path, tmp_path: Path) -> Path:
    """Copies of them, which a test may change."""
    shutil.copytree(captures, tmp_path, dirs_exist_ok=True)
    return tmp_path


def said(done: Done) -> str:
    assert done.code == 0, done.err
    return done.out


def total(folded: str) -> int:
    return sum(int(line.rpartition(" ")[2]) for line in folded.splitlines())


def test_equal_pids_and_addresses_on_two_hosts_are_not_mixed(folder: Path) -> None:
    merge([folder / "node1", folder / "node2"], folder / "two")
    assert said(iaprof("report", folder / "two", "--frames=host,pid,cpu,function,instruction,offset")) == (
        "node1;7;[alpha+0x20];[alpha+0x10];-;alpha_[G];[no binary]_[g];0x8_[g] 3\n"
        "node2;7;[beta+0x20];[beta+0x10];-;beta_[G];[no binary]_[g];0x10_[g] 3\n"
        "node2;7;[beta+0x20];[beta+0x10];-;beta_[G];[no binary]_[g];0x8_[g] 9\n"
    )
    kernels = json.loads(said(iaprof("top", folder / "two", "--json")))["entries"]
    assert [(each["kernel"], each["processes"], each["launches"]) for each in kernels] == [
        ("beta", 1, 1),
        ("alpha", 1, 1),
    ]
    processes = json.loads(said(iaprof("top", folder / "two", "--by=process", "--json")))["entries"]
    assert [(each["host"], each["pid"], each["samples"]) for each in processes] == [("node2", 7, 12), ("node1", 7, 3)]


def test_kernels_on_two_hosts_are_added_up_but_not_processes(tmp_path: Path) -> None:
    for number, host in enumerate(("node1", "node2")):
        recorded(tmp_path / host, "same", host, (5, 10 + number), stall(S, record(A, sbid=3)))
    merge([tmp_path / "node1", tmp_path / "node2"], tmp_path / "m")
    assert said(iaprof("report", tmp_path / "m")) == (
        "same-app;7;[same+0x20];[same+0x10];-;same_[G];[no binary]_[g];sbid_[g];0x0_[g] 6\n"
    )
    (kernel,) = json.loads(said(iaprof("top", tmp_path / "m", "--json")))["entries"]
    assert (kernel["samples"], kernel["processes"], kernel["launches"]) == (6, 2, 2)
    (listing,) = json.loads(said(iaprof("annotate", tmp_path / "m", "same", "--json")))["kernels"]
    assert (listing["samples"], listing["processes"], listing["launches"]) == (6, 2, 2)


def test_the_report_of_a_twice_merged_capture_is_the_same(folder: Path) -> None:
    merge([folder / "node2", folder / "text"], folder / "some")
    merge([folder / "node1", folder / "some"], folder / "again")
    for words in ([SHORT], ["--json"], ["--format=iaprof"], ["--per-interval"]):
        assert said(iaprof("report", folder / "again", *words)) == said(iaprof("report", folder / "all", *words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", IMPORTED + NODE1 + NODE2),
        ("--pid=7", NODE1 + NODE2),
        ("--pid=4242,9", PYTHON),
        ("--comm=beta-app", NODE2),
        ("--kernel=copy|alp", COPY + NODE1),
        ("--reason=sbid", PYTHON[6:7] + NODE1),
        # Filters by what an imported text lacks select nothing of it.
        ("--tid=970", NODE1),
        ("--tid=75,970", NODE1 + NODE2),
        ("--cgroup=/beta", NODE2),
        ("--device=card0", NODE1),
        ("--device=/dev/dri/card1", NODE2),
        ("--device=card0,card1", NODE1 + NODE2),
        # Times count from the begin of the first part, which is unknown for the imported text.
        ("--time=-1500ms", IMPORTED + NODE1),
        ("--time=500ms-2s", NODE1),
        ("--time=10s-11s", NODE2[1:]),
        ("--time=11s-", NODE2[:1]),
        ("--time=0%-50%", IMPORTED + NODE1),  # of 14 s
        ("--time=80%-100%", NODE2[:1]),
    ],
)
def test_filters_of_a_merged_capture(folder: Path, words: str, expected: list[str]) -> None:
    assert said(iaprof("report", folder / "all", SHORT, *words.split())).splitlines() == sorted(expected)


def test_filters_that_match_in_different_parts_match_nothing(folder: Path) -> None:
    done = iaprof("report", folder / "all", SHORT, "--time=10s-", "--comm=alpha-app")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "iaprof: no stall matches --time 10s- and --comm alpha-app: the only process is beta-app 7 on node2\n"
    )


def test_intervals_count_from_the_begin_of_the_first_part(folder: Path) -> None:
    merge([folder / "node2", folder / "node1"], folder / "two")
    assert said(iaprof("report", folder / "two", "--per-interval", SHORT)).splitlines() == [
        "01.000 s;alpha_[G];sbid_[g] 3",
        "10.000 s;beta_[G];send_[g] 5",
        "13.000 s;beta_[G];inst_fetch_[g] 7",
    ]


@pytest.mark.parametrize(
    ("name", "words", "code", "message"),
    [
        ("all", "--device=card7", 2, "iaprof: the capture has no device 'card7'; it has: card0, card1\n"),
        ("text", "--tid=3", 2, "iaprof: --tid, --cgroup and --device find nothing here: an imported text does not"),
        ("text", "--cgroup=/x", 2, "iaprof: --tid, --cgroup and --device find nothing here"),
        ("text", "--device=card0", 2, "iaprof: --tid, --cgroup and --device find nothing here"),
        ("texts", "--device=card0", 2, "iaprof: --tid, --cgroup and --device find nothing here"),
    ],
)
def test_filters_that_no_part_has_are_refused(folder: Path, name: str, words: str, code: int, message: str) -> None:
    other = json.loads(json.dumps(CaptureReader(folder / "text").header)) | {"totals": {"samples": 1}}
    sample = CaptureReader(folder / "text").table("sample").to_pylist()[:1]
    merge([folder / "text", capture(folder / "other", other, sample=sample)], folder / "texts")
    done = iaprof("report", folder / name, words)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(message) and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", IMPORTED),
        ("--pid=4242", PYTHON),
        ("--comm=python3", PYTHON),
        ("--kernel=^copy", COPY),
        ("--reason=control,tdr", [PYTHON[0], PYTHON[2], PYTHON[8]]),
        ("--attribution=latest", IMPORTED),  # the tool that wrote the text has joined it
    ],
)
def test_filters_of_an_imported_capture(folder: Path, words: str, expected: list[str]) -> None:
    assert said(iaprof("report", folder / "text", SHORT, *words.split())).splitlines() == sorted(expected)


def test_times_of_an_imported_capture_are_those_of_its_intervals(folder: Path) -> None:
    late = ["0x8000ffd00000_[G];control_[g] 2", "matmul(float const*, float*)_[G];sbid_[g] 11"]
    for time in ("15ms-", "50%-100%"):
        assert said(iaprof("report", folder / "text", SHORT, "--time", time)).splitlines() == late


@pytest.mark.parametrize("name", ["all", "text", "node2"])
def test_every_verb_has_the_same_number_of_samples(folder: Path, name: str) -> None:
    path, samples = folder / name, {"all": SAMPLES, "text": 85, "node2": 12}[name]
    assert total(said(iaprof("report", path))) == samples
    # top, by whatever
    for by in ("kernel", "function", "line", "instruction", "reason", "process", "stack"):
        top = json.loads(said(iaprof("top", path, "--by", by, "--json", "-n", "2")))
        assert top["total"]["samples"] == samples
        assert sum(each["samples"] for each in top["entries"]) + top["more"]["samples"] == samples
    # diff with itself, and with nothing of it
    same = json.loads(said(iaprof("diff", path, path, "--json", "--normalize=none")))["total"]
    assert (same["samples_before"], same["samples_after"], same["change"]) == (samples, samples, 0)
    # annotate: all of its kernels
    listings = json.loads(said(iaprof("annotate", path, ".", "--json")))["kernels"]
    assert sum(each["samples"] for each in listings) == samples
    # query
    ((asked,),) = asked_of(path, "SELECT sum(samples) FROM samples")
    assert asked == samples
    # Intel's text, and back
    said(iaprof("report", path, "-o", folder / "again.iaprof.txt"))
    said(iaprof("import", folder / "again.iaprof.txt"))
    assert total(said(iaprof("report", folder / "again.parquet"))) == samples


def asked_of(path: Path, sql: str) -> list[list[Any]]:
    return [list(row.values()) for row in json.loads(said(iaprof("query", path, sql, "--json")))]


def test_queries_have_a_part_column_and_info_counts_parts(folder: Path) -> None:
    by_part = "SELECT part, count(*), sum(send + inst_fetch + sbid) FROM stalls GROUP BY part ORDER BY part"
    assert asked_of(folder / "all", by_part) == [[0, 1, 3], [1, 3, 12]]
    by_host = "SELECT host, sum(samples) FROM samples GROUP BY host ORDER BY host NULLS FIRST"
    assert asked_of(folder / "all", by_host) == [[None, 85], ["node1", 3], ["node2", 12]]
    about = json.loads(said(iaprof("info", folder / "all", "--json")))
    assert {name: about["counts"][name] for name in ("stalls", "launches", "stacks")} == {
        "stalls": 4, "launches": 2, "stacks": 2}  # fmt: skip
    assert [(part["label"], part["imported"], part["counts"]["stalls"]) for part in about["parts"]] == [
        ("node1", None, 1), ("node2", None, 3), ("text", "iaprof 2026.2", 0)]  # fmt: skip
    assert total(said(iaprof("report", folder / "all"))) == SAMPLES


def test_recordings_days_apart_have_longer_intervals(tmp_path: Path) -> None:
    # given two recordings of seconds, three days apart
    for host, begun_s in (("node1", 100), ("node2", 100 + 3 * 86_400)):
        recorded(tmp_path / host, "alpha", host, (5, begun_s), stall(S, record(A + 8, sbid=3)), end_ns=8 * S)
    merge([tmp_path / "node1", tmp_path / "node2"], tmp_path / "both")
    # when
    done = iaprof("report", tmp_path / "both", "-o", tmp_path / "page.html")
    # then
    assert done.code == 0, done.err
    assert fitting_interval(CaptureReader(tmp_path / "both"), 0.02) * 30_000 > 3 * 86_400
    assert fitting_interval(CaptureReader(tmp_path / "node1"), 0.02) == 0.02


def test_stalls_by_time_are_those_of_a_report_by_interval(folder: Path) -> None:
    def by_interval(profile: Profile) -> Counter[tuple[int, Launch | None, str]]:
        found: Counter[tuple[int, Launch | None, str]] = Counter()
        for row, samples in enumerate(profile.counts.sum(axis=1).tolist()):
            kernel = profile.kernels[profile.kernel[row]]
            launch = profile.launches[profile.launch[row]]
            found[int(profile.interval[row]), launch, kernel.symbol if kernel else ""] += samples
        return found

    def built(path: Path, options: ReportOptions) -> Report:
        with GpuModuleLoader() as loader:
            return build_parts(CaptureReader(path), loader, options, SymbolOptions())

    for name in ("node2", "text", "all"):
        whole = built(folder / name, ReportOptions(by_time_s=0.001))
        timed = built(folder / name, ReportOptions(interval_s=0.001)).profile
        assert whole.by_time is not None
        assert len(timed.intervals) > 1
        assert list(whole.by_time.intervals) == list(timed.intervals)
        assert by_interval(whole.by_time) == by_interval(timed)
        assert len(whole.profile.intervals) == 1
        # Recorded instructions are in one row; those of imported texts stay.
        recorded_codes = {code.mnemonic for code in whole.by_time.codes} - {code.mnemonic for code in timed.codes}
        assert recorded_codes == (set() if name == "text" else {ANY_INSTRUCTION})
    assert built(folder / "all", ReportOptions(interval_s=0.001)).by_time is None
