"""What a capture's header says of the jobs of the kernel's GPU scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SOURCE = "gpu jobs"
"""Of losses, if records of jobs are missing."""


def all_recorded(header: Mapping[str, Any]) -> bool:
    """Whether no record of a job is missing, so that a process without a job had nothing on a GPU."""
    losses = header.get("losses")
    return isinstance(losses, list) and not any(
        isinstance(each, dict) and each.get("source") == SOURCE for each in losses
    )


def pci_addresses(header: Mapping[str, Any]) -> list[str]:
    """The PCI addresses of the GPUs whose samples a capture has."""
    streams = header.get("streams")
    found = (each.get("pci_address") for each in streams if isinstance(each, dict)) if isinstance(streams, list) else ()
    return sorted({each for each in found if isinstance(each, str)})
