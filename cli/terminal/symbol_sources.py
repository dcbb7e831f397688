"""The table of `iaprof report --symbol-sources`: the symbol source of each file, and which have none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from iaprof.formats.profile import clean

if TYPE_CHECKING:
    from iaprof.report.facts import CpuModule


def symbol_source_lines(modules: Sequence[CpuModule]) -> Iterator[str]:
    """The lines of the table.

    Args:
        modules: the files with frames in launching stacks.
    """
    if not modules:
        yield "no CPU stacks to name"
        return
    yield f"{'SAMPLES':>8} {'UNNAMED':>8}  FILE"
    for told in modules:
        module, named = told.names.module, told.names.named
        where = module.path or f"no mapping of process {module.pid}"
        count = f"{len(told.names.rows):,} of {told.names.addresses:,} addresses named"
        yield clean(f"{told.share:8.1%} {told.unnamed:8.1%}  {where}")
        for what in (count + (f", from {named.source}" if named.source else ""), named.problem):
            if what:
                yield clean(f"{'':19}{what}")
