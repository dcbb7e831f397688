"""The Linux kernel: our rights, its version, and its configuration."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator
from pathlib import Path

from iaprof.bpf.gpu_jobs import job_formats
from iaprof.record.checks.result import Check, Level

GROUP = "Kernel"
EU_STALLS = (6, 15)
PROCMAP_QUERY = (6, 11)  # gives the build-ids of what already runs
SESSIONS = (6, 13)  # uprobe sessions, with which waits are recorded
NEEDED = ("BPF_SYSCALL", "BPF_EVENTS", "PERF_EVENTS", "UPROBE_EVENTS")
_MOST_BYTES = 4 << 20
_UPROBE = Path("/sys/bus/event_source/devices/uprobe/type")
_BTF = Path("/sys/kernel/btf/vmlinux")
_GPU_SCHEDULER = Path("/sys/module/gpu_sched")


def checks(xe: bool = True) -> Iterator[Check]:
    """Checks the kernel.

    Args:
        xe: whether EU stalls may be recorded under the kernel's own driver.
    """
    yield _root()
    yield _version(os.uname().release, xe)
    yield _config(read_config())
    yield _uprobes()
    yield _btf()
    if _GPU_SCHEDULER.exists():
        yield _jobs()


def _root() -> Check:
    if os.geteuid() == 0:
        return Check(GROUP, "root", Level.OK, "yes")
    text = "recording needs root, and so do some checks: they are warnings without it"
    return Check(GROUP, "root", Level.PROBLEM, text, "sudo iaprof check")


def _version(release: str, xe: bool = True) -> Check:
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    lacks = []
    if xe and version < EU_STALLS:
        lacks.append("EU stalls came with 6.15; only a backported driver can have them")
    if version < PROCMAP_QUERY:
        lacks.append("Before 6.11 processes that already run have no build-ids")
    if version < SESSIONS:
        lacks.append("--waits needs 6.13")
    if lacks:
        return Check(GROUP, "version", Level.WARNING, f"{release}: {'. '.join(lacks)}")
    return Check(GROUP, "version", Level.OK, f"{release}, new enough for {'EU stalls (6.15)' if xe else '--waits'}")


def read_config() -> str | None:
    """Returns the running kernel's configuration; None if it cannot be found."""
    try:
        with gzip.open("/proc/config.gz") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, EOFError):
        pass
    try:
        with open(f"/boot/config-{os.uname().release}", "rb") as plain:
            return plain.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return None


def _config(config: str | None) -> Check:
    if config is None:
        text = "unknown: there is neither /proc/config.gz nor /boot/config-$(uname -r)"
        return Check(GROUP, "config", Level.WARNING, text, "sudo modprobe configs")
    options = set(re.findall(r"^CONFIG_(\w+)=[ym]$", config, re.MULTILINE))
    if missing := [f"CONFIG_{name}" for name in NEEDED if name not in options]:
        text = f"it was built without {', '.join(missing)}: boot one that has them, as distributions' kernels do"
        return Check(GROUP, "config", Level.PROBLEM, text)
    if "BPF_JIT" not in options:
        text = "it was built without CONFIG_BPF_JIT: each launch costs several times more"
        return Check(GROUP, "config", Level.WARNING, text)
    return Check(GROUP, "config", Level.OK, "BPF, perf events and uprobes are built in")


def _uprobes() -> Check:
    if _UPROBE.exists():
        return Check(GROUP, "uprobes", Level.OK, "the uprobe PMU exists")
    text = "there is no uprobe PMU (CONFIG_UPROBE_EVENTS), so launches cannot be seen"
    return Check(GROUP, "uprobes", Level.PROBLEM, text)


def _btf() -> Check:
    if _BTF.exists():
        return Check(GROUP, "BTF", Level.OK, "the kernel describes its types")
    text = "the kernel has none (CONFIG_DEBUG_INFO_BTF). iaprof works without it; other tools may not"
    return Check(GROUP, "BTF", Level.WARNING, text)


def _jobs() -> Check:
    name = "GPU jobs"
    if job_formats():
        return Check(GROUP, name, Level.OK, "the kernel's GPU scheduler tells when each process had work on a GPU")
    text = (
        "when each process had work on a GPU is not known: its scheduler's tracepoints cannot be read, or have changed"
    )
    return Check(GROUP, name, Level.WARNING, text, "sudo mount -t tracefs nodev /sys/kernel/tracing")
