"""This kernel takes the BPF programs as they ship, and as bcc and LLVM of three releases of Debian compile them.

How many instructions its verifier follows is held far from its limit, as other kernels' verifiers may follow more.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from iaprof.bpf import loader
from iaprof.bpf.bytecode import Bytecode
from iaprof.bpf.programs import SAMPLE_PROGRAMS, SESSION_PROGRAMS, SHIPPED, WHEN_NEEDED, WITHOUT_ITERATORS, shipped
from iaprof.bpf.sizes import kernel_offsets, map_entries, program_constants
from iaprof.bpf.syscall import BPF_PROG_LOAD, bpf
from iaprof.formats.wire.launches import MAX_DEPTH
from thorough import thorough, usually

pytestmark = [pytest.mark.bpf, pytest.mark.beside]

RELEASES = ("bookworm", "trixie", "unstable")
MOST_FOLLOWED = 300_000  # instructions; the verifier's limit is a million
MOST_TOGETHER = 600_000  # instructions of what ships, a microsecond each: this is when a recording starts
MOST_WITHOUT_ITERATORS = 1_300_000
LOG_STATISTICS = 4


@functools.cache
def compiled(release: str) -> Bytecode:
    """What `make bytecode` would ship, were it not for Debian 12's."""
    path = Path(__file__).parents[2] / "scripts" / "bytecode.py"
    spec = importlib.util.spec_from_file_location("make_bytecode", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result: Bytecode = module.compiled(release)
    return result


def followed(name: str, code: bytes) -> int:
    """How many instructions the verifier followed of a program that it takes."""
    instructions, terms = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"GPL")
    log = ctypes.create_string_buffer(1 << 16)
    attributes = struct.pack(
        "<IIQQIIQII16sII",
        7 if name in SAMPLE_PROGRAMS else 2,  # BPF_PROG_TYPE_PERF_EVENT, BPF_PROG_TYPE_KPROBE
        len(code) // 8,
        ctypes.addressof(instructions),
        ctypes.addressof(terms),
        LOG_STATISTICS,
        len(log),
        ctypes.addressof(log),
        0,
        0,
        name.encode()[:15],
        0,
        # BPF_TRACE_UPROBE_SESSION, BPF_TRACE_UPROBE_MULTI
        0 if name in SAMPLE_PROGRAMS else 57 if name in SESSION_PROGRAMS else 48,
    )
    os.close(bpf(BPF_PROG_LOAD, attributes))
    found = re.search(rb"processed (\d+) insns", log.value)
    assert found, log.value
    return int(found[1])


RULES = program_constants(MAX_DEPTH, offsets=kernel_offsets())


@pytest.mark.parametrize(
    ("constants", "most_together"),
    [
        pytest.param(RULES, MOST_TOGETHER, id="rules"),
        pytest.param(RULES | WITHOUT_ITERATORS, MOST_WITHOUT_ITERATORS, id="bounded loops", marks=thorough),
        pytest.param(program_constants(MAX_DEPTH), MOST_WITHOUT_ITERATORS, id="frame pointers", marks=thorough),
    ],
)
@pytest.mark.parametrize("release", usually([""], ["", *RELEASES]))
def test_this_kernel_takes_every_program(release: str, constants: Mapping[str, int], most_together: int) -> None:
    bytecode = compiled(release) if release else shipped()
    programs = loader.load(bytecode, constants, map_entries())
    fds = programs.fds
    try:
        programs.need(WHEN_NEEDED)
        counts = {name: followed(name, each.linked(fds, constants)) for name, each in bytecode.programs.items()}
    finally:
        loader.close(fds)
    print(f"{bytecode.compiler}: {counts}")
    assert max(counts.values()) < MOST_FOLLOWED, counts
    assert release or sum(counts.values()) < most_together, counts


@thorough
def test_what_ships_is_what_debian_12_compiles() -> None:
    assert SHIPPED.read_text() == compiled("bookworm").to_text()
