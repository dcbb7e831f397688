"""BPF: whether the kernel takes it from us, bcc, headers, and as the proof the recorder's own programs."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator

from iaprof.bpf.compiler import BpfUnavailable, import_bcc, kernel_headers
from iaprof.bpf.syscall import bpf
from iaprof.record.checks.packages import install_command
from iaprof.record.checks.result import Check, Level

GROUP = "BPF"
_BPF_MAP_CREATE = 0
_BPF_MAP_TYPE_ARRAY = 2
_NEEDS_ROOT = "cannot be told without root"


def checks() -> Iterator[Check]:
    """Checks BPF."""
    found = [_map(), _bcc(), _headers()]
    yield from found
    if os.geteuid() == 0 and all(check.level is Level.OK for check in found):
        yield _programs()


def _map() -> Check:
    try:
        os.close(bpf(_BPF_MAP_CREATE, struct.pack("<IIII", _BPF_MAP_TYPE_ARRAY, 4, 8, 1)))
    except OSError as error:
        if os.geteuid() != 0:
            return Check(GROUP, "maps", Level.WARNING, _NEEDS_ROOT)
        text = f"refused ({error.strerror}): lockdown, a container without CAP_BPF, or a security module"
        return Check(GROUP, "maps", Level.PROBLEM, text, "cat /sys/kernel/security/lockdown")
    return Check(GROUP, "maps", Level.OK, "the kernel makes them")


def _bcc() -> Check:
    try:
        bcc = import_bcc()
    except BpfUnavailable as error:
        return Check(GROUP, "bcc", Level.PROBLEM, str(error), install_command("python3-bpfcc", "python3-bcc"))
    return Check(GROUP, "bcc", Level.OK, f"version {getattr(bcc, '__version__', 'unknown')}")


def _headers() -> Check:
    named = os.environ.get("BCC_KERNEL_SOURCE", "")
    try:
        with kernel_headers():
            joined = os.environ.get("BCC_KERNEL_SOURCE", "")
    except BpfUnavailable as error:
        mend = install_command("linux-headers-$(uname -r)", "kernel-devel-$(uname -r)")
        return Check(GROUP, "headers", Level.PROBLEM, str(error), mend)
    if named:
        return Check(GROUP, "headers", Level.OK, f"those in {named} (BCC_KERNEL_SOURCE)")
    text = "of another kernel's version, which serves" if joined else "of the running kernel"
    return Check(GROUP, "headers", Level.OK, text)


def _programs() -> Check:
    from iaprof.bpf.launches import LaunchProbes  # brings NumPy, which nothing else here needs

    began = time.monotonic()
    try:
        with contextlib.closing(LaunchProbes()) as probes:
            probes.ready()
    except (BpfUnavailable, OSError) as error:
        return Check(GROUP, "programs", Level.PROBLEM, str(error))
    return Check(GROUP, "programs", Level.OK, f"compiled and loaded in {time.monotonic() - began:.1f} s")
