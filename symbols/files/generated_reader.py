"""Runs in a sandboxed child: reads perf maps and jitdumps, for symbols/symbolizers/generated.py.

The data of a request are addresses, then as many times; its file is the one to read. The file is copied, not mapped, as
its process may be writing to it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.sandbox.reader import Operation, Refusal
from iaprof.symbols.files.jitdump import JitdumpError, read_jitdump
from iaprof.symbols.files.symbol_lists import read_perf_map
from iaprof.symbols.names.names import Frame

MOST_BYTES = 256 << 20  # of a file
_CHUNK = 16 << 20  # bytes
MOST_CHARACTERS = 4 << 20  # in an answer; a character takes up to 12 bytes of JSON


def operations(_stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations of this child, by name."""
    # Makes libraries import what they need, before the sandbox forbids opening files.
    read_perf_map(b"10 1 function\n", np.array([0x10], np.uint64))
    return {"perf_map": perf_map, "jitdump": jitdump}


def perf_map(_parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """Names addresses by a perf map."""
    addresses, _ = _addresses_and_times(data)
    content, problem = _content(files[0])
    names, skipped = read_perf_map(content, addresses)
    if skipped:
        problem = f"{skipped} of its lines {'is' if skipped == 1 else 'are'} damaged"
    return _answer({index: Frame(name) for index, name in names.items()}, problem)


def jitdump(_parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """Names addresses by a jitdump."""
    content, problem = _content(files[0])
    try:
        dump = read_jitdump(content, *_addresses_and_times(data))
    except JitdumpError as error:
        raise Refusal("JitdumpError", str(error)) from None
    return _answer(dump.frames, dump.problem or problem)


def _addresses_and_times(data: bytearray) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    numbers = np.frombuffer(data, np.uint64)
    return numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]


def _content(file: int) -> tuple[bytearray, str]:
    """Reads the first MOST_BYTES of a file; returns them, and a sentence if there are more."""
    content = bytearray()
    while chunk := os.pread(file, min(_CHUNK, MOST_BYTES - len(content)), len(content)):
        content += chunk
    is_longer = os.pread(file, 1, MOST_BYTES) != b""
    return content, f"it is longer than {MOST_BYTES >> 20} MiB, of which the first were read" if is_longer else ""


def _answer(frames: dict[int, Frame], problem: str) -> object:
    """Returns the frames as columns, with each distinct text once."""
    texts: dict[str, int] = {}
    columns: dict[str, list[int]] = {"index": [], "function": [], "file": [], "line": []}
    left = MOST_CHARACTERS
    for index, frame in sorted(frames.items()):
        left -= sum(len(text) for text in (frame.function, frame.file) if text not in texts)
        if left < 0:
            problem = f"its names are longer than {MOST_CHARACTERS} characters together, of which the first were read"
            break
        columns["index"].append(index)
        columns["function"].append(texts.setdefault(frame.function, len(texts)))
        columns["file"].append(texts.setdefault(frame.file, len(texts)))
        columns["line"].append(frame.line)
    return {**columns, "strings": list(texts), "problem": problem}
