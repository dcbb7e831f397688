"""Trees that open level by level, against trees that a few lines of Python make of all stacks at once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from iaprof.formats.profile import Code, Kernel, Launch, Profile, StackOptions
from iaprof.formats.stacks.trees import divided_nodes, stall_tree
from iaprof.gpu.intel.reasons import REASONS
from iaprof.report.views.browsing.levels import GROUPINGS
from iaprof.report.views.browsing.tree import Node, Selection, Tree, next_match
from iaprof.report.views.difference import joined
from unit.profiles import Row, counts, profile, rows

Stack = tuple[tuple[str, str], ...]
EVERYTHING = Selection()
LAUNCHES = [
    Launch("app", 7, ("main", "a", "b", "a"), ("ioctl",)),
    Launch("app", 7, ("main", "a")),
    Launch("other", 8, ("main",), operators=("aten::mm", "aten::add")),
    Launch("other", 8, ()),
    None,
]
KERNELS = [Kernel(0x1000, "mm", "m.cl"), Kernel(0x2000, "add", "a.cl"), None]
CODES = [Code("send", ("mm", "dot"), (1, 5), ("m.cl", "d.h")), Code("mad", ("mm",), (2,)), Code("mov", ("add",), (0,))]


BARE = Code("[no binary]", (), ())  # of addresses in no kernel


def random_profile(seed: int, size: int = 200) -> Profile:
    chance = random.Random(seed)
    return profile(
        [
            Row(
                chance.randrange(4),
                chance.choice(LAUNCHES),
                kernel := chance.choice(KERNELS),
                chance.choice(CODES) if kernel else BARE,
                16 * chance.randrange(3),
                [chance.choice((0, 0, chance.randrange(100))) for _ in REASONS],
            )
            for _ in range(size)
        ],
        (0.0, 1.0, 2.0, 3.0),
    )


def frames(row: Row, level: str, reason: str) -> list[str]:
    """The texts of a row's stack in one level."""
    launch, kernel, code = row.launch, row.kernel, row.code
    stack = [*launch.stack, *(f"{each}_[k]" for each in launch.kernel_stack)] if launch else []
    symbol = kernel.symbol if kernel else "[unknown kernel]"
    instruction = f"0x{row.offset:x} {code.mnemonic}"
    file = (code.files[-1] if code.files else kernel.file if kernel else "").rpartition("/")[2]
    return {
        "process": [f"{launch.comm} {launch.pid}" if launch else "[unknown process]"],
        "operator": list(launch.operators) if launch else [],
        "cpu": stack,
        "callers": stack[::-1],
        "kernel": [symbol],
        "inlined": list(code.functions[1:]) if kernel else [],
        "line": [f"{file}:{code.lines[-1]}"] if kernel and code.lines[-1] else [],
        "instruction": [instruction],
        "place": [f"{symbol}+{instruction}"],
        "reason": [reason],
    }[level]


def stacks(of: Profile, grouping: str, is_inverted: bool) -> Iterator[tuple[Stack, Row, str, int]]:
    """Each stack with its row, reason and samples."""
    for row in rows(of):
        for reason, count in zip(of.reasons, row.counts, strict=True):
            if count:
                stack = [(level, text) for level in GROUPINGS[grouping] for text in frames(row, level, reason)]
                yield tuple(stack[::-1] if is_inverted else stack), row, reason, count


def sums(of: Profile, grouping: str, is_inverted: bool, selection: Selection = EVERYTHING) -> Counter[Stack]:
    """Samples of each beginning of a stack."""
    found: Counter[Stack] = Counter()
    whole = [stack for stack, *_ in stacks(of, "stack", False)]
    for (stack, row, reason, count), all_frames in zip(stacks(of, grouping, is_inverted), whole, strict=True):
        if selection.reasons is not None and reason not in selection.reasons:
            continue
        if selection.intervals is not None and not selection.intervals[0] <= row.interval < selection.intervals[1]:
            continue
        if selection.text and not any(selection.text in text for _, text in all_frames):
            continue
        for length in range(len(stack) + 1):
            found[stack[:length]] += count
    return found


def opened(tree: Tree) -> dict[Stack, tuple[int, ...]]:
    """The samples of all nodes, all of which are opened, the last ones first."""
    found = {}
    waiting = [tree.root]
    while waiting:
        node = waiting.pop()
        tree.open(node)
        found[tree.path(node)] = tree.totals(node)
        waiting += node.rank
    return found


@pytest.mark.parametrize("is_inverted", [False, True])
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_all_nodes_have_the_samples_of_their_stacks(grouping: str, is_inverted: bool) -> None:
    # given
    of = random_profile(1)
    # when
    tree = Tree(of, grouping, is_inverted)
    # then
    expected = sums(of, grouping, is_inverted)
    assert opened(tree) == {stack: (count,) for stack, count in expected.items()}


@pytest.mark.parametrize("grouping", ["stack", "reason"])
@pytest.mark.parametrize(
    "selection",
    [
        Selection(reasons=frozenset(("sbid", "send"))),
        Selection(intervals=(1, 3)),
        Selection(text="aten"),
        Selection(frozenset(("active",)), (0, 1), "dot"),
        Selection(text="nowhere"),
    ],
)
def test_a_selection_counts_the_same_before_and_after_nodes_are_opened(grouping: str, selection: Selection) -> None:
    # given
    of = random_profile(2)
    early, late = Tree(of, grouping), Tree(of, grouping)
    # when
    early.select(selection)
    opened(late)
    late.select(selection)
    # then
    expected = {stack: (count,) for stack, count in sums(of, grouping, False, selection).items()} or {(): (0,)}
    assert opened(early) == expected
    assert opened(late) == expected


def test_nodes_know_their_reasons_and_kernels() -> None:
    # given
    of = random_profile(3)
    tree = Tree(of, "process")
    node, is_it = tree.find((("process", "app 7"),))
    assert is_it
    # when
    found = tree.sums(node)
    # then
    expected: Counter[str] = Counter()
    kernels = set()
    for stack, row, reason, count in stacks(of, "process", False):
        if stack[0] == ("process", "app 7"):
            expected[reason] += count
            kernels.add(row.kernel)
    assert dict(zip(found.reasons, found.counts[0], strict=True)) == {name: expected[name] for name in REASONS}
    assert {of.kernels[each] for each in of.kernel[tree.kernel_rows(node)].tolist()} == kernels


def test_a_difference_has_both_sides_and_the_largest_change_first() -> None:
    # given
    row = Row(0, LAUNCHES[1], KERNELS[0], CODES[0], 0, counts(sbid=50))
    before = profile([row, row._replace(kernel=KERNELS[1], code=CODES[2], counts=counts(send=50))])
    after = profile(
        [row._replace(counts=counts(sbid=100, sync=100)), row._replace(kernel=None, code=BARE, counts=counts(send=200))]
    )
    # when
    tree = Tree(joined(before, after), "kernel", sides=2)
    # then
    assert [(tree.text(each), tree.totals(each)) for each in tree.root.rank] == [
        ("[unknown kernel]", (0, 200)),
        ("add", (50, 0)),
        ("mm", (50, 200)),
    ]
    assert tree.sums(tree.root).samples == (100, 400)


def visited(tree: Tree, is_backward: bool) -> list[Stack]:
    found = []
    node: Node | None = None
    while (node := next_match(tree, node, is_backward)) is not None:
        found.append(tree.path(node))
    return found


@pytest.mark.parametrize("grouping", ["stack", "launcher"])
@pytest.mark.parametrize("text", ["a", "MM", "sbid", "dot", "none of these"])
def test_searching_visits_every_match_in_the_order_of_the_lines(text: str, grouping: str) -> None:
    # given
    of = random_profile(4, 40)
    tree, whole = Tree(of, grouping), Tree(of, grouping)
    opened(whole)
    # when
    samples = tree.search(text)
    # then
    lines = [whole.path(line.node) for line in whole.visible()]
    matches = [path for path in lines if text.casefold() in path[-1][1].casefold()]
    assert visited(tree, False) == matches
    assert visited(tree, True) == matches[::-1]
    expected = [
        count
        for stack, *_, count in stacks(of, grouping, False)
        if any(text.casefold() in t.casefold() for _, t in stack)
    ]
    assert samples == sum(expected)


def test_a_search_stays_when_the_selection_and_the_tree_change() -> None:
    # given
    tree = Tree(random_profile(5, 40), "kernel")
    tree.select(Selection(text="nowhere"))
    tree.search("mad")
    assert next_match(tree, None) is None
    # when
    tree.select(Selection())
    tree.group("process", False)
    found = next_match(tree, None)
    # then
    assert found is not None
    assert "mad" in tree.text(found)


def test_many_children_are_shown_in_parts_and_found_all_the_same() -> None:
    # given
    of = profile(
        [Row(0, LAUNCHES[1], Kernel(at, f"kernel_{at}", ""), CODES[1], 0, counts(send=2000 - at)) for at in range(1500)]
    )
    tree = Tree(of, "kernel")
    # when
    shown = [tree.text(each) for each in tree.root.rank]
    # then
    assert shown == [f"kernel_{at}" for at in range(500)]
    assert [(line.node, line.hidden) for line in tree.visible()][-1] == (tree.root, 1000)
    # when
    tree.more(tree.root)
    # then
    assert len(tree.root.rank) == 1500
    assert tree.root.hidden == 0
    # given
    fresh = Tree(of, "kernel")
    # when
    fresh.search("kernel_1499")
    found = next_match(fresh, None)
    # then
    assert found is not None
    assert fresh.text(found) == "kernel_1499"


def test_a_profile_without_stalls_has_no_lines() -> None:
    # given
    of = profile([])
    # when
    tree = Tree(of)
    # then
    assert tree.visible() == []
    assert tree.search("x") == 0
    assert next_match(tree, None) is None


A, B = (Launch("app", 7, ("main", name)) for name in ("left", "right"))
DIVIDED = replace(
    profile(
        [
            Row(0, A, KERNELS[0], CODES[1], 0x10, counts(sbid=600)),
            Row(1, B, KERNELS[0], CODES[1], 0x10, counts(sbid=300)),
            Row(1, A, KERNELS[1], CODES[2], 0x20, counts(tdr=100)),
        ],
        (0.0, 1.0),
    ),
    divided=np.array([600, 300, 0], np.uint64),
)
"""A kernel whose samples are divided between two stacks, and one that a stack alone launches."""


@pytest.mark.parametrize(
    ("grouping", "is_inverted", "selection", "expected"),
    [
        (
            "stack",
            False,
            EVERYTHING,
            {"left": 600, "mm": 900, "m.cl:2": 900, "0x10 mad": 900, "sbid": 900, "right": 300},
        ),
        ("stack", True, EVERYTHING, {"left": 600, "right": 300, "main": 900, "app 7": 900}),
        ("kernel", False, EVERYTHING, {}),
        ("launcher", False, EVERYTHING, {"left": 600, "right": 300, "main": 900, "app 7": 900}),
        ("process", False, EVERYTHING, {}),
        ("instruction", False, EVERYTHING, {"left": 600, "right": 300, "main": 900, "app 7": 900}),
        ("reason", False, EVERYTHING, {}),
        (
            "launcher",
            False,
            Selection(reasons=frozenset(["sbid"])),
            {"left": 600, "right": 300, "main": 900, "app 7": 900},
        ),
        ("launcher", False, Selection(reasons=frozenset(["tdr"])), {}),
        ("launcher", False, Selection(intervals=(0, 1)), {}),  # when only one stack launched it
        ("launcher", False, Selection(text="right"), {"mm": 300, "right": 300, "main": 300, "app 7": 300}),
    ],
)
def test_nodes_say_what_is_divided_between_them_and_others(
    grouping: str, is_inverted: bool, selection: Selection, expected: dict[str, int]
) -> None:
    tree = Tree(DIVIDED, grouping, is_inverted)
    tree.select(selection)
    found: Counter[str] = Counter()
    for node in nodes(tree, tree.root):
        found[tree.text(node)] += tree.sums(node).divided
    assert +found == expected
    assert tree.sums(tree.root).divided == (300 if selection.text else 0)


def nodes(tree: Tree, node: Node) -> Iterator[Node]:
    """All nodes below a node."""
    for child in tree.children(node):
        yield child
        yield from nodes(tree, child)


def test_what_is_divided_is_the_same_as_in_pictures() -> None:
    # given a random profile, of which some is divided
    made = random_profile(5)
    chance = random.Random(5)
    divided = np.array([chance.choice((0, 1, 1)) for _ in range(len(made))], np.uint64) * made.counts.sum(axis=1)
    made = replace(made, divided=divided)
    # when it is a tree of both kinds
    picture = stall_tree(made, StackOptions(components=("process", "cpu")), lambda frame: frame.text)
    tree = Tree(made, "stack", groupings={"stack": ("process", "cpu")})
    # then a node of as many samples has as many that are divided
    pictured = sorted(zip(picture.total().tolist(), divided_nodes(picture).tolist(), strict=True))
    assert len(pictured) > 8
    found = sorted((sum(tree.totals(node)), tree.sums(node).divided) for node in (tree.root, *nodes(tree, tree.root)))
    assert found == pictured
