"""The members of a capture's header: each is described once, for their order in captures and for redaction.

Redaction keeps a member only if it is described here, as members of later recorders could identify someone.
docs/capture-format.md explains the members; the other files of this folder read some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class Redaction(Enum):
    """What redaction does with a member."""

    KEPT = auto()  # its numbers stay, and those of its texts that the description names
    CLOCKS = auto()  # an instant on both clocks, which are moved by distances of their own
    TRACES = auto()  # imported traces: what tells devices and ranks stays
    DROPPED = auto()


@dataclass(frozen=True)
class Member:
    """A member of the header.

    `texts`, `times` and `identifies` name values by the object's member that has them, at any depth; "" is the member
    itself, or an item of it.
    """

    name: str
    redaction: Redaction = Redaction.KEPT
    texts: tuple[str, ...] = ()  # stay; all other texts become null
    times: tuple[str, ...] = ()  # of CLOCK_MONOTONIC, which redaction moves
    identifies: Mapping[str, str] = field(default_factory=dict)  # what texts name that redaction replaces


_IN_ORDER = (
    Member("iaprof", texts=("",)),
    Member("host", texts=("machine",), identifies={"name": "host", "boot_id": "boot"}),
    Member("python", texts=("",)),
    Member("command", identifies={"": "word"}),
    Member("arguments", identifies={"": "word"}),
    Member("labels", Redaction.DROPPED),
    Member("part"),
    Member("clock", Redaction.CLOCKS),
    Member("stack_depth"),
    Member("follows_frame_pointers"),
    Member("launches_by", texts=("",)),
    Member("waits_wanted"),
    Member("cpu_hz"),
    Member("metric_interval_ns"),
    Member("streams", texts=("device", "card", "name", "pci_address", "layout")),
    Member("libraries", texts=("way", "single_stepped"), times=("since_ns",), identifies={"path": "path"}),
    Member("scope"),
    Member("recorder_pid", Redaction.DROPPED),
    Member("command_pid", Redaction.DROPPED),
    Member("sampled_pids", Redaction.DROPPED),
    Member("removed_files"),
    Member("max_cpu_percent"),
    Member("thinned", times=("time_ns",)),
    Member("paused", times=("",)),
    Member("unprobed"),
    Member("end_ns", times=("",)),
    Member("clock_end", Redaction.CLOCKS),
    Member("probes"),
    Member("cost"),
    # What is known when the capture is written.
    Member("no_launches", texts=("driver", "by", "way")),
    Member("totals"),
    Member("losses", texts=("source", "what")),
    Member("stack_ends"),
    Member("python_stacks"),
    Member("waits"),
    Member("symbols", texts=("which",)),
    Member("recovered"),
    # Of imports, archives and merged captures.
    Member("imported", texts=("format",)),
    Member("traces", Redaction.TRACES, texts=("dialect",)),
    Member("matched"),
    Member("redacted"),
    Member("file", identifies={"": "file"}),
    Member("parts", Redaction.DROPPED),  # redacted one by one, as each is a header
    Member("format"),
)
MEMBERS = {member.name: member for member in _IN_ORDER}
"""The members by name, in the order in which recorders write them."""
