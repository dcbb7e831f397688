"""Headers of merged captures: the order of parts, their labels, and the sums over them.

Headers are untrusted: members of another form than expected are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

_MOST = 1 << 64  # above every valid count and time, which have 64 bits
UNKNOWN_WALL = _MOST

Header = dict[str, Any]


def recording_key(header: Header) -> tuple[object, ...]:
    """A key that is equal for two captures of the same recording and file number (or of the same imported text)."""
    host = header.get("host")
    boot = host.get("boot_id") if isinstance(host, dict) else None
    # Imported texts have neither boot id nor clock: their totals stand in.
    more = [header.get(name) for name in ("end_ns", "totals", "imported", "traces")] if "imported" in header else []
    return tuple(repr(value) for value in (boot, header.get("clock"), header.get("part"), more))


def in_time_order(headers: Sequence[Header]) -> list[int]:
    """Indices of headers by time: grouped by machine, machines in the order of their first recordings.

    Within one boot of a machine, the monotonic clock decides, as the wall clock may have been set. The file numbers
    decide between files of one recording that begin at the same time.
    """
    begun: dict[tuple[str, str], int] = {}
    for header in headers:
        machine = _machine(header)
        begun[machine] = min(begun.get(machine, _MOST), start_wall_ns(header))

    def key(index: int) -> tuple[object, ...]:
        machine = _machine(headers[index])
        monotonic = _of_clock(headers[index], "monotonic_ns")
        return begun[machine], machine, monotonic, _number(headers[index].get("part")) or 0, index

    return sorted(range(len(headers)), key=key)


def part_labels(headers: Sequence[Header]) -> list[str]:
    """A distinct label for each part: the host's name, and the file's name if several parts are of one host."""
    hosts = Counter(map(_host, headers))
    alone = {host for host, number in hosts.items() if host and number == 1}
    found = [host if (host := _host(each)) in alone else f"{host} {_text(each.get('file'))}" for each in headers]
    times = Counter(found)
    return [
        label.strip() if times[label] == 1 and label.strip() else f"{label} (part {number})".strip()
        for number, label in enumerate(found)
    ]


def merged_members(headers: Sequence[Header]) -> Header:
    """A merged capture's header members `clock` (of the earliest part), `totals`, `losses` and `parts`."""
    totals: Counter[str] = Counter()
    losses: dict[object, Any] = {}
    for header in headers:
        found = header.get("totals")
        for name, number in found.items() if isinstance(found, dict) else ():
            totals[name] += _number(number) or 0
        found = header.get("losses")
        for loss in found if isinstance(found, list) else ():
            match loss:
                case {"source": str(source), "what": str(what)}:
                    empty = {"source": source, "what": what, "count": None, "events": 0}
                    total = losses.setdefault((source, what), empty)
                    total["events"] += _number(loss.get("events")) or 0
                    if (count := _number(loss.get("count"))) is not None:
                        total["count"] = (total["count"] or 0) + count
                case _:
                    losses[len(losses)] = loss  # keep it, as it says at least that something is missing
    earliest = min(headers, key=start_wall_ns)
    clock = {"clock": earliest["clock"]} if "clock" in earliest else {}
    return {**clock, "totals": dict(totals), "losses": list(losses.values()), "parts": list(headers)}


def start_wall_ns(header: Header) -> int:
    """The start of a recording, wall clock, ns since 1970; UNKNOWN_WALL if unknown."""
    return _of_clock(header, "realtime_ns") or _MOST


def _of_clock(header: Header, name: str) -> int:
    clock = header.get("clock")
    return (_number(clock.get(name)) if isinstance(clock, dict) else None) or 0


def _machine(header: Header) -> tuple[str, str]:
    host = header.get("host")
    return _host(header), _text(host.get("boot_id")) if isinstance(host, dict) else ""


def _host(header: Header) -> str:
    host = header.get("host")
    return _text(host.get("name")) if isinstance(host, dict) else ""


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MOST else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
