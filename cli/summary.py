"""The line that ends a recording, in perf's manner: what is there, what is missing, what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from iaprof.formats.profile import clean


def end_line(verb: str, output: Path, header: dict[str, Any], size: int) -> str:
    """One line of text.

    Args:
        verb: `record` or `recover`.
        output: the capture.
        header: of that capture.
        size: of its file, bytes.
    """
    totals = header.get("totals", {})
    parts = [
        f"wrote {in_bytes(size)} to {output}",
        f"{_count(totals, 'stalls', 'stall record')}",
        f"{_count(totals, 'launches', 'launch', 'launches')}",
        f"{_count(totals, 'stacks', 'stack')}",
        f"{_count(totals, 'modules', 'module')}",
        f"lost: {losses(header)}",
    ]
    cost = header.get("cost", {})
    if "peak_bytes" in cost:
        parts.append(f"own cost: {cost['cpu_s']:.2f} s CPU recording, {in_bytes(cost['peak_bytes'])} peak memory")
    return clean(f"[ iaprof {verb}: {'; '.join(parts)} ]")


def losses(header: dict[str, Any]) -> str:
    """What is missing and from where, or `nothing`."""
    texts = []
    for loss in header.get("losses", []):
        what = f"{loss['source']} {loss['what']}"
        if loss["count"] is not None:
            texts.append(f"{loss['count']:,} {what}")
        else:
            texts.append(f"{what} ({loss['events']} time{'s' if loss['events'] != 1 else ''}, how much is unknown)")
    return ", ".join(texts) or "nothing"


def in_bytes(size: float) -> str:
    """A size for people, in powers of 1,000."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _count(totals: dict[str, Any], key: str, one: str, many: str = "") -> str:
    number = int(totals.get(key, 0))
    return f"{number:,} {one if number == 1 else many or one + 's'}"
