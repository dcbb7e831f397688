"""Puts a capture's inventory into words, for `iaprof info` and reports."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from iaprof.basics.quantities import and_more, counted, in_bytes, in_time, in_time_units, in_utc, or_dash
from iaprof.formats.header.left_out import TOTALS as LEFT_OUT, left_out_text
from iaprof.formats.header.stack_counts import COUNTED, NOUNS, PythonCounts, WholeStacks

if TYPE_CHECKING:
    from iaprof.report.inventory import Cost, Loss, Part

MOST_ROWS = 50  # of a group of facts
_FIRST = "sample", "launch", "transfer", "stack", "python_code", "kernel", "mapping", "process", "cpu_sample", "wait"
_MATCHED = {
    "kernel": "to a kernel",
    "instruction": "to an instruction",
    "stack": "to one stack",
    "ambiguous": "ambiguous",
}
_STACKS = {"launches": "launch", "cpu_samples": "CPU"}
Fact = tuple[str, str]
"""A name, and the fact as text."""


def recording(part: Part) -> Iterator[Fact]:
    """Yields where, when and how a part was recorded."""
    if part.host or part.kernel:
        about = [part.kernel and f"Linux {part.kernel}", part.machine, part.cpus and counted(part.cpus, "CPU")]
        details = ", ".join(str(each) for each in about if each)
        yield "host", f"{part.host} ({details})" if details else part.host
    if part.command:
        yield "command", shlex.join(part.command)
    if part.arguments:
        yield "recorded by", shlex.join(part.arguments)
    if part.labels:
        yield "labels", ", ".join(f"{name}={value}" for name, value in part.labels.items())
    if part.iaprof:
        yield "version", f"iaprof {part.iaprof}" + (f", Python {part.python}" if part.python else "")
    if part.begun:
        yield "started", in_utc(part.begun)
    if part.duration_s is not None:
        yield "duration", in_time_units(part.duration_s)
    if part.paused:
        yield "paused", f"{counted(part.paused, 'time')}, {in_time(part.paused_s)}"
    if part.scope is not None:
        yield "processes", ", ".join(map(str, part.scope[:MOST_ROWS])) + and_more(len(part.scope) - MOST_ROWS)
    if kept := sorted({stream.subsample for stream in part.streams} - {1}):
        yield "kept", ", ".join(f"one of every {number:,} records" for number in kept)
    if counted_samples := sum(stream.samples or 0 for stream in part.streams):
        yield "sampled", f"{counted_samples:,} samples, as CUPTI counts them: those recorded, and those lost"
    if part.part:
        yield "file", f"number {part.part:,} of the recording; the first one is 0"
    if part.thinned:
        yield "thinned", part.thinned
    if part.removed_files is not None:
        yield "removed", part.removed_files.sentence()
    if part.waits is not None:
        yield "waits", part.waits.sentence()
    if part.imported is not None:
        yield "imported", "from " + (part.imported or "another profiler's text")
    if part.redacted:
        yield "redacted", "names are hashes"
    if part.recovered:
        yield "recovered", "from the spool of a recording that did not end"


def holds(counts: dict[str, int | None]) -> Iterator[Fact]:
    """Yields the capture's counts of rows."""
    # Imported here, as every verb imports this module, and needs no Arrow for that.
    from iaprof.formats.capture.schema import ROW_KINDS, sorted_kinds

    labels = {"stalls": "stall records"} | {
        kind.count: kind.label for kind in sorted_kinds(ROW_KINDS, _FIRST) if kind.label
    }
    remarks = {
        "stalls": _remark("in ", counts["stall_reads"], "read"),
        "launches": "; ".join(filter(None, _of_launches(counts))),
        "transfers": f"copies and fills of {in_bytes(counts['transferred_bytes'])}"
        if counts["transferred_bytes"]
        else "",
        "cpu_samples": f"reports leave out {left_out}"
        if (left_out := left_out_text({why: counts[name] for why, name in LEFT_OUT.items()}))
        else "",
        "symbols": _remark("in ", counts["named_modules"], "file"),
    }
    found = {name: "unknown" if (count := counts[name]) is None else f"{count:,}" for name in labels}
    shown = [name for name in labels if counts[name] != 0 or remarks.get(name)] or ["stalls"]
    width = max(len(found[name]) for name in shown)
    for name in shown:
        yield labels[name], f"{found[name]:>{width}}  {remarks.get(name, '')}".rstrip()


def _of_launches(counts: dict[str, int | None]) -> Iterator[str]:
    yield _remark("with ", counts["executions"], "execution", behind=" of command lists")
    yield _remark("and ", counts["carried_launches"], "launch", "launches", " from before this file")


def _remark(before: str, number: int | None, what: str, many: str = "", behind: str = "") -> str:
    return f"{before}{counted(number, what, many)}{behind}" if number else ""


def warnings(parts: Sequence[Part]) -> Iterator[str]:
    """Yields the warnings of each part, after the part's label if it has one."""
    sentences = [f"{part.label}: {text}".removeprefix(": ") for part in parts for text in part.warnings]
    yield from sentences[:MOST_ROWS]
    if len(sentences) > MOST_ROWS:
        yield f"and {len(sentences) - MOST_ROWS:,} more"


def lost(losses: list[Loss], stack_ends: Iterable[dict[str, WholeStacks] | None] = ()) -> Iterator[str]:
    """Yields what was lost, or "nothing".

    Args:
        losses: the capture's losses.
        stack_ends: of the capture's parts: missing callers of incomplete stacks are a loss, too.
    """
    for loss in losses[:MOST_ROWS]:
        how_many = "an unknown number" if loss.count is None else f"{loss.count:,}"
        times = "" if loss.events is None else f", {counted(loss.events, 'time')}"
        what = f"{loss.source} {loss.what}".strip() or "something that the header does not describe"
        yield f"{what}: {how_many}{times}"
    if len(losses) > MOST_ROWS:
        yield f"and {len(losses) - MOST_ROWS:,} more"
    of_parts = [ends["launches"] for ends in stack_ends if ends and "launches" in ends]
    launches = WholeStacks.total(of_parts)
    if launches.early:
        unknown = ", or may not" if launches.unknown else ""
        missing = counted(launches.early, "launch", "launches")
        yield f"callers: of {missing}, whose stacks do not reach the program's start{unknown}"
    elif not losses:
        yield "nothing"


def quality(part: Part) -> Iterator[Fact]:
    """Yields how well a part's stacks were unwound and symbolized and its samples matched, from its header."""
    yield from stack_quality([part])
    matched = part.matched or {}
    if shares := [f"{100 * matched[what]:.1f} % {text}" for what, text in _MATCHED.items() if what in matched]:
        yield "matched", ", ".join(shares)
    if (symbols := part.symbols) is not None:
        named = f"{or_dash(symbols.named)} of {or_dash(symbols.addresses)} CPU addresses"
        yield "named", f"{named} in {or_dash(symbols.modules)} files"


def stack_quality(parts: Sequence[Part]) -> Iterator[Fact]:
    """Yields how many stacks are whole, for all parts together, and why others are not."""
    for kind in COUNTED:
        ends = [part.stack_ends[kind] for part in parts if part.stack_ends and kind in part.stack_ends]
        yield from WholeStacks.total(ends).facts(f"{_STACKS[kind]} stacks", NOUNS[kind])
    for kind in NOUNS:
        python_counts = [
            part.python_stacks[kind] for part in parts if part.python_stacks and kind in part.python_stacks
        ]
        yield from PythonCounts.total(python_counts).facts(kind)


def own_cost(cost: Cost) -> Iterator[Fact]:
    """Yields the recorder's own cost."""
    if cost.cpu_s is not None:
        details = [f"{in_time(cost.cpu_s)} recording"]
        if cost.cpu_percent is not None:
            details[0] += f" ({cost.cpu_percent:.1f} % of one CPU)"
        if cost.compile_cpu_s:
            details.append(f"{in_time(cost.compile_cpu_s)} of it compiling BPF")
        if cost.learn_cpu_s:
            details.append(f"{in_time(cost.learn_cpu_s)} of it learning to unwind")
        if cost.finish_cpu_s is not None:
            details.append(f"{in_time(cost.finish_cpu_s)} writing the capture")
        yield "CPU", ", ".join(details)
    if cost.probe_ns_per_launch is not None:
        yield "probes", f"{cost.probe_ns_per_launch / 1000:,.1f} µs a launch"
    if cost.peak_bytes is not None:
        more = "" if cost.finish_peak_bytes is None else f", {in_bytes(cost.finish_peak_bytes)} writing the capture"
        yield "memory", f"{in_bytes(cost.peak_bytes)} recording{more}"
    if cost.spool_bytes is not None:
        yield "spool", in_bytes(cost.spool_bytes)
