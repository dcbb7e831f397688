"""Describes a capture, from its header and the sizes of its row groups.

Rows are only read if command lists were executed, as launches and executions together give the number of launches.

Headers are untrusted: members of the wrong type count as missing, and texts are cleaned for the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from iaprof.basics.clean import clean
from iaprof.basics.quantities import in_time
from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.merged import merged_members
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import ROW_KINDS, SAMPLE_KINDS, sorted_kinds
from iaprof.formats.header.budgets import RemovedFiles, thinned
from iaprof.formats.header.labels import labels_of
from iaprof.formats.header.launch_warnings import (
    NO_LAUNCHES,
    UNPROBED,
    no_launches_sentence,
    slow_launches_sentence as slow_launches,
    unprobed_sentence as unprobed,
    unrecorded_sentence as unrecorded_copies,
)
from iaprof.formats.header.left_out import TOTALS as LEFT_OUT
from iaprof.formats.header.stack_counts import (
    PYTHON_STACKS,
    STACK_ENDS,
    PythonCounts,
    WholeStacks,
    recorded,
    recorded_python,
)
from iaprof.formats.header.traces import TraceFile, trace_files
from iaprof.formats.header.waits import WaitTotals
from iaprof.gpu import vendors
from iaprof.report.join.executions import count_launches, describe_unknown_executions

_TOLD_GAP_S = 1.0  # less is how the wall clock is corrected
_LIMIT = 1 << 64  # above every valid count and time
_STALLS = "totals", "stalls"
_MAX_LIBRARIES = 256  # with warnings; a recorder takes no more
_FIRST = "launch", "transfer", "stack", "python_code", "mapping", "process", "kernel", "cpu_sample", "wait"
_ROWS = {kind.count: kind.name for kind in sorted_kinds(ROW_KINDS, _FIRST) if kind.count}
"""The name of each count, and the kind of rows that it counts."""


@dataclass(frozen=True)
class Stream:
    """A stream of EU stalls: a GT of a GPU."""

    card: str
    device: str
    name: str
    pci_address: str
    tile: int | None
    gt: int | None
    xecores: int | None
    multiprocessors: int | None
    ip_version: str  # "20.01.0"; a compute capability such as "9.0"
    generation: str  # "Xe2"
    layout: str
    layout_guessed: bool  # the recorder did not know the IP version
    rate_cycles: int | None  # GPU cycles between two samples
    subsample: int  # the number of samples that each record stands for
    samples: int | None  # that the GPU's own library has counted, the lost ones included; None: unknown


@dataclass(frozen=True)
class Loss:
    """A kind of loss."""

    source: str
    what: str
    count: int | None  # None: unknown
    events: int | None  # times that it happened


@dataclass(frozen=True)
class Library:
    """A driver library that the recorder inspected for launches."""

    path: str
    probes: int | None


@dataclass(frozen=True)
class Cost:
    """The recorder's own cost; None: unknown."""

    cpu_s: float | None  # including the start
    compile_cpu_s: float | None  # part of cpu_s: compiling BPF programs
    learn_cpu_s: float | None  # part of cpu_s: unwinding stacks that BPF had no rules for, and learning the rules
    cpu_percent: float | None  # of one CPU, over the recording
    finish_cpu_s: float | None
    peak_bytes: int | None
    finish_peak_bytes: int | None
    spool_bytes: int | None
    probe_ns_per_launch: float | None


@dataclass(frozen=True)
class Symbols:
    """Numbers of CPU addresses that the capture has names for."""

    which: str
    modules: int | None
    addresses: int | None
    named: int | None


@dataclass(frozen=True)
class Part:
    """A part of a capture: one recording."""

    label: str  # unique in a merged capture
    file: str  # the capture that it was merged from
    format: int
    iaprof: str  # version of the recorder
    python: str
    host: str
    kernel: str
    machine: str
    cpus: int | None
    command: list[str]
    arguments: list[str]  # the recorder's own command line
    labels: dict[str, str]  # that the user gave it
    begun: str | None  # UTC, ISO 8601
    duration_s: float | None
    part: int | None  # the number of the file in a rotated recording
    removed_files: RemovedFiles | None  # earlier files of the recording's name, removed to make room; None: none
    thinned: str  # how sampling was thinned to keep to the recorder's budget; "": it was not
    paused: int  # times
    paused_s: float
    scope: list[int] | None  # pids that the user chose to record; None: all
    stack_depth: int | None
    cpu_hz: int | None
    metric_interval_ns: int | None
    streams: list[Stream]
    libraries: list[Library]
    counts: dict[str, int | None]
    losses: list[Loss]
    cost: Cost
    symbols: Symbols | None
    warnings: list[str]  # sentences about what makes the data doubtful
    matched: dict[str, float] | None  # shares of the samples
    stack_ends: dict[str, WholeStacks] | None  # where stacks of `launches` and `cpu_samples` end; None before format 5
    python_stacks: dict[str, PythonCounts] | None  # Python frames of these stacks; None before format 7
    waits: WaitTotals | None  # None: no waits, or before format 8
    traces: list[TraceFile]  # that were imported
    imported: str | None  # the format of the imported text, "": unknown; None: not imported
    redacted: bool
    recovered: bool


@dataclass(frozen=True)
class Inventory:
    """The description of a capture."""

    file: str
    bytes: int
    format: int
    merged: bool
    counts: dict[str, int | None]  # of all parts
    losses: list[Loss]  # of all parts
    parts: list[Part]


def inventory(capture: CaptureReader) -> Inventory:
    """Describes a capture."""
    parts = [_part(part) for part in capture.parts]
    counts: dict[str, int | None] = {}
    for name in parts[0].counts:
        numbers = [part.counts[name] for part in parts]
        counts[name] = None if None in numbers else sum(number for number in numbers if number is not None)
    whole = merged_members([part.header for part in capture.parts])
    format_ = capture.header.get("format")  # the reader checks the file's, but nobody that of a part
    format_ = format_ if type(format_) is int else 0
    return Inventory(
        clean(str(capture.path)), capture.bytes, format_, capture.is_merged, counts, _losses(_Header(whole)), parts
    )


def _clock_gap(header: _Header) -> str:
    """Returns a sentence if the wall clock went further than CLOCK_MONOTONIC, as in a suspend; else ""."""
    clocks = [
        header.number(name, clock) for clock in ("realtime_ns", "monotonic_ns") for name in ("clock", "clock_end")
    ]
    known = [each for each in clocks if each]
    if len(known) < 4:
        return ""
    gap_s = ((known[1] - known[0]) - (known[3] - known[2])) / 1e9
    if abs(gap_s) < _TOLD_GAP_S:
        return ""
    if gap_s < 0:
        return f"the wall clock was set back by {in_time(-gap_s)} while this was recorded"
    return (
        f"the wall clock went on by {in_time(gap_s)} more than the recording's: the machine was suspended for that "
        "time, and nothing was recorded then, or the clock was set"
    )


def _part(capture: CaptureReader) -> Part:
    header = _Header(capture.header)
    begin, end = header.number("clock", "monotonic_ns"), header.number("end_ns")
    duration = (end - begin) / 1e9 if begin is not None and end is not None and end >= begin else None
    wall = header.number("clock", "realtime_ns")
    paused = [last - first for first, last in map(_span, header.items("paused"))]
    libraries = map(_Header, header.items("libraries"))
    streams = [_stream(each) for each in map(_Header, header.items("streams"))]
    counts = _counts(capture, header)
    sentences = [
        *_warnings(capture.header, header),
        _clock_gap(header),
        describe_unknown_executions(counts["unknown_executions"] or 0),
    ]
    return Part(
        label=clean(capture.label),
        file=header.text("file"),
        format=header.number("format") or 0,
        iaprof=header.text("iaprof"),
        python=header.text("python"),
        host=header.text("host", "name"),
        kernel=header.text("host", "kernel"),
        machine=header.text("host", "machine"),
        cpus=header.number("host", "cpus"),
        command=header.texts("command"),
        arguments=header.texts("arguments"),
        labels=labels_of(capture.header),
        begun=_utc(wall) if wall else None,
        duration_s=duration,
        part=header.number("part"),
        removed_files=RemovedFiles.from_header(capture.header),
        thinned=thinned(capture.header),
        paused=len(paused),
        paused_s=sum(paused) / 1e9,
        scope=header.numbers("scope") if "scope" in capture.header else None,
        stack_depth=header.number("stack_depth"),
        cpu_hz=header.number("cpu_hz"),
        metric_interval_ns=header.number("metric_interval_ns"),
        streams=streams,
        libraries=[Library(each.text("path"), each.number("probes")) for each in libraries],
        counts=counts,
        losses=_losses(header),
        cost=_cost(header, duration),
        symbols=_symbols(header),
        warnings=[*_guesses(streams), *filter(None, map(clean, sentences))],
        matched=_matched(header),
        stack_ends=_stack_ends(capture.header),
        python_stacks=recorded_python(capture.header) if PYTHON_STACKS in capture.header else None,
        waits=WaitTotals.from_header(capture.header),
        traces=trace_files(capture.header, clean),
        imported=header.text("imported", "format") if "imported" in capture.header else None,
        redacted=capture.header.get("redacted") is True,
        recovered=capture.header.get("recovered") is True,
    )


def _warnings(header: dict[str, Any], read: _Header) -> Iterator[str]:
    """Yields warnings about the recording; "" for those that do not apply."""
    yield no_launches_sentence(header.get(NO_LAUNCHES), read.number(*_STALLS))
    yield unprobed(header.get(UNPROBED))
    yield from dict.fromkeys(map(slow_launches, read.items("libraries")[:_MAX_LIBRARIES]))
    yield from dict.fromkeys(map(unrecorded_copies, read.items("libraries")[:_MAX_LIBRARIES]))


class _Header:
    """Untrusted JSON, with checked access. `names` are the members on the way to a value."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def _at(self, names: tuple[str, ...]) -> Any:
        found = self._value
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def text(self, *names: str) -> str:
        """Returns a text, cleaned; "" if there is none."""
        found = self._at(names)
        return clean(found) if isinstance(found, str) else ""

    def number(self, *names: str) -> int | None:
        """Returns a count or a time; None if there is none."""
        found = self._at(names)
        return found if type(found) is int and 0 <= found < _LIMIT else None

    def amount(self, *names: str) -> float | None:
        """Returns a number, whole or not; None if there is none."""
        found = self._at(names)
        return float(found) if type(found) in (int, float) and 0 <= found < _LIMIT else None

    def flag(self, *names: str) -> bool:
        """Whether the value is true."""
        return self._at(names) is True

    def items(self, *names: str) -> list[Any]:
        """Returns a list; an empty one if there is none."""
        found = self._at(names)
        return found if isinstance(found, list) else []

    def texts(self, *names: str) -> list[str]:
        """Returns the texts in a list, cleaned."""
        return [clean(each) for each in self.items(*names) if isinstance(each, str)]

    def numbers(self, *names: str) -> list[int]:
        """Returns the counts in a list."""
        return [each for each in self.items(*names) if type(each) is int and 0 <= each < _LIMIT]


def _stack_ends(header: dict[str, Any]) -> dict[str, WholeStacks] | None:
    if not isinstance(header.get(STACK_ENDS), dict):
        return None
    return {what: each.cleaned(clean) for what, each in recorded(header).items()}


def _span(span: Any) -> tuple[int, int]:
    match span:
        case [int(first), int(last)] if 0 <= first <= last < _LIMIT:
            return first, last
    return 0, 0


def _utc(wall_ns: int) -> str:
    seconds, ns = divmod(wall_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{ns // 1000:06}Z"


def _stream(stream: _Header) -> Stream:
    ip_version = generation = ""
    numbers = stream.numbers("ip_version")
    match numbers:
        case [major, minor, revision]:
            ip_version = f"{major}.{minor:02}.{revision}"
        case [major, minor]:
            ip_version = f"{major}.{minor}"
    if ip_version:
        generation = vendors.of_layout(stream.text("layout")).generation(*numbers[:2])
    return Stream(
        card=stream.text("card"),
        device=stream.text("device"),
        name=stream.text("name"),
        pci_address=stream.text("pci_address"),
        tile=stream.number("tile"),
        gt=stream.number("gt"),
        xecores=stream.number("xecores"),
        multiprocessors=stream.number("multiprocessors"),
        ip_version=ip_version,
        generation=generation,
        layout=stream.text("layout"),
        layout_guessed=stream.flag("layout_guessed"),
        rate_cycles=stream.number("rate_cycles"),
        subsample=stream.number("subsample") or 1,
        samples=stream.number("samples"),
    )


def _guesses(streams: Sequence[Stream]) -> Iterator[str]:
    guessed = ((stream.card or stream.device or "a GPU", stream) for stream in streams if stream.layout_guessed)
    yield from dict.fromkeys(
        vendors.of_layout(stream.layout).guessed_layout(gpu, stream.ip_version, stream.layout)
        for gpu, stream in guessed
    )


def _counts(capture: CaptureReader, header: _Header) -> dict[str, int | None]:
    """Counts rows by kind. The number of stall records is only in the header, as a row is a read."""
    reads = sum(capture.count(kind) for kind in SAMPLE_KINDS)
    rows = {"stall_reads": reads} | {name: capture.count(kind) for name, kind in _ROWS.items()}
    carried = min(header.number("totals", "carried_launches") or 0, rows["launches"])
    rows["launches"] -= carried
    stalls = header.number("totals", "stalls") if rows["stall_reads"] else 0
    executed: dict[str, int | None] = {"executions": 0, "unknown_executions": 0}
    try:
        if (lists := count_launches(capture)) is not None:
            executed = {"executions": lists.executions, "unknown_executions": lists.unknown}
            rows["launches"] = lists.launches
    except CaptureError:  # these rows are damaged: the rest of the description is still valid
        executed = {"executions": None, "unknown_executions": None, "launches": None}
    moved = header.number("totals", "transferred_bytes") if rows["transfers"] else 0
    left_out = {name: header.number("totals", name) or 0 for name in LEFT_OUT.values()}
    return {"stalls": stalls, **rows, "carried_launches": carried, **executed, "transferred_bytes": moved, **left_out}


def _losses(header: _Header) -> list[Loss]:
    found = map(_Header, header.items("losses"))
    return [Loss(each.text("source"), each.text("what"), each.number("count"), each.number("events")) for each in found]


def _cost(header: _Header, duration_s: float | None) -> Cost:
    cpu_s = header.amount("cost", "cpu_s")
    # Those of CUDA on known paths do not enter the kernel.
    launches = max(header.number("probes", "launches") or 0, header.number("totals", "launches") or 0)
    probe_ns, calls = header.number("cost", "probe_ns"), launches + (header.number("probes", "executions") or 0)
    return Cost(
        cpu_s=cpu_s,
        compile_cpu_s=header.amount("cost", "compile_cpu_s"),
        learn_cpu_s=header.amount("cost", "learn_cpu_s"),
        cpu_percent=100 * cpu_s / duration_s if cpu_s is not None and duration_s else None,
        finish_cpu_s=header.amount("cost", "finish_cpu_s"),
        peak_bytes=header.number("cost", "peak_bytes"),
        finish_peak_bytes=header.number("cost", "finish_peak_bytes"),
        spool_bytes=header.number("cost", "spool_bytes"),
        probe_ns_per_launch=probe_ns / calls if probe_ns is not None and launches else None,
    )


def _symbols(header: _Header) -> Symbols | None:
    counts = [header.number("symbols", name) for name in ("modules", "addresses", "named")]
    return None if counts == [None] * 3 else Symbols(header.text("symbols", "which"), *counts)


def _matched(header: _Header) -> dict[str, float] | None:
    shares = {name: header.amount("matched", name) for name in ("kernel", "instruction", "stack", "ambiguous")}
    return {name: share for name, share in shares.items() if share is not None and share <= 1} or None
