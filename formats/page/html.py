"""Pages: a report (`--format=html`) or a difference as one file that any browser opens without a network.

`assets/` has the page's HTML, scripts and styles, which this module joins. page/data.py has the data of the flame
graph and heat maps, page/panels.py those of the other panels. The data is Base64, so that no name from a capture is
part of the page's source except in its title, and the content security policy admits only the page's own script.

The page of `iaprof diff -o FILE.html` says what changed, as a flame graph and a table.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import IO, Any

from iaprof.basics.clean import clean
from iaprof.formats.export import Export
from iaprof.formats.page.data import packed, payload
from iaprof.formats.profile import CodeKind, Profile, StackOptions
from iaprof.formats.stacks.frames import Frame
from iaprof.formats.writers.folded import DIFFERENCE_COMPONENTS
from iaprof.formats.writers.writer import Needs, Writer

BASE = ("model.js", "about.js", "words.js", "theme.js", "paper.js")
"""The scripts of every page."""
STACKS = (
    *("picture.js", "stacks/groups.js", "stacks/colours.js", "stacks/input.js", "stacks/calltree.js"),
    *("stacks/estimates.js", "flame.js"),
    *("stacks/link.js", "stacks/help.js"),
)
"""The scripts of pages with a flame graph."""
_SCRIPTS = (
    *BASE,
    *STACKS,
    *("stacks/strip.js", "heatmap.js", "hosts.js", "operators.js", "timeline.js", "kernels.js", "main.js"),
)
_STYLES = ("page.css", "panels.css")


class HtmlPage(Writer):
    """Flame graph, heat maps, time line, kernels."""

    readable = False  # its payload is base64
    interval_s = 0.02  # like FlameScope: fifty rows per second
    needs = Needs.TIME | Needs.CPU | Needs.SERIES | Needs.LAUNCHES | Needs.LISTINGS | Needs.ABOUT

    def write(self, export: Export, options: StackOptions, out: IO[str]) -> None:
        """Writes the page."""
        # Imported here, so that the registry of formats loads without NumPy.
        from iaprof.formats.page.data import payload
        from iaprof.formats.page.panels import panels

        write_page(STALLS, export.about.title, payload(export, options, panels(export)), out)


@dataclass(frozen=True)
class Parts:
    """What a page consists of: names in assets."""

    body: tuple[str, ...]
    scripts: tuple[str, ...]
    styles: tuple[str, ...]


STALLS = Parts(
    ("page.html", "stacks/panel.html", "below.html", "stacks/help.html"),
    _SCRIPTS,
    (*_STYLES, "stacks/stacks.css", "print.css"),
)
TIME_LINES = Parts(
    ("traces/traces.html",),
    (
        *BASE,
        "heatmap.js",
        "traces/busy.js",
        "traces/tracks.js",
        "traces/counters.js",
        "traces/energy.js",
        "traces/traces.js",
    ),
    (*_STYLES, "traces/traces.css", "print.css"),
)


def write_page(parts: Parts, title: str, payload: bytes, out: IO[str]) -> None:
    """Writes a page.

    Args:
        parts: of the page.
        title: untrusted.
        payload: its data, as page.data.packed makes it.
        out: receives the page.
    """
    script = "\n".join(_asset(name) for name in parts.scripts)
    style = "\n".join([_kinds(), *(_asset(name) for name in parts.styles)])
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:"
    out.write(
        Template(_asset("frame.html")).substitute(
            body="".join(_asset(name) for name in parts.body),
            title=html.escape(clean(title) or "iaprof"),
            policy=f"{policy}; base-uri 'none'; form-action 'none'",
            script=script,
            style=style,
            payload=base64.b64encode(payload).decode(),
        )
    )


def _asset(name: str) -> str:
    return (resources.files("iaprof.formats.page") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The source expression of a text for a content security policy (W3C, CSP 3, 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _kinds() -> str:
    """The style rules with the colours of kinds of code, in the order of CodeKind, and of the text on them."""
    from iaprof.formats.stacks.flame_layout import DARK, LIGHT, ink

    def rules(colours: dict[CodeKind, str]) -> str:
        return "".join(
            f"--kind-{number}:{colours[kind]};--kind-ink-{number}:{ink(colours[kind])};"
            for number, kind in enumerate(CodeKind)
        )

    return f":root{{{rules(LIGHT)}}}:root[data-theme=dark]{{{rules(DARK)}}}"


_LONGEST = 2_000  # characters of a name
_TABLE = Parts(
    ("difference/difference.html", "difference/table.html"),
    (*BASE, "difference/difference.js"),
    ("page.css", "panels.css", "difference/difference.css", "print.css"),
)
_STACKS = Parts(
    (
        *("difference/difference.html", "difference/stacks.html", "stacks/panel.html"),
        *("difference/table.html", "stacks/help.html"),
    ),
    (*BASE, *STACKS, "difference/graph.js", "difference/difference.js"),
    ("page.css", "panels.css", "stacks/stacks.css", "difference/difference.css", "print.css"),
)
_ALL = 1 << 62  # counts by interval: before and after must not be summed up


def write_difference(document: Mapping[str, Any], out: IO[str], both: Profile | None = None) -> None:
    """Writes the page.

    Args:
        document: as `iaprof diff --json` prints it, with `sides`: for each a name and what is said of it.
        out: receives the page.
        both: the stacks of both sides, for a flame graph: interval 0 is before, interval 1 is after.
    """
    entries = [_entry(each, document["by"]) for each in document["entries"]]
    sides = [{"name": clean(side["name"]), "facts": clean(side["facts"])} for side in document["sides"]]
    panels = {
        "by": document["by"],
        "unit": document["unit"],
        "sides": sides,
        "entries": entries,
        "more": document["more"],
        "total": document["total"],
    }
    title = " · ".join(side["name"] for side in sides)
    if both is None:
        write_page(_TABLE, title, packed({"panels": panels, "trees": {}}, ()), out)
        return
    export = Export(both, interval_s=1.0)
    stacks = payload(export, StackOptions(components=DIFFERENCE_COMPONENTS), panels, most_entries=_ALL, key=_key)
    write_page(_STACKS, title, stacks, out)


def _key(frame: Frame) -> Hashable:
    """Builds of two captures may be in different folders: modules do not matter."""
    return frame.text, frame.kind


def _entry(entry: Mapping[str, Any], by: str) -> dict[str, Any]:
    shown = ("state", "samples_before", "samples_after", "before", "after", "change", "reasons", "by_chance")
    known = {name: entry[name] for name in shown if name in entry}
    return {**known, "name": _short(_name(entry, by)), "place": _short(str(entry.get("file", "")))}


def _name(entry: Mapping[str, Any], by: str) -> str:
    value = entry[by]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "\n".join([*map(str, value), str(entry.get("process", ""))]).rstrip()
    return str(value)


def _short(text: str) -> str:
    lines = [clean(line) for line in text.split("\n")]
    found = "\n".join(lines)
    return found if len(found) <= _LONGEST else f"{found[: _LONGEST - 1]}…"
