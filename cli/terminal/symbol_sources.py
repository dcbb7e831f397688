"""The table of `iaprof report --symbol-sources`: the symbol source of each file, and which have none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from iaprof.basics.clean import clean

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
    for row in modules:
        module, symbolized = row.names.module, row.names.symbolized
        where = module.path or f"no mapping of process {module.pid}"
        count = f"{len(row.names.rows):,} of {row.names.addresses:,} addresses named"
        yield clean(f"{row.share:8.1%} {row.unnamed:8.1%}  {where}")
        for what in (count + (f", from {symbolized.source}" if symbolized.source else ""), symbolized.problem):
            if what:
                yield clean(f"{'':19}{what}")
