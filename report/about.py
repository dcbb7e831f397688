"""Collects what a report says about its capture: the recording, the GPUs, losses, quality and warnings."""

from __future__ import annotations

import math
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from iaprof.basics.clean import clean
from iaprof.basics.quantities import and_more, counted, in_time_units, in_utc, or_dash, percent
from iaprof.formats.capture.merged import UNKNOWN_WALL, start_wall_ns
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.export import About
from iaprof.report.facts import Facts
from iaprof.report.gpu.source_files import NO_SOURCES, SourceFiles
from iaprof.report.inventory import Inventory, Loss, Part, Stream, inventory
from iaprof.report.inventory_texts import (
    MOST_ROWS,
    Fact,
    holds,
    lost,
    own_cost,
    quality,
    recording,
    stack_quality,
    warnings,
)
from iaprof.report.join.selection import Selection
from iaprof.report.parts import whole_ns

_MIN_LOST_SHARE = 0.01  # of recorded and lost items; a smaller loss is not a warning
_MIN_SHARE = 0.05  # of samples; fewer are not warning
_MAX_SHOWN = 3  # of a list of names
_MAX_WARNINGS = 20
_MAX_CHARS = 2_000  # of a text


def about(
    capture: CaptureReader,
    facts: Facts | None = None,
    sources: SourceFiles = NO_SOURCES,
    selection: Selection = Selection(),  # noqa: B008 (it is frozen)
) -> About:
    """Collects the facts and warnings about a capture and a report of it.

    Args:
        capture: the open capture.
        facts: the report's; None: the report has no stalls.
        sources: the source files that the report shows.
        selection: the report's filters.
    """
    found = inventory(capture)
    walls = [wall for part in capture.parts if (wall := start_wall_ns(part.header)) < UNKNOWN_WALL]
    begun = min(walls, default=0) / 1e9
    groups = (
        (heading, tuple((name, _cut(text)) for name, text in facts_))
        for heading, facts_ in _groups(found, facts, selection)
    )
    return About(
        host=_join_names(part.host for part in found.parts),
        command=_join_names(shlex.join(part.command) for part in found.parts),
        gpus=_gpu_names(found.parts),
        begun=begun,
        seconds=whole_ns(capture) / 1e9,
        headline=[_cut(text) for text in _headline(found, facts)],
        facts=[(heading, facts_) for heading, facts_ in groups if facts_],
        warnings=[_cut(text) for text in _warnings(found, facts, sources.newer_than(begun or math.inf))],
    )


def _headline(found: Inventory, facts: Facts | None) -> Iterator[str]:
    """Yields the most important facts."""
    if facts is not None:
        report_facts = dict(_report_facts(found.parts, facts))
        yield facts.samples_text()
        yield from (
            f"{name}: {report_facts[name]}"
            for name in ("rate", "matched", "stacks", "Python", "unmatched", "unnamed", "energy")
            if name in report_facts
        )
    missing = lost(found.losses[:_MAX_SHOWN], (part.stack_ends for part in found.parts))
    yield f"lost: {', '.join(missing)}{and_more(len(found.losses) - _MAX_SHOWN)}"
    costs = [part.cost.cpu_percent for part in found.parts if part.cost.cpu_percent is not None]
    if costs:
        yield f"recorder: {max(costs):.1f} % of one CPU"


def _groups(found: Inventory, facts: Facts | None, selection: Selection) -> Iterator[tuple[str, Iterable[Fact]]]:
    parts = found.parts
    yield "Recording", _part_facts(parts) if found.merged else recording(parts[0])
    yield "GPUs", _gpu_facts(parts, found.merged)
    if facts is not None:
        yield "This report", [*_report_facts(parts, facts), *_selection_facts(selection)]
    yield "Contents", ((name, " ".join(text.split())) for name, text in holds(found.counts))
    yield "Lost", (("", text) for text in lost(found.losses, (part.stack_ends for part in parts)))
    if found.merged:
        yield "Own cost", ((part.label, text) for part in parts[:MOST_ROWS] if (text := _cost_text(part)))
        yield "Quality", stack_quality(parts)
    else:
        yield "Quality", quality(parts[0])
        yield "Own cost", own_cost(parts[0].cost)


def _part_facts(parts: Sequence[Part]) -> Iterator[Fact]:
    for part in parts[:MOST_ROWS]:
        details = [
            part.begun and in_utc(part.begun),
            part.duration_s is not None and in_time_units(part.duration_s),
            f"{or_dash(part.counts['stalls'])} stall records",
            part.losses and counted(len(part.losses), "kind") + " of loss",
            shlex.join(part.command),
        ]
        yield part.label, ", ".join(str(each) for each in details if each)
    if len(parts) > MOST_ROWS:
        yield "", and_more(len(parts) - MOST_ROWS).strip(", ")


def _gpu_facts(parts: Sequence[Part], several: bool) -> Iterator[Fact]:
    streams = [(part.label if several else "", stream) for part in parts for stream in part.streams]
    for label, stream in streams[:MOST_ROWS]:
        details = [
            stream.name or stream.generation,
            stream.ip_version and f"{'ip' if stream.multiprocessors is None else 'compute'} {stream.ip_version}",
            stream.pci_address,
            stream.tile is not None and f"tile {stream.tile}",
            stream.gt is not None and f"GT {stream.gt}",
            stream.xecores is not None and counted(stream.xecores, "XeCore"),
            stream.multiprocessors is not None and counted(stream.multiprocessors, "multiprocessor"),
        ]
        yield f"{label} {_device(stream)}".strip(), ", ".join(str(each) for each in details if each)
    if len(streams) > MOST_ROWS:
        yield "", and_more(len(streams) - MOST_ROWS).strip(", ")


def _device(stream: Stream) -> str:
    return stream.card or os.path.basename(stream.device) or "GPU"


def _gpu_names(parts: Sequence[Part]) -> str:
    """Returns the names of the GPUs, each GPU once, however many streams it has."""
    names: dict[tuple[str, str], str] = {}
    for part in parts:
        for stream in part.streams:
            gpu = part.host, stream.pci_address or stream.device or stream.card
            names[gpu] = names.get(gpu) or stream.name or stream.generation
    counts = Counter(name for name in names.values() if name)
    return _join_names(name if count == 1 else f"{count:,}x {name}" for name, count in counts.items())


def _report_facts(parts: Sequence[Part], facts: Facts) -> Iterator[Fact]:
    yield "samples", f"{facts.stalls:,} in {counted(facts.records, 'stall record')}"
    if facts.active:
        yield "active", f"{percent(facts.active / facts.stalls)} of the samples: an instruction was issued, no stall"
    streams = [stream for part in parts for stream in part.streams]
    if cycles := sorted({stream.rate_cycles for stream in streams if stream.rate_cycles}):
        yield "rate", f"one sample every {' or '.join(f'{each:,}' for each in cycles[:MOST_ROWS])} GPU cycles"
    if kept := sorted({stream.subsample for stream in streams} - {1}):
        yield "scaled", ", ".join(f"one of every {number:,} records was kept" for number in kept[:MOST_ROWS])
    if not facts.stalls:
        return
    shares = facts.matched.shares()
    ambiguous = f", {percent(shares['ambiguous'])} ambiguous" if facts.matched.ambiguous else ""
    yield (
        "matched",
        f"{percent(shares['kernel'])} to a kernel, {percent(shares['instruction'])} to an instruction, "
        f"{percent(shares['stack'])} to one stack{facts.others_text}{ambiguous}",
    )
    if facts.whole.stacks:
        yield "stacks", clean(facts.whole.text("samples"))
    if facts.python.stacks:
        yield "Python", facts.python.text("samples")
    yield "unmatched", f"{facts.unknown_kernel:,} in no known kernel, {facts.no_launch:,} without a launch"
    if facts.energy is not None and facts.energy.total:
        yield "energy", facts.energy.text()
    unnamed = [module for module in facts.cpu_modules if module.unnamed]
    files = _join_names(
        f"{clean(os.path.basename(module.names.module.path)) or 'code without a file'} in {percent(module.unnamed)}"
        for module in unnamed
    )
    yield "unnamed", f"frames of {files} of the samples with a stack" if files else "all frames named"


def _selection_facts(selection: Selection) -> Iterator[Fact]:
    """Yields the report's filters, if there are any."""
    chosen: list[tuple[str, Iterable[object]]] = [
        ("pid", sorted(selection.pids)),
        ("tid", sorted(selection.tids)),
        ("process", sorted(selection.comms)),
        ("kernel", [selection.kernel.pattern] if selection.kernel else ()),
        ("Python function", [selection.python.pattern] if selection.python else ()),
        ("device", selection.devices),
        ("reason", sorted(selection.reasons) if selection.active else ["other than active"]),
        ("cgroup", selection.cgroups),
    ]
    filters = [f"{name} {' or '.join(map(str, values))}" for name, values in chosen if values]
    if (time_range := selection.time_range) is not None:
        unit, scale = ("%", 100) if time_range.shares else (" s", 1)
        end = f"{time_range.end * scale:g}{unit}" if math.isfinite(time_range.end) else "the end"
        filters.insert(0, f"{time_range.begin * scale:g}{unit} to {end}")
    if filters:
        yield "only", clean(", ".join(filters))


def _cost_text(part: Part) -> str:
    return "; ".join(f"{name} {text}" for name, text in own_cost(part.cost))


def _warnings(found: Inventory, facts: Facts | None, newer: Sequence[str]) -> list[str]:
    """Returns all warnings, the most important first."""
    losses = [text for loss in found.losses if (text := _loss_warning(loss, found.counts))]
    sentences = [*warnings(found.parts), *losses, *(_report_warnings(facts) if facts is not None else ())]
    sentences += [clean(f"{path} was changed after the recording began: its lines may differ") for path in newer]
    if len(sentences) > _MAX_WARNINGS:
        sentences[_MAX_WARNINGS:] = [f"and {len(sentences) - _MAX_WARNINGS:,} more warnings"]
    return sentences


def _loss_warning(loss: Loss, counts: dict[str, int | None]) -> str:
    """Returns the warning about a loss; "" if the loss is small."""
    what = next(lost([loss]))
    if loss.count is None:
        return f"lost while recording: {what}"
    kinds = {"stalls": "stalls", "launches": "launches", "stacks": "stacks", "kernels": "modules"}
    kind = next((kind for name, kind in kinds.items() if loss.source.startswith(name)), None)
    there = counts[kind] if kind else None
    if there is None:
        return f"lost while recording: {what}"
    share = loss.count / max(loss.count + there, 1)
    return f"lost while recording: {what}, {percent(share)} of all" if share > _MIN_LOST_SHARE else ""


def _report_warnings(facts: Facts) -> Iterator[str]:
    if not facts.stalls:
        yield "there are no samples"
        return
    shares = facts.matched.shares()
    unknown, unlaunched = facts.unknown_kernel / facts.stalls, facts.no_launch / facts.stalls
    undecoded = shares["kernel"] - shares["instruction"]
    if unknown > _MIN_SHARE:
        yield f"{percent(unknown)} of the samples are in no known kernel"
    if unlaunched > _MIN_SHARE:
        yield f"{percent(unlaunched)} of the samples are in kernels without a recorded launch: no stack is known"
    if undecoded > _MIN_SHARE:
        yield f"{percent(undecoded)} of the samples are at instructions that could not be decoded"
    for problem, paths in facts.problems.items():
        more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
        yield clean(f"{paths[0]}{more}: {problem}")


def _join_names(names: Iterable[str]) -> str:
    """Joins distinct names, at most _MAX_SHOWN of them."""
    known = list(dict.fromkeys(name for name in names if name))
    return _cut(", ".join(known[:_MAX_SHOWN]) + and_more(len(known) - _MAX_SHOWN))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"
