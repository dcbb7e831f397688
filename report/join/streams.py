"""Reads from a capture's header which GPU each stream belongs to, and its record layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from iaprof.formats.capture.limits import CaptureError
from iaprof.gpu import vendors
from iaprof.gpu.instructions import InstructionSet
from iaprof.gpu.samples import SampleLayout
from iaprof.gpu.vendors import FIRST_REASONS

MAX_SUBSAMPLE = 1 << 30
_LONGEST_DEVICE = 64


@dataclass(frozen=True)
class Stream:
    """A stream, as the capture's header describes it."""

    index: int
    layout: SampleLayout
    ip_version: tuple[int, int]
    subsample: int = 1  # the number of samples that each record stands for
    device: str = ""  # the GPU's name

    @property
    def instruction_set(self) -> InstructionSet | None:
        """The GPU's; None if it is unknown."""
        return vendors.of_layout(self.layout.name).instruction_set(*self.ip_version)


def streams(header: dict[str, object]) -> list[Stream]:
    """Returns the streams of a capture, by index.

    Raises:
        CaptureError: the header describes a stream in a way that no recorder does.
    """
    found, layouts = header.get("streams"), vendors.layouts()
    result = []
    for index, entry in enumerate(found if isinstance(found, list) else []):
        match entry:
            case {"ip_version": [int(major), int(minor), *_], "layout": str(name)} if name in layouts:
                kept = entry.get("subsample", 1)
                if type(kept) is not int or not 1 <= kept <= MAX_SUBSAMPLE:
                    raise CaptureError(f"the capture's header gives an implausible subsampling for stream {index}")
                result.append(Stream(index, layouts[name], (major, minor), kept, _device(entry)))
            case _:
                raise CaptureError(f"the capture's header describes stream {index} in a way that cannot be right")
    return result


def _device(entry: dict[str, Any]) -> str:
    """Returns the name of a stream's GPU: `card0`, or the render node's name if the card is unknown."""
    names = (entry.get("card"), entry.get("device"))
    return next((os.path.basename(name)[:_LONGEST_DEVICE] for name in names if isinstance(name, str) and name), "")


def reasons_of(known: Sequence[Stream]) -> tuple[str, ...]:
    """Returns the reasons that these streams' records count, in the order of tables; without streams FIRST_REASONS."""
    return tuple(dict.fromkeys(reason for stream in known for reason in stream.layout.reasons)) or FIRST_REASONS
