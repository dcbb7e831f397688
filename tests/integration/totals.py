"""What the files of each format add up to, as a reader of that format would."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.csv as csv
import pyarrow.parquet as pq
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as perfetto

from browser import chromium, opened
from iaprof.formats.writers.pprof_proto import new_profile


def _folded(file: Path) -> int:
    return sum(int(line.rsplit(" ", 1)[1]) for line in file.read_text().splitlines())


def _html(file: Path) -> int:
    with chromium() as browser, opened(browser, file) as page:
        page.wait_for_selector("#content:not([hidden])")
        return sum(page.evaluate("[...window.iaprof.model.stallsPerInterval]"))


def _svg(file: Path) -> int:
    said = re.search(r"([0-9,]+) samples of GPU stalls", file.read_text())
    assert said
    return int(said[1].replace(",", ""))


def _iaprof(file: Path) -> int:
    lines = (line.split("\t") for line in file.read_text().splitlines())
    return sum(sum(map(int, line[3:])) for line in lines if line[0] == "eustall")


def _json(file: Path) -> int:
    return sum(sum(row["samples"].values()) for row in json.loads(file.read_text())["rows"])


def _perfetto(file: Path) -> int:
    trace = perfetto.Trace.FromString(file.read_bytes())
    names = {packet.track_descriptor.uuid: packet.track_descriptor.name for packet in trace.packet}
    events = [packet.track_event for packet in trace.packet if packet.HasField("track_event")]
    return int(sum(event.counter_value for event in events if names[event.track_uuid] == "all reasons"))


def _chrome(file: Path) -> int:
    events = json.loads(file.read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C" and "by reason" in event["name"]]
    return int(sum(sum(event["args"].values()) for event in counters))


def _firefox(file: Path) -> int:
    threads = json.loads(file.read_text())["threads"]
    return sum(sum(thread["samples"]["weight"]) for thread in threads if "stalls" in thread["name"])


def _flamescope(file: Path) -> int:
    return sum(map(int, re.findall(r"^\S.*: ([0-9]+) \S+: *$", file.read_text(), re.MULTILINE)))


def _speedscope(file: Path) -> int:
    profiles = json.loads(file.read_text())["profiles"]
    return sum(sum(profile["weights"]) for profile in profiles if "stalls" in profile["name"])


def _pprof(file: Path) -> int:
    message = new_profile()
    message.ParseFromString(gzip.decompress(file.read_bytes()))
    return sum(sample.value[0] for sample in message.sample)


def _csv(file: Path) -> int:
    return int(csv.read_csv(io.BytesIO(file.read_bytes()))["samples"].to_numpy().sum())


def _parquet(file: Path) -> int:
    return int(pq.read_table(file)["samples"].to_numpy().sum())


TOTALS: dict[str, Callable[[Path], int]] = {
    "folded": _folded,
    "html": _html,
    "svg": _svg,
    "iaprof": _iaprof,
    "json": _json,
    "perfetto": _perfetto,
    "chrome": _chrome,
    "firefox": _firefox,
    "flamescope": _flamescope,
    "speedscope": _speedscope,
    "pprof": _pprof,
    "csv": _csv,
    "parquet": _parquet,
}
