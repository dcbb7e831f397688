"""The child process of sandbox.parent: gives up its rights, then serves the parent's requests with a reader module.

It first imports, loads and opens everything that it will need. Afterwards it cannot open files or start processes, can
write only to files that it gets from the parent, and has the user nobody, or another one, instead of root.
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
from collections.abc import Mapping
from typing import Any

from iaprof.sandbox.messages import ANSWER, IS_BYTES, LONGEST_DATA, REQUEST, receive
from iaprof.sandbox.privileges import filter_system_calls, give_up_privileges
from iaprof.sandbox.reader import Operation, OutOfTime, Refusal

_CHANNEL = 0  # file descriptor: a socket to the parent
_STANDARD_FILES = 3
_LONGEST_HEADER = 1 << 20
_PR_SET_DUMPABLE = 4  # linux/prctl.h


def main(reader_module: str, limits: str) -> None:
    """Serves requests until the parent closes the channel.

    Args:
        reader_module: name of the module with the operations, see sandbox.reader.
        limits: the parent's Limits as JSON.
    """
    allowed = json.loads(limits)
    gc.disable()  # until all is imported, which stays
    try:
        operations = importlib.import_module(reader_module).operations(allowed["stage_seconds"])
        channel = socket.socket(fileno=_CHANNEL)
        _give_up_rights(allowed)
    except Exception as error:  # noqa: BLE001 (the parent reports every error)
        _send({"error": type(error).__name__, "message": str(error), "details": None})
        return
    gc.freeze()
    gc.enable()
    _send({"ok": None})
    with contextlib.suppress(ConnectionResetError):  # the parent has closed the channel
        while _serve(channel, operations, allowed):
            pass


def _serve(channel: socket.socket, operations: Mapping[str, Operation], allowed: dict[str, Any]) -> bool:
    """Answers one request; returns whether another may come."""
    start, files, _, _ = socket.recv_fds(channel, REQUEST.size, allowed["files"], socket.MSG_CMSG_CLOEXEC)
    header_length, data_length = REQUEST.unpack(start + receive(channel, REQUEST.size - len(start)))
    if header_length > _LONGEST_HEADER or data_length > LONGEST_DATA:
        return False
    request, data = json.loads(receive(channel, header_length)), receive(channel, data_length)
    _allow_cpu(request["seconds"])
    answer = _answer(operations[request["operation"]], request["parameters"], data, files)
    for file in files:
        os.close(file)
    _send(answer, allowed["answer_bytes"])
    return True


def _answer(operation: Operation, parameters: dict[str, Any], data: bytearray, files: list[int]) -> dict[str, object]:
    try:
        return {"ok": operation(parameters, data, files)}
    except Refusal as refusal:
        return _error(refusal.kind, str(refusal), refusal.details)
    except OutOfTime:
        return _error("OutOfTime", "reading it takes too long")
    except MemoryError:
        return _error("MemoryError", "reading it takes too much memory")
    except Exception as error:  # noqa: BLE001 (hostile bytes may make a library raise anything)
        return _error("Unexpected", f"reading it failed ({type(error).__name__}: {error})"[:1000])


def _error(kind: str, message: str, details: object = None) -> dict[str, object]:
    return {"error": kind, "message": message, "details": details}


def _allow_cpu(seconds: float) -> None:
    """Limits this process's CPU time from now on; SIGXCPU ends it when it uses more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    total = int(used.ru_utime + used.ru_stime + seconds) + 2  # a second more at least: the parent says that it is slow
    resource.setrlimit(resource.RLIMIT_CPU, (total, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _give_up_rights(allowed: dict[str, Any]) -> None:
    """Gives up all rights that reading bytes does not need; `allowed` are the parent's Limits."""
    os.chdir("/")
    files = allowed["files"]
    give_up_privileges(
        {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: allowed["written_bytes"],
            resource.RLIMIT_NPROC: 0,
            # Open files stay open. A mapped file is open twice, because Python's mmap duplicates the descriptor.
            resource.RLIMIT_NOFILE: _STANDARD_FILES + 2 * files if files else 0,
            resource.RLIMIT_DATA: allowed["memory_bytes"],
            resource.RLIMIT_AS: allowed["memory_bytes"] + allowed["mapped_bytes"],
        },
        tuple(allowed["user"]),
    )
    libc = ctypes.CDLL(None)
    # So that other processes of its user cannot trace it.
    libc.prctl(_PR_SET_DUMPABLE, *map(ctypes.c_ulong, (0, 0, 0, 0)))
    filter_system_calls(libc)


def _send(answer: dict[str, object], most_bytes: int = _LONGEST_HEADER) -> None:
    result = answer.get("ok")
    is_bytes = isinstance(result, bytes)
    encoded = result if isinstance(result, bytes) else json.dumps(answer, separators=(",", ":")).encode()
    if len(encoded) > most_bytes:
        encoded, is_bytes = json.dumps(_error("TooLarge", "there is more in it than a report can hold")).encode(), False
    view = memoryview(ANSWER.pack(len(encoded) | (IS_BYTES if is_bytes else 0)) + encoded)
    while view:
        view = view[os.write(_CHANNEL, view) :]  # the filter of system calls does not allow send
