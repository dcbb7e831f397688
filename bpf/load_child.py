"""The process that compiles and loads the BPF programs for the recorder, and ends: `load_child.main()`, see loader.py.

A request comes as JSON over the SOCK_SEQPACKET socket whose descriptor is the first argument. The answer goes back
over it: the names of the descriptors that come with it, or why there are none.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile

from iaprof.bpf.compiler import BpfUnavailable, compile_program

MAX_MESSAGE = 1 << 16


def main() -> None:
    """Serves one request."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    request = json.loads(channel.recv(MAX_MESSAGE))
    tempfile.tempdir = request["folder"]
    fds: dict[str, int] = {}
    answer: dict[str, object]
    try:
        fds = compile_program(request["sources"], request["defines"], request["functions"], request["maps"])
        answer = {"names": list(fds)}
    except BpfUnavailable as error:
        answer = {"error": str(error)[: MAX_MESSAGE // 8]}
    socket.send_fds(channel, [json.dumps(answer).encode()], list(fds.values()))
    os._exit(0)  # the kernel gives back at once what clang and bcc would take apart piece by piece
