"""The facts and warnings of a report: whole texts for captures made by hand, and when it warns."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.export import About
from iaprof.report.about import about
from iaprof.report.facts import CpuModule, Facts, Matched
from iaprof.report.gpu.source_files import SourceFiles
from iaprof.report.join.selection import Selection, TimeRange
from iaprof.report.merging import merge
from iaprof.symbols.cpu_frames import ModuleNames
from iaprof.symbols.names.names import Module, ModuleKind, Symbolized
from unit.capturing import capture, launch, record, stall
from unit.cli.test_info import FULL, GUESS, GUESSED, SECOND, full

GOOD = Facts(records=100, stalls=800, matched=Matched(800, 800, 800, 400))


def of(path: Path, facts: Facts | None = None) -> About:
    return about(CaptureReader(path), facts)


def with_losses(path: Path, *losses: Any, stalls: int = 990) -> Path:
    header = {"totals": {"stalls": stalls}, "losses": list(losses)}
    return capture(path, header, stall=[stall(9, record(64, sbid=3))], launch=[launch(n, 7, 64) for n in range(10)])


def loss(source: str, what: str, count: int | None, events: int = 1) -> dict[str, Any]:
    return {"source": source, "what": what, "count": count, "events": events}


def test_a_capture_with_everything(tmp_path: Path) -> None:
    facts = replace(GOOD, unknown_kernel=8, no_launch=16, matched=Matched(800, 792, 780, 400, 1))
    found = of(full(tmp_path / "cap.parquet"), facts)
    assert (found.host, found.gpus, found.command, found.begun, found.seconds) == (
        "node1", "Ponte Vecchio (Xe-HPC)", "./train --data 'my data'", 1_795_257_213.747495691, 200.0
    )  # fmt: skip
    assert found.title == "./train --data 'my data' · Ponte Vecchio (Xe-HPC) · node1"
    assert found.headline == [
        "800 samples",
        "rate: one sample every 1,757 GPU cycles",
        "matched: 99.0 % to a kernel, 97.5 % to an instruction, 50.0 % to one stack, 0.1 % ambiguous",
        "unmatched: 8 in no known kernel, 16 without a launch",
        "unnamed: all frames named",
        "lost: launches lost: 1,200, 2 times, stalls of card0, GT 0 overflow: an unknown number, 1 time",
        "recorder: 2.0 % of one CPU",
    ]
    groups = dict(found.facts)
    assert list(groups) == ["Recording", "GPUs", "This report", "Contents", "Lost", "Quality", "Own cost"]
    assert groups["GPUs"] == (
        ("card0", "Ponte Vecchio (Xe-HPC), ip 12.60.0, 0000:03:00.0, tile 0, GT 0, 64 XeCores"),
        ("renderD128", "Xe-HPC, ip 12.60.0, 0000:03:00.0, tile 1, GT 1, 64 XeCores"),
    )
    assert groups["This report"] == (
        ("samples", "800 in 100 stall records"),
        ("rate", "one sample every 1,757 GPU cycles"),
        ("scaled", "one of every 8 records was kept"),
        ("matched", "99.0 % to a kernel, 97.5 % to an instruction, 50.0 % to one stack, 0.1 % ambiguous"),
        ("unmatched", "8 in no known kernel, 16 without a launch"),
        ("unnamed", "all frames named"),
    )
    assert groups["Contents"][0] == ("stall records", "1,234,567 in 1 read")
    assert groups["Own cost"][1] == ("probes", "1.2 µs a launch")


def test_a_capture_with_almost_nothing(tmp_path: Path) -> None:
    found = of(capture(tmp_path / "cap.parquet", {}))
    facts = [("Contents", (("stall records", "0"),)), ("Lost", (("", "nothing"),))]
    assert found == About(headline=["lost: nothing"], facts=facts, warnings=[])


def test_merged_captures_have_hosts_and_gpus_of_all(tmp_path: Path) -> None:
    second = FULL | {
        "host": {"name": "node2"},
        "streams": [{"card": "card0", "name": "Battlemage", "pci_address": "0000:03:00.0"},
                    {"card": "card1", "name": "Battlemage", "pci_address": "0000:04:00.0"}],
        "clock": {"monotonic_ns": 0, "realtime_ns": FULL["clock"]["realtime_ns"] + 50 * SECOND},
    }  # fmt: skip
    merge([full(tmp_path / "a"), capture(tmp_path / "b", second, stall=[stall(9)])], tmp_path / "all.parquet")
    found = of(tmp_path / "all.parquet")
    assert (found.host, found.gpus) == ("node1, node2", "Ponte Vecchio (Xe-HPC), 2x Battlemage")
    assert (found.command, found.begun) == ("./train --data 'my data'", 1_795_257_213.747495691)
    assert found.seconds == 260.0  # the second lasts 210 s and was begun 50 s later
    groups = dict(found.facts)
    assert [name for name, _ in groups["Recording"]] == ["node1", "node2"]
    assert [name for name, _ in groups["GPUs"]] == ["node1 card0", "node1 renderD128", "node2 card0", "node2 card1"]
    assert [name for name, _ in groups["Own cost"]] == ["node1", "node2"]


@pytest.mark.parametrize(
    ("losses", "warnings"),
    [
        ([loss("stalls of card0", "lost", 9)], []),  # 9 of 999
        ([loss("stalls of card0", "lost", 110, 2)],
         ["lost while recording: stalls of card0 lost: 110, 2 times, 10.0 % of all"]),
        ([loss("stalls of card0", "overflow", None)],
         ["lost while recording: stalls of card0 overflow: an unknown number, 1 time"]),
        ([loss("launches", "lost", 10)], ["lost while recording: launches lost: 10, 1 time, 50.0 % of all"]),
        ([loss("recorder", "died", 1)], ["lost while recording: recorder died: 1, 1 time"]),
        (["?"], ["lost while recording: something that the header does not describe: an unknown number"]),
        ([loss("a" * 3_000, "b", None)], [f"lost while recording: {'a' * 1_977}…"]),
    ],
)  # fmt: skip
def test_large_losses_are_warnings(losses: list[Any], warnings: list[str], tmp_path: Path) -> None:
    assert of(with_losses(tmp_path / "cap.parquet", *losses), GOOD).warnings == warnings


@pytest.mark.parametrize(
    ("facts", "warnings"),
    [
        (GOOD, []),
        (Facts(), ["there are no samples"]),
        (replace(GOOD, unknown_kernel=40, no_launch=40, matched=Matched(800, 760, 720)), []),  # 5 % of each
        (replace(GOOD, unknown_kernel=41, matched=Matched(800, 759, 759)),
         ["5.1 % of the samples are in no known kernel"]),
        (replace(GOOD, no_launch=80),
         ["10.0 % of the samples are in kernels without a recorded launch: no stack is known"]),
        (replace(GOOD, matched=Matched(800, 800, 0), problems={"no decoder:\nget one": ["a.elf", "b.elf"]}),
         ["100.0 % of the samples are at instructions that could not be decoded",
          "a.elf and 1 more: no decoder:\\x0aget one"]),
    ],
)  # fmt: skip
def test_many_unmatched_samples_are_warnings(facts: Facts, warnings: list[str], tmp_path: Path) -> None:
    assert of(with_losses(tmp_path / "cap.parquet"), facts).warnings == warnings


def test_many_warnings_are_counted(tmp_path: Path) -> None:
    facts = replace(GOOD, problems={f"problem {number}": ["a"] for number in range(30)})
    warnings = of(with_losses(tmp_path / "cap.parquet"), facts).warnings
    assert len(warnings) == 21
    assert warnings[-2:] == ["a: problem 19", "and 10 more warnings"]


def test_changed_source_files_are_warnings(tmp_path: Path) -> None:
    path = full(tmp_path / "cap.parquet", losses=[])
    (tmp_path / "old.cl").write_text("\n")
    (tmp_path / "new.cl").write_text("\n")
    begun = of(path).begun
    os.utime(tmp_path / "old.cl", (begun - 1, begun - 1))
    os.utime(tmp_path / "new.cl", (begun + 1, begun + 1))
    sources = SourceFiles([tmp_path])
    sources.line("old.cl", 1)
    sources.line("new.cl", 1)
    found = about(CaptureReader(path), GOOD, sources)
    assert found.warnings == [f"{tmp_path}/new.cl was changed after the recording began: its lines may differ"]


@pytest.mark.parametrize(
    ("selection", "only"),
    [
        (Selection(), None),
        (Selection(time_range=TimeRange.parse("10%-20%"), pids=frozenset([8, 7])), "10% to 20%, pid 7 or 8"),
        (Selection(time_range=TimeRange.parse("500ms-"), kernel=re.compile("mat.*\x1b"), reasons=frozenset(["sbid"])),
         "0.5 s to the end, kernel mat.*\\x1b, reason sbid"),
        (Selection(tids=frozenset([9]), comms=frozenset("ba"), devices=("card0",), cgroups=("/a",)),
         "tid 9, process a or b, device card0, cgroup /a"),
    ],
)  # fmt: skip
def test_filters_are_reported(selection: Selection, only: str | None, tmp_path: Path) -> None:
    found = about(CaptureReader(with_losses(tmp_path / "cap.parquet")), GOOD, selection=selection)
    assert dict(dict(found.facts)["This report"]).get("only") == only


def test_unnamed_modules_are_reported(tmp_path: Path) -> None:
    modules = [CpuModule(module("/opt/lib\x1b.so"), 1.0, 0.25), CpuModule(module("/usr/lib/libc.so"), 1.0, 0.0)]
    found = dict(of(with_losses(tmp_path / "cap.parquet"), replace(GOOD, cpu_modules=modules)).facts)
    assert dict(found["This report"])["unnamed"] == "frames of lib\\x1b.so in 25.0 % of the samples with a stack"


def module(path: str) -> ModuleNames:
    return ModuleNames(Module(ModuleKind.FILE, path), 1, {}, Symbolized())


def test_a_guessed_layout_is_the_first_warning(tmp_path: Path) -> None:
    path = full(tmp_path / "cap.parquet", streams=[GUESSED])
    assert of(path).warnings[0] == GUESS
