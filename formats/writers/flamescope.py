"""Text in the format of `perf script`, for FlameScope (https://github.com/Netflix/flamescope) and similar tools.

FlameScope counts every event as one sample, whatever its count, and is slow with very large files. The number of events
is therefore limited, and all events stand for the same number of samples: with samples sorted by interval, then by
stack, every k-th becomes an event. So each interval, and each stack in it, has its share of the events, give or take
one. The counts of all events add up to the number of samples.
"""

from __future__ import annotations

import re
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats.export import Export
from iaprof.formats.guesses import SUFFIX, is_guess, unmarked
from iaprof.formats.profile import UNKNOWN_PROCESS, Launch, StackOptions
from iaprof.formats.ranges import ranges
from iaprof.formats.stacks.frames import Frame, clean_frame
from iaprof.formats.stacks.trees import Tree, ancestor_paths, stalls_by_time, viewer_tree, without_components
from iaprof.formats.writers.writer import Needs, Writer

MOST_EVENTS = 1_000_000
MOST_BYTES = 50_000_000  # as text; FlameScope reads the whole file at each click
_EVENTS_AT_ONCE = 1 << 16
_TEXT = pa.large_string()
_BETWEEN = pa.scalar("", _TEXT)
_LIKE_A_TIME = re.compile(r"((?:^| )[0-9.]+):(?= |$)")  # FlameScope takes this for an event's time in any line
_IN_FILE = re.compile(r"\[(.+)\+0x([0-9a-f]+)\]")  # frames without a name
_Ints = NDArray[np.int64]


class Flamescope(Writer):
    """Events over time: one per stall, or fewer if the file would become too large."""

    needs = Needs.TIME | Needs.ABOUT
    interval_s = 0.02  # a cell of FlameScope's heat map, which has 50 per second

    def write(self, export: Export, options: StackOptions, out: IO[str]) -> None:
        """Writes the events in order of time."""
        write_events(export, options, out)


def write_events(
    export: Export, options: StackOptions, out: IO[str], most: int = MOST_EVENTS, size: int = MOST_BYTES
) -> None:
    """Writes at most `most` events in about `size` bytes."""
    cpu = export.cpu if options.cpu_samples else None
    profile, stalls_options = stalls_by_time(export, options)
    bare = without_components(
        options if cpu else stalls_options, ("process", "pid")
    )  # process and pid are in each event's first line
    tree = viewer_tree(cpu or profile, bare, lambda frame: (frame.text, frame.module))
    order = np.lexsort((tree.node, tree.interval))
    lines = [_line(frame) for frame in tree.frames]
    heads = [_head(launch) for launch in tree.launches]
    event = "cpu-clock" if cpu else "gpu-sample"
    row, count = _distribute(tree.count[order], min(most, _events_that_fit(tree, lines, heads, size)))
    row = order[row]
    times = _times(tree.interval[row], round((export.interval_s or export.about.seconds or 1.0) * 1e9))
    heads_, lines_ = pa.array(heads, _TEXT), pa.array([*lines, ""], _TEXT)
    for begin in range(0, len(row), _EVENTS_AT_ONCE):
        some = slice(begin, begin + _EVENTS_AT_ONCE)
        nodes, stack = np.unique(tree.node[row[some]], return_inverse=True)
        text = pc.binary_join_element_wise(
            heads_.take(pa.array(tree.launch[row[some]])),
            pa.array(times[some] // 10**9).cast(_TEXT),
            pa.scalar(".", _TEXT),
            pc.utf8_lpad(pa.array(times[some] % 10**9).cast(_TEXT), 9, "0"),
            pa.scalar(": ", _TEXT),
            pa.array(count[some]).cast(_TEXT),
            pa.scalar(f" {event}:\n", _TEXT),
            _stacks(tree, nodes, lines_).take(pa.array(stack)),
            pa.scalar("\n", _TEXT),
            _BETWEEN,
        )
        out.write("".join(text.to_pylist()))


def _distribute(counts: _Ints, most: int) -> tuple[_Ints, _Ints]:
    """Distributes samples over events: the row of each event, int64[m], and its number of samples, int64[m].

    Args:
        counts: int64[n], samples of each row.
        most: maximum number of events.
    """
    total = int(counts.sum())
    events = min(total, most)
    # Event e of m stands for the samples from e * total // m on, computed in steps that do not overflow.
    share, rest = divmod(total, max(events, 1))
    ends = np.arange(events + 1) * share + np.arange(events + 1) * rest // max(events, 1)
    return np.searchsorted(np.cumsum(counts), ends[:-1] + np.diff(ends) // 2, side="right"), np.diff(ends)


def _times(interval: _Ints, length: int) -> _Ints:
    """When the events are, in ns, evenly within their intervals: int64[m] for the intervals [m], ascending."""
    events = np.unique(interval, return_counts=True)[1]
    within = (ranges(0, events) * 2 + 1) / (2 * np.repeat(events, events)) * length
    return interval * length + np.minimum(within.astype(np.int64), length - 1)


def _events_that_fit(tree: Tree, lines: list[str], heads: list[str], size: int) -> int:
    """The number of events that fit into a file of `size` bytes."""
    length = np.array([*(len(line.encode()) for line in lines), 0], np.int64)[tree.frame]
    depth = tree.depth()
    for level in range(1, int(depth.max()) + 1):
        nodes = np.flatnonzero(depth == level)
        length[nodes] += length[tree.parent[nodes]]
    head = np.array([len(each.encode()) for each in heads], np.int64) + len("1234.123456789: 1000 gpu-sample:\n\n")
    if not len(tree.node):
        return 1
    return max(int(size / np.average(length[tree.node] + head[tree.launch], weights=tree.count)), 1)


def _stacks(tree: Tree, nodes: _Ints, lines: pa.Array) -> pa.Array:
    """The frame lines of each stack, leaf first."""
    table = ancestor_paths(tree, nodes)
    frames = np.where(table < 0, len(lines) - 1, tree.frame[table])
    return pc.binary_join_element_wise(*(lines.take(pa.array(column)) for column in frames.T), _BETWEEN)


def _head(launch: Launch | None) -> str:
    """An event's first line up to the time; the name has no blanks or leading `#`, which parsers would misread."""
    comm = clean(launch.comm if launch and launch.comm else UNKNOWN_PROCESS).replace(" ", "_")
    return f"{'_' if comm.startswith('#') else ''}{comm} {launch.pid if launch else 0} "


def _line(frame: Frame) -> str:
    text = _LIKE_A_TIME.sub(r"\1 :", clean_frame(frame.text))
    module = clean(frame.module).replace(" ", "_") or ("[gpu]" if frame.on_gpu else "[unknown]")
    # as perf shows the place of code without a name; FlameScope cuts names at a `+`
    if found := _IN_FILE.fullmatch(unmarked(text)):
        mark = SUFFIX if is_guess(text) else ""
        return f"\t    {found[2]:>12} [unknown]{mark} ({module if frame.module else found[1].replace(' ', '_')})\n"
    return f"\t    {0:>12} {text} ({module})\n"
