"""Metrics: from files and events to rows of the capture, and to two lines of iaprof text."""

import io
import itertools
import json
import os
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from iaprof.bpf.perf_event import Attr, open_event
from iaprof.formats.capture.metric_values import decode
from iaprof.formats.capture.metrics import MISSING, Derivation, Metric, busy, describe, describe_processes
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.export import Export
from iaprof.formats.profile import Code, Gauges, StackOptions
from iaprof.formats.writers.iaprof_text import IaprofText
from iaprof.record.capture.finish import finish
from iaprof.record.sources import intel_metrics, metrics
from iaprof.record.sources.i915_metrics import I915Gt
from iaprof.record.sources.intel_metrics import IntelGt
from iaprof.record.sources.metrics import Metrics
from iaprof.record.sources.stall_driver import Device, Engine, Gt
from iaprof.record.sources.xe_metrics import XeGt
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from iaprof.report.gauges import gauges
from thorough import thorough
from unit.builds import no_descriptor_is_lost
from unit.capturing import capture
from unit.profiles import Row, profile
from waiting import until

S = 1_000_000_000
DOCS = Path(__file__).resolve().parents[4] / "docs"


def packed(*rows: tuple[int, ...]) -> bytes:
    return b"".join(struct.pack(f"<{len(row)}Q", *(number % 2**64 for number in row)) for row in rows)


def decoded(meta: bytes, *rows: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Decodes metric rows: (time, stream, pid, name, value)."""
    return [tuple(row.values()) for row in decode(meta, packed(*rows)).to_pylist()]


def values(how: Derivation, *counts: int, scale: float = 1.0) -> list[tuple[int, float]]:
    """(second, value) of a metric of one column that was read once a second."""
    meta = describe(0, 2, [Metric("m", how, (1,), (), scale)])
    return [(row[0] // S, row[4]) for row in decoded(meta, *((n * S, count) for n, count in enumerate(counts)))]


# Raw rows to values


def test_each_row_says_when_whose_and_what() -> None:
    meta = describe(3, 2, [Metric("fan-1-RPM", Derivation.VALUE, (1,))])
    assert decoded(meta, (10, 1000), (20, 1100), (30, 1200)) == [
        (20, 3, None, "fan-1-RPM", 1100.0),
        (30, 3, None, "fan-1-RPM", 1200.0),
    ]


def test_the_ways_from_counts_to_values() -> None:
    assert values(Derivation.VALUE, 0, 48_000, -5_000, scale=1e-3) == [(1, 48.0), (2, -5.0)]
    assert values(Derivation.STEP, 100, 2500, 2500) == [(1, 2400.0), (2, 0.0)]
    assert values(Derivation.RATE, 0, 150_000_000, 400_000_000, scale=1e-6) == [(1, 150.0), (2, 250.0)]


def test_a_rate_is_by_the_time_that_passed() -> None:
    meta = describe(0, 2, [Metric("power-card-W", Derivation.RATE, (1,), (), 1e-6)])
    rows = decoded(meta, (0, 0), (S // 2, 50_000_000), (S // 2, 60_000_000), (S // 2 + 2 * S, 80_000_000))
    assert [row[4] for row in rows] == [100.0, 10.0]  # and no row where no time passed
    steps = decoded(describe(0, 2, [Metric("m", Derivation.STEP, (1,))]), (0, 0), (5, 1), (5, 2), (4, 3), (6, 4))
    assert [row[0] for row in steps] == [5, 6]


def test_how_busy_is_ticks_of_ticks_over_all_engines_of_the_class() -> None:
    meta = describe(0, 5, [Metric(busy("copy"), Derivation.SHARE, (1, 3), (2, 4), 100.0)])
    rows = decoded(
        meta, (0, 0, 0, 0, 0), (1, 25, 100, 0, 100), (2, 25, 200, 0, 200), (3, 25, 200, 0, 200), (4, 26, 200, 0, 200)
    )
    assert [(row[0], row[4]) for row in rows] == [(1, 12.5), (2, 0.0)]  # later no ticks had passed
    over = decoded(meta, (0, 0, 0, 0, 0), (1, 101, 100, 101, 100))
    assert [row[4] for row in over] == [100.0]


def test_a_counter_passes_its_end_or_begins_anew() -> None:
    assert values(Derivation.STEP, 2**64 - 10, 10, 30) == [(1, 20.0), (2, 20.0)]
    assert values(Derivation.STEP, 1000, 5, 25) == [(2, 20.0)]


def test_a_number_that_was_not_there_takes_only_what_needs_it() -> None:
    assert values(Derivation.VALUE, 1, MISSING, 3) == [(2, 3.0)]
    assert values(Derivation.STEP, 1, 2, MISSING, 4, 5) == [(1, 1.0), (4, 1.0)]


def test_where_one_batch_ends_and_the_next_begins_nothing_is_lost() -> None:
    meta = describe(0, 3, [Metric("a", Derivation.RATE, (1,)), Metric("b", Derivation.VALUE, (2,))])
    rows = [(n * S, n * n, 7 * n) for n in range(10)]
    whole = decoded(meta, *rows)
    pieces = [decoded(meta, *rows[first : last + 1]) for first, last in itertools.pairwise((0, 1, 4, 5, 9))]
    assert sorted(itertools.chain(*pieces)) == sorted(whole)
    assert len(whole) == 18
    batches = [packed(*rows[first : last + 1]) for first, last in itertools.pairwise((0, 1, 4, 5, 9))]
    assert [tuple(row.values()) for row in decode(meta, *batches).to_pylist()] == whole


def test_what_a_lost_batch_had_is_nobody_else_s() -> None:
    meta = describe(0, 2, [Metric("frequency-actual-MHz", Derivation.STEP, (1,))])
    first, third = packed((0, 0), (1, 100), (2, 200)), packed((4, 400), (5, 500))
    assert [row["time_ns"] for row in decode(meta, first, b"", third).to_pylist()] == [1, 2, 5]
    assert [row["time_ns"] for row in decode(meta, b"", packed((0, 0)), first).to_pylist()] == [1, 2]


def test_processes_in_batches() -> None:
    batches = [packed((n * S, 7, 100, 10 * n), ((n + 1) * S, 7, 100, 10 * n + 10)) for n in range(3)]
    rows = decode(describe_processes(100), *batches).to_pylist()
    assert [(row["time_ns"] // S, row["value"]) for row in rows] == [(1, 10.0), (2, 10.0), (3, 10.0)]


def test_joining_of_one_pid_are_not_mixed() -> None:
    rows = [
        (0, 7, 100, 500),
        (S, 7, 100, 550),
        (S, 8, 100, 0),
        (S, 7, 200, 10),
        (2 * S, 8, 100, 25),
        (2 * S, 7, 200, 30),
    ]
    assert sorted(decoded(describe_processes(100), *rows)) == [
        (S, None, 7, "cpu-percent", 50.0),
        (2 * S, None, 7, "cpu-percent", 20.0),
        (2 * S, None, 8, "cpu-percent", 25.0),
    ]


GOOD = json.loads(describe(0, 3, [Metric("m", Derivation.SHARE, (1,), (2,), 100.0)]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
METRIC = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["m", "", "a\nb", "x" * 1000]) | JSON,
        "how": st.sampled_from(list(Derivation)) | JSON,
        "columns": st.lists(st.integers(-1, 4), max_size=4) | JSON,
        "of": st.lists(st.integers(-1, 4), max_size=4) | JSON,
        "scale": st.floats() | JSON,
    }
)
META = (
    st.binary(max_size=64)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries(
        {
            "stream": st.integers(-1, 70_000) | st.none(),
            "width": st.integers(-1, 5) | JSON,
            "metrics": st.lists(METRIC, max_size=3) | JSON,
        }
    ).map(lambda value: json.dumps(value).encode())
)
NUMBER = st.sampled_from([0, 1, 5, 2**32, 2**63 - 1, MISSING, 2**64 - 1]) | st.integers(0, 2**64 - 1)
NUMBERS = st.lists(NUMBER, max_size=40)
ROWS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), NUMBER, NUMBER), max_size=10)


def valid(stream: int | None, how: Derivation, columns: list[int], scale: float) -> bytes:
    """The description of a metric in rows of four numbers."""
    metric = Metric("m", how, tuple(columns), (3,) if how is Derivation.SHARE else (), scale)
    return json.dumps({"stream": stream, "width": 4, "metrics": [asdict(metric)]}).encode()


VALID = st.builds(
    valid,
    st.none() | st.integers(0, 5),
    st.sampled_from(list(Derivation)),
    st.lists(st.integers(1, 3), min_size=1, max_size=2),
    st.floats(allow_nan=False, allow_infinity=False),
)


@thorough
def test_any_bytes_are_rows_or_a_value_error() -> None:
    outcomes: Counter[str] = Counter()

    @settings(deadline=None, max_examples=500)
    @given(META, NUMBERS.map(lambda numbers: packed(tuple(numbers))) | st.binary(max_size=100))
    def any_bytes(meta: bytes, rows: bytes) -> None:
        check(meta, rows)

    @settings(deadline=None, max_examples=500)
    @given(VALID, ROWS.map(lambda rows: packed(*rows)))
    def any_numbers(meta: bytes, rows: bytes) -> None:
        check(meta, rows)

    def check(meta: bytes, rows: bytes) -> None:
        try:
            result = decode(meta, rows)
        except ValueError:
            outcomes["refused"] += 1
            return
        result.validate(full=True)
        assert result.type == KINDS["metric"]
        for row in result.to_pylist():
            assert row["name"].isprintable()
            assert abs(row["value"]) < float("inf")
            assert (row["stream"] is None) != (row["pid"] is None)
            outcomes["rows"] += 1

    any_bytes()
    any_numbers()
    assert min(outcomes["refused"], outcomes["rows"]) > 100, outcomes


@pytest.mark.parametrize(
    "change",
    [
        {"width": 10**9},
        {"stream": -1},
        {"stream": True},
        {"metrics": [{}]},
        {"metrics": [GOOD["metrics"][0]] * 2000},
        {"metrics": [GOOD["metrics"][0] | {"columns": [3]}]},
        {"metrics": [GOOD["metrics"][0] | {"columns": [0]}]},
        {"metrics": [GOOD["metrics"][0] | {"of": []}]},
        {"metrics": [GOOD["metrics"][0] | {"how": "x"}]},
        {"metrics": [GOOD["metrics"][0] | {"scale": 1e999}]},
        {"metrics": [GOOD["metrics"][0] | {"scale": 10**400}]},
    ],
    ids=str,
)
def test_nonsense_is_a_value_error(change: dict[str, Any]) -> None:
    rows = packed((0, 0, 0), (1, 1, 1))
    assert len(decode(json.dumps(GOOD).encode(), rows)) == 1
    with pytest.raises(ValueError, match=r"\w"):
        decode(json.dumps(GOOD | change).encode(), rows)


def test_deep_json_and_part_of_a_row_are_value_errors() -> None:
    with pytest.raises(ValueError, match="describe"):
        decode(b"[" * 100_000, b"")
    with pytest.raises(ValueError, match="whole rows"):
        decode(json.dumps(GOOD).encode(), b"\0" * 25)


# What the machine has


class Machine:
    """The folders of sysfs and /proc, perf events, and the clock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 0
        self.opened: list[tuple[int, int, int]] = []  # type, config, CPU
        self._events: dict[int, tuple[int, int]] = {}  # by config: a group's pipe

    def write(self, path: str, text: object) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def pmu(
        self,
        card: str,
        events: dict[str, str] | None = None,
        form: dict[str, str] | None = None,
        driver: str = "xe",
    ) -> None:
        folder = f"pmu/{driver}_{card.replace(':', '_')}"
        self.write(f"{folder}/type", 61)
        self.write(f"{folder}/cpumask", "3")
        for name, text in (FORM if form is None else form).items():
            self.write(f"{folder}/format/{name}", text)
        for name, text in (EVENTS if events is None else events).items():
            self.write(f"{folder}/events/{name}", text)

    def open_event(self, attr: Attr, pid: int, cpu: int, group_fd: int = -1) -> int:
        assert pid == -1
        self.opened.append((attr.type, attr.config, cpu))
        if group_fd < 0:
            self._group = os.pipe()
            os.set_blocking(self._group[0], False)
            return self._group[0]
        return os.dup(group_fd)

    def count(self, *counts: int) -> None:
        """Sets what the last group returns at its next read."""
        os.write(self._group[1], packed((len(counts), *counts)))

    def unplug(self) -> None:
        """Makes the last group's PMU vanish: reads of its events return nothing."""
        os.close(self._group[1])

    def after(self, seconds: float) -> None:
        self.now += int(seconds * S)

    def monotonic_ns(self) -> int:
        return self.now


FORM = {
    "event": "config:0-11",
    "engine_instance": "config:12-19",
    "engine_class": "config:20-27",
    "gt": "config:60-63",
}
EVENTS = {
    "engine-active-ticks": "event=0x02",
    "engine-total-ticks": "event=0x03",
    "gt-actual-frequency": "event=0x04",
    "gt-actual-frequency.unit": "MHz",
    "gt-requested-frequency": "event=0x05",
    "gt-requested-frequency.unit": "MHz",
}
CARD = "0000:03:00.0"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setattr(intel_metrics, "DEVICES", tmp_path / "pmu")
    monkeypatch.setattr(intel_metrics, "open_event", machine.open_event)
    monkeypatch.setattr(intel_metrics, "DRM", tmp_path / "drm")
    monkeypatch.setattr(metrics, "time", machine)
    return machine


def metered(*engines: Engine, gts: int = 1, driver: type[IntelGt] = XeGt) -> list[IntelGt]:
    """The GTs of one card, whose streams are numbered from 5 on."""
    all_gts = tuple(Gt(index, index, (20, 1, 0)) for index in range(gts))
    device = Device(
        driver="i915" if driver is I915Gt else "xe",
        path="/dev/dri/renderD128",
        card="card0",
        name="",
        pci_address=CARD,
        device_id=0xE20B,
        revision=0,
        gts=all_gts,
        engines=engines,
        xecore_buffer_bytes=1 << 19,
        rates=(251,),
    )
    return [driver(5 + index, device, gt) for index, gt in enumerate(all_gts)]


def taken(measured: Metrics) -> list[tuple[str, int | None, Any]]:
    """All that was measured: (name, stream or pid, value)."""
    rows = [row for meta, data in measured.take() for row in decode(meta, data).to_pylist()]
    return [(row["name"], row["pid"] if row["stream"] is None else row["stream"], row["value"]) for row in rows]


COMPUTE, COPY = Engine(4, 0, 0), Engine(1, 2, 0)


def test_a_card_with_everything(machine: Machine) -> None:
    # given
    machine.pmu(CARD)
    hwmon = "drm/renderD128/device/hwmon/hwmon3"
    machine.write(f"{hwmon}/energy1_label", "card")
    energy = machine.write(f"{hwmon}/energy1_input", 1_000_000)
    machine.write(f"{hwmon}/temp2_label", "pkg")
    machine.write(f"{hwmon}/temp2_input", 48_500)
    machine.write(f"{hwmon}/fan1_input", 1180)
    machine.write(f"{hwmon}/power1_max", 190_000_000)
    measured = Metrics(metered(COMPUTE, COPY))
    # when
    machine.count(2400, 2500, 0, 0, 0, 0)
    measured.sample()
    machine.after(1)
    energy.write_text("201000000\n")
    machine.count(2400 + 2000, 2500 + 2100, 30, 100, 1, 100)
    measured.sample()
    # then
    assert measured.problems == []
    assert taken(measured) == [
        ("frequency-actual-MHz", 5, 2000.0),
        ("frequency-requested-MHz", 5, 2100.0),
        ("busy-compute-percent", 5, 30.0),
        ("busy-copy-percent", 5, 1.0),
        ("energy-card-J", 5, pytest.approx(201.0)),
        ("power-card-W", 5, pytest.approx(200.0)),
        ("fan-1-RPM", 5, 1180.0),
        ("temperature-pkg-C", 5, pytest.approx(48.5)),
    ]
    measured.close()


def test_a_max_with_two_tiles_under_intel_s_i915(machine: Machine) -> None:
    # given
    machine.pmu(CARD, driver="i915")
    card = "drm/renderD128/device"
    for number, name in enumerate(("i915_gt1", "i915", "i915_gt0")):
        machine.write(f"{card}/hwmon/hwmon{number}/name", name)
        machine.write(f"{card}/hwmon/hwmon{number}/energy1_input", 1_000_000 * (1 + number))
    machine.write(f"{card}/hwmon/hwmon1/in0_input", 800)
    for gt in (0, 1):
        machine.write(f"{card}/drm/card0/gt/gt{gt}/rps_act_freq_mhz", 1500 + gt)
        machine.write(f"{card}/drm/card0/gt/gt{gt}/rps_cur_freq_mhz", 1600 + gt)
    one, two = metered(gts=2, driver=I915Gt)
    first, second = Metrics([one]), Metrics([two])
    # when the last tile is busy for a quarter of a second, and for a whole one
    machine.count(5_000)
    second.sample()
    machine.after(1)
    machine.count(250_005_000)
    second.sample()
    machine.after(1)
    machine.count(1_250_005_000)
    second.sample()
    # then
    assert machine.opened == [(61, 0x10000A, 3), (61, 0x10000A | 1 << 60, 3)]
    assert second.problems == first.problems == []
    values = Counter((name, stream, round(value, 6)) for name, stream, value in taken(second))
    assert values == Counter(
        {
            ("busy-any-percent", 6, 25.0): 1,
            ("busy-any-percent", 6, 100.0): 1,
            ("frequency-actual-MHz", 6, 1501.0): 2,
            ("frequency-requested-MHz", 6, 1601.0): 2,
            ("energy-card-J", 6, 2.0): 2,
            ("energy-gt0-J", 6, 3.0): 2,
            ("energy-gt1-J", 6, 1.0): 2,
            ("power-card-W", 6, 0.0): 2,
            ("power-gt0-W", 6, 0.0): 2,
            ("power-gt1-W", 6, 0.0): 2,
        }
    )
    for each in (first, second):
        each.close()


def test_a_max_of_which_nothing_can_be_measured(machine: Machine) -> None:
    measured = Metrics(metered(driver=I915Gt))
    measured.sample()
    assert [problem.split(": ")[1] for problem in measured.problems] == [
        "its engines' use is not measured",
        "frequency-actual-MHz is not measured",
        "frequency-requested-MHz is not measured",
    ]
    assert taken(measured) == []
    measured.close()


def test_events_are_encoded_as_sysfs_says(machine: Machine) -> None:
    form = {
        "event": "config:8-15",
        "engine_class": "config:0-3,60-63",
        "engine_instance": "config:20",
        "gt": "config:30",
    }
    machine.pmu(CARD, events=EVENTS | {"engine-active-ticks": "event=0x7f"}, form=form)
    Metrics(metered(Engine(4, 1, 0))).close()
    active = 0x7F << 8 | 4 | 1 << 20
    assert [opened for opened in machine.opened if opened[1] >> 8 & 0xFF == 0x7F] == [(61, active, 3)]
    assert (61, 0x04 << 8, 3) in machine.opened
    machine.opened.clear()
    shifted = {**form, "engine_class": "config:60-61,0-3"}
    machine.pmu(CARD, form=shifted)
    Metrics(metered(Engine(4, 1, 0))).close()
    assert (61, 0x02 << 8 | 1 | 1 << 20, 3) in machine.opened


def test_a_value_that_a_field_has_no_room_for_is_a_problem_and_measures_nothing_else(machine: Machine) -> None:
    machine.pmu(CARD, form=FORM | {"engine_class": "config:20-21"})
    measured = Metrics(metered(COMPUTE))
    assert any("cannot hold" in problem for problem in measured.problems)
    assert [config >> 20 & 0xFF for _, config, _ in machine.opened] == [0, 0]
    measured.close()


def test_each_gt_has_its_own_and_the_card_s_go_to_the_first(machine: Machine) -> None:
    for tile, speed in ((0, 1500), (1, 1600)):
        machine.write(f"drm/renderD128/device/tile{tile}/gt{tile}/freq0/act_freq", speed)
        machine.write(f"drm/renderD128/device/tile{tile}/gt{tile}/freq0/cur_freq", speed + 1)
    machine.write("drm/renderD128/device/hwmon/hwmon0/temp1_label", "")
    temperature = machine.write("drm/renderD128/device/hwmon/hwmon0/temp1_input", 50_000)
    measured = Metrics(metered(gts=2))
    measured.sample()
    temperature.write_text("-5500\n")
    machine.after(2)
    measured.sample()
    assert sorted(taken(measured)) == [
        ("frequency-actual-MHz", 5, 1500.0),
        ("frequency-actual-MHz", 6, 1600.0),
        ("frequency-requested-MHz", 5, 1501.0),
        ("frequency-requested-MHz", 6, 1601.0),
        ("temperature-1-C", 5, -5.5),
    ]
    measured.close()


def test_an_engine_is_its_gt_s(machine: Machine) -> None:
    machine.pmu(CARD)
    measured = Metrics(metered(COMPUTE, Engine(0, 0, 1), Engine(2, 0, 7), gts=2))
    engines = [(config >> 60, config >> 20 & 0xFF) for _, config, _ in machine.opened if config & 0xFFF in (2, 3)]
    assert engines == [(0, 4), (0, 4), (1, 0), (1, 0)]
    measured.close()


def test_what_is_missing_is_reported_in_sentences(machine: Machine) -> None:
    measured = Metrics(metered(COMPUTE))
    measured.sample()
    machine.after(1)
    measured.sample()
    assert taken(measured) == []
    assert len(measured.problems) == 3
    for problem, what in zip(
        measured.problems, ("engines' use", "frequency-actual", "frequency-requested"), strict=True
    ):
        assert problem.startswith("/dev/dri/renderD128 (GT 0): ")
        assert what in problem
        assert "No such file" in problem
    measured.close()


def test_the_kernel_refuses_an_engine_and_the_others_are_measured(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(attr: Attr, pid: int, cpu: int, group_fd: int = -1) -> int:
        if attr.config >> 20 & 0xFF == COPY.engine_class:
            raise OSError(2, "No such file or directory")
        return machine.open_event(attr, pid, cpu, group_fd)

    monkeypatch.setattr(intel_metrics, "open_event", refuse)
    machine.pmu(CARD)
    measured = Metrics(metered(COPY, COMPUTE))
    assert ["copy" in problem for problem in measured.problems] == [True]
    for row in ((0, 0, 0, 0), (0, 0, 50, 100)):
        machine.count(*row)
        measured.sample()
        machine.after(1)
    assert ("busy-compute-percent", 5, 50.0) in taken(measured)
    measured.close()


def test_a_device_that_vanishes_is_reported_once_and_what_was_read_stays(machine: Machine) -> None:
    machine.pmu(CARD)
    machine.write("drm/renderD128/device/hwmon/hwmon0/fan1_input", 900)
    measured = Metrics(metered(COMPUTE))
    for row in ((0, 0, 0, 0), (500, 500, 0, 100)):
        machine.count(*row)
        measured.sample()
        machine.after(1)
    machine.unplug()
    for _ in range(3):
        measured.sample()
        machine.after(1)
    assert len(measured.problems) == 1
    assert "counters cannot be measured any more" in measured.problems[0]
    names = [name for name, _, _ in taken(measured)]
    assert names.count("frequency-actual-MHz") == 1
    assert names.count("fan-1-RPM") == 4
    assert taken(measured) == []
    # and when the card comes back
    measured.add(metered(COMPUTE)[0])
    for row in ((0, 0, 0, 0), (600, 600, 0, 100)):
        machine.count(*row)
        measured.sample()
        machine.after(1)
    assert ("frequency-actual-MHz", 5, 600.0) in taken(measured)
    measured.close()


def test_slow_things_are_asked_seldom(machine: Machine) -> None:
    machine.pmu(CARD)
    machine.write("drm/renderD128/device/hwmon/hwmon0/temp1_input", 50_000)
    machine.write("drm/renderD128/device/hwmon/hwmon0/energy1_input", 50_000)
    measured = Metrics(metered())
    for n in range(301):
        machine.count(n, n)
        measured.sample()
        machine.after(0.01)
    names = [name for name, _, _ in taken(measured)]
    assert names.count("frequency-actual-MHz") == 300
    assert 25 <= names.count("energy-1-J") <= 30
    assert names.count("temperature-1-C") == 3
    measured.close()


def test_what_is_taken_piece_by_piece_is_whole(machine: Machine) -> None:
    machine.pmu(CARD)
    measured = Metrics(metered())
    speeds: list[float] = []
    total = 0
    for n in range(40):
        total += 100 + n
        machine.count(total, 0)
        measured.sample()
        machine.after(0.01)
        if n % 7 == 0:
            speeds += [value for name, _, value in taken(measured) if name == "frequency-actual-MHz"]
    speeds += [value for name, _, value in taken(measured) if name == "frequency-actual-MHz"]
    assert speeds == [100.0 + n for n in range(1, 40)]
    measured.close()


def test_from_the_spool_to_the_capture_and_a_damaged_frame_is_counted(machine: Machine, tmp_path: Path) -> None:
    # given metrics in several frames, one of which is cut short
    machine.pmu(CARD)
    measured = Metrics(metered())
    spool = Spool(tmp_path / "s")
    frames = 0
    for n in range(1, 31):
        machine.count(2400 * n, 2500 * n)
        measured.sample()
        machine.after(0.01)
        for meta, rows in measured.take():
            frames += 1
            cut = 8 if frames == 10 else 0
            spool.write(FrameKind.METRICS, meta, rows[: len(rows) - cut], shape=len(meta))
    measured.close()
    spool.close()
    # when
    finish(SpoolReader(tmp_path / "s"), tmp_path / "c")
    # then
    reader = CaptureReader(tmp_path / "c")
    rows = reader.table("metric").to_pylist()
    assert frames == 29
    assert [row["value"] for row in rows if row["name"] == "frequency-actual-MHz"] == [2400.0] * 28
    assert [row["value"] for row in rows if row["name"] == "frequency-requested-MHz"] == [2500.0] * 28
    assert [row["what"] for row in reader.table("loss").to_pylist()] == ["damaged", "died"]


@pytest.mark.root
def test_the_kernel_s_own_groups(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    # given the kernel's software PMU as the card's: its event 0 counts a CPU's time in ns, here as the engine's
    events = EVENTS | {f"engine-{what}-ticks": "event=0" for what in ("active", "total")}
    events |= {f"gt-{what}-frequency.unit": "none" for what in ("actual", "requested")}
    machine.pmu(CARD, events=events, form=FORM | dict.fromkeys(("engine_class", "gt"), "config2:0-63"))
    machine.write("pmu/xe_0000_03_00.0/type", 1)
    machine.write("pmu/xe_0000_03_00.0/cpumask", "0-1")
    monkeypatch.setattr(intel_metrics, "open_event", open_event)
    measured = Metrics(metered(COMPUTE))
    # when
    for _ in range(3):
        measured.sample()
        time.sleep(0.02)
        machine.after(0.02)
    # then
    assert len(measured.problems) == 2  # of frequencies
    assert taken(measured) == [("busy-compute-percent", 5, pytest.approx(100, abs=50))] * 2
    measured.close()


# Processes


def stat(pid: int, name: str, start: int, user: int, system: int) -> str:
    """As proc_pid_stat(5) describes it."""
    fields = ["S", "1", *["0"] * 9, str(user), str(system), *["0"] * 6, str(start), *["0"] * 30]
    return f"{pid} ({name}) {' '.join(fields)}"


@pytest.fixture
def proc(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(metrics, "PROC", machine.root / "proc")
    yield machine


def ticks(percent: float) -> int:
    return int(percent * os.sysconf("SC_CLK_TCK") / 100)


def test_cpu_use_of_a_process_whatever_its_name(proc: Machine) -> None:
    proc.write("proc/42/stat", stat(42, "evil) S 1 (", 100, ticks(1000), 0))
    measured = Metrics([])
    measured.watch([42, 43])
    proc.after(1)
    proc.write("proc/42/stat", stat(42, ") R 0 0 0\n(", 100, ticks(1100), ticks(150)))
    measured.sample()
    assert taken(measured) == [("cpu-percent", 42, pytest.approx(250.0))]
    assert taken(measured) == []
    measured.close()


def test_a_tick_in_no_time_is_not_a_busy_process(proc: Machine) -> None:
    proc.write("proc/42/stat", stat(42, "a", 100, 50, 0))
    measured = Metrics([])
    measured.watch([42])
    proc.after(0.001)
    proc.write("proc/42/stat", stat(42, "a", 100, 51, 0))
    measured.sample()
    assert taken(measured) == []
    proc.after(1)
    measured.sample()
    assert [value for _, _, value in taken(measured)] == [pytest.approx(100 / os.sysconf("SC_CLK_TCK"), rel=0.01)]
    measured.close()


@pytest.mark.parametrize("noticed", [True, False])
def test_another_process_gets_the_pid(proc: Machine, noticed: bool) -> None:
    first = proc.write("proc/42/stat", stat(42, "a", 100, ticks(10), 0))
    measured = Metrics([])
    measured.watch([42])
    proc.after(1)
    first.write_text("")  # as of a process that is no more
    if noticed:
        measured.sample()
    first.unlink()
    proc.write("proc/42/stat", stat(42, "b", 900, ticks(500), 0))
    measured.watch([42])
    proc.after(1)
    proc.write("proc/42/stat", stat(42, "b", 900, ticks(530), 0))
    measured.sample()
    assert taken(measured) == [("cpu-percent", 42, pytest.approx(30.0))]
    measured.close()


def test_the_processes_named_last_are_looked_at_and_no_descriptor_is_left(proc: Machine) -> None:
    most = metrics.MAX_PROCESSES
    for pid in range(1, most + 11):
        proc.write(f"proc/{pid}/stat", stat(pid, "a", 100, 0, 0))
    with no_descriptor_is_lost(sockets=True):
        measured = Metrics([])
        measured.watch(range(1, most + 1))
        measured.watch([1])
        measured.watch(range(most + 1, most + 11))
        proc.after(1)
        measured.sample()
        assert {pid for _, pid, _ in taken(measured)} == {1, *range(12, most + 11)}
        measured.close()


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]))


def test_a_real_process_that_works_and_ends() -> None:
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        measured = Metrics([])
        measured.watch([child.pid, os.getpid()])
        used = cpu_ticks(child.pid)
        time.sleep(0.6)  # in less than half a second nobody looks
        until(lambda: cpu_ticks(child.pid) > used + 5, child)
        measured.sample()
        use = {pid: value for _, pid, value in taken(measured)}
        assert 0 < use[child.pid] <= 130  # of one CPU; the kernel counts in hundredths of a second
        child.kill()
        child.wait()
        time.sleep(1)
        measured.sample()
        assert [pid for _, pid, _ in taken(measured)] == [os.getpid()]
        measured.close()


# In the report


def metric(time_s: float, name: str, value: float, stream: int | None = 0) -> dict[str, Any]:
    return {"time_ns": int(time_s * S), "stream": stream, "pid": None, "name": name, "value": value}


def gauges_of(tmp_path: Path, *rows: dict[str, Any], intervals: int = 3) -> dict[int, Gauges]:
    reader = CaptureReader(capture(tmp_path / "c.parquet", metric=list(rows)))
    return gauges(reader, start_ns=10 * S, interval_ns=S, intervals=intervals)


def test_gauges_are_means_of_gts_of_the_busiest_class(tmp_path: Path) -> None:
    found = gauges_of(
        tmp_path,
        metric(10.1, "frequency-actual-MHz", 1000),
        metric(10.2, "frequency-actual-MHz", 2000),
        metric(10.3, "frequency-actual-MHz", 500, stream=1),
        metric(10.1, "frequency-requested-MHz", 9000),
        metric(10.1, "busy-compute-percent", 80),
        metric(10.2, "busy-compute-percent", 40),
        metric(10.3, "busy-copy-percent", 10),
        metric(10.3, "busy-copy-percent", 30, stream=1),
        metric(12.0, "busy-copy-percent", 7),
        metric(13.0, "busy-copy-percent", 99),  # after the last interval
    )
    assert found == {0: Gauges(1000.0, 45.0), 2: Gauges(0.0, 7.0)}
    assert gauges_of(tmp_path) == {}


def test_gauges_of_a_stranger_s_capture_are_numbers(tmp_path: Path) -> None:
    nonsense = [float("nan"), float("inf"), -1.0, 1e300]
    rows = [metric(10.5, name, value) for value in nonsense for name in ("frequency-actual-MHz", "busy-copy-percent")]
    assert gauges_of(tmp_path, *rows) == {}
    row = metric(2**63 / S, "frequency-actual-MHz", 5.0)
    early = metric(0, "frequency-actual-MHz", 7.0, stream=None)
    assert gauges_of(tmp_path, row, early, *rows) == {0: Gauges(7.0, 0.0)}


def test_iaprof_text_ends_intervals_with_gauges() -> None:
    rows = [Row(n, None, None, Code("mov", (), ()), 0, (1,) * 10) for n in (0, 2)]
    out = io.StringIO()
    found = profile(rows, [0.0, 1.0, 2.0], {0: Gauges(2399.6, 99.4), 1: Gauges(7.0, 0.0)})
    IaprofText().write(Export(found), StackOptions(), out)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("metric")]
    assert lines == [
        "metric\tfrequency-MHz\t2400",
        "metric\tbusy-percent\t99",
        "metric\tfrequency-MHz\t7",
        "metric\tbusy-percent\t0",
        "metric\tfrequency-MHz\t0",
        "metric\tbusy-percent\t0",
    ]


def test_the_names_are_in_the_page_about_the_capture(machine: Machine) -> None:
    page = (DOCS / "capture-format.md").read_text()
    machine.pmu(CARD)
    for kind in ("energy", "temp", "fan"):
        machine.write(f"drm/renderD128/device/hwmon/hwmon0/{kind}1_input", 5)
    measured = Metrics(metered(*(Engine(number, 0, 0) for number in range(5))))
    for row in ((0,) * 12, (1,) * 12):
        machine.count(*row)
        measured.sample()
        machine.after(2)
    names = [name for name, _, _ in taken(measured)]
    assert len(names) == 2 + 5 + 4
    for name in names:
        parts = name.split("-", 1)
        known = {name, name.replace("-1-", "-PLACE-")}
        if parts[0] == "busy":
            assert f"`{parts[1].removesuffix('-percent')}`" in page
            known = {"busy-CLASS-percent"}
        assert any(f"`{name}`" in page for name in known), name
    measured.close()
