"""The output formats: the one table from which `--format`, extensions and help come."""

from __future__ import annotations

from pathlib import Path

from iaprof.formats.folded import Folded
from iaprof.formats.iaprof_text import IaprofText
from iaprof.formats.json_stacks import JsonStacks
from iaprof.formats.profile import Writer

WRITERS: dict[str, Writer] = {writer.name: writer for writer in (Folded(), IaprofText(), JsonStacks())}


def for_file(path: Path) -> Writer | None:
    """The writer whose extension `path` has; None where no one's fits."""
    matches = [writer for writer in WRITERS.values() if path.name.endswith(writer.extensions)]
    return matches[0] if len(matches) == 1 else None
