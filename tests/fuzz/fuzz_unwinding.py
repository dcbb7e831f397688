"""Makes up call frame information, stacks and structures of Python, and reads them as the recorder's child does.

The recorder reads these in a child without rights (symbols/unwind/reader.py); here they are read in this process, so
that an exception shows. Only ElfError, InterpreterError, LayoutError and TextError may come out, and each
case takes 3 s of CPU time and 512 MB at most. What fails is told with the seed that makes it again.

    .venv/bin/python tests/fuzz/fuzz_unwinding.py [--seconds 600] [--seed N]
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from iaprof.formats.elf import HEADER, PT_GNU_EH_FRAME, SECTION, SEGMENT, ElfError, ElfFile, in_memory
from iaprof.formats.wire.unwind_rules import Rule, Walked
from iaprof.symbols.python.interpreter import InterpreterError, read_interpreter
from iaprof.symbols.python.layout import (
    COOKIE,
    FIRST_MINOR,
    LAST_MINOR,
    PUBLISHED_BYTES,
    Layout,
    LayoutError,
    layout_of,
)
from iaprof.symbols.python.locations import lines_of
from iaprof.symbols.python.texts import TextError, bytes_of, text_of
from iaprof.symbols.unwind.finishing import (
    PAGE,
    HowFound,
    StackCopy,
    _answers as answers_of,
    _Walk as Walk,
)
from iaprof.symbols.unwind.library import WalkLibrary
from iaprof.symbols.unwind.outermost import outermost
from iaprof.symbols.unwind.reader import MAPPING
from unit.elfwriter import uleb

LONGEST_S = 3.0
MOST_BYTES = 512 << 20
CODE, STACK, IMAGE = 0x40_0000, 0x7FFF_0000_0000, 1
_NUMBERS = (0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_OPERATIONS = [
    6,
    *range(8, 0x18),
    0x1A,
    *range(0x1C, 0x30),
    *range(0x30, 0x50, 9),
    *range(0x70, 0x90),
    0x92,
    0x94,
    0x96,
]
_EXPORTS = """
unsigned long Py_Version = 0x030b00f0;
struct { char cookie[8]; unsigned long version, members[100]; } _PyRuntime = {"xdebugpy", 0x030b00f0};
char PyUnicode_Type[400], PyBytes_Type[400];
"""


def number(chance: random.Random) -> bytes:
    kind = chance.random()
    if kind < 0.7:
        return uleb(chance.choice((0, 8, 16, 24, 32, 64, chance.randrange(256))))
    return uleb(chance.choice(_NUMBERS)) if kind < 0.97 else b"\xff" * chance.randrange(1, 14)


def register(chance: random.Random) -> bytes:
    return uleb(chance.choice((3, 6, 7, 12, 16, 16, 7, chance.randrange(200))))


def expression(chance: random.Random) -> bytes:
    code = b"".join(
        bytes([chance.choice(_OPERATIONS)]) + chance.randbytes(chance.choice((0, 0, 1, 2, 4, 8)))
        for _ in range(chance.randrange(12))
    )
    code = chance.choice((code, b"\x77\x08", b"\x77\xa0\x01\x06", b"\x30\x2f\xfc\xff", code * 40))
    return uleb(len(code) if chance.random() < 0.95 else chance.choice(_NUMBERS)) + code


def instructions(chance: random.Random) -> bytes:
    """Instructions of call frame information, mostly with operands that they take."""
    made = b""
    for _ in range(chance.choice((1, 3, 10, 40, 400))):
        kind = chance.randrange(12)
        if kind == 0:
            made += bytes([0x40 | chance.randrange(64)])
        elif kind == 1:
            made += bytes([0x80 | chance.choice((6, 7, 16, 3, chance.randrange(64)))]) + number(chance)
        elif kind == 2:
            made += bytes([0xC0 | chance.randrange(64)])
        elif kind == 3:
            made += b"\x0c" + register(chance) + number(chance)
        elif kind == 4:
            made += b"\x0e" + number(chance)
        elif kind == 5:
            made += b"\x0f" + expression(chance)
        elif kind == 6:
            made += bytes([chance.choice((0x10, 0x16))]) + register(chance) + expression(chance)
        elif kind == 7:
            made += bytes([chance.choice((0x05, 0x09, 0x11, 0x14, 0x15, 0x2F))]) + register(chance) + number(chance)
        elif kind == 8:
            made += bytes([chance.choice((0x06, 0x07, 0x08))]) + register(chance)
        elif kind == 9:
            made += bytes([chance.choice((0x0A, 0x0B, 0x0A, 0x0B, 0x00))])
        elif kind == 10:
            size = chance.choice((1, 2, 4))
            made += bytes([{1: 2, 2: 3, 4: 4}[size]]) + chance.randbytes(size)
        else:
            made += chance.randbytes(chance.randrange(4))
    return made


def image(chance: random.Random) -> bytes:
    """An ELF image with one common entry, some functions and, mostly, a table of them."""
    augmentation = chance.choice((b"zR", b"zR", b"zRS", b"zPLR", b"z", b"", b"zX", chance.randbytes(3)))
    encoding = chance.choice((0x1B, 0x1B, 0x1B, 0x00, 0x03, 0x0B, 0x1C, 0x01, 0x09, 0xFF, chance.randrange(256)))
    start = b"\x0c\x07\x08\x90\x01" if chance.random() < 0.8 else instructions(chance)
    body = chance.choice((b"\1", b"\1", b"\3")) + augmentation + b"\0" + b"\1\x78\x10"
    if augmentation[:1] == b"z":
        body += uleb(augmentation.count(b"R")) + bytes([encoding]) * augmentation.count(b"R")
    cie = entry(0, body + start)
    frame, starts = bytearray(cie), []
    at_frame = 0x1000
    functions = chance.choice((1, 2, 8))
    for index in range(functions):
        at = len(frame)
        begins = CODE + index * 256
        fields = struct.pack("<iI", (begins - (CODE + at_frame + at + 8)), 256) + b"\0" + instructions(chance)
        starts.append((begins, CODE + at_frame + at))
        frame += entry(at + 4, fields)
    table_at = at_frame + len(frame) + 16 & ~15
    own = CODE + table_at
    count = functions if chance.random() < 0.9 else chance.choice(_NUMBERS) & 0xFFFFFFFF
    table = b"\1\x1b\3\x3b" + struct.pack("<iI", CODE + at_frame - own - 4, count)
    table += b"".join(struct.pack("<ii", begins - own, placed - own) for begins, placed in starts)
    names = b"\0.eh_frame\0.shstrtab\0"
    size = table_at + len(table)
    segments = [SEGMENT.pack(1, 5, 0, CODE, CODE, size, size, 4096)]
    if chance.random() < 0.8:
        segments.append(SEGMENT.pack(PT_GNU_EH_FRAME, 4, table_at, own, own, len(table), len(table), 4))
    sections = [
        bytes(64),
        SECTION.pack(1, 1, 2, CODE + at_frame, at_frame, len(frame), 0, 0, 8, 0),
        SECTION.pack(11, 3, 0, 0, size, len(names), 0, 0, 1, 0),
    ]
    at_sections = size + len(names)
    header = HEADER.pack(
        b"\x7fELF\2\1\1" + bytes(9), 3, 62, 1, CODE + 0x800, 64, at_sections, 0, 64, 56, len(segments), 64, 3, 2
    )
    data = bytearray(size) + names + b"".join(sections)
    data[: len(header)] = header
    data[64 : 64 + 56 * len(segments)] = b"".join(segments)
    data[at_frame : at_frame + len(frame)] = frame
    data[table_at:size] = table
    data[0x400:0x440] = (b"\xe8\0\0\0\0" * 13)[:64]  # calls, after which addresses are return addresses
    if chance.random() < 0.3:
        damage(data, chance)
    return bytes(data)


def entry(to_common: int, body: bytes) -> bytes:
    padded = body + bytes(-len(body) % 8)
    return struct.pack("<II", len(padded) + 4, to_common) + padded


def damage(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 1, 3, 20))):
        at = chance.randrange(len(data)) if chance.random() < 0.5 else chance.randrange(min(200, len(data)))
        width = chance.choice((1, 2, 4, 8))
        value = chance.choice((*_NUMBERS, chance.randrange(1 << 64))) % (1 << 8 * width)
        data[at : at + width] = value.to_bytes(width, "little")


@cache
def _library() -> WalkLibrary:
    return WalkLibrary()


def call_frames(chance: random.Random) -> str:
    """Walks a stack through made-up call frame information, as the learner's child does."""
    content, library = image(chance), _library()
    file = os.memfd_create("image")
    os.write(file, content)
    library.add_image(IMAGE, file)
    os.close(file)
    mappings = [(CODE, CODE + 0x3000, 0, IMAGE), (0x700000, 0x710000, 0, chance.choice((-1, IMAGE)))]
    library.set_space(IMAGE, bytearray(b"".join(MAPPING.pack(*each) for each in mappings)), len(mappings))
    words = [
        chance.choice((0, CODE + chance.randrange(0x800), STACK + 8 * chance.randrange(1024), 0x700010, CODE + 0x405))
        if chance.random() < 0.9
        else chance.choice(_NUMBERS)
        for _ in range(1024)
    ]
    page = struct.pack("<1024Q", *words)
    registers = {number: chance.choice((0, STACK + 128, *_NUMBERS)) for number in range(16) if chance.random() < 0.7}
    registers |= {
        16: CODE + chance.randrange(0x800),
        7: STACK + 8 * chance.randrange(64),
        6: chance.choice((0, STACK + 256, *_NUMBERS)),
    }
    copy = StackCopy(
        registers,
        chance.choice((HowFound.INTERRUPTED, HowFound.BY_RULE)),
        {STACK: page[:PAGE], STACK + PAGE: page[PAGE:]},
    )
    walk = Walk(IMAGE, copy, 200, lambda _: b"")
    for _ in range(70):
        ((needs, value, finished),) = answers_of(bytearray(library.run(bytearray(walk.request()))), [walk])
        if finished is None:
            walk.supply(value & -PAGE)
            continue
        assert needs < len(Walked)
        assert len(finished.ips) == len(finished.cfas) == len(finished.how_found) <= 200
        assert all(Rule.unpack(rule.pack()) == rule for rule in finished.rules.values())
        outermost(content, np.array([CODE, CODE + 5, CODE + 256], np.uint64))
        return f"walked: {finished.ending.name}"
    return "asks for memory without end"


def interpreter(chance: random.Random) -> str:
    """Reads a damaged interpreter: a file that exports what CPython does."""
    data = bytearray(chance.choice(_interpreters()))
    damage(data, chance)
    try:
        found = read_interpreter(ElfFile(in_memory(bytes(data))))
    except (InterpreterError, ElfError):
        return "no interpreter"
    return "no interpreter" if found is None else "interpreter"


def layouts(chance: random.Random) -> str:
    """Reads offsets that are made up."""
    minor = chance.randrange(FIRST_MINOR, LAST_MINOR + 1)
    version = 3 << 24 | minor << 16 | 0xF0
    content = b"".join(
        struct.pack("<Q", chance.choice((0, 8, 16, 64, 1024, chance.choice(_NUMBERS)))) for _ in range(95)
    )
    content = struct.pack("<8sQQ", COOKIE, version, 0) + content[24:]
    try:
        layout_of(minor, version, lambda count: content[:count])
    except LayoutError:
        return "no layout"
    assert len(content) >= PUBLISHED_BYTES
    return "layout"


def objects(chance: random.Random) -> str:
    """Reads objects and tables of lines that are noise."""
    layout: Layout = layout_of(chance.choice((11, 12)), 0, lambda _: b"")
    copied = bytearray(chance.randbytes(chance.choice((0, 8, 40, 64, 300, 4096))))
    if len(copied) >= 64 and chance.random() < 0.8:
        struct.pack_into("<q", copied, layout.string_length, chance.choice((0, 1, 50, 1 << 40, -1)))
        state = 1 << 5 | chance.choice((1, 2, 4)) << 2 | chance.choice((0, 1 << 6))
        struct.pack_into("<I", copied, layout.string_state, state)
    for read in (text_of, bytes_of):
        try:
            got = read(bytes(copied), layout)
        except TextError:
            continue
        if isinstance(got.value, str):
            got.value.encode()
    table = bytes(
        chance.choice((0x80, 0xFF, 0xF8, 0x3F, 0x7F, 0)) | chance.randrange(256) for _ in range(chance.randrange(400))
    )
    lines = lines_of(table, chance.choice((0, 1, -1, 1 << 31, (1 << 31) - 1)), [-2, 0, 2, 1 << 40])
    assert ((lines >= 0) & (lines < 1 << 31)).all()
    return "objects"


@cache
def _interpreters() -> list[bytes]:
    """Small libraries that export what CPython does, one for each kind of hash table."""
    made = []
    for style in ("gnu", "sysv"):
        with tempfile.TemporaryDirectory() as name:
            command = ["gcc", "-shared", "-nostdlib", f"-Wl,--hash-style={style}", "-x", "c", "-", "-o", "python.so"]
            subprocess.run(command, cwd=name, input=_EXPORTS, text=True, check=True)
            made.append((Path(name) / "python.so").read_bytes())
    return made


KINDS: tuple[Callable[[random.Random], str], ...] = (*[call_frames] * 4, interpreter, layouts, objects)


def fuzz(seconds: float, number: int) -> Counter[str]:
    """Makes up cases for so long, and counts what became of all; tells those that fail, each kind once."""
    counts, end, seed = Counter[str](), time.monotonic() + seconds, number << 32
    while time.monotonic() < end:
        seed += 1
        begin = time.process_time()
        try:
            outcome = one(seed)
        except Exception as error:  # noqa: BLE001 (whatever it is, it should not have happened)
            outcome = "failed"
            kind = f"failed with {type(error).__name__}: {error}"
            if not counts[kind]:
                print(f"seed {seed}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            counts[kind] += 1
        took = time.process_time() - begin
        if took > LONGEST_S:
            counts["slow"] += 1
            print(f"seed {seed}: {outcome} took {took:.1f} s", file=sys.stderr, flush=True)
        counts[outcome] += 1
    return counts


def one(seed: int) -> str:
    """Makes up one case; returns what became of it."""
    chance = random.Random(seed)
    return chance.choice(KINDS)(chance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (4 * MOST_BYTES, 4 * MOST_BYTES))
    counts = fuzz(arguments.seconds, arguments.seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()), f"; {peak >> 20} MiB at most")
    sys.exit(bool(counts["failed"] or counts["slow"] or peak > MOST_BYTES))


if __name__ == "__main__":
    main()
