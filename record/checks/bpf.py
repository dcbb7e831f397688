"""BPF: whether the kernel permits it and loads the recorder's programs; if it refuses them, also bcc and headers."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator

from iaprof.bpf.bytecode import BpfUnavailable
from iaprof.bpf.compile.compiler import bcc_version
from iaprof.bpf.compile.headers import find_headers
from iaprof.bpf.syscall import bpf
from iaprof.record.checks.result import Check, Level, install_command

GROUP = "BPF"
_BPF_MAP_CREATE = 0
_BPF_MAP_TYPE_ARRAY = 2
_NEEDS_ROOT = "unknown without root"


def checks() -> Iterator[Check]:
    """Checks BPF; also bcc and headers if the kernel refuses the programs that ship."""
    maps = _map()
    yield maps
    if os.geteuid() != 0 or maps.level is not Level.OK:
        return
    programs, from_bcc = _programs()
    if from_bcc:
        yield _bcc()
        yield _headers()
    yield programs


def _map() -> Check:
    try:
        os.close(bpf(_BPF_MAP_CREATE, struct.pack("<IIII", _BPF_MAP_TYPE_ARRAY, 4, 8, 1)))
    except OSError as error:
        if os.geteuid() != 0:
            return Check(GROUP, "maps", Level.WARNING, _NEEDS_ROOT)
        text = f"refused ({error.strerror}): lockdown, a container without CAP_BPF, or a security module"
        return Check(GROUP, "maps", Level.PROBLEM, text, "cat /sys/kernel/security/lockdown")
    return Check(GROUP, "maps", Level.OK, "the kernel creates them")


def _bcc() -> Check:
    version = bcc_version()
    if version is None:
        text = "not installed, but needed to compile the programs: the kernel refuses those that ship with iaprof"
        return Check(GROUP, "bcc", Level.PROBLEM, text, install_command("python3-bpfcc", "python3-bcc"))
    return Check(GROUP, "bcc", Level.OK, f"version {version}")


def _headers() -> Check:
    try:
        return Check(GROUP, "headers", Level.OK, find_headers(os.environ).about)
    except BpfUnavailable as error:
        mend = install_command("linux-headers-$(uname -r)", "kernel-devel-$(uname -r)")
        return Check(GROUP, "headers", Level.PROBLEM, str(error), mend)


def _programs() -> tuple[Check, bool]:
    """Returns the check, and whether bcc has to compile the programs."""
    from iaprof.bpf.loader import Origin
    from iaprof.bpf.probes.launches import LaunchProbes  # imports NumPy, which nothing else here needs
    from iaprof.bpf.programs import WHEN_NEEDED

    began = time.monotonic()
    try:
        with contextlib.closing(LaunchProbes()) as probes:
            probes.ready()
            origin = probes.origin
            probes.need(WHEN_NEEDED)
    except BpfUnavailable as error:
        return Check(GROUP, "programs", Level.PROBLEM, str(error)), error.needs_bcc
    except OSError as error:
        text = f"the kernel refuses one that Intel's drivers need: their launches are not recorded by probes ({error})"
        return Check(GROUP, "programs", Level.PROBLEM, text), False
    took = f"loaded in {time.monotonic() - began:.2f} s"
    if origin is Origin.SHIPPED:
        return Check(GROUP, "programs", Level.OK, took), False
    text = f"{took}: {origin}, because the kernel refuses those that ship with iaprof"
    return Check(GROUP, "programs", Level.OK, text), True
