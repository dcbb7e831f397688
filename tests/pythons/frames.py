"""Frames of Python at launches: what a capture has, and what programs told (tests/pythons/programs/launching.py)."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from iaprof.formats.capture.reader import CaptureReader

Frames = list[tuple[str, str, int]]
"""File, qualified name and line, the innermost first."""


def launches_of(reader: CaptureReader, pid: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """A process's launches in the order of time, each with its stack, which is empty if it was lost."""
    stacks: dict[int, dict[str, Any]] = {0: {"python": None, "ips": None, "ended": None}}
    stacks |= {row["id"]: row for row in reader.table("stack").to_pylist()}
    launches = [row for row in reader.table("launch").to_pylist() if row["pid"] == pid]
    return [(launch, stacks[launch["stack"]]) for launch in sorted(launches, key=lambda row: row["time_ns"])]


def frames_of(reader: CaptureReader, pid: int) -> dict[int, list[Frames]]:
    """File, name and line of the frames of Python of each of a process's launches, the innermost first, by thread."""
    codes = {row["id"]: (row["file"], row["name"]) for row in reader.table("python_code").to_pylist()}
    found = defaultdict(list)
    for launch, stack in launches_of(reader, pid):
        frames = [(*codes.get(frame["code"], ("", "")), frame["line"]) for frame in stack["python"] or ()]
        found[launch["tid"]].append(frames)
    return found


def frames_told(*files: Path) -> dict[int, list[Frames]]:
    """Frames of each launch by thread, as programs told them one after the other."""
    told = defaultdict(list)
    for file in files:
        for row in file.read_text().splitlines():
            tid, frames = row.split("\t")
            told[int(tid)].append([(path, name, line) for path, name, line in json.loads(frames)])
    return told
