"""A flame graph as one SVG file: a static picture in any program, with zoom and search where scripts run.

The root is at the top, as on the page of `--format=html`. The picture is 1,000 pixels wide. The elements carry the
script's data: `data-x` and `data-w` in samples, and texts in `<title>`, so that untrusted names appear only as XML
text. Colours are literal, as programs other than browsers do not know CSS variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import IO, Protocol
from xml.sax.saxutils import escape

from iaprof.basics.quantities import percent
from iaprof.formats import guesses
from iaprof.formats.estimates import EXPLANATION, MARK, divided_text, is_marked, short_divided_text
from iaprof.formats.export import About, Export
from iaprof.formats.profile import CodeKind, StackOptions
from iaprof.formats.stacks.flame_layout import DEEPEST, Box, FlameLayout, frame_key, lay_out
from iaprof.formats.stacks.palette import DARK, LIGHT, ink
from iaprof.formats.stacks.trees import cpu_tree, stall_tree
from iaprof.formats.writers.writer import Writer

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

    def write(self, export: Export, options: StackOptions, out: IO[str]) -> None:
        """Writes the picture; frames that are too small are merged per parent, and the head line counts them."""
        if options.cpu_samples:
            assert export.cpu is not None
            tree, active, divided = cpu_tree(export.cpu, options, frame_key), 0, 0
        else:
            tree = stall_tree(export.profile, options, frame_key)
            active, divided = export.profile.active, export.profile.divided_samples
        draw(lay_out(tree, options.percent_limit), export.about, options, out, active, divided)


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
        colours: what colours mean.
    """
    head = list(_head(layout, about, options, active, divided))
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


def _head(layout: FlameLayout, about: About, options: StackOptions, active: int, divided: int) -> Iterator[str]:
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
        why = f"{divided_text(divided, layout.total)} {EXPLANATION}"
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
