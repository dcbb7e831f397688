"""The table of `iaprof report --symbol-sources`: which file was named from where, and what has no names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from iaprof.formats.profile import clean

if TYPE_CHECKING:
    from iaprof.report.facts import CpuModule


def sources(modules: Sequence[CpuModule]) -> Iterator[str]:
    """The lines: samples whose stack has a frame in the file, those of them with an unnamed one, and why.

    Args:
        modules: of the launching stacks.
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
