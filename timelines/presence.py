"""Whether a capture is shown as time lines, which is asked of every capture: this module imports nothing else."""

from __future__ import annotations

from iaprof.formats.capture.reader import CaptureReader


def shows_time_lines(capture: CaptureReader) -> bool:
    """Tells whether a report of a capture shows time lines: it has slices, and no stalls or CPU samples."""
    parts = capture.parts
    return any(part.count("slice") for part in parts) and not any(
        part.count(kind) for part in parts for kind in ("stall", "cpu_sample")
    )
