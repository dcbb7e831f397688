"""`--format=html`: everything a report has to show, in one file that any browser opens without a network.

The page's own parts are in `assets/`; here they become one file. What it shows is in `html_data.py` (flame graph and
heat maps) and `html_panels.py` (the other panels). All of it travels as Base64, so that no name of a capture stands in
the page's own text but the title's, and a content security policy lets nothing run but the page's own script.
"""

from __future__ import annotations

import base64
import hashlib
import html
from importlib import resources
from string import Template
from typing import IO

from iaprof.formats.export import Export
from iaprof.formats.profile import Kind, Shape, clean
from iaprof.formats.writers.writer import Needs, Writer

_SCRIPTS = ("model.js", "about.js", "words.js", "heatmap.js", "flame.js", "timeline.js", "kernels.js", "main.js")
_STYLES = ("page.css", "panels.css")


class HtmlPage(Writer):
    """Flame graph, heat maps, time line, kernels."""

    interval_s = 0.02  # FlameScope's: fifty rows of a second
    needs = Needs.TIME | Needs.CPU | Needs.SERIES | Needs.LAUNCHES | Needs.LISTINGS

    def write(self, export: Export, shape: Shape, out: IO[str]) -> None:
        """Writes the page."""
        # Imported here, as other verbs need no NumPy for knowing of this format.
        from iaprof.formats.page.data import payload
        from iaprof.formats.page.panels import panels

        script = "\n".join(_asset(name) for name in _SCRIPTS)
        style = "\n".join([_kinds(), *(_asset(name) for name in _STYLES)])
        policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:"
        page = Template(_asset("page.html"))
        out.write(
            page.substitute(
                title=html.escape(clean(export.about.title) or "iaprof"),
                policy=f"{policy}; base-uri 'none'; form-action 'none'",
                script=script,
                style=style,
                payload=base64.b64encode(payload(export, shape, panels(export))).decode(),
            )
        )


def _asset(name: str) -> str:
    return (resources.files("iaprof.formats.page") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a content security policy calls a text that may run (W3C, CSP 3, 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _kinds() -> str:
    """The colours of kinds of code, in the order of Kind, and what is written on them."""
    from iaprof.formats.stacks.palette import DARK, LIGHT, ink

    def rules(colours: dict[Kind, str]) -> str:
        return "".join(
            f"--kind-{number}:{colours[kind]};--kind-ink-{number}:{ink(colours[kind])};"
            for number, kind in enumerate(Kind)
        )

    return f":root{{{rules(LIGHT)}}}:root[data-theme=dark]{{{rules(DARK)}}}"
