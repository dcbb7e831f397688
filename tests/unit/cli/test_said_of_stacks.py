"""What every verb says of the stacks of launches and CPU samples, from one header: by number, process and library."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from iaprof.cli.terminal.summary import end_line
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.stack_counts import ProcessEnd, WholeStacks
from iaprof.report.about import about
from iaprof.report.merging import merge
from unit.capturing import HEADER, capture, launch, record, stall
from unit.in_process import iaprof

SECOND = 1_000_000_000
LAUNCHES = WholeStacks.from_counts(
    7,
    0,
    Counter({"libfoo.so": 3}),
    [ProcessEnd(71, 9, 3, late=2), ProcessEnd(72, 1, 0, presumed=1)],
    late=2,
    presumed=1,
)
SAMPLES = WholeStacks.from_counts(
    85,
    0,
    Counter({"libbar.so": 6, "python3": 4}),
    [ProcessEnd(73, 60, 10, deep=2, guessed=5), ProcessEnd(74, 40, 0, late=8)],
    deep=2,
    guessed=5,
    late=8,
    deep_in={"python3": 2},
    guesses=Counter({"libblas.so": 5}),
)
STACK_ENDS = {"launches": LAUNCHES.to_json(), "cpu_samples": SAMPLES.to_json()}
LAUNCHES_IN_SHORT = "7 of 10 launches (70.0 %) have a whole stack, 3 (30.0 %) are cut, 1 presumed, 2 finished late"
SAMPLES_IN_SHORT = (
    "85 of 100 CPU samples (85.0 %) have a whole stack, 5 (5.0 %) a guessed one, 8 (8.0 %) are cut, "
    "2 (2.0 %) are too deep, 8 finished late"
)
QUALITY = """\
Quality
  launch stacks  7 of 10 launches (70.0 %) have a whole stack, 3 (30.0 %) are
                 cut; 1 has the stack of another one that looked the same; 2
                 were finished when the recording had ended
    end in       libfoo.so (3)
    process      71: 3 of 9 end early, 2 finished late
    process      72: 1 with another's stack
  CPU stacks     85 of 100 CPU samples (85.0 %) have a whole stack, 5 (5.0 %) a
                 guessed one, 8 (8.0 %) are cut, 2 (2.0 %) are too deep; 8 were
                 finished when the recording had ended
    end in       libbar.so (6), python3 (4)
    guessed in   libblas.so (5)
    process      73: 10 of 60 end early, 2 of these too deep, 5 with guessed
                 callers
    process      74: 8 finished late
"""


def captured(path: Path, **more: Any) -> Path:
    clock = {"clock": {"monotonic_ns": 1, "realtime_ns": SECOND}, "end_ns": 2 * SECOND}
    header = HEADER | clock | {"stack_ends": STACK_ENDS, "host": {"name": path.name, "boot_id": path.name}} | more
    return capture(path, header, stall=[stall(9, record(64, sbid=3))], launch=[launch(3, 7, 64)])


def test_record_s_last_line(tmp_path: Path) -> None:
    line = end_line("record", tmp_path / "c", {"stack_ends": STACK_ENDS}, 100)
    launches = LAUNCHES.text("launches")
    assert "7 of 10 launches (70.0 %) have a whole stack, 3 (30.0 %) are cut; 3 end early, in libfoo.so (3)" in line
    assert ", in process 71 (3 of 9); 1 has the stack" in line
    assert f"; stacks: {launches}; {SAMPLES_IN_SHORT}; lost: nothing ]" in line
    # and where there are samples only
    line = end_line("record", tmp_path / "c", {"stack_ends": {"cpu_samples": SAMPLES.to_json()}}, 100)
    assert f"; stacks: {SAMPLES_IN_SHORT}; lost: nothing ]" in line
    assert "stacks: " not in end_line("record", tmp_path / "c", {}, 100)


def test_info(tmp_path: Path) -> None:
    path = captured(tmp_path / "c")
    assert QUALITY in iaprof("info", path).out
    (part,) = json.loads(iaprof("info", "--json", path).out)["parts"]
    assert part["stack_ends"] == STACK_ENDS


@pytest.mark.parametrize("verb", ["report", "top"])
def test_the_line_of_a_report_says_what_its_samples_cannot_tell(tmp_path: Path, verb: str) -> None:
    done = iaprof(verb, captured(tmp_path / "c"))
    assert f"; recorded stacks: {LAUNCHES_IN_SHORT}; {SAMPLES_IN_SHORT}; lost while recording: " in done.err
    # if there is something
    whole = {"launches": WholeStacks.from_counts(5, 0, Counter()).to_json()}
    assert "recorded stacks" not in iaprof(verb, captured(tmp_path / "d", stack_ends=whole)).err


@pytest.mark.parametrize("words", [("report", "--json"), ("top", "--json"), ("top", "--json", "--per-interval")])
def test_json_of_reports(tmp_path: Path, words: tuple[str, ...]) -> None:
    told = json.loads(iaprof(*words, "-q", captured(tmp_path / "c")).out)
    assert told["recorded_stack_ends"] == STACK_ENDS
    assert told["stack_ends"]["stacks"] == 0  # of the samples: this launch's stack is not in the capture


def test_the_page(tmp_path: Path) -> None:
    groups = dict(about(CaptureReader(captured(tmp_path / "c"))).facts)
    assert groups["Quality"] == (
        *LAUNCHES.facts("launch stacks", "launches"),
        *SAMPLES.facts("CPU stacks", "CPU samples"),
    )


def test_a_merged_capture(tmp_path: Path) -> None:
    merge([captured(tmp_path / "a"), captured(tmp_path / "b")], tmp_path / "all")
    shown = iaprof("info", tmp_path / "all").out
    assert "\n  launch stacks  14 of 20 launches (70.0 %) have a whole stack, 6 (30.0 %) are\n" in shown
    assert "\n    guessed in   libblas.so (10)\n" in shown
    assert "    process " not in shown  # of several hosts
    groups = dict(about(CaptureReader(tmp_path / "all")).facts)
    assert groups["Quality"][0][1].startswith("14 of 20 launches ")
    told = json.loads(iaprof("report", "--json", "-q", tmp_path / "all").out)["recorded_stack_ends"]
    assert (told["launches"]["late"], told["cpu_samples"]["late"]) == (4, 16)


def test_names_of_libraries_are_hostile(tmp_path: Path) -> None:
    evil = "\x1b[2J\n"
    ends = WholeStacks.from_counts(1, 0, Counter({evil: 1}), guessed=1, guesses=Counter({evil: 1}), late=1)
    path = captured(tmp_path / "c", stack_ends={"launches": ends.to_json()})
    for done in (iaprof("info", path), iaprof("report", path)):
        assert "\x1b" not in done.out + done.err
    texts = [text for _, said in about(CaptureReader(path)).facts for _, text in said]
    assert sum("\\x1b[2J" in text for text in texts) == 2
    assert all("\x1b" not in text for text in texts)
    assert "\x1b" not in end_line("record", path, CaptureReader(path).header, 1)
