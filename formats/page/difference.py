"""The page of `iaprof diff -o FILE.html`: a table of what changed, as one file that any browser opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from iaprof.formats.page.data import packed
from iaprof.formats.page.html import Parts, write_page
from iaprof.formats.profile import clean

_LONGEST = 2_000  # characters of a name
_PARTS = Parts(
    ("difference/difference.html",),
    ("model.js", "about.js", "words.js", "theme.js", "difference/difference.js"),
    ("page.css", "panels.css", "difference/difference.css", "print.css"),
)


def write_difference(document: Mapping[str, Any], out: IO[str]) -> None:
    """Writes the page.

    Args:
        document: as `iaprof diff --json` prints it, with `sides`: for each a name and what is said of it.
        out: receives the page.
    """
    entries = [_entry(each, document["by"]) for each in document["entries"]]
    sides = [{"name": clean(side["name"]), "facts": clean(side["facts"])} for side in document["sides"]]
    head = {
        "by": document["by"],
        "unit": document["unit"],
        "sides": sides,
        "entries": entries,
        "more": document["more"],
        "total": document["total"],
        "trees": {},
    }
    title = " · ".join(side["name"] for side in sides)
    write_page(_PARTS, title, packed(head, ()), out)


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
