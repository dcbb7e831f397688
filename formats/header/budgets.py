"""What a recording did to keep to its limits: sampling thinned for `--max-cpu`, files removed for `--max-files`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from iaprof.basics.quantities import counted, in_bytes

THINNED = "thinned"
"""The header member: a list of changes, each with `time_ns`, `cpu_hz`, `metric_interval_ns` and the `percent` used."""
BUDGET = "max_cpu_percent"
"""The header member: percent of one CPU."""
_MOST_CHANGES = 1000
_MOST_PERCENT = 1e6

REMOVED_FILES = "removed_files"
"""The header member: what was removed since the recording began, as far as is known when the file ends."""
_MOST_FILES = 1 << 62


def change(time_ns: int, cpu_hz: int, metric_interval_ns: int, share: float) -> dict[str, Any]:
    """Returns an item of the list.

    Args:
        time_ns: since when, CLOCK_MONOTONIC.
        cpu_hz: CPU samples per second and CPU from then on.
        metric_interval_ns: between two metrics from then on.
        share: of one CPU, which was used before.
    """
    return {
        "time_ns": time_ns, "cpu_hz": cpu_hz, "metric_interval_ns": metric_interval_ns, "percent": round(share * 100, 2)
    }  # fmt: skip


def sampled(cpu_hz: int, metric_interval_ns: int) -> str:
    """Returns how densely is sampled, for people."""
    samples = f"{cpu_hz} CPU samples/s" if cpu_hz else "no CPU samples"
    return f"{samples}, " + (f"metrics each {metric_interval_ns / 1e6:g} ms" if metric_interval_ns else "no metrics")


def thinned(header: dict[str, Any]) -> str:
    """Returns what a header (untrusted) says of thinned sampling; "" if it was not thinned."""
    found = list(_changes(header.get(THINNED)))
    if not found:
        return ""
    thinnest = min(found, key=lambda each: (each[0], -each[1]))
    times = "once" if len(found) == 1 else f"{len(found):,} times"
    limit = ""
    match header.get(BUDGET):
        case int(budget) | float(budget) if 0 < budget <= _MOST_PERCENT:
            limit = f" to keep to {budget:g} % of a CPU"
    return f"sampling was changed {times}{limit}: at its lowest, {sampled(*thinnest)}"


def _changes(value: Any) -> Iterator[tuple[int, int]]:
    for item in value[:_MOST_CHANGES] if isinstance(value, list) else []:
        match item:
            case {"cpu_hz": int(hz), "metric_interval_ns": int(interval)} if 0 <= hz <= 10**6 and 0 <= interval < 2**62:
                yield int(hz), int(interval)


@dataclass(frozen=True)
class RemovedFiles:
    """A number of files, and their bytes."""

    files: int = 0
    bytes: int = 0

    def with_file(self, bytes_: int) -> RemovedFiles:
        """Returns these and one more."""
        return RemovedFiles(self.files + 1, self.bytes + bytes_)

    def to_json(self) -> dict[str, int]:
        """Returns the value of the header member."""
        return asdict(self)

    def sentence(self) -> str:
        """Returns the number for people."""
        return f"{counted(self.files, 'earlier file')}, {in_bytes(self.bytes)}, to make room"

    @classmethod
    def from_header(cls, header: dict[str, Any]) -> RemovedFiles | None:
        """Reads a header (untrusted); None if it does not say, or nothing was removed."""
        match header.get(REMOVED_FILES):
            case {"files": int(files), "bytes": int(bytes_)} if 0 < files < _MOST_FILES and 0 <= bytes_ < _MOST_FILES:
                return cls(int(files), int(bytes_))
        return None
