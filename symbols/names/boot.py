"""Whether this is the machine, since the same start of it, on which something was recorded."""

from __future__ import annotations

from pathlib import Path


def boot_id() -> str:
    """A name that the kernel makes up each time it starts; empty where it does not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_same_boot(header: dict[str, object]) -> bool:
    """Whether a capture's header says that it was recorded on this machine since it was started last."""
    host = header.get("host")
    return isinstance(host, dict) and bool(boot_id()) and host.get("boot_id") == boot_id()
