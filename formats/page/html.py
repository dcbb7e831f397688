"""`--format=html`: a report as one file that any browser opens without a network.

`assets/` has the page's HTML, scripts and styles, which this module joins. page/data.py has the data of the flame
graph and heat maps, page/panels.py those of the other panels. The data is Base64, so that no name from a capture is
part of the page's source except in its title, and the content security policy admits only the page's own script.
"""

from __future__ import annotations

import base64
import hashlib
import html
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import IO

from iaprof.basics.clean import clean
from iaprof.formats.export import Export
from iaprof.formats.profile import CodeKind, StackOptions
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
    needs = Needs.TIME | Needs.CPU | Needs.SERIES | Needs.LAUNCHES | Needs.LISTINGS

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
