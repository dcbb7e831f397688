"""perf script text, parsed by the rules in FlameScope's source (app/perf and app/controllers of Netflix/flamescope)."""

import io
import re
from collections import Counter
from math import floor
from pathlib import Path

import pytest

from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions, reason_name
from iaprof.formats.writers.flamescope import Flamescope, write_events
from iaprof.gpu.intel.reasons import REASONS
from unit import stalled
from unit.profiles import Row, counts

EVENT = re.compile(r" +([0-9.]+): .+?:")
FRAME = re.compile(r"^[\t ]*[0-9a-fA-F]+ (.+) \((.*?)\)$")
COMM = re.compile(r"^ *([^0-9]+)")
ROWS = 50  # per second


def written(export: Export, options: StackOptions | None = None) -> str:
    out = io.StringIO()
    Flamescope().write(export, options or StackOptions(), out)
    return out.getvalue()


def events(text: str) -> list[tuple[float, list[tuple[str, str]]]]:
    """Time and stack of each event as FlameScope's flame graph has them, from the process on."""
    found: list[tuple[float, list[tuple[str, str]]]] = []
    for line in text.splitlines(keepends=True):
        if line[0] == "#":
            continue
        if line[0] != "\t" and (event := EVENT.search(line)):
            comm = COMM.search(line)
            found.append((float(event[1]), [(comm[1].rstrip() if comm else "<unknown>", "")]))
        elif frame := FRAME.search(line):
            name = frame[1].split("+")[0] if frame[1].find("+") > 0 else frame[1]
            found[-1][1].insert(1, (name, frame[2]))
    return found


def heat_map(text: str) -> Counter[tuple[int, int]]:
    """Events by second and row; FlameScope takes any line for an event that looks like one."""
    times = [float(event[1]) for line in text.splitlines() if line[:1] != "#" and (event := EVENT.search(line))]
    return Counter((floor(time - floor(min(times))), floor(ROWS * (time % 1))) for time in times)


def test_events_by_flamescopes_published_rules_as_it_cannot_be_had_offline() -> None:
    text = written(stalled.export([stalled.ROWS[2], stalled.ROWS[3]]))
    # given intervals with five and three samples, when written, then as many events are spread evenly over them
    event = (
        "Web_Content 7 0.0{:0<8}: 1 gpu-sample:\n"
        "\t               0 0x10_[g] ([gpu])\n"
        "\t               0 stall: send ([gpu])\n"
        "\t               0 send_[g] ([gpu])\n"
        "\t               0 dot(float)_[G] ([gpu])\n"
        "\t               0 matmul_[G] ([gpu])\n"
        "\t               0 src/matmul.cl_[G] ([gpu])\n"
        "\t             1f0 [unknown] (libfoo.so)\n"
        "\n"
    )
    unknown = (
        "[unknown_process] 0 0.0{:0<8}: 1 gpu-sample:\n"
        "\t               0 0x8000000000000001_[g] ([gpu])\n"
        "\t               0 stall: control ([gpu])\n"
        "\t               0 [unknown kernel]_[G] ([gpu])\n"
        "\t               0 [unknown process] ([unknown])\n"
        "\n"
    )
    assert text == "".join(event.format(time) for time in (22, 26, 30, 34, 38)) + "".join(
        unknown.format(time) for time in ("63333333", "7", "76666666")
    )


def test_the_heat_map_has_the_stalls_of_each_interval() -> None:
    found = heat_map(written(stalled.export()))
    assert found == {(0, row): count for row, count in stalled.per_interval(stalled.ROWS).items()}


def test_many_stalls_give_fewer_events_in_the_same_proportions() -> None:
    # given 40 intervals with over a million samples of two stacks, three to one
    rows = [
        Row(interval, stalled.APP, stalled.MATMUL, stalled.SEND, 0x10, counts(sbid=factor * 10_000 * (interval + 1)))
        for interval in range(40)
        for factor in (3, 1)
    ]
    rows[1::2] = [row._replace(launch=stalled.AGAIN) for row in rows[1::2]]
    total = sum(sum(row.counts) for row in rows)
    # when at most a thousand events are allowed
    out = io.StringIO()
    write_events(stalled.export(rows), StackOptions(), out, most=1_000)
    # then each interval and stack has its share, give or take one, and the counts add up to all samples
    text = out.getvalue()
    found = heat_map(text)
    assert sum(found.values()) == 1_000
    for interval, samples in stalled.per_interval(rows).items():
        assert abs(found[0, interval] - samples * 1_000 / total) <= 1
    assert abs(sum(1 for _, stack in events(text) if len(stack) > 8) - 750) <= 40
    weights = [int(each) for each in re.findall(r": (\d+) gpu-sample:", text)]
    assert (sum(weights), max(weights) - min(weights)) == (total, 0 if total % 1_000 == 0 else 1)


def test_a_file_keeps_to_its_maximum_size() -> None:
    rows = [row._replace(counts=[count * 1_000 for count in row.counts]) for row in stalled.ROWS]
    out = io.StringIO()
    write_events(stalled.export(rows), StackOptions(), out, size=300_000)
    assert 270_000 < len(out.getvalue()) < 330_000


@pytest.mark.parametrize(
    ("options", "stacks"),
    [
        (StackOptions(components=("process", "reason")), {"app;active": 10, "app;stall: sbid": 72, "app;stall: tdr": 20,
            "[unknown_process];stall: control": 3, "Web_Content;stall: send": 5}),
        (StackOptions(components=("function",), inverted=True), {"app;matmul_[G]": 20,
            "app;dot(float)_[G];matmul_[G]": 82, "[unknown_process];[unknown kernel]_[G]": 3,
            "Web_Content;dot(float)_[G];matmul_[G]": 5}),
        (StackOptions(cpu_samples=True), {"app;main;wait": 4, "swapper;cpu_idle_[k]": 2}),
    ],
)  # fmt: skip
def test_chosen_components(options: StackOptions, stacks: dict[str, int]) -> None:
    found = events(written(stalled.export(), options))
    assert Counter(";".join(name for name, _ in stack) for _, stack in found) == stacks


def test_a_large_capture_is_written_from_its_profile_by_interval() -> None:
    export = stalled.export(stalled.ROWS[:1])
    by_time = stalled.export(stalled.ROWS).profile
    found = written(Export(export.profile, export.about, export.interval_s, by_time))
    assert len(events(found)) == stalled.SAMPLES
    assert {stack[-1][0] for _, stack in events(found)} <= {reason_name(reason) for reason in REASONS}


def test_no_stalls_give_no_events() -> None:
    assert written(stalled.export([])) == ""


def test_hostile_names_add_no_events_and_break_no_frames() -> None:
    text = written(stalled.hostile())
    total = sum(range(1, len(stalled.HOSTILE) + 1))
    assert all(character.isprintable() for line in text.split("\n") for character in line.removeprefix("\t"))
    assert sum(heat_map(text).values()) == total
    found = events(text)
    # process, CPU, OS kernel, file (if it has a name), two functions, mnemonic, reason and offset
    assert Counter(len(stack) for _, stack in found) == {9: total - 10, 8: 10}
    assert stalled.HOSTILE[9] == ""
    assert max(time for time, _ in found) < 0.08
    assert {stack[-2][0] for _, stack in found} == {"stall: sbid"}


def flamescope_total(file: Path) -> int:
    return sum(map(int, re.findall(r"^\S.*: ([0-9]+) \S+: *$", file.read_text(), re.MULTILINE)))


TOTALS = {"flamescope": flamescope_total}
