"""The tree of a trace's slices, whose lines are those of the folded stacks."""

from __future__ import annotations

from collections.abc import Iterator

from iaprof.report.views.browsing.levels import OF_SLICES
from iaprof.report.views.browsing.tree import Node, Tree
from iaprof.timelines.trace import Dialect, Trace
from iaprof.timelines.views.stacks import OTHERS, browsable
from unit.timelines.traces import slice_, trace


def step() -> Trace:
    """A Python function, an operator in it, and its launch of a kernel, on a file of rank 3."""
    return trace(
        [
            slice_("step", 1000, 300, cat="python_function"),
            slice_("aten::mm", 1005, 50, cat="cpu_op"),
            slice_("launch", 1010, 20, cat="cuda_runtime", correlation=9),
            slice_("gemm", 1070, 50, pid=0, tid=7, cat="kernel", correlation=9),
        ],
        dialect=Dialect.TORCH,
        ranks=[3],
    )


def lines(grouping: str, is_inverted: bool = False) -> list[str]:
    """A tree's nodes, all open, with their time in us."""
    tree = Tree(browsable(step()), grouping, is_inverted, groupings=OF_SLICES)

    def below(node: Node, indent: str) -> Iterator[str]:
        tree.open(node)
        for child in node.rank:
            yield f"{indent}{tree.text(child)} {tree.totals(child)[0] // 1000}"
            yield from below(child, indent + " ")

    return list(below(tree.root, ""))


def test_a_slice_is_one_node_with_its_own_time_and_that_of_those_in_it() -> None:
    assert lines("stack") == [
        "rank 3 350",
        " thread 1 300",
        "  step 300",
        "   aten::mm 50",
        "    launch 20",
        " kernel 50",
        "  step 50",
        "   aten::mm 50",
        "    launch 50",
        "     gemm 50",
    ]


def test_slices_by_their_own_time_have_those_around_them() -> None:
    found = lines("slice")
    assert [line for line in found if line[0] != " "] == ["step 250", "gemm 50", "aten::mm 30", "launch 20"]
    first = found.index("gemm 50")
    assert found[first : first + 5] == ["gemm 50", " launch 50", "  aten::mm 50", "   step 50", "    kernel 50"]


def test_a_tree_turned_around_has_the_same_time() -> None:
    assert lines("stack", is_inverted=True)[:2] == ["step 250", " thread 1 250"]


def test_categories_are_those_of_devices_and_the_host() -> None:
    assert lines("category") == ["host 300", " step 250", " aten::mm 30", " launch 20", "kernel 50", " gemm 50"]


def test_a_profile_has_a_bounded_number_of_categories() -> None:
    kernels = [slice_("gemm", 100 * n, 50, pid=0, tid=n, cat=f"kernel {n}", stream=n) for n in range(300)]
    found = browsable(trace([*kernels, slice_("main", 0, 10)], dialect=Dialect.TORCH))
    assert len(found.reasons) <= 102
    assert found.counts.sum() == 300 * 50_000 + 10_000
    assert OTHERS in found.reasons
