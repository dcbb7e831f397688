"""The process that compiles the BPF programs for the recorder, and ends: see compilation.py.

It gets a folder that only root can enter. The file REQUEST in it says what to compile; the process writes the result to
the file ANSWER.
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
    os._exit(0)  # the kernel gives back at once what clang and bcc would take apart piece by piece
