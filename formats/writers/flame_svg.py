"""A flame graph as one SVG file: a static picture in any program, with zoom and search where scripts run.

The root is at the top, as on the page of `--format=html`. The picture is 1,000 pixels wide. The elements carry the
script's data: `data-x` and `data-w` in samples, and texts in `<title>`, so that untrusted names appear only as XML
text. Colours are literal, as programs other than browsers do not know CSS variables.

Of two captures, widths are the samples after, colours the change. Stacks without samples after have no width; a line
above the picture counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files
from typing import IO, Protocol
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.basics.quantities import percent
from iaprof.formats import guesses
from iaprof.formats.estimates import MARK, divided_text, explanation, is_marked, short_divided_text
from iaprof.formats.export import About, Export
from iaprof.formats.profile import CodeKind, Profile, StackOptions
from iaprof.formats.stacks.flame_layout import DARK, DEEPEST, LIGHT, Box, FlameLayout, frame_key, ink, lay_out
from iaprof.formats.stacks.trees import cpu_tree, stall_tree
from iaprof.formats.writers.writer import Needs, Writer

_WIDTH = 1000
_PAD = 10
_ROW = 17  # height, including the gap of one pixel below a box
_LETTER = 7.25  # width in 12 px DejaVu Sans Mono; other fonts are narrower
_TITLE_LETTER = 9.1  # width in 15 px, bold
_LINE = 18  # height of a line of text
_FOOT = 26
_LEAST = 3  # minimum letters of a truncated text
_MOST_WARNINGS = 3
CLASSES = {kind: f"k{index}" for index, kind in enumerate(CodeKind)}

_LESS = ("#b2d5f0", "#7db5e0", "#4a90c8", "#1f68a8")  # weak to strong
_MORE = ("#f6c9b8", "#ee9f84", "#de6f52", "#b93b26")
_SAME = "#e9e9e9"
_SAME_DARK = "#4e4e4e"
_STEPS = len(_LESS)


class Colours(Protocol):
    """What the colours of boxes mean."""

    def rules(self) -> str:
        """The style rules of all classes."""

    def painted(self, box: Box) -> tuple[str, str]:
        """The class of a box, and the beginning of what is said of it."""

    def legend(self, layout: FlameLayout) -> list[tuple[str, str]]:
        """The classes to explain, and their names."""


class FlameSvg(Writer):
    """An interactive flame graph like flamegraph.pl's, with the root at the top."""

    needs = Needs.ABOUT

    def write(self, export: Export, options: StackOptions, out: IO[str]) -> None:
        """Writes the picture; frames that are too small are merged per parent, and the head line counts them."""
        if options.cpu_samples:
            assert export.cpu is not None
            draw(lay_out(cpu_tree(export.cpu, options, frame_key), options.percent_limit), export.about, options, out)
            return
        profile = export.profile
        layout = lay_out(stall_tree(profile, options, frame_key), options.percent_limit)
        draw(layout, export.about, options, out, profile.active, profile.divided_samples, profile.timed)


class Kinds:
    """Colours that show which kind of code a box is."""

    def rules(self) -> str:
        """The style rules: for light screens and paper, and for dark screens."""
        rules = rules_of({CLASSES[kind]: colour for kind, colour in LIGHT.items()})
        return rules + dark({CLASSES[kind]: colour for kind, colour in DARK.items()})

    def painted(self, box: Box) -> tuple[str, str]:
        """The class of a box, and the beginning of what is said of it."""
        return CLASSES[box.kind], "" if box.kind is CodeKind.PROCESS else f"{box.kind}, "

    def legend(self, layout: FlameLayout) -> list[tuple[str, str]]:
        """The classes that occur, and their names."""
        present = {box.kind for row in layout.rows for box in row}
        return [(CLASSES[kind], str(kind)) for kind in CodeKind if kind in present]


def draw(
    layout: FlameLayout,
    about: About,
    options: StackOptions,
    out: IO[str],
    active: int = 0,
    divided: int = 0,
    timed: bool = False,
    colours: Colours = Kinds(),  # noqa: B008
) -> None:
    """Writes the picture.

    Args:
        layout: the boxes to draw.
        about: for the title.
        options: the stack options, for the lines above the picture.
        out: receives the text of the file.
        active: samples in which an instruction was issued.
        divided: samples that are divided among stacks.
        timed: see `Profile`.
        colours: what colours mean.
    """
    head = list(_head(layout, about, options, active, divided, timed))
    top = 10 + len(head) * _LINE + 38
    height = top + len(layout.rows) * _ROW + 8 + _FOOT
    title = escape(about.title or "iaprof")
    out.write(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Flame graph">\n'
        f"<title>{title}</title>\n<style>\n{colours.rules()}{_asset('svg/flame.css')}</style>\n"
        '<rect id="page" width="100%" height="100%"/>\n'
        f'<g id="frames" data-pad="{_PAD}" data-letter="{_LETTER}" data-top="{top}" data-row="{_ROW}">\n'
    )
    scale = (_WIDTH - 2 * _PAD) / max(layout.total, 1)
    unit = "us" if options.waits else "ns" if options.slices else "samples"
    for depth, row in enumerate(layout.rows):
        out.write(f'<g transform="translate(0,{top + depth * _ROW})">\n')
        out.writelines(_box(box, layout.total, scale, unit, colours) for box in row)
        out.write("</g>\n")
    out.write(f'</g>\n<g id="head"><rect class="cover" width="100%" height="{top - 4}"/>\n{"".join(head)}')
    out.write(f'<g id="legend" transform="translate({_PAD},{top - 27})">{_legend(colours.legend(layout))}</g></g>\n')
    out.write(f'<g transform="translate(0,{height - _FOOT})"><g id="foot"><rect class="cover" width="100%" ')
    out.write(f'height="{_FOOT}"/><text id="details" x="{_PAD}" y="17"> </text><text id="matched" y="17"> </text>')
    out.write(f"</g></g>\n<script><![CDATA[\n{_asset('svg/flame.js')}]]></script>\n</svg>\n")


def _head(
    layout: FlameLayout, about: About, options: StackOptions, active: int, divided: int, timed: bool
) -> Iterator[str]:
    """The lines above the picture: title, origin, totals and warnings."""
    unit = "CPU samples" if options.cpu_samples else "GPU samples"
    if options.waits:
        unit = "us of waits for the GPU"
    if options.slices:
        unit = "ns"
    where = [each for each in (about.gpus, about.host) if each]
    if about.begun:
        where.append(f"{datetime.fromtimestamp(about.begun, UTC):%Y-%m-%d %H:%M:%S} UTC")
    if about.seconds:
        where.append(f"{about.seconds:,.1f} s")
    much = [f"{layout.total:,} {unit}"]
    if active:
        much.append(f"{percent(active / layout.total)} active")
    if options.inverted:
        much.append("leaf first")
    if layout.left_out:
        deep = f" or deeper than {DEEPEST:,}" if len(layout.rows) > DEEPEST + 1 else ""
        much.append(f"{layout.left_out:,} frames below {layout.limit:g} %{deep} not drawn")
    lines = [
        ("title", about.command or "iaprof", _TITLE_LETTER, ""),
        *(("said", " · ".join(each), _LETTER, "") for each in (where, much) if each),
        *(("warning", warning, _LETTER, "") for warning in about.warnings[:_MOST_WARNINGS]),
    ]
    if divided:
        why = f"{divided_text(divided, layout.total, timed)} {explanation(timed)}"
        lines.insert(1 + bool(where) + bool(much), ("said", short_divided_text(divided, layout.total), _LETTER, why))
    if any(guesses.is_guess(box.text) for row in layout.rows for box in row):
        lines.append(("said", guesses.NOTE, _LETTER, ""))
    for index, (name, text, letter, why) in enumerate(lines):
        cut = escape(_cut(text, int((_WIDTH - 2 * _PAD) / letter)))
        said = f' data-said="{escape(text)}"' if why else ""  # which the script cuts, instead of the title
        yield (
            f'<text class="{name}" data-letter="{letter}"{said} x="{_PAD}" y="{24 + index * _LINE}">'
            f"<title>{escape(why or text)}</title>{cut}</text>\n"
        )


def _box(box: Box, total: int, scale: float, unit: str, colours: Colours) -> str:
    x, width = _PAD + box.x * scale, box.width * scale
    marked = is_marked(box.divided, box.width)
    marks = f"{MARK} " * marked + f"{guesses.MARK} " * guesses.is_guess(box.text)
    mark = f' data-mark="{marks}"' if marks else ""  # which the script puts before the name
    text = _cut(marks + guesses.unmarked(box.text), int((width - 5) / _LETTER))
    label = f'<text x="{x + 3:.2f}" y="12">{escape(text)}</text>' if text else ""
    # A gap of half a pixel, except for boxes that would mostly be gap.
    drawn = width - 0.5 if width > 2 else width
    name, said = colours.painted(box)
    share = 100 * box.width / max(total, 1)
    estimate = f", of which {percent(box.divided / box.width)} divided among stacks" if marked else ""
    return (
        f'<g class="{name}" data-x="{box.x}" data-w="{box.width}"{mark}>'
        f"<title>{escape(box.text)} ({said}{box.width:,} {unit}, {share:.2f} %{estimate})</title>"
        f'<rect x="{x:.2f}" width="{drawn:.2f}" height="{_ROW - 1}"/>{label}</g>\n'
    )


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    """A patch and a name for each class of boxes."""
    found, x = [], 0.0
    for class_, name in entries:
        found.append(f'<g class="{class_}"><rect x="{x:g}" width="11" height="11"/></g>')
        found.append(f'<text x="{x + 15:g}" y="10">{escape(name)}</text>')
        x += 15 + round(len(name) * _LETTER) + 11
    return "".join(found)


def _cut(text: str, most: int) -> str:
    """Truncates a text to `most` letters; empty if too few of them would remain."""
    letters = [2 if ord(character) >= 0x1100 else 1 for character in text] if not text.isascii() else []
    if (sum(letters) or len(text)) <= most:
        return text
    if most < _LEAST:
        return ""
    if not letters:
        return f"{text[: most - 2]}.."
    end = room = 0
    while room + letters[end] <= most - 2:
        room += letters[end]
        end += 1
    return f"{text[:end]}.."


def dark(colours: dict[str, str]) -> str:
    """The style rules for classes of boxes on dark screens."""
    return f"@media screen and (prefers-color-scheme: dark) {{\n{rules_of(colours)}}}\n"


def rules_of(colours: dict[str, str]) -> str:
    """The style rules for classes of boxes."""
    return "".join(
        f".{class_} rect {{ fill: {colour} }} .{class_} text {{ fill: {ink(colour)} }}\n"
        for class_, colour in colours.items()
    )


def _asset(name: str) -> str:
    return (files("iaprof.formats.page") / "assets" / name).read_text("utf-8")


def write_difference(
    both: Profile, names: tuple[str, str], options: StackOptions, relative: bool, out: IO[str]
) -> None:
    """Writes the picture.

    Args:
        both: interval 0 is before, interval 1 is after.
        names: of the two captures.
        options: the stack options.
        relative: compare shares of all samples, not samples.
        out: receives the text of the file.
    """
    tree = stall_tree(both, options, frame_key)
    after = replace(tree, count=np.where(tree.interval == 1, tree.count, 0))
    before = replace(tree, count=np.where(tree.interval == 0, tree.count, 0))
    gone = int(before.own()[after.own() == 0].sum())
    of_gone = f"{gone:,} samples before belong to stacks that are gone: swap the captures to see them"
    about = About(command=clean(" → ".join(names)), warnings=[of_gone] if gone else [])
    layout = lay_out(after, options.percent_limit)
    totals = after.total()
    layout = replace(layout, left_out=layout.left_out - int((totals == 0).sum()))
    draw(layout, about, options, out, colours=_Change(before.total(), totals, relative))


class _Change:
    """Colours that show whether a box has more samples than before, or less."""

    def __init__(self, before: NDArray[np.int64], after: NDArray[np.int64], relative: bool) -> None:
        """Takes the samples of each node of the tree: int64[nodes]."""
        wholes = [max(int(each[0]), 1) / 100 if relative else 1 for each in (before, after)]
        self._before, self._after = before / wholes[0], after / wholes[1]
        self._change = self._after - self._before
        shown = np.abs(self._change[1:][after[1:] > 0])
        self._most = float(shown.max(initial=0)) or 1.0
        self._relative = relative
        self._form = "{:.2f} %" if relative else "{:,.0f}"

    def rules(self) -> str:
        """The style rules of all classes."""
        shades = {f"less{step}": colour for step, colour in enumerate(_LESS)}
        shades |= {f"more{step}": colour for step, colour in enumerate(_MORE)}
        return rules_of({"same": _SAME, **shades}) + dark({"same": _SAME_DARK})

    def painted(self, box: Box) -> tuple[str, str]:
        """The class of a box, and the beginning of what is said of it."""
        if box.node < 0:
            return "same", ""
        values = [self._form.format(float(each[box.node])) for each in (self._before, self._after)]
        change = float(self._change[box.node])
        changed = f"{change:+.2f}" if self._relative else f"{change:+,.0f}"
        return self._class(change), f"{values[0]} before, {values[1]} after: {changed}; "

    def _class(self, change: float) -> str:
        step = min(int(abs(change) / self._most * _STEPS), _STEPS - 1)
        if abs(change) < self._most / (2 * _STEPS):
            return "same"
        return f"{'more' if change > 0 else 'less'}{step}"

    def legend(self, _: FlameLayout) -> list[tuple[str, str]]:
        """The classes to explain, and their names."""
        return [("more3", "more than before"), ("more0", "a little more"), ("same", "unchanged"),
                ("less0", "a little less"), ("less3", "less than before")]  # fmt: skip
