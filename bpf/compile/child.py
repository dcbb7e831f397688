"""The child process that compiles the BPF programs for the recorder; compilation.py starts it.

It gets a folder that only root can enter. It reads what to compile from the file REQUEST in that folder, writes the
result to the file ANSWER, and ends.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from iaprof.bpf.compile.compiler import Source, compile_source
from iaprof.bpf.compile.headers import find_headers
from iaprof.bpf.errors import BpfUnavailable

REQUEST, ANSWER = "request", "answer"


def main(folder: str) -> None:
    """Serves one request."""
    private = Path(folder)
    tempfile.tempdir = str(private)
    request = json.loads((private / REQUEST).read_text())
    try:
        find_headers(os.environ).prepare(private)
        compiled = compile_source(Source(**request["source"]), request["bcc_folders"])
        answer = {"bytecode": compiled.to_text()}
    except BpfUnavailable as error:
        answer = {"error": str(error)}
    (private / ANSWER).write_text(json.dumps(answer))
    os._exit(0)  # the kernel frees clang's and bcc's memory faster than their destructors
