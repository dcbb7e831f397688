"""Changes single values in good ELF files."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

HEADER = {
    "ident": (0, "16s"),
    "machine": (18, "<H"),
    "phoff": (32, "<Q"),
    "shoff": (40, "<Q"),
    "phnum": (56, "<H"),
    "shnum": (60, "<H"),
}
SECTION = {"type": (4, "<I"), "flags": (8, "<Q"), "offset": (24, "<Q"), "size": (32, "<Q"), "link": (40, "<I")}


def header_of(content: bytes, name: str) -> int:
    """The offset of a section's header."""
    table = int.from_bytes(content[40:48], "little")
    count, strings = struct.unpack_from("<HH", content, 60)
    (names,) = struct.unpack_from("<Q", content, table + 64 * strings + 24)
    for index in range(count):
        at = names + struct.unpack_from("<I", content, table + 64 * index)[0]
        if content[at : content.index(b"\0", at)] == name.encode():
            return table + 64 * index
    raise KeyError(name)


def bounds_of(content: bytes, name: str) -> tuple[int, int]:
    """Offset and size of a section."""
    offset, size = struct.unpack_from("<QQ", content, header_of(content, name) + 24)
    return offset, size


def with_section(content: bytes, name: str, **fields: int) -> bytes:
    """The file with other values in the header of a section."""
    changed = bytearray(content)
    for field, value in fields.items():
        at, form = SECTION[field]
        struct.pack_into(form, changed, header_of(content, name) + at, value)
    return bytes(changed)


def with_header(content: bytes, **fields: int | bytes) -> bytes:
    """The file with other values in its ELF header."""
    changed = bytearray(content)
    for field, value in fields.items():
        at, form = HEADER[field]
        struct.pack_into(form, changed, at, value)
    return bytes(changed)


def objcopy(folder: Path, content: bytes, *options: str) -> bytes:
    """The file that objcopy makes with these options."""
    (folder / "in").write_bytes(content)
    subprocess.run(["objcopy", *options, "in", "out"], cwd=folder, check=True)
    return (folder / "out").read_bytes()
