"""The page of `iaprof diff -o FILE.html`: what changed, as a flame graph and a table in one file for any browser."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import IO, Any

from iaprof.basics.clean import clean
from iaprof.formats.export import Export
from iaprof.formats.page.data import packed, payload
from iaprof.formats.page.html import BASE, STACKS, Parts, write_page
from iaprof.formats.profile import Profile, StackOptions
from iaprof.formats.stacks.frames import Frame
from iaprof.formats.writers.folded import DIFFERENCE_COMPONENTS

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
