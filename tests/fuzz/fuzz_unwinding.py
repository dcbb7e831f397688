"""Makes up call frame information, stacks and structures of Python, and reads them as the recorder's child does.

The recorder reads these in a child without rights (symbols/unwind/reader.py); here they are read in this process, so
that an exception shows. Only ElfError, InterpreterError, LayoutError and TextError may come out, and each
case takes 3 s of CPU time and 512 MB at most. What fails is told with the seed that makes it again.

    .venv/bin/python tests/fuzz/fuzz_unwinding.py [--seconds 600] [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
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

from iaprof.basics.elf import HEADER, PT_GNU_EH_FRAME, SECTION, SEGMENT, ElfError, ElfFile, in_memory
from iaprof.formats.wire.unwind_rules import Rule, Walked
from iaprof.symbols.python.code_objects import TextError, bytes_of, lines_of, text_of
from iaprof.symbols.python.layout import (
    COOKIE,
    FIRST_MINOR,
    LAST_MINOR,
    PUBLISHED_BYTES,
    InterpreterError,
    Layout,
    LayoutError,
    layout_of,
    read_interpreter,
)
from iaprof.symbols.unwind.file_code import outermost
from iaprof.symbols.unwind.finishing import (
    PAGE,
    HowFound,
    StackCopy,
    _answers as answers_of,
    _Walk as Walk,
)
from iaprof.symbols.unwind.reader import MAPPING
from unit.elfwriter import uleb

LONGEST_S = 3.0
MOST_BYTES = 512 << 20
CODE, STACK, IMAGE, OTHER_IMAGE = 0x40_0000, 0x7FFF_0000_0000, 1, 2
CODE_BYTES = 0x800  # from CODE + 0x400 on
LAST_PAGES = 10
LAST_STACK = (1 << 64) - 4096 * LAST_PAGES  # up to the end of the address space
DAMAGED_WALKS = 200  # for each that is made up
MOST_IMAGE_BYTES = 1 << 20
SLOWEST_US = 1_000_000  # for a walk, with sanitizers
SOURCES = Path(__file__).resolve().parents[2] / "symbols/unwind"
SANITIZED = [
    "-std=gnu11",
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-Dmmap=copied_file",
]
SANITIZER = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
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


def code(chance: random.Random) -> bytes:
    """Code in which a walk recognises something: calls, jumps, returns from signals, starts of goroutines, ends."""
    made = bytearray(chance.choice((b"", b"\x90\x90\x90\xff\xd0")))  # page() has the address behind this call
    while len(made) < CODE_BYTES:
        target = struct.pack(
            "<i", chance.choice((0, 16, -64, chance.randrange(-0x800, 0x800), chance.choice(_NUMBERS[:9])))
        )
        made += chance.choice(
            (
                *[b"\xe8" + target] * 4,
                b"\xe9" + target,
                b"\xeb" + chance.randbytes(1),
                b"\xf3\x0f\x1e\xfa\xf2\xe9" + target,
                b"\xf3\x0f\x1e\xfa\xff\x25" + target,
                b"\xff\xd0",
                b"\xff\x14\x25" + target,
                b"\x48\xc7\xc0\x0f\0\0\0\x0f\x05",
                b"\xb8\x0f\0\0\0\x0f\x05",
                b"\x31\xed",
                b"\x48\x89\xe3",
                b"\x90\xe8" + target,
                *[epilogue(chance)] * 2,
                b"\xc3" + b"\x90" * (-len(made) % 16),
            )
        )
    return bytes(made[:CODE_BYTES])


def epilogue(chance: random.Random) -> bytes:
    """Loads the old stack pointer from a frame, and what was saved below it, and returns, mostly."""

    def load(register: int, displacement: int) -> bytes:
        mode = chance.choice((0x40, 0x80)) if displacement else chance.choice((0, 0x40, 0x80))
        size = {0: 0, 0x40: 1, 0x80: 4}[mode]
        prefix, code = (0x4C, register - 8) if register > 7 else (0x48, register)
        return bytes([prefix, 0x8B, mode | code << 3 | 4, 0x24]) + displacement.to_bytes(size, "little", signed=True)

    made = load(4, chance.choice((8, 0x10, 0x40, 0x78, chance.randrange(-128, 128))))
    for _ in range(chance.choice((0, 1, 3, 6, 30))):
        register = chance.choice((3, 5, 12, 13, 14, 15)) if chance.random() < 0.98 else chance.randrange(16)
        made += chance.choice(
            (
                *[load(register, 8 * chance.randrange(-2, 8))] * 3,
                *[b"\x41" * (register > 7) + bytes([0x58 | register & 7])] * 3,
                b"\x48\x83\xc4" + bytes([8 * chance.randrange(32)]),
                b"\x48\x81\xc4" + struct.pack("<i", chance.choice((8, 0x100, chance.choice(_NUMBERS[:9])))),
                b"\xc5\xf8\x77",
            )
        )
    return made + (b"\xc3" if chance.random() < 0.95 else b"")


def frames(chance: random.Random, at: int, is_debug: bool) -> tuple[bytes, list[tuple[int, int]]]:
    """A section of common entries and functions, and for each function its start and the address of its entry.

    Args:
        chance: for what is made up.
        at: offset of the section.
        is_debug: whether it is .debug_frame instead of .eh_frame.
    """
    frame, starts, encoding, common = bytearray(), [], 0, 0
    for index in range(chance.choice((1, 2, 8))):
        if not index or chance.random() < 0.1:
            augmentation = chance.choice((b"zR", b"zR", b"zRS", b"zPLR", b"z", b"", b"zX", chance.randbytes(3)))
            encoding = chance.choice(
                (0x1B, 0x1B, 0x1B, 0x00, 0x03, 0x0B, 0x1C, 0x01, 0x09, 0xFF, chance.randrange(256))
            )
            if is_debug and chance.random() < 0.9:
                augmentation, encoding = b"", 0
            version = chance.choice((1, 1, 3, 4)) if is_debug or chance.random() < 0.1 else chance.choice((1, 1, 3))
            body = bytes([version]) + augmentation + b"\0" + (b"\x08\0" if version == 4 else b"") + b"\1\x78\x10"
            if augmentation[:1] == b"z":
                body += uleb(augmentation.count(b"R")) + bytes([encoding]) * augmentation.count(b"R")
            common = len(frame)
            start = b"\x0c\x07\x08\x90\x01" if chance.random() < 0.8 else instructions(chance)
            frame += entry(0xFFFFFFFF if is_debug else 0, body + start)
        begins, here = CODE + index * 256 + (128 if is_debug else 0), len(frame)
        length = chance.choice((256, 256, 100, 0))
        if is_debug:
            fields = struct.pack("<QQ", begins, length)
        else:
            fields = struct.pack("<iI", begins - (CODE + at + here + 8), length) + b"\0"
        starts.append((begins, CODE + at + here))
        frame += entry(common if is_debug else here + 4 - common, fields + instructions(chance))
        if is_debug and chance.random() < 0.2:
            frame += bytes(4 * chance.randrange(4))
    return bytes(frame), starts


def symbols(chance: random.Random) -> bytes:
    """A table of symbols, mostly of functions."""
    return bytes(24) + b"".join(
        struct.pack("<IBBHQQ", 1, chance.choice((2, 0x12, 0x1A, 0)), 0, chance.choice((1, 1, 0, 0xFFF1)), start, 16)
        for start in (CODE + chance.randrange(CODE_BYTES) for _ in range(chance.choice((0, 3, 30))))
    )


def image(chance: random.Random) -> bytes:
    """An ELF image with code, functions in .eh_frame and .debug_frame, symbols and, mostly, a table of functions."""
    data = bytearray(0x400) + code(chance)
    parts: list[tuple[bytes, int, int, int]] = []  # name, type, offset and size of a section

    def add(name: bytes, kind: int, content: bytes) -> None:
        data.extend(bytes(-len(data) % 16))
        parts.append((name, kind, len(data), len(content)))
        data.extend(content)

    eh_frame, starts = frames(chance, len(data), False)
    at_frame = len(data)
    add(b".eh_frame", 1, eh_frame)
    own = CODE + len(data) + (-len(data) % 16)
    count = len(starts) if chance.random() < 0.9 else chance.choice(_NUMBERS) & 0xFFFFFFFF
    table = b"\1\x1b\3\x3b" + struct.pack("<iI", CODE + at_frame - own - 4, count)
    add(b".eh_frame_hdr", 1, table + b"".join(struct.pack("<ii", begins - own, at - own) for begins, at in starts))
    _, _, at_table, table_bytes = parts[-1]
    for name, kind, content in (
        (b".debug_frame", 1, frames(chance, 0, True)[0]),
        (b".symtab", 2, symbols(chance)),
        (b".dynsym", 11, symbols(chance)),
        (b".go.buildinfo", 1, b"go"),
    ):
        if chance.random() < (0.15 if name == b".go.buildinfo" else 0.5):
            add(name, kind, content)
    names = b"\0" + b"".join(name + b"\0" for name, *_ in parts) + b".shstrtab\0"
    add(b".shstrtab", 3, names)
    size = len(data)
    segments = [SEGMENT.pack(1, 5, 0, CODE, CODE, size, size, 4096)]
    if chance.random() < 0.7:
        segments.append(SEGMENT.pack(PT_GNU_EH_FRAME, 4, at_table, own, own, table_bytes, table_bytes, 4))
    sections = [bytes(64)] + [
        SECTION.pack(names.index(b"\0" + name + b"\0") + 1, kind, 2, CODE + at, at, length, 0, 0, 8, 0)
        for name, kind, at, length in parts
    ]
    data += b"".join(sections)
    header = HEADER.pack(
        b"\x7fELF\2\1\1" + bytes(9), 3, 62, 1, CODE + 0xBF0, 64, size, 0, 64, 56, len(segments), 64, len(sections),
        len(sections) - 1,
    )  # fmt: skip
    data[: len(header)] = header
    data[64 : 64 + 56 * len(segments)] = b"".join(segments)
    if chance.random() < 0.3:
        damage(data, chance)
    return b"" if chance.random() < 0.005 else bytes(data)


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
def _compiled() -> tempfile.TemporaryDirectory[str]:
    """A folder with the driver."""
    folder = tempfile.TemporaryDirectory()
    sources = [SOURCES / "walk.c", SOURCES / "frames.c", Path(__file__).with_name("walk_driver.c")]
    subprocess.run(["gcc", *SANITIZED, *sources, "-o", Path(folder.name) / "driver"], check=True)
    return folder


class SanitizedLibrary:
    """The library's functions as WalkLibrary has them, compiled with sanitizers: walk_driver.c runs them."""

    def __init__(self) -> None:
        """Starts it."""
        command = ["prlimit", "--as=unlimited", str(Path(_compiled().name, "driver"))]
        self._driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=SANITIZER)

    def _ask(self, kind: int, number: int, data: bytes | bytearray, extra: int = 0) -> tuple[int, bytes]:
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._driver.stdin.write(struct.pack("<4Q", kind, number, len(data), extra) + data)
            self._driver.stdin.flush()
        reply = self._driver.stdout.read(16)
        if len(reply) < 16:
            raise SanitizerError(f"status {self._driver.wait()}")
        value, size = struct.unpack("<QQ", reply)
        return value, self._driver.stdout.read(size)

    def add_image(self, number: int, file: int | None) -> None:
        """Takes an image as an open file."""
        assert file is not None
        self._ask(0, number, os.pread(file, MOST_IMAGE_BYTES, 0))

    def set_space(self, number: int, mappings: bytearray, count: int) -> None:
        """Takes the mappings of a process."""
        self._ask(1, number, mappings, count)

    def run(self, requests: bytearray) -> bytes:
        """Walks a stack; raises ValueError if the request is refused."""
        value, answer = self._ask(2, 0, requests)
        if value != len(requests) or not answer:
            raise ValueError("the request is refused")
        return answer

    def run_damaged(self, seed: int, count: int) -> None:
        """Walks the last stack again, with `count` times some random damage; raises SanitizerError."""
        slowest, _ = self._ask(3, seed, b"", count)
        if slowest > SLOWEST_US:
            raise SanitizerError(f"a walk was ended, or took too long: {slowest} us")


class SanitizerError(Exception):
    """The driver has died, or a walk took too long."""


@cache
def _libraries() -> list[SanitizedLibrary]:
    """The running driver, if any; it is started anew now and then, as it keeps all images."""
    return []


def _sanitized() -> SanitizedLibrary:
    running = _libraries()
    if not running:
        running.append(SanitizedLibrary())
    return running[0]


def call_frames(chance: random.Random) -> str:
    """Walks a stack through made-up call frame information, as the learner's child does, and as often with damage."""
    content, library = image(chance), _sanitized()
    try:
        return _walked(chance, content, library)
    except SanitizerError:
        _libraries().clear()
        raise


def _walked(chance: random.Random, content: bytes, library: SanitizedLibrary) -> str:
    for number, bytes_ in ((OTHER_IMAGE, image(chance)), (IMAGE, content)):
        file = os.memfd_create("image")
        os.write(file, bytes_)
        library.add_image(number, file)
        os.close(file)
    mappings = [
        (CODE, CODE + 0x3000, 0, IMAGE),
        (0x700000, 0x710000, 0, chance.choice((-1, IMAGE))),
        (0x800000, 0x803000, 0, OTHER_IMAGE),
    ]
    library.set_space(IMAGE, bytearray(b"".join(MAPPING.pack(*each) for each in mappings)), len(mappings))
    stack, pages = (STACK, 2) if chance.random() < 0.9 else (LAST_STACK, LAST_PAGES)
    content_pages = {stack + PAGE * index: page(chance) for index in range(pages)}
    registers = {number: chance.choice((0, stack + 128, *_NUMBERS)) for number in range(16) if chance.random() < 0.7}
    ends = [found.start() for found in re.finditer(rb"\x48\x8b[\x64\xa4]\x24", content[:0xC00])]  # epilogue()
    near = chance.choice(ends) + chance.choice((-4, 0, 5, 8)) if ends and chance.random() < 0.3 else 0
    registers |= {
        16: CODE + (near or chance.randrange(0x400, 0xC00)),
        7: stack + chance.choice((8, 32)) * chance.randrange(512 if stack == LAST_STACK else 64),
        6: chance.choice((0, stack + 256, *_NUMBERS)),
    }
    copy = StackCopy(registers, chance.choice((HowFound.INTERRUPTED, HowFound.BY_RULE)), content_pages)
    walk = Walk(IMAGE, copy, chance.choice((0, 1, 200, 1024)), lambda _: page(chance) if chance.random() < 0.5 else b"")
    for _ in range(300):
        ((needs, value, finished),) = answers_of(bytearray(library.run(bytearray(walk.request()))), [walk])
        if finished is None:
            walk.supply(value & -PAGE)
            continue
        assert needs < len(Walked)
        assert len(finished.ips) == len(finished.cfas) == len(finished.how_found) <= walk.limit
        assert all(Rule.unpack(rule.pack()) == rule for rule in finished.rules.values())
        outermost(content, np.array([CODE, CODE + 5, CODE + 256], np.uint64))
        library.run_damaged(chance.randrange(1 << 40), DAMAGED_WALKS)
        return f"walked: {finished.ending.name}"
    return "asks for memory without end"


def page(chance: random.Random) -> bytes:
    """A page of the stack: addresses of code and of the stack."""
    words = [
        chance.choice(
            (0, CODE + chance.randrange(0x400, 0xC00), STACK + 8 * chance.randrange(1024), 0x700410, CODE + 0x405,
             0x800000 + chance.randrange(0x400, 0xC00))
        )
        if chance.random() < 0.9
        else chance.choice(_NUMBERS)
        for _ in range(512)
    ]  # fmt: skip
    return struct.pack("<512Q", *words)


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
    resource.setrlimit(resource.RLIMIT_AS, (4 * MOST_BYTES, resource.RLIM_INFINITY))
    counts = fuzz(arguments.seconds, arguments.seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()), f"; {peak >> 20} MiB at most")
    sys.exit(bool(counts["failed"] or counts["slow"] or peak > MOST_BYTES))


if __name__ == "__main__":
    main()
