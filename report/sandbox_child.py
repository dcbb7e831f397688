"""The child of report.sandbox: gives up its rights, then reads zebins, DWARF and GPU code for its parent.

Everything that it will need is imported, loaded and opened first: afterwards it can open nothing, start nothing, write
to no file, and is nobody if it was root.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
from collections.abc import Callable
from typing import Any

import cffi

from iaprof.report.gpu_reader import GpuReader, Refusal
from iaprof.report.sandbox import ANSWER, LONGEST_DATA, REQUEST
from iaprof.report.stage_limit import OutOfTime

_CHANNEL = 0  # file descriptor: a socket to the parent
_LONGEST_HEADER = 1 << 20
_NOBODY = 65534
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38  # linux/prctl.h
_CAPABILITY_VERSION_3 = 0x2008_0522  # linux/capability.h


def main(limits: str) -> None:
    """Serve requests until the parent closes the channel."""
    allowed = json.loads(limits)
    try:
        reader = GpuReader(allowed["stage_seconds"])
        _lower(allowed["memory_bytes"])
    except Exception as error:  # noqa: BLE001 (the parent reports it, whatever it is)
        _send({"error": type(error).__name__, "message": str(error), "details": None})
        return
    gc.freeze()
    _send({"ok": None})
    operations: dict[str, Callable[[dict[str, Any], bytearray], object]] = {
        "disasm": reader.disasm,
        "module": reader.module,
    }
    while True:
        head = _receive(REQUEST.size)
        if head is None:
            return
        header_length, data_length = REQUEST.unpack(head)
        if header_length > _LONGEST_HEADER or data_length > LONGEST_DATA:
            return
        header, data = _receive(header_length), _receive(data_length)
        if header is None or data is None:
            return
        request = json.loads(header)
        _allow_cpu(allowed["seconds"])
        answer = _answer(operations[request["operation"]], request["parameters"], data)
        encoded = json.dumps(answer, separators=(",", ":")).encode()
        if len(encoded) > allowed["answer_bytes"]:
            encoded = json.dumps(_error("TooLarge", "there is more in it than a report can hold")).encode()
        _send_bytes(encoded)


def _answer(
    operation: Callable[[dict[str, Any], bytearray], object], parameters: dict[str, Any], data: bytearray
) -> dict[str, object]:
    try:
        return {"ok": operation(parameters, data)}
    except Refusal as refusal:
        return _error(refusal.kind, str(refusal), refusal.details)
    except OutOfTime:
        return _error("OutOfTime", "reading it takes too long")
    except MemoryError:
        return _error("MemoryError", "reading it takes too much memory")
    except Exception as error:  # noqa: BLE001 (what a library makes of hostile bytes may be anything)
        return _error("Unexpected", f"reading it failed ({type(error).__name__}: {error})"[:1000])


def _error(kind: str, message: str, details: object = None) -> dict[str, object]:
    return {"error": kind, "message": message, "details": details}


def _allow_cpu(seconds: float) -> None:
    """SIGXCPU ends this process when it uses more than that from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    total = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (total, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _lower(memory_bytes: int) -> None:
    """Give up every right that reading bytes does not need."""
    os.chdir("/")
    if os.geteuid() == 0:
        # In a user namespace nobody may not exist; then giving up the capabilities is what can be done.
        with contextlib.suppress(OSError):
            os.setgroups([])
        with contextlib.suppress(OSError):
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        with contextlib.suppress(OSError):
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    ffi = cffi.FFI()
    ffi.cdef(
        """
        int prctl(int option, unsigned long a, unsigned long b, unsigned long c, unsigned long d);
        int capset(uint32_t header[2], uint32_t sets[6]);
        """
    )
    libc: Any = ffi.dlopen(None)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError("the kernel refuses PR_SET_NO_NEW_PRIVS")
    if libc.capset([_CAPABILITY_VERSION_3, 0], [0] * 6) != 0:
        raise OSError("capabilities cannot be given up")
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # another process of nobody's could trace this one
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),  # what is open stays open
        (resource.RLIMIT_AS, memory_bytes),
    ):
        hard = resource.getrlimit(kind)[1]
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (allowed, allowed))


def _receive(length: int) -> bytearray | None:
    """So many bytes, None where the parent has closed the channel."""
    received = bytearray(length)
    view = memoryview(received)
    while view:
        count = os.readv(_CHANNEL, [view])
        if count == 0:
            return None
        view = view[count:]
    return received


def _send(answer: dict[str, object]) -> None:
    _send_bytes(json.dumps(answer).encode())


def _send_bytes(encoded: bytes) -> None:
    view = memoryview(ANSWER.pack(len(encoded)) + encoded)
    while view:
        view = view[os.write(_CHANNEL, view) :]
