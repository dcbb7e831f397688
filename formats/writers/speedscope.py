"""speedscope's JSON format (https://www.speedscope.app/file-format-schema.json).

One "sampled" profile has all processes, as roots of its stacks: speedscope can select a process there, and compare
processes. CPU samples are a second profile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof import __version__
from iaprof.basics.clean import clean
from iaprof.formats.distinct import distinct_rows, sum_groups
from iaprof.formats.export import CpuSamples, Export
from iaprof.formats.profile import Profile, StackOptions
from iaprof.formats.stacks.frames import clean_frame
from iaprof.formats.stacks.trees import Tree, ancestor_paths, viewer_tree, without_offsets
from iaprof.formats.writers.writer import Needs, Writer

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_STACKS_AT_ONCE = 1 << 16
_TEXT = pa.large_string()
_Frames = dict[tuple[str, str], dict[str, Any]]


class Speedscope(Writer):
    """The format of the viewer at speedscope.app, which also runs without a network."""

    needs = Needs.CPU | Needs.ABOUT

    def write(self, export: Export, options: StackOptions, out: IO[str]) -> None:
        """Writes a profile of the stalls and one of the CPU samples, or only the latter."""
        sources: list[tuple[str, Profile | CpuSamples]] = []
        if not options.cpu_samples:
            sources.append(("GPU samples", export.profile))
        if export.cpu is not None and (len(export.cpu.count) or options.cpu_samples):
            name = "waits" if options.waits else "slices" if options.slices else "CPU samples"
            sources.append((name, export.cpu))
        frames: _Frames = {}
        profiles = [(name, *_stacks(source, options, frames)) for name, source in sources]
        head = {
            "$schema": _SCHEMA,
            "exporter": f"iaprof {__version__}",
            "name": export.about.title or "iaprof",
            "activeProfileIndex": 0,
            "shared": {"frames": list(frames.values())},
        }
        out.write(json.dumps(head)[:-1])
        before = ', "profiles": [\n'
        for name, samples, weights in profiles:
            start = {
                "type": "sampled",
                "name": name,
                "unit": "microseconds" if options.waits else "nanoseconds" if options.slices else "none",
                "startValue": 0,
                "endValue": sum(weights),
            }
            out.write(f'{before}{json.dumps(start)[:-1]}, "samples": [')
            between = "\n"
            for some in samples:
                out.write(between + some)
                between = ",\n"
            out.write(f'], "weights": {json.dumps(weights)}}}')
            before = ",\n"
        out.write("]}\n")


def _stacks(source: Profile | CpuSamples, options: StackOptions, frames: _Frames) -> tuple[Iterator[str], list[int]]:
    """The distinct stacks of each interval, as JSON in chunks, and their samples; adds frames to `frames`."""
    tree = viewer_tree(source, without_offsets(options), lambda frame: (frame.text, frame.file, frame.line))
    number = _numbered(tree, frames)
    first, stack = distinct_rows(tree.interval, tree.node)
    return _texts(tree, tree.node[first], number), sum_groups(tree.count, stack).tolist()


def _numbered(tree: Tree, frames: _Frames) -> list[int]:
    """The index in `frames` of each frame of a tree.

    A function is one frame wherever its calls are, as speedscope adds up by frame; it has a line only if all
    occurrences have the same.
    """
    found = []
    index = {key: number for number, key in enumerate(frames)}
    for frame in tree.frames:
        key = clean_frame(frame.text), clean(frame.file)
        if key not in frames:
            index[key] = len(frames)
            frames[key] = {"name": key[0]}
            if key[1]:
                frames[key]["file"] = key[1]
            if frame.line:
                frames[key]["line"] = frame.line
        elif frames[key].get("line") != frame.line:
            frames[key].pop("line", None)
        found.append(index[key])
    return found


def _texts(tree: Tree, nodes: NDArray[np.int64], number: list[int]) -> Iterator[str]:
    texts = pa.array([*(f"{each}," for each in number), ""], _TEXT)
    for begin in range(0, len(nodes), _STACKS_AT_ONCE):
        table = ancestor_paths(tree, nodes[begin : begin + _STACKS_AT_ONCE])
        frames = np.where(table < 0, len(number), tree.frame[table])
        columns = [texts.take(pa.array(column)) for column in frames.T[::-1]]
        stacks = pc.utf8_rtrim(pc.binary_join_element_wise(*columns, pa.scalar("", _TEXT)), ",")
        yield "[" + "],\n[".join(stacks.to_pylist()) + "]"
