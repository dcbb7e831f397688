"""Traces that iaprof wrote, which it can read again: their events stay as they are.

An output has the events of several files, with the processes and times that the stages gave them. It lists these files,
and each slice has the name of its file (`jobname`). So a trace that is read back has the
files, ranks, names and dialects of the trace that was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError
from iaprof.timelines.arguments import Arguments, members_of
from iaprof.timelines.made_events import EVERYWHERE
from iaprof.timelines.stages.collectives.bandwidth import OF_ALL, OF_CALLS, OF_SUMS
from iaprof.timelines.trace import ABSENT, MADE_OF_TEXT, MOST_RANK, NO_TEXT, Trace, TraceFile, dialect_of

FILES = "Files"
"""The member of otherData that lists the files of an output in Chrome's format."""
EVENT = "iaprof_file"
"""The name of the metadata events that list them in Perfetto's format: one for each file."""

_OF_ALL_RANKS = f"^({OF_CALLS.name}|{OF_SUMS.name}|{OF_ALL.name})$"
_AT_ONCE = 1 << 18  # rows
_MEMBER = r'"{}":(?P<value>"(?:[^"\\]|\\.)*"|[-+.\deE]+)'


def described(trace: Trace) -> list[dict[str, Any]]:
    """Returns the files of a trace as an output lists them."""
    return [
        {"Name": file.name, "Dialect": str(file.dialect), "Rank": file.rank, "Job": job}
        for file, job in zip(trace.files, trace.job_names, strict=True)
    ]


def restore(trace: Trace, arguments: Callable[[str], Arguments]) -> None:
    """Restores the files of an output's events, and the results of stages about them.

    Args:
        trace: as it was loaded.
        arguments: opens the arguments of the events of a kind.

    Raises:
        IaprofError: only some of the files are outputs.
    """
    own = _files_of_outputs(trace, arguments)
    if not own:
        return
    if others := [file.name for number, file in enumerate(trace.files) if number not in own]:
        written = trace.files[min(own)].name
        raise IaprofError(
            f"{written} is output of iaprof, and {others[0]} is not: read the one or the other, as their clocks and "
            "processes differ"
        )
    files: list[TraceFile] = []
    numbers: dict[str, int] = {}  # --tb writes several outputs, each of which lists all files
    firsts, jobs = [], []
    for output, file in enumerate(trace.files):
        of_output = []
        for each in own[output]:
            number = numbers.setdefault(json.dumps(each, sort_keys=True), len(files))
            files += [_file(each)] if number == len(files) else []
            of_output.append(number)
            jobs.append((output, each.get("Job"), number))
        first = files[of_output[0]]
        files[of_output[0]] = replace(
            first, devices=(*first.devices, *file.devices), members={**file.members, **first.members}
        )
        firsts.append(of_output[0])
    names = ", ".join(file.name for file in trace.files[:3])
    trace.messages.note(
        "OUT", f"{names}: output of iaprof, so its events stay as they are, and tables are made of them"
    )
    trace.files = files
    places = np.array(firsts, np.int32)
    for columns in (trace.points, trace.flows, trace.instants):
        columns.file = places[columns.file]
    points = trace.points  # in Perfetto's format they are on no thread; those of all ranks are on no process
    points.tid = np.where(points.tid >= MADE_OF_TEXT, 0, points.tid)
    of_all = (points.pid >= MADE_OF_TEXT) & trace.texts.matches(points.name, _OF_ALL_RANKS)
    points.pid = np.where(of_all, EVERYWHERE, points.pid)
    _restore_slices(trace, arguments, places, jobs)


def _files_of_outputs(trace: Trace, arguments: Callable[[str], Arguments]) -> dict[int, Sequence[Mapping[str, Any]]]:
    """Returns the files that outputs list, by the number of the output; drops the metadata events that list them."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for number, file in enumerate(trace.files):
        about = file.members.get("otherData")
        if isinstance(about, dict) and about.get("Application") == "iaprof" and isinstance(about.get(FILES), list):
            found[number] = [each for each in about[FILES] if isinstance(each, dict)]
    marks = trace.instants
    has_name = trace.texts.matches(marks.phase, "^M$") & trace.texts.matches(marks.name, f"^{EVENT}$")
    rows = np.flatnonzero(has_name)
    if len(rows):
        with arguments("instant") as given:
            texts = given.take(marks.row[rows]).to_pylist()
        for number, text in zip(marks.file[rows].tolist(), texts, strict=True):
            found.setdefault(number, []).append(members_of(text))
        trace.instants = marks.take(~has_name)
    return {number: each for number, each in found.items() if each}


def _file(members: Mapping[str, Any]) -> TraceFile:
    name, dialect, rank = (members.get(key) for key in ("Name", "Dialect", "Rank"))
    return TraceFile(
        clean(name) if isinstance(name, str) else "",
        dialect_of(dialect),
        rank if type(rank) is int and 0 <= rank < MOST_RANK else 0,
        is_output=True,
    )


def _restore_slices(
    trace: Trace, arguments: Callable[[str], Arguments], first: NDArray[np.int32], jobs: Sequence[tuple[int, Any, int]]
) -> None:
    slices, texts = trace.slices, trace.texts
    found: dict[str, list[NDArray[Any]]] = {"jobname": [], "orig_name": [], "class": [], "rank": [], "pt_active": []}
    with arguments("slice") as given:
        for members in _chunks(given, slices.row):
            for name in ("jobname", "orig_name", "class"):
                found[name].append(texts.codes(_texts(members, name)))
            rank = _numbers(members, "rank")
            found["rank"].append(np.where(np.abs(rank) < MOST_RANK, rank, ABSENT).astype(np.int64))
            found["pt_active"].append(_numbers(members, "pt_active"))
    columns = {name: np.concatenate(values) for name, values in found.items() if values}
    if not columns:
        return
    file = first[slices.file]
    of_output = slices.file
    for output, job, number in jobs:
        if isinstance(job, str):
            file[(of_output == output) & (columns["jobname"] == texts.code(job))] = number
    slices.file = file
    original = columns["orig_name"]
    slices.name = np.where(original == NO_TEXT, slices.name, original).astype(np.int32)
    slices.extra["class"], slices.extra["rank"] = columns["class"], columns["rank"]
    if np.isfinite(columns["pt_active"]).any():
        slices.extra["pt_active"] = columns["pt_active"]


def _chunks(given: Arguments, rows: NDArray[np.int64]) -> Iterator[pa.StringArray]:
    for begin in range(0, len(rows), _AT_ONCE):
        yield given.take(rows[begin : begin + _AT_ONCE])


def _values(members: pa.StringArray, name: str) -> pa.StringArray:
    """Returns a member of each object as JSON: a text or a number; null for others."""
    return pc.struct_field(pc.extract_regex(members, _MEMBER.format(name)), "value")


def _texts(members: pa.StringArray, name: str) -> pa.DictionaryArray:
    values = _values(members, name).dictionary_encode()
    decoded = [json.loads(each) for each in values.dictionary.to_pylist()]
    plain = pa.array([each if isinstance(each, str) else None for each in decoded], pa.string())
    return plain.take(values.indices).dictionary_encode()


def _numbers(members: pa.StringArray, name: str) -> NDArray[np.float64]:
    values = _values(members, name).dictionary_encode()
    decoded = pa.array([_number(each) for each in values.dictionary.to_pylist()], pa.float64())
    return np.asarray(decoded.take(values.indices).to_numpy(zero_copy_only=False), np.float64)  # NaN where absent


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
