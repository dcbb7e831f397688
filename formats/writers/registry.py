"""The output formats: the one table from which `--format`, extensions and help come."""

from __future__ import annotations

from pathlib import Path

from iaprof.formats.page.html import HtmlPage
from iaprof.formats.writers.chrome import Chrome
from iaprof.formats.writers.firefox import Firefox
from iaprof.formats.writers.flame_svg import FlameSvg
from iaprof.formats.writers.flamescope import Flamescope
from iaprof.formats.writers.folded import Collapsed, Folded
from iaprof.formats.writers.iaprof_text import IaprofText
from iaprof.formats.writers.json_stacks import JsonStacks
from iaprof.formats.writers.perfetto import Perfetto
from iaprof.formats.writers.pprof import Pprof
from iaprof.formats.writers.speedscope import Speedscope
from iaprof.formats.writers.table_csv import Csv
from iaprof.formats.writers.table_parquet import Parquet
from iaprof.formats.writers.writer import Writer

WRITERS: dict[str, Writer] = {
    writer.name: writer
    for writer in (
        Folded(),
        HtmlPage(),
        FlameSvg(),
        IaprofText(),
        JsonStacks(),
        Perfetto(),
        Chrome(),
        Firefox(),
        Flamescope(),
        Speedscope(),
        Pprof(),
        Csv(),
        Parquet(),
        Collapsed(),
    )
}


def for_file(path: Path) -> Writer | None:
    """The writer whose extension `path` has, of several the longest; None where no one's fits."""
    matches = {end: writer for writer in WRITERS.values() for end in writer.extensions if path.name.endswith(end)}
    return matches[max(matches, key=len)] if matches else None
