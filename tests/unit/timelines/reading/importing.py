"""Imports traces in this process, without the sandbox, and describes what came of them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, BinaryIO, ClassVar
from unittest import mock

import pyarrow as pa

from iaprof.formats.capture.reader import CaptureReader
from iaprof.timelines.reading import importing
from iaprof.timelines.reading.children import PIECE_BYTES, Children
from iaprof.timelines.reading.imported_file import FileFacts
from iaprof.timelines.reading.importing import import_traces
from iaprof.timelines.reading.perfetto import packet_reader

KINDS = ("slice", "counter", "flow", "instant")


class HereReader:
    """Does what a sandboxed child does, in this process."""

    def __init__(self) -> None:
        self._operations = packet_reader.operations(1.0)

    def call(
        self,
        operation: str,
        parameters: Mapping[str, object] | None = None,
        data: bytes = b"",
        fds: Any = (),
        seconds: float | None = None,
    ) -> Any:
        answer = self._operations[operation](dict(parameters or {}), bytearray(data), list(fds))
        return json.loads(json.dumps(answer))


class AtOnce(Executor):
    """Runs everything when it is submitted: threads of a busy machine take long to wake each other."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (the future's, as with threads)
            future.set_exception(error)
        return future


HERE = HereReader()


def imported(
    folder: Path, *contents: bytes | str | list[Any] | dict[str, Any], piece_bytes: int = PIECE_BYTES
) -> tuple[CaptureReader, list[FileFacts]]:
    """The capture of files with these contents, and what was found in them. Checks that the counts add up."""
    paths = []
    for number, content in enumerate(contents):
        paths.append(folder / f"job-{number}.json")
        raw = content if isinstance(content, bytes | str) else json.dumps(content)
        paths[-1].write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    path = folder / "run.parquet"
    with path.open("wb+") as output, Children(1, [HERE], AtOnce()) as children:
        facts = import_traces(paths, output, lambda done: None, children, piece_bytes)
    capture = CaptureReader(path)
    for number, file in enumerate(facts.files):
        counts = file.counts
        kept = counts.slices + counts.counters + counts.flows + counts.instants
        assert counts.events == kept + sum(counts.dropped.values()) + sum(counts.merged.values())
        rows = {kind: [row for row in rows_of(capture, kind) if row["file"] == number] for kind in KINDS}
        assert [len(rows[kind]) for kind in KINDS] == [
            counts.slices, counts.counter_values, counts.flows, counts.instants,
        ]  # fmt: skip
    return capture, facts.files


class _Kept:
    """In place of a CaptureWriter: keeps rows, which is much faster than a file."""

    rows: ClassVar[dict[str, list[dict[str, Any]]]] = {}

    def __init__(self, file: BinaryIO, kinds: Collection[str]) -> None:
        self.rows.clear()
        self.rows.update({kind: [] for kind in KINDS})

    def write(self, kind: str, rows: pa.StructArray) -> None:
        self.rows[kind] += rows.to_pylist()

    def close(self, header: dict[str, Any]) -> None:
        pass


def rows_without_file(content: bytes, piece_bytes: int) -> tuple[dict[str, list[dict[str, Any]]], FileFacts]:
    """The rows of a trace by kind, and what was found in it, without a capture. Checks that the counts add up."""
    with (
        tempfile.NamedTemporaryFile() as file, tempfile.TemporaryFile() as output,
        Children(1, [HERE], AtOnce()) as children, mock.patch.object(importing, "CaptureWriter", _Kept),
    ):  # fmt: skip
        file.write(content)
        file.flush()
        facts = import_traces([Path(file.name)], output, lambda done: None, children, piece_bytes, ["x.json"]).files[0]
    counts = facts.counts
    kept = counts.slices + counts.counters + counts.flows + counts.instants
    assert counts.events == kept + sum(counts.dropped.values()) + sum(counts.merged.values())
    numbers = [counts.slices, counts.counter_values, counts.flows, counts.instants]
    assert [len(_Kept.rows[kind]) for kind in KINDS] == numbers
    return {kind: _with_args(rows) for kind, rows in _Kept.rows.items()}, facts


def rows_of(capture: CaptureReader, kind: str) -> list[dict[str, Any]]:
    """All rows of a kind, with args as objects."""
    return _with_args(capture.table(kind).to_pylist())


def _with_args(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        if row.get("args") is not None:
            row["args"] = json.loads(row["args"])
    return rows


def short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what is absent or 0."""
    return [{name: value for name, value in row.items() if value not in (None, 0)} for row in rows]
