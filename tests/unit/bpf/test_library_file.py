"""Reading an untrusted library's build-id, and the file offsets of its addresses."""

from __future__ import annotations

import contextlib
import io
import struct
import time
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from iaprof.bpf.driver_layout import find_layout
from iaprof.bpf.probes.library_file import LibraryFile, ProbeError
from unit.builds import build


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build(tmp_path_factory.mktemp("library") / "l.so").path.read_bytes()


def opened(content: bytes | bytearray) -> LibraryFile:
    return LibraryFile(io.BytesIO(bytes(content)))


def section(library: bytes, name: str) -> tuple[int, int, int]:
    """Offsets in the file of a section's header and of its content, and the content's size."""
    elf = ELFFile(io.BytesIO(library))
    index = elf.get_section_index(name)
    assert index is not None
    found = elf.get_section(index)
    return elf["e_shoff"] + index * elf["e_shentsize"], found["sh_offset"], found["sh_size"]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("0x" + "ab" * 20, "ab" * 20),
        ("0x" + "01" * 8, "01" * 8),
        ("0x" + "ff" * 32, "ff" * 32),
        ("0x" + "ab" * 7, ""),
        ("0x" + "ab" * 33, ""),
        ("0x" + "ab" * 2000, ""),
        ("none", ""),
    ],
    ids=["20 bytes", "8", "32", "7", "33", "2,000", "none"],
)
def test_build_ids(tmp_path: Path, option: str, expected: str) -> None:
    with build(tmp_path / "l.so", build_id=option).path.open("rb") as file:
        assert LibraryFile(file).build_id() == expected
    # and the layout of such a build-id can be searched for
    assert find_layout(expected) is None


def test_a_library_without_sections_has_no_build_id(library: bytes) -> None:
    changed = bytearray(library)
    struct.pack_into("<Q", changed, 40, 0)  # e_shoff
    struct.pack_into("<HHH", changed, 58, 64, 0, 0)  # e_shentsize, e_shnum, e_shstrndx
    assert opened(library).build_id()
    assert opened(changed).build_id() == ""


def test_a_section_of_that_name_without_notes_has_no_build_id(library: bytes) -> None:
    row, _, _ = section(library, ".note.gnu.build-id")
    changed = bytearray(library)
    struct.pack_into("<I", changed, row + 4, 1)  # SHT_PROGBITS
    assert opened(changed).build_id() == ""


@pytest.mark.parametrize(
    ("name", "described", "kind"),
    [(4, 1 << 31, 3), (4, 0, 3), (1 << 31, 20, 3), (4, 20, 1), (4, 20, 1 << 31), (0, 20, 3)],
)
def test_invalid_and_other_notes_are_no_build_id(library: bytes, name: int, described: int, kind: int) -> None:
    _, at, _ = section(library, ".note.gnu.build-id")
    changed = bytearray(library)
    struct.pack_into("<III", changed, at, name, described, kind)
    with contextlib.suppress(ProbeError):
        assert opened(changed).build_id() == ""


def test_too_many_notes_are_refused(library: bytes) -> None:
    # given 8 MB of notes of another type, of 12 bytes each
    row, _, _ = section(library, ".note.gnu.build-id")
    changed = library + struct.pack("<III", 0, 0, 1) * (8 << 20 >> 4)
    changed = changed[: row + 24] + struct.pack("<QQ", len(library), 8 << 20) + changed[row + 40 :]
    # when
    begun = time.process_time()
    with pytest.raises(ProbeError, match="more headers, notes or symbols"):
        opened(changed).build_id()
    # then
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(("field", "value"), [(24, 1 << 62), (32, 1 << 62)], ids=["far", "huge"])
def test_a_section_of_notes_outside_the_file_has_no_build_id(library: bytes, field: int, value: int) -> None:
    row, at, _ = section(library, ".note.gnu.build-id")
    changed = bytearray(library)
    struct.pack_into("<Q", changed, row + field, value)
    struct.pack_into("<I", changed, at + 8, 1)  # of another type, so that the next note is read
    with contextlib.suppress(ProbeError):
        assert opened(changed).build_id() == ""


def test_broken_libraries_raise_probe_error(library: bytes) -> None:
    # given truncations, and flipped bytes of the headers and of the end
    cases = [library[:length] for length in range(0, len(library), 509)]
    for position in [*range(64), *range(len(library) - 1500, len(library), 7)]:
        changed = bytearray(library)
        changed[position] ^= 0xFF
        cases.append(bytes(changed))
    # when, then
    refused = 0
    for case in cases:
        try:
            build_id = opened(case).build_id()
            assert len(build_id) in (0, *range(16, 65))
        except ProbeError:
            refused += 1
    assert len(library) // 509 // 2 < refused < len(cases)


@pytest.mark.parametrize(
    ("position", "value"), [(4, 1), (5, 2), (18, 3), (18, 183), (18, 205)], ids=["32", "big", "i386", "arm", "GPU"]
)
def test_libraries_of_other_machines_are_refused(library: bytes, position: int, value: int) -> None:
    changed = bytearray(library)
    changed[position] = value
    with pytest.raises(ProbeError):
        opened(changed)


def test_offsets_of_code_must_be_in_executable_segments(library: bytes) -> None:
    elf, file = ELFFile(io.BytesIO(library)), opened(library)
    segments = list(elf.iter_segments("PT_LOAD"))
    code = next(segment for segment in segments if segment["p_flags"] & 1)
    start, size, at = code["p_vaddr"], code["p_filesz"], code["p_offset"]
    assert file.offset(start, executable=True) == at
    assert file.offset(start + size - 1, executable=True) == at + size - 1
    outside = [start - 1, start + size, 0, (1 << 64) - 1, *(each["p_vaddr"] for each in segments if each is not code)]
    for address in outside:
        with pytest.raises(ProbeError, match="outside its executable segments"):
            file.offset(address, executable=True)


def test_offsets_of_semaphores_must_be_in_writable_segments(library: bytes) -> None:
    elf, file = ELFFile(io.BytesIO(library)), opened(library)
    data = next(segment for segment in elf.iter_segments("PT_LOAD") if segment["p_flags"] & 2)
    start, size = data["p_vaddr"], data["p_filesz"]
    assert file.offset(start + size - 2, executable=False) == data["p_offset"] + size - 2
    for address in (start - 1, start + size - 1, elf["e_entry"]):
        with pytest.raises(ProbeError, match="outside its writable segments"):
            file.offset(address, executable=False)


def test_segments_that_are_writable_and_executable_are_refused(library: bytes) -> None:
    elf = ELFFile(io.BytesIO(library))
    changed = bytearray(library)
    for index, segment in enumerate(elf.iter_segments()):
        if segment["p_type"] == "PT_LOAD":
            struct.pack_into("<I", changed, elf["e_phoff"] + index * elf["e_phentsize"] + 4, 7)
    code = next(segment for segment in elf.iter_segments("PT_LOAD") if segment["p_flags"] & 1)
    for executable in (True, False):
        with pytest.raises(ProbeError, match="outside its"):
            opened(changed).offset(code["p_vaddr"], executable=executable)
