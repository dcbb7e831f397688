"""Formats numbers for messages and tables."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, what: str, many: str = "") -> str:
    """A number and its noun: `1 time`, `1,200 times`; `many` is an irregular plural."""
    return f"{number:,} {what if number == 1 else many or what + 's'}"


def in_ranges(numbers: Sequence[int]) -> str:
    """Ascending integers, neighbours as ranges: `0-3, 8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def in_bytes(size: float) -> str:
    """A size in bytes, kB, MB or GB (powers of 1,000)."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def in_time(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def in_time_units(seconds: float) -> str:
    """A duration as `in_time` says it; below a second in ms, us or ns, with three decimals."""
    for unit, each in (("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if each <= seconds < 1:
            return f"{seconds / each:.3f}".rstrip("0").rstrip(".") + f" {unit}"
    return in_time(seconds)


def percent(share: float) -> str:
    """A share (0 to 1) in percent, which shows 100 or 0 only if the share is exactly that."""
    text = f"{100 * share:.1f}"
    if text == "100.0" and share < 1:
        text = "99.9+"
    elif text == "0.0" and share > 0:
        text = "<0.1"
    return f"{text} %"


def percents(counts: Sequence[int]) -> list[str]:
    """Shares of a whole in percent, which add up to 100; each as `percent` shows it.

    Args:
        counts: the parts of the whole, which is their sum.
    """
    total = max(sum(counts), 1)
    tenths = [count * 1000 // total for count in counts]
    # What rounding down left goes to those with the largest remainders.
    by_remainder = sorted(range(len(counts)), key=lambda at: -(counts[at] * 1000 % total))
    for at in by_remainder[: 1000 - sum(tenths)] if any(counts) else ():
        tenths[at] += 1
    # Neither all nor nothing, however little is missing of it.
    return [
        percent(min(max(tenth / 1000, 1e-9), 1 - 1e-9) if 0 < count < total else tenth / 1000)
        for count, tenth in zip(counts, tenths, strict=True)
    ]


def in_utc(iso: str) -> str:
    """An ISO 8601 time such as `2026-11-21T10:33:33.747495Z`, to the second."""
    return f"{iso[:10]} {iso[11:19]} UTC"


def or_dash(number: int | None) -> str:
    """A number, or `-` for None."""
    return "-" if number is None else f"{number:,}"


def and_more(number: int) -> str:
    """The end of a list that leaves out `number` items; empty if it leaves out none."""
    return f", and {number:,} more" if number > 0 else ""
