"""The layout of flame graphs: which frames of a tree are drawn, where, and in which colours.

A picture cannot show a million frames. Frames with too small a share are merged into one per parent, by operations on
whole columns; only frames that are drawn are handled one by one.

Each kind of code has the same colour in every picture. The hues are those of Okabe and Ito's set for colour-blind
readers ("Color Universal Design", 2008): warm hues for the GPU, cool ones for the CPU. Each kind has its own lightness,
about six steps of CIE L* from the next, so that they differ in black-and-white prints, too.
tests/unit/formats/test_palette.py measures both.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats.guesses import shortened
from iaprof.formats.profile import CodeKind
from iaprof.formats.stacks.frames import Frame
from iaprof.formats.stacks.trees import Tree, divided_nodes

LIGHT = {
    CodeKind.PROCESS: "#e9e9e9",
    CodeKind.PYTHON: "#eade40",
    CodeKind.SOURCE: "#fdb651",
    CodeKind.CPP: "#56bbeb",
    CodeKind.UNKNOWN: "#a0a0a0",
    CodeKind.INSTRUCTION: "#ef662e",
    CodeKind.KERNEL: "#b660a2",
    CodeKind.JIT: "#047959",
    CodeKind.C: "#055e92",
}
"""For light backgrounds, lightest first."""
DARK = {**LIGHT, CodeKind.PROCESS: "#4e4e4e"}
"""For backgrounds as dark as #1b1b1f, where the lightest colour of LIGHT would glare."""

SMALLEST = 0.01  # percent of all samples: a tenth of a pixel at a width of 1,000 pixels
DEEPEST = 1000  # frames: some programs do not show pictures higher than 20,000 pixels
_MOST_BYTES = 9_000_000
_BOX_BYTES = 200  # besides the text; each box may have a rest, which is another box
_LONGEST = 1000  # characters in a frame's text
_Ints = NDArray[np.int64]


def ink(colour: str) -> str:
    """Black or white, whichever has more contrast with a background.

    Args:
        colour: `#rrggbb`.
    """
    return "#000000" if contrast(colour, "#000000") >= contrast(colour, "#ffffff") else "#ffffff"


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, 1 to 21 (WCAG 2.2); text is easy to read from 4.5 on."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """The relative luminance of a colour (sRGB, IEC 61966-2-1), 0 to 1."""
    shares = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of the flame graph."""

    text: str  # clean
    kind: CodeKind
    x: int  # samples to its left
    width: int  # samples
    node: int = -1  # of the tree; -1: several that are too small
    divided: int = 0  # of the samples: divided between this frame and frames beside it


@dataclass(frozen=True)
class FlameLayout:
    """Boxes by depth, each row from left to right; the first row has only the root."""

    rows: Sequence[Sequence[Box]]
    limit: float  # percent of all samples: frames with less are merged
    left_out: int  # frames without a box of their own

    @property
    def total(self) -> int:
        """Samples of the root."""
        return self.rows[0][0].width


def frame_key(frame: Frame) -> Hashable:
    """Frames with equal keys are merged, as they look the same."""
    return frame.kind, clean(frame.name)


def lay_out(tree: Tree, percent_limit: float = 0.0, most_bytes: int = _MOST_BYTES) -> FlameLayout:
    """Lays out a tree, siblings in alphabetical order; frames that are too small become one box after their siblings.

    Args:
        tree: made with `frame_key`.
        percent_limit: frames with a smaller share of all samples, or less than `SMALLEST`, are too small.
        most_bytes: approximate maximum size of a file with the boxes; a higher limit enforces it.
    """
    totals, depth, divided = tree.total(), tree.depth(), divided_nodes(tree)
    total = int(totals[0])
    limit = max(percent_limit, SMALLEST)
    sizes = np.where(depth <= DEEPEST, totals, 0)
    shown = _shown(sizes, limit)
    # Largest first: keep as many as fit into the file.
    largest = shown[np.argsort(-totals[shown], kind="stable")]
    names = {int(frame): _text(tree.frames[frame]) for frame in np.unique(tree.frame[shown[1:]])}
    length = np.zeros(len(tree.frames) + 1, np.int64)  # the last element is the root's, whose frame is -1
    length[np.array(list(names), np.int64)] = [len(escape(name).encode()) for name in names.values()]
    room = int(np.searchsorted(np.cumsum(2 * _BOX_BYTES + length[tree.frame[largest]]), most_bytes))
    if room < len(largest):
        limit = _rounded_up(100 * int(totals[largest[max(room, 1)]]) / total)
        shown = _shown(sizes, limit)
    del sizes
    is_shown = np.zeros(len(totals), bool)
    is_shown[shown] = True
    rests = np.flatnonzero(~is_shown & is_shown[tree.parent])
    parents, parent_of = np.unique(tree.parent[rests], return_inverse=True)
    rest = np.bincount(parent_of, totals[rests], len(parents)).astype(np.int64)
    has_box = (rest > 0) & (rest * 100.0 >= limit * total)

    by_name = {frame: rank for rank, frame in enumerate(sorted(names, key=names.__getitem__))}
    rows: list[list[Box]] = [[] for _ in range(int(depth[shown].max()) + 2)]
    begin = {0: 0}  # where a node's next child begins
    rows[0].append(Box("all", CodeKind.PROCESS, 0, total, 0))
    # Sorted by parent, as a box needs the position of its parent's box.
    rank = np.array([by_name.get(int(frame), -1) for frame in tree.frame[shown]], np.int64)
    order = shown[np.lexsort((rank, tree.parent[shown]))][1:]
    columns = (order, tree.parent[order], tree.frame[order], totals[order], divided[order])
    for node, parent, frame, width, shared in zip(*(column.tolist() for column in columns), strict=True):
        rows[int(depth[node])].append(Box(names[frame], tree.frames[frame].kind, begin[parent], width, node, shared))
        begin[node] = begin[parent]
        begin[parent] += width
    for node, width in zip(parents[has_box].tolist(), rest[has_box].tolist(), strict=True):
        rows[int(depth[node]) + 1].append(Box(f"[below {limit:g} %]", CodeKind.PROCESS, begin[node], width))
    for row in rows:
        row.sort(key=lambda box: box.x)
    return FlameLayout([row for row in rows if row], limit, len(totals) - len(shown))


def _shown(totals: _Ints, limit: float) -> _Ints:
    """The root and the nodes with at least this share: int64[n], ascending. A node's parent is always included."""
    found = totals * 100.0 >= limit * totals[0]
    found &= totals > 0
    found[0] = True
    return np.flatnonzero(found)


def _text(frame: Frame) -> str:
    return shortened(clean(frame.name), _LONGEST, "..")


def _rounded_up(percent: float) -> float:
    """The next larger number with two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(percent)) - 1)
    return (math.floor(percent / unit) + 1) * unit
