"""What is read from the files of interpreters, checked by walking through the memory of a process that runs them."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import struct
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from iaprof.basics.elf import in_memory
from iaprof.symbols.files.elf import Elf
from iaprof.symbols.python.code_objects import bytes_of, lines_of, text_of
from iaprof.symbols.python.layout import LARGEST_FRAME, Interpreter, InterpreterError, Layout, Version, read_interpreter
from iaprof.symbols.unwind.cfi import CallFrames, CfiError
from pythons.interpreters import HERE, NAMES, files_of, output_of, started_as

GENERATOR = 1  # the owner of a generator's frame
VERSION = "import sys; print(*sys.version_info[:3])"


def walked(python: list[str], file: Path, interpreter: Interpreter) -> dict[str, Any]:
    """Runs own_memory.py; returns what it prints."""
    layout = dataclasses.asdict(interpreter.layout) | {"frame_bytes": interpreter.layout.frame_bytes}
    preferred = Elf(in_memory(file.read_bytes())).first_address
    numbers = [str(preferred), str(interpreter.runtime), json.dumps(layout)]
    result: dict[str, Any] = json.loads(output_of(python, HERE / "own_memory.py", file, *numbers))
    return result


def read(frame: dict[str, Any], layout: Layout) -> list[object]:
    """File, name, line, code object and first line of a frame that own_memory.py found."""
    texts = {name: text_of(bytes.fromhex(frame[name]), layout) for name in ("filename", "name", "qualname")}
    table = bytes_of(bytes.fromhex(frame["linetable"]), layout)
    assert not any(text.is_cut for text in texts.values())
    assert len(table.value) == table.length
    assert texts["qualname"].value.rpartition(".")[2] == texts["name"].value
    (line,) = lines_of(table.value, frame["first_line"], [frame["offset"]])
    return [texts["filename"].value, texts["qualname"].value, int(line), frame["code"], frame["first_line"]]


@pytest.mark.parametrize("name", NAMES)
def test_a_walk_by_the_layout_finds_the_frames_that_the_interpreter_reports(name: str) -> None:
    python = started_as(name)
    ((file, interpreter),) = files_of(python).items()
    assert interpreter.version == tuple(map(int, output_of(python, "-c", VERSION).split()))
    result = walked(python, file, interpreter)
    assert result["interpreters"] == 2
    layout, threads = interpreter.layout, result["threads"]
    for thread in threads:
        told = [[path.replace("\udcff", "\ufffd"), *rest] for path, *rest, _ in thread["told"]]
        assert [read(frame, layout) for frame in thread["found"]] == told
        callers = zip(thread["found"][1:], thread["told"][1:], strict=True)
        assert all(found["offset"] == told[-1] for found, told in callers)
    frames = [frame for thread in threads for frame in thread["found"]]
    print(f"{file}: {interpreter.version}, {len(threads)} threads, {len(frames)} frames")
    assert len(threads) == 4
    assert min(len(thread["found"]) for thread in threads) >= 4
    assert {chr(0xF6), chr(0x5C3A), chr(0x103A0)} <= set("".join(str(read(frame, layout)[1]) for frame in frames))
    generators = {frame["code"] for frame in frames if frame["owner"] == GENERATOR}
    assert generators == {frame["code"] for frame in frames if read(frame, layout)[1] == "generated"} != set()
    loops = [sum(frame["is_last"] for frame in thread["found"]) for thread in threads]
    assert max(loops) > 2
    if layout.cframe_previous is not None:
        assert [thread["cframes"] for thread in threads] == [count + 1 for count in loops]
    if layout.code_version is not None:
        by_code = {frame["code"]: frame["version"] for frame in frames}
        assert len(set(by_code.values())) == len(by_code)
        assert 0 not in by_code.values()


# What Debian's Python 3.14.10 publishes, by offset in _Py_DebugOffsets; read from its headers by a debugger.
PUBLISHED = {
    24: 316616, 40: 808,
    48: 227768, 64: 7272, 72: 7344,
    176: 800, 192: 8, 208: 72, 216: 152,
    248: 88, 256: 8, 264: 0, 272: 56, 288: 74,
    312: 216, 320: 112, 328: 120, 336: 128, 344: 136, 352: 68, 384: 208,
    592: 40, 600: 16, 608: 32,
    616: 64, 624: 32, 632: 16, 640: 40,
}  # fmt: skip
FIELDS = {
    40: "interpreters_head", 64: "interpreter_next", 72: "threads_head", 192: "thread_next", 208: "thread_frame",
    216: "thread_id", 256: "frame_previous", 264: "frame_code", 272: "frame_instruction", 288: "frame_owner",
    320: "code_filename", 328: "code_name", 336: "code_qualname", 344: "code_linetable", 352: "code_first_line",
    384: "code_bytecode", 600: "bytes_length", 608: "bytes_data", 624: "string_state", 632: "string_length",
    640: "string_ascii_data",
}  # fmt: skip
SIZES = (24, 48, 176, 248, 312, 592, 616)
BYTES = 760
HEX = 0x030E0AF0
COOKIE, VERSION_MARK = b"xdebugpy", 0x5AFE_C0DE_1234_5678
SOURCE = f"""
char _PyRuntime[4096] = "{COOKIE.decode()}";
const unsigned long Py_Version = {VERSION_MARK:#x}ul;
long PyUnicode_Type, PyBytes_Type;
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library with the exports of an interpreter."""
    return built(tmp_path_factory.mktemp("image"), SOURCE)


def built(folder: Path, source: str, *flags: str) -> bytes:
    output = folder / "library.so"
    words = [os.environ.get("CC", "cc"), "-shared", "-nostdlib", *flags, "-x", "c", "-", "-o"]
    subprocess.run([*words, output], input=source.encode(), check=True)
    return output.read_bytes()


def published(changes: dict[int, int] | None = None, version: int = HEX, free_threaded: int = 0) -> bytes:
    content = bytearray(struct.pack("<8sQQ", COOKIE, version, free_threaded).ljust(BYTES, b"\0"))
    for at, offset in (PUBLISHED | (changes or {})).items():
        struct.pack_into("<Q", content, at, offset)
    return bytes(content)


def patched(image: bytes, content: bytes, version: int = HEX) -> bytes:
    """The library with these first bytes of _PyRuntime, and this version."""
    version_at, content_at = image.index(struct.pack("<Q", VERSION_MARK)), image.index(COOKIE)
    changed = bytearray(image)
    changed[version_at : version_at + 8] = struct.pack("<Q", version)
    changed[content_at : content_at + len(content)] = content
    return bytes(changed)


def interpreter_of(content: bytes) -> Interpreter | None:
    return read_interpreter(CallFrames(content))


def test_published_offsets_are_read(image: bytes) -> None:
    interpreter = interpreter_of(patched(image, published()))
    assert interpreter is not None
    assert interpreter.version == Version(3, 14, 10)
    assert str(interpreter.version) == "3.14.10"
    layout = interpreter.layout
    assert {at: getattr(layout, name) for at, name in FIELDS.items()} == {at: PUBLISHED[at] for at in FIELDS}
    assert (layout.code_version, layout.string_other_data, layout.frame_bytes) == (92, 56, 80)
    assert layout.thread_cframe is layout.cframe_frame is layout.frame_is_entry is None


@pytest.mark.parametrize("at", FIELDS, ids=FIELDS.get)
def test_no_offset_is_assumed(image: bytes, at: int) -> None:
    """A field at another offset is read there."""
    elsewhere = {24: 4096, 48: 16384, 176: 1024, 248: 128, 312: 1024, 592: 128, 616: 128}
    group = max(size for size in SIZES if size < at)
    moved = {288: 75, 640: 48}.get(at, PUBLISHED[at] + (256 if at < 248 or 312 <= at < 592 else 32))
    interpreter = interpreter_of(patched(image, published({group: elsewhere[group], at: moved})))
    assert interpreter is not None
    assert {name: getattr(interpreter.layout, name) for name in FIELDS.values()} == {
        name: moved if own == at else PUBLISHED[own] for own, name in FIELDS.items()
    }


REFUSED = {
    "free-threaded": (published(free_threaded=1), "it is a free-threaded build, whose frames are kept in another way"),
    "of another version": (published(version=HEX + 256), "of another version"),
    "nothing": (bytes(BYTES), "does not publish"),
    "zeros": (published(dict.fromkeys(PUBLISHED, 0)), "absurd"),
    "zeros in large structures": (published(dict.fromkeys(PUBLISHED, 0) | dict.fromkeys(SIZES, 4096)), "overlap"),
    "half of it in another": (published({216: 12}), "overlap"),
    "not aligned": (published({216: 153}), "not aligned"),
    "frames without end": (published({248: 4096, 256: 4088}), "too large"),
    **{f"{name} of 2^60": (published({at: 1 << 60}), f"{name} is absurd") for at, name in FIELDS.items()},
    **{f"{name} of 2^60 in 2^61": (published(dict.fromkeys(SIZES, 1 << 61) | {at: 1 << 60}), f"{name} is absurd")
       for at, name in FIELDS.items()},
    **{f"{name} behind the end": (published({at: PUBLISHED[max(size for size in SIZES if size < at)] + 1}), "absurd")
       for at, name in FIELDS.items()},
}  # fmt: skip


@pytest.mark.parametrize(("content", "reason"), REFUSED.values(), ids=REFUSED)
def test_absurd_offsets_are_refused(image: bytes, content: bytes, reason: str) -> None:
    with pytest.raises(InterpreterError, match=reason):
        interpreter_of(patched(image, content))


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (0, "as its version; frames of Python 3."),
        ((1 << 64) - 1, "as its version; frames of Python 3."),
        (0x02071200, "as its version; frames of Python 3."),
        (0x030A0EF0, "as its version; frames of Python 3."),
        (0x040B00F0, "as its version; frames of Python 3."),
        (0x10000_030B02F0, "as its version; frames of Python 3."),
        (0x031000F0, "3.16.0, which is newer"),
        (0x03FF00F0, "3.255.0, which is newer"),
        (0x030E00A7, "a preview of Python 3.14.0"),
        (0x030B00B1, "a preview of Python 3.11.0"),
    ],
)
def test_other_versions_are_refused(image: bytes, version: int, reason: str) -> None:
    with pytest.raises(InterpreterError, match=reason):
        interpreter_of(patched(image, published(version=version), version))


@pytest.mark.parametrize(("version", "expected"), [(0x030B00C2, (3, 11, 0)), (0x030C63F0, (3, 12, 99))])
def test_versions_that_publish_nothing_are_in_a_table(image: bytes, version: int, expected: tuple[int, ...]) -> None:
    interpreter = interpreter_of(patched(image, b"", version))
    assert interpreter is not None
    assert interpreter.version == expected
    assert interpreter.layout.frame_bytes == 72 <= LARGEST_FRAME


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("char _PyRuntime[64] = {1};", r"older than Python 3\.11"),
        ("char _PyRuntime[64] = {1}; unsigned long Py_Version;", "its version lies outside of the file"),
        (
            f"char _PyRuntime[4096]; const unsigned long Py_Version = {HEX}ul; long PyUnicode_Type, PyBytes_Type;",
            "lie outside of the file",
        ),
        (
            f"char _PyRuntime[64] = {{1}}; const unsigned long Py_Version = {HEX}ul; long PyBytes_Type;",
            "does not export the types",
        ),
    ],
    ids=["no version", "version in .bss", "runtime in .bss", "no types"],
)
def test_interpreters_with_missing_exports_are_refused(source: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InterpreterError, match=reason):
        interpreter_of(built(tmp_path, source))


@pytest.mark.parametrize(
    "source",
    [
        "int other;",
        "extern char _PyRuntime[]; char *get(void) { return _PyRuntime; }",
        "static char _PyRuntime[64]; char *get(void) { return _PyRuntime; }",
        "char _PyRuntime_[64], x_PyRuntime[64], _PyRuntim[64];",
    ],
    ids=["another library", "one that uses an interpreter", "local", "other names"],
)
def test_files_without_an_interpreter(source: str, tmp_path: Path) -> None:
    assert interpreter_of(built(tmp_path, source, "-fPIC")) is None


@pytest.mark.parametrize("style", ["sysv", "gnu", "both"])
def test_exports_are_found_by_any_hash_table_without_sections(style: str, tmp_path: Path) -> None:
    content = bytearray(patched(built(tmp_path, SOURCE, f"-Wl,--hash-style={style}"), published()))
    content[40:48] = bytes(8)  # e_shoff
    content[60:64] = bytes(4)  # e_shnum, e_shstrndx
    interpreter = interpreter_of(bytes(content))
    assert interpreter is not None
    assert interpreter.version == (3, 14, 10)


def test_a_truncated_file_is_an_error_or_holds_nothing(image: bytes) -> None:
    whole = patched(image, published())
    outcomes: Counter[object] = Counter()
    for size in [*range(0, 4096, 7), *range(4096, len(whole), 97)]:
        try:
            interpreter = interpreter_of(whole[:size])
        except (CfiError, InterpreterError) as error:
            outcomes[type(error)] += 1
        else:
            outcomes[interpreter and interpreter.version] += 1
    assert outcomes.keys() == {None, CfiError, InterpreterError, (3, 14, 10)}


def test_damage_is_an_error_or_holds_nothing(image: bytes) -> None:
    whole, chance = patched(image, published()), random.Random(1)
    outcomes: set[type[object]] = set()
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 9)):
            at = chance.randrange(len(whole) if chance.random() < 0.3 else 1024)
            damaged[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        try:
            outcomes.add(type(interpreter_of(bytes(damaged))))
        except (CfiError, InterpreterError) as error:
            outcomes.add(type(error))
    assert outcomes == {Interpreter, type(None), CfiError, InterpreterError}
