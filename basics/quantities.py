"""Numbers as people read them."""

from __future__ import annotations


def counted(number: int, what: str, many: str = "") -> str:
    """`1 time`, `1,200 times`; `many` where an s does not do."""
    return f"{number:,} {what if number == 1 else many or what + 's'}"


def in_bytes(size: float) -> str:
    """A size, in powers of 1,000."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def in_time(seconds: float) -> str:
    """A length of time."""
    if seconds < 100:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def percent(share: float) -> str:
    """A share that is 100 or 0 only where it is all or nothing."""
    text = f"{100 * share:.1f}"
    if text == "100.0" and share < 1:
        text = "99.9+"
    elif text == "0.0" and share > 0:
        text = "<0.1"
    return f"{text} %"


def in_utc(iso: str) -> str:
    """A moment such as `2026-11-21T10:33:33.747495Z`."""
    return f"{iso[:10]} {iso[11:19]} UTC"


def or_dash(number: int | None) -> str:
    """A number; `-` where it is not known."""
    return "-" if number is None else f"{number:,}"


def and_more(number: int) -> str:
    """What stands behind the shown ones of many."""
    return f", and {number:,} more" if number > 0 else ""
