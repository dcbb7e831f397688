"""The keys of the view, for its help."""

from __future__ import annotations

from collections.abc import Sequence

_GROUPINGS = {
    "stack": "process, stack, kernel, instruction, reason",
    "kernel": "kernel, inlined function, line, instruction, reason",
    "launcher": "kernel, and who launched it: the innermost frame first",
    "process": "process, kernel, line, instruction, reason",
    "line": "source line, kernel, instruction, reason",
    "instruction": "instructions of all kernels, and who launched them",
    "reason": "reason, kernel, line, instruction",
}
_OF_SLICES = {
    "stack": "rank, thread or category, slices and those within them",
    "slice": "slices by their own time, and the slices around them",
    "rank": "rank, slice",
    "category": "category, slice",
}
_BEFORE = (
    ("Up Down k j", "move by a line; PageUp, PageDown, Home and End by more"),
    ("Right l +", "open the line, and each only child below it"),
    ("Left h -", "close the line, or go to its parent"),
    ("Space", "open or close the line"),
    ("e", "open the largest child, then its largest, down to a leaf"),
    ("c", "close everything"),
    ("Enter", "annotate the kernel: its instructions with their stalls"),
)
_AFTER = (
    ("Tab", "the next of these trees; Shift-Tab the one before"),
    ("i", "invert the tree: from the leaves to the root"),
    ("o", "order by samples or by name"),
    ("/", "search: go to the first name with a text; n next, N previous"),
    ("f", "filter: only stacks with a text in a name"),
    ("r", "only some stall reasons, or some categories of slices"),
    ("t", "only a part of the recording"),
    ("x", "clear all filters"),
    ("?", "this list"),
    ("q Ctrl-C", "quit; Escape or q leaves a list like this one"),
)


def keys_for(groupings: Sequence[str], width: int) -> list[str]:
    """The keys of a view with these trees, as lines."""
    texts = _GROUPINGS if "kernel" in groupings else _OF_SLICES
    keys = (*_BEFORE, *((str(number), texts[name]) for number, name in enumerate(groupings, 1)), *_AFTER)
    return [f"  {key:12} {what}"[:width] for key, what in keys]
