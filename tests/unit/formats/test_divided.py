"""What is an estimate of samples that are divided among stacks, compared with sums made node by node."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from iaprof.formats.profile import Code, Kernel, Launch, Profile, StackOptions
from iaprof.formats.stacks.frames import Frame
from iaprof.formats.stacks.trees import Tree, divided_nodes, divided_rows, stall_tree, stall_tree_by_time
from unit.capturing import capture, launch, record, stall
from unit.in_process import iaprof
from unit.profiles import Row, counts, profile

K, L = Kernel(0x1000, "k", "k.cl"), Kernel(0x2000, "l", "k.cl")
SEND, ADD = Code("send", ("k",), (1,)), Code("add", ("k",), (2,))
F, G = (Launch("app", 7, ("main", name, "launch")) for name in "fg")
SHORT = ("cpu", "function", "instruction", "reason")


def by_text(frame: Frame) -> str:
    return frame.text


def divided(rows: list[Row], samples: list[int], options: StackOptions) -> tuple[Tree, dict[str, int]]:
    """The tree, and the estimated samples of each path that has any."""
    made = replace(profile(rows), divided=np.array(samples, np.uint64))
    tree = stall_tree(made, options, by_text)
    found = divided_nodes(tree)
    return tree, {path(tree, node): int(found[node]) for node in np.flatnonzero(found).tolist()}


def path(tree: Tree, node: int) -> str:
    names: list[str] = []
    while node:
        names.insert(0, tree.frames[tree.frame[node]].name)
        node = int(tree.parent[node])
    return ";".join(names)


def test_frames_below_the_place_where_stacks_part_are_estimates() -> None:
    # given one kernel that two stacks launched at once, and another one that a single stack launched
    rows = [
        Row(0, F, K, SEND, 0, counts(sbid=6)),
        Row(0, G, K, SEND, 0, counts(sbid=4)),
        Row(0, F, L, ADD, 0, counts(send=5)),
    ]
    # when
    _, found = divided(rows, [6, 3, 0], StackOptions(components=("cpu", "function")))
    # then main has all of them for certain
    assert found == {
        "main;f": 6, "main;f;launch": 6, "main;f;launch;k": 6, "main;g": 3, "main;g;launch": 3, "main;g;launch;k": 3,
    }  # fmt: skip


def test_with_the_leaves_first_callers_are_estimates_from_where_they_part() -> None:
    rows = [Row(0, F, K, SEND, 0, counts(sbid=6)), Row(0, G, K, SEND, 0, counts(sbid=4))]
    _, found = divided(rows, [6, 4], StackOptions(components=("cpu", "function", "reason"), inverted=True))
    start = "stall: sbid;k;launch"
    assert found == {f"{start};f": 6, f"{start};f;main": 6, f"{start};g": 4, f"{start};g;main": 4}


@pytest.mark.parametrize("seed", range(12))
def test_nodes_have_what_nodes_beside_them_could_have_had(seed: int) -> None:
    # given random stacks, kernels and divided samples
    rng = random.Random(seed)
    names = [tuple(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(8)]
    rows = [
        Row(0, Launch("app", 7, rng.choice(names)), rng.choice((K, L)), rng.choice((SEND, ADD)), 0, counts(sbid=9))
        for _ in range(20)
    ]
    samples = [rng.choice((0, 9)) for _ in rows]
    # when
    tree, found = divided(rows, samples, StackOptions(components=SHORT))
    # then an estimate is what a node has of a kernel, unless it has all divided samples of this kernel
    totals: dict[int, float] = defaultdict(float)
    of_node: dict[tuple[int, int], float] = defaultdict(float)
    assert tree.divided is not None
    for node, place, part in zip(tree.node.tolist(), tree.place.tolist(), tree.divided.tolist(), strict=True):
        totals[place] += part
        while node >= 0:
            of_node[node, place] += part
            node = int(tree.parent[node])
    expected: dict[str, float] = defaultdict(float)
    for (node, place), part in of_node.items():
        if part < totals[place]:
            expected[path(tree, node)] += part
    assert found == {name: part for name, part in expected.items() if part}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("components", [SHORT, ("interval", *SHORT), ("cpu", "offset", "function")])
def test_a_tree_by_time_has_what_the_tree_of_all_rows_has(seed: int, components: tuple[str, ...]) -> None:
    # given random rows, many of which differ by interval or offset only
    rng = random.Random(seed)
    rows = [
        Row(interval, launch_, rng.choice((K, L)), SEND, rng.randrange(2), counts(sbid=rng.randrange(9), send=7))
        for interval in range(3)
        for launch_ in rng.choices((F, G), k=10)
    ]
    made = replace(profile(rows), divided=np.array([rng.randrange(7) for _ in rows], np.uint64))
    # when
    options = StackOptions(components=components)
    all_rows, (by_time, row) = stall_tree(made, options, by_text), stall_tree_by_time(made, options, by_text)
    # then
    found = by_time.tree
    assert [found.frames[at] for at in found.frame[1:]] == [all_rows.frames[at] for at in all_rows.frame[1:]]
    assert found.parent.tolist() == all_rows.parent.tolist()
    assert found.node[by_time.row].tolist() == all_rows.node.tolist()
    assert found.reason[by_time.row].tolist() == all_rows.reason.tolist()
    assert made.kernel[row][by_time.row].tolist() == made.kernel[made.entries()[0]].tolist()
    assert by_time.interval.tolist() == all_rows.interval.tolist()
    assert by_time.count.tolist() == all_rows.count.tolist()
    assert found.own().tolist() == all_rows.own().tolist()
    assert divided_nodes(found, by_time).tolist() == divided_nodes(all_rows).tolist()
    assert divided_nodes(found, by_time).any()


def test_rows_that_have_all_of_a_kernel_have_it_for_certain() -> None:
    numbers, kernels = np.array([0, 0, 1, 1]), np.array([0, 0, 0, 1])
    assert divided_rows(numbers, kernels, np.array([2, 1, 4, 7], np.uint64)).tolist() == [2, 1, 4, 0]
    assert divided_rows(numbers * 0, kernels, np.array([2, 1, 4, 7], np.uint64)).tolist() == [0, 0, 0, 0]


def test_a_profile_that_does_not_know_has_no_estimates() -> None:
    made: Profile = profile([Row(0, F, K, SEND, 0, counts(sbid=6))])
    assert not divided_nodes(stall_tree(made, StackOptions(), by_text)).any()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Two threads that launch one kernel at once, and one that alone launches another."""
    launches = [
        launch(1_000_000_000, 7, 0x8000_0001_0000, 1, name="both"),
        launch(1_000_000_000, 7, 0x8000_0001_0000, 2, name="both"),
        launch(1_000_000_000, 7, 0x8000_0002_0000, 1, name="own"),
    ]
    stacks = [
        {"id": 1, "time_ns": 1, "pid": 7, "truncated": False, "ips": [0x100]},
        {"id": 2, "time_ns": 1, "pid": 7, "truncated": False, "ips": [0x200]},
    ]
    records = [record(0x8000_0001_0000, sbid=6, active=4), record(0x8000_0002_0000, send=10)]
    read = stall(1_010_000_000, *records, begin_ns=1_000_000_000)
    return capture(tmp_path / "c.parquet", launch=launches, stack=stacks, stall=[read])


def test_top_marks_what_is_an_estimate_and_says_how_much(shared: Path) -> None:
    # when stacks are ranked
    done = iaprof("top", shared, "--by", "stack", "-q")
    # then the sentence stands above the table, and all that has a part of the kernel has the mark
    assert done.out.startswith("50.0 % of the samples are divided among stacks that launched the same kernel at")
    assert [line.split()[0] for line in done.out.splitlines()[-3:]] == ["~15", "~5", "20"]
    # when kernels are, or processes
    for by in ("kernel", "process", "reason"):
        exact = iaprof("top", shared, "--by", by, "-q")
        # then nothing is an estimate
        assert exact.code == 0
        assert "~" not in exact.out


def test_stalls_alone(shared: Path) -> None:
    whole, stalls = iaprof("top", shared), iaprof("top", shared, "--no-active")
    assert "20 samples, 20.0 % active;" in whole.err
    assert "16 samples;" in stalls.err
    done = iaprof("top", shared, "--no-active", "--reason", "send")
    assert (done.code, done.err) == (
        2, "iaprof: --reason chooses the reasons, active among them: leave out --no-active\n",
    )  # fmt: skip


def test_the_svg_says_and_marks_it(shared: Path, tmp_path: Path) -> None:
    assert iaprof("report", shared, "-o", tmp_path / "c.svg", "-q").code == 0
    text = (tmp_path / "c.svg").read_text()
    assert "20 GPU samples · 20.0 % active" in text
    assert "50.0 % of the samples are divided among stacks" in text
    assert text.count('data-mark="~ "') > 2
