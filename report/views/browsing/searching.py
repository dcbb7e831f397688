"""Goes from one match of a search to the next in a tree, of which it opens only what leads to matches."""

from __future__ import annotations

from collections.abc import Sequence

from iaprof.report.views.browsing.tree import Node, Tree


def next_match(tree: Tree, after: Node | None, is_backward: bool = False) -> Node | None:
    """Finds the next node that matches, or the one before, and opens what leads to it; None if there is none.

    Args:
        tree: in which something is searched for.
        after: where to begin; None for the begin, or the end.
        is_backward: search towards the begin.
    """
    if not tree.is_searched:
        return None
    found = _before(tree, after) if is_backward else _after(tree, after or tree.root)
    above = found.parent if found is not None else None
    while above is not None:
        tree.open(above)
        above = above.parent
    return found


def _after(tree: Tree, node: Node) -> Node | None:
    found = _first(tree, tree.children(node)) if tree.has_match(node) else None
    while found is None and node.parent is not None:
        found = _first(tree, node.parent.rank[_place(node) + 1 :])
        node = node.parent
    return found


def _before(tree: Tree, node: Node | None) -> Node | None:
    if node is None:
        return _last(tree, tree.root.rank)
    while node.parent is not None:
        found = _last(tree, node.parent.rank[: _place(node)])
        if found is not None:
            return found
        node = node.parent
        if node.parent is not None and tree.matches(node):
            return node
    return None


def _first(tree: Tree, nodes: Sequence[Node]) -> Node | None:
    """The first match in some nodes and below them."""
    waiting = list(reversed(nodes))
    while waiting:
        node = waiting.pop()
        if tree.has_match(node):
            if tree.matches(node):
                return node
            waiting += reversed(tree.children(node))
    return None


def _last(tree: Tree, nodes: Sequence[Node]) -> Node | None:
    """The last match in some nodes and below them."""
    waiting = [(node, False) for node in nodes]
    while waiting:
        node, are_children_done = waiting.pop()
        if are_children_done:
            if tree.matches(node):
                return node
        elif tree.has_match(node):
            waiting.append((node, True))
            waiting += ((child, False) for child in tree.children(node))
    return None


def _place(node: Node) -> int:
    """A node's place among its parent's children."""
    assert node.parent is not None
    return node.parent.rank.index(node)
