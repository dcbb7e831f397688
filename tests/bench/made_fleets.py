"""Captures of many machines: recordings of tests/data, each copy with a host, a time, and stalls of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.report.archive.archiving import rows_of

SAMPLES = sorted((Path(__file__).parents[1] / "data" / "captures").glob("format-[56789].parquet"))
HOSTS = 40
RECORDS_PER_READ = 100
FIRST_WALL_NS = 1_795_219_200 * 10**9  # 2026-11-21
APART_NS = 60 * 10**9


class Program:
    """The rows of a recording, of which all but the stalls are the same in each capture."""

    def __init__(self, source: Path) -> None:
        reader = CaptureReader(source)
        self.header: dict[str, Any] = reader.header
        self._rows = [
            (kind, rows)
            for kind in KINDS
            if kind != "stall"
            for table in reader.tables(kind)
            for rows in rows_of(kind, table)
        ]
        stalls = pa.concat_tables(list(reader.tables("stall")))
        self._words = [_flat(stalls, name) for name in ("w0", "w1", "w2")]
        self._times = stalls["time_ns"].to_numpy()

    def write(self, path: Path, number: int, records: int) -> None:
        """Writes the capture of that number."""
        chance = np.random.default_rng(number)
        first = self._words[0]
        assert first is not None
        chosen = chance.integers(0, len(first), records)
        # A host has its own share of each of the first records, so that hosts differ a little.
        chosen[: number % HOSTS * records // (10 * HOSTS)] = number % HOSTS
        reads = max(records // RECORDS_PER_READ, 1)
        times = np.linspace(self._times[0], self._times[-1], reads).astype(np.uint64)
        offsets = np.linspace(0, records, reads + 1).astype(np.int32)
        type_ = KINDS["stall"].field("w0").type
        lists = [
            pa.nulls(reads, type_)
            if words is None
            else pa.ListArray.from_arrays(pa.array(offsets), pa.array(words[chosen]), type=type_)
            for words in self._words
        ]
        columns = [pa.array(times), pa.array(times), pa.array(np.zeros(reads, np.uint16)), *lists]
        host = self.header["host"] | {"name": f"node-{number % HOSTS:02}"}
        clock = self.header["clock"] | {"realtime_ns": FIRST_WALL_NS + number // HOSTS * APART_NS}
        totals = self.header["totals"] | {"stalls": records}
        with path.open("wb") as file:
            writer = CaptureWriter(file)
            writer.write("stall", pa.StructArray.from_arrays(columns, fields=list(KINDS["stall"])))
            for kind, rows in self._rows:
                writer.write(kind, rows)
            labels = {"job": f"train-{number % 3}", "version": str(41 + number % 2)}
            writer.close(self.header | {"host": host, "clock": clock, "totals": totals, "labels": labels})


def _flat(stalls: pa.Table, name: str) -> NDArray[np.uint64] | None:
    column = stalls[name].combine_chunks()
    return None if column.null_count == len(column) else np.asarray(column.flatten())


def write_fleet(folder: Path, captures: range, records: int) -> None:
    """Writes captures that are not there yet into folders, as docs/fleet.md lays out a store: date=/host=."""
    programs = [Program(source) for source in SAMPLES]
    for number in captures:
        path = folder / "date=2026-11-21" / f"host=node-{number % HOSTS:02}" / f"{number:06}.parquet"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            programs[number % len(programs)].write(path, number, records)
