"""The child of sandbox.parent: gives up its rights, then reads what its parent hands to it, with the reader it names.

Everything that it will need is imported, loaded and opened first: afterwards it can open nothing, start nothing, write
to no file but those that it is handed, and is nobody if it was root.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import socket
from typing import Any

from iaprof.sandbox import seccomp
from iaprof.sandbox.parent import ANSWER, LONGEST_DATA, REQUEST
from iaprof.sandbox.reader import Operation, Refusal
from iaprof.sandbox.stage_limit import OutOfTime

_CHANNEL = 0  # file descriptor: a socket to the parent
_STANDARD_FILES = 3
_LONGEST_HEADER = 1 << 20
_NOBODY = 65534
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38  # linux/prctl.h
_CAPABILITY_VERSION_3 = 0x2008_0522  # linux/capability.h


def main(reader_module: str, limits: str) -> None:
    """Serve requests until the parent closes the channel."""
    allowed = json.loads(limits)
    try:
        operations = importlib.import_module(reader_module).operations(allowed["stage_seconds"])
        channel = socket.socket(fileno=_CHANNEL)
        _lower(allowed)
    except Exception as error:  # noqa: BLE001 (the parent reports it, whatever it is)
        _send({"error": type(error).__name__, "message": str(error), "details": None})
        return
    gc.freeze()
    _send({"ok": None})
    while True:
        files: list[int] = []
        head = _receive_head(channel, allowed["files"], files)
        if head is None:
            return
        header_length, data_length = REQUEST.unpack(head)
        if header_length > _LONGEST_HEADER or data_length > LONGEST_DATA:
            return
        header, data = _receive(header_length), _receive(data_length)
        if header is None or data is None:
            return
        request = json.loads(header)
        _allow_cpu(request["seconds"])
        answer = _answer(operations[request["operation"]], request["parameters"], data, files)
        for file in files:
            os.close(file)
        encoded = json.dumps(answer, separators=(",", ":")).encode()
        if len(encoded) > allowed["answer_bytes"]:
            encoded = json.dumps(_error("TooLarge", "there is more in it than a report can hold")).encode()
        _send_bytes(encoded)


def _answer(operation: Operation, parameters: dict[str, Any], data: bytearray, files: list[int]) -> dict[str, object]:
    try:
        return {"ok": operation(parameters, data, files)}
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


def _lower(allowed: dict[str, Any]) -> None:
    """Give up every right that reading bytes does not need; `allowed` are the parent's Limits."""
    os.chdir("/")
    if os.geteuid() == 0:
        # In a user namespace nobody may not exist; then giving up the capabilities is what can be done.
        with contextlib.suppress(OSError):
            os.setgroups([])
        with contextlib.suppress(OSError):
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        with contextlib.suppress(OSError):
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    libc = ctypes.CDLL(None)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, *_numbers(1, 0, 0, 0)) != 0:
        raise OSError("the kernel refuses PR_SET_NO_NEW_PRIVS")
    if libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()) != 0:
        raise OSError("capabilities cannot be given up")
    libc.prctl(_PR_SET_DUMPABLE, *_numbers(0, 0, 0, 0))  # another process of nobody's could trace this one
    files = allowed["files"]
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, allowed["written_bytes"]),
        (resource.RLIMIT_NPROC, 0),
        # What is open stays open. A file that is mapped is open twice: Python's mmap has a descriptor of its own.
        (resource.RLIMIT_NOFILE, _STANDARD_FILES + 2 * files if files else 0),
        (resource.RLIMIT_DATA, allowed["memory_bytes"]),
        (resource.RLIMIT_AS, allowed["memory_bytes"] + allowed["mapped_bytes"]),
    ):
        # The soft one is inherited, too: who started this may have limited its own memory to less.
        value = min([limit, *(each for each in resource.getrlimit(kind) if each != resource.RLIM_INFINITY)])
        resource.setrlimit(kind, (value, value))
    seccomp.install(libc)  # where a kernel has none, all of the above still holds


def _numbers(*values: int) -> list[ctypes.c_ulong]:
    """Arguments of a function that takes any number of them: C must be told how wide each is."""
    return [ctypes.c_ulong(value) for value in values]


def _receive_head(channel: socket.socket, most_files: int, files: list[int]) -> bytearray | None:
    """The first bytes of a request, with which its open files come; None where the parent has closed the channel."""
    start, received, _, _ = socket.recv_fds(channel, REQUEST.size, most_files, socket.MSG_CMSG_CLOEXEC)
    files += received
    if not start:
        return None
    rest = _receive(REQUEST.size - len(start))
    return None if rest is None else bytearray(start) + rest


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
