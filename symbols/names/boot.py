"""Tells whether a capture was recorded on this machine since it booted."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """Returns the id that the Linux kernel generates at each boot; empty if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_same_boot(header: dict[str, object]) -> bool:
    """Tells from a capture's header whether it was recorded on this machine since it booted."""
    host = header.get("host")
    return isinstance(host, dict) and bool(boot_id()) and host.get("boot_id") == boot_id()
