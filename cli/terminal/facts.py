"""What a verb says on stderr about its report: totals, match rates, waits, and where names came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from iaprof.basics.clean import clean
from iaprof.basics.quantities import percent
from iaprof.cli.terminal.summary import losses, say
from iaprof.formats.header.stack_counts import NOUNS, recorded, recorded_python

if TYPE_CHECKING:
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.facts import CpuModule, Facts

_NONE = (
    "no waits were recorded: nothing waited, the kernel was older than Linux 6.13, or the driver's layout has no "
    "functions that wait (run 'sudo iaprof calibrate')"
)


def no_waits(reader: CaptureReader) -> str:
    """Why a capture has no `wait` rows, or how to record waits: a sentence without a full stop."""
    headers = [part.header for part in reader.parts]
    if not any(header.get("waits_wanted") is True for header in headers):
        return "this capture has no waits: record with 'iaprof record --waits'"
    return "; ".join([_NONE, *_losses(headers)])


def say_waits(verb: str, reader: CaptureReader) -> None:
    """Prints the totals and losses of waits over all parts."""
    from iaprof.formats.header.waits import WaitTotals, total_waits

    headers = [part.header for part in reader.parts]
    say(f"[ iaprof {verb}: {(total_waits(headers) or WaitTotals()).sentence()} ]")
    for text in _losses(headers):
        say(f"iaprof: {text}")


def _losses(headers: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for loss in (loss for header in headers for loss in header.get("losses", ()) if isinstance(loss, dict)):
        if loss.get("source") == "waits" and isinstance(loss.get("what"), str):
            count = loss.get("count")
            yield f"waits {loss['what']}: {count:,}" if type(count) is int else f"waits {loss['what']}"


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


MOST_PROBLEMS = 50  # printed


def say_facts(verb: str, facts: Facts, header: dict[str, Any]) -> None:
    """Prints problems as warnings, and a line of totals."""
    say_problems(facts)
    imported = facts.stalls and not facts.records  # counts without records
    records = "" if imported else f"{facts.records:,} stall records, "
    say(
        clean(
            f"[ iaprof {verb}: {records}{facts.samples_text()}; {_scaled(header)}"
            f"{matched_text(facts) if facts.stalls else ''}{_recorded(header)}lost while recording: {losses(header)} ]"
        )
    )


def say_problems(facts: Facts) -> None:
    """Prints what could not be read of GPU modules, as warnings."""
    for problem, paths in list(facts.problems.items())[:MOST_PROBLEMS]:
        more = f" (and {len(paths) - 1:,} more)" if len(paths) > 1 else ""
        say(clean(f"iaprof: warning: {paths[0]}{more}: {problem}"))
    if len(facts.problems) > MOST_PROBLEMS:
        say(f"iaprof: warning: and {len(facts.problems) - MOST_PROBLEMS:,} more problems")


def matched_text(facts: Facts) -> str:
    """The match rates."""
    shares = facts.matched.shares()
    ambiguous = f", {percent(shares['ambiguous'])} ambiguous" if facts.matched.ambiguous else ""
    no_launch = f", {facts.no_launch:,} without a launch" if facts.no_launch else ""
    whole = f"; stacks: {facts.whole.text('samples')}" if facts.whole.stacks else ""
    python = f"; {facts.python.text('samples')}" if facts.python.stacks else ""
    return (
        f"matched to a kernel {percent(shares['kernel'])}, an instruction {percent(shares['instruction'])}, "
        f"one stack {percent(shares['stack'])}{facts.others_text}{ambiguous}{no_launch}{whole}{python}; "
    )


def _recorded(header: dict[str, Any]) -> str:
    """The recorder's counts of stacks, if some were finished late or presumed: the report cannot know that."""
    texts = [ends.short(NOUNS[kind]) for kind, ends in recorded(header).items() if ends.late or ends.presumed]
    texts += [each.text(NOUNS[kind]) for kind, each in recorded_python(header).items() if not each.is_whole]
    return f"recorded stacks: {'; '.join(texts)}; " if texts else ""


def _scaled(header: dict[str, Any]) -> str:
    """How counts were scaled, if not every record was kept."""
    streams = header.get("streams")
    kept = {s.get("subsample", 1) for s in streams if isinstance(s, dict)} if isinstance(streams, list) else {1}
    return "".join(f"one of every {n:,} records was kept, and counts are scaled; " for n in sorted(kept) if n > 1)
