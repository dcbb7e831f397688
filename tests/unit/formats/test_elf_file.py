"""The reader of ELF files, compared with pyelftools on the machine's own, and on damaged ones."""

from __future__ import annotations

import random
import struct
import subprocess
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection, SymbolTableSection

from iaprof.basics.elf import (
    ElfError,
    ElfFile,
    TooLarge,
    in_file,
    in_memory,
    in_stream,
)
from unit.builds import build
from unit.elf_patching import with_header, with_section

FILES = [
    *(Path("/lib/x86_64-linux-gnu") / name for name in ("libc.so.6", "libstdc++.so.6")),
    Path("/lib64/ld-linux-x86-64.so.2"),
    Path("/proc/self/exe"),
]
SEGMENT = ("flags", "offset", "vaddr", "paddr", "filesz", "memsz", "align")
SECTION = ("name", "flags", "addr", "offset", "size", "link", "info", "addralign", "entsize")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return build(tmp_path_factory.mktemp("library") / "l.so").path.read_bytes()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_all_of_it_is_what_pyelftools_reads(path: Path) -> None:
    with path.open("rb") as file:
        theirs = ELFFile(file)
        for read in (in_memory(path.read_bytes()), in_file(file.fileno()), in_stream(file)):
            ours = ElfFile(read)
            raw = theirs.header
            assert (ours.header.entry, ours.header.segments, ours.header.sections) == (
                raw["e_entry"], raw["e_phoff"], raw["e_shoff"],
            )  # fmt: skip
            assert [each[1:] for each in ours.segments] == [
                tuple(segment[f"p_{name}"] for name in SEGMENT) for segment in theirs.iter_segments()
            ]
            assert [(each.name, *each[2:]) for each in ours.sections] == [
                tuple(section[f"sh_{name}"] for name in SECTION) for section in theirs.iter_sections()
            ]
            assert list(ours.indices) == list(dict.fromkeys(section.name for section in theirs.iter_sections()))
        tables = [section for section in theirs.iter_sections() if isinstance(section, SymbolTableSection)]
        assert sum(table.num_symbols() for table in tables) > 10
        for section in theirs.iter_sections():
            if isinstance(section, NoteSection):
                assert [(note.name.decode(), note.description) for note in ours.notes_of(section.name)] == [
                    (note["n_name"], note["n_descdata"]) for note in section.iter_notes()
                ]
            if isinstance(section, SymbolTableSection):
                assert [(name.decode(), symbol.value) for name, symbol in ours.named_symbols(section.name)] == [
                    (symbol.name, symbol["st_value"]) for symbol in section.iter_symbols()
                ]


def test_the_build_id_is_the_one_that_readelf_tells(library: bytes, tmp_path: Path) -> None:
    (tmp_path / "l.so").write_bytes(library)
    told = subprocess.run(["readelf", "-n", tmp_path / "l.so"], capture_output=True, text=True, check=True).stdout
    [note] = [note for note in ElfFile(in_memory(library)).notes_of(".note.gnu.build-id") if note.is_build_id]
    assert f"Build ID: {note.description.hex()}" in told


def test_more_sections_than_the_header_has_room_for(tmp_path: Path) -> None:
    # given 70,000 sections, which are counted in the first one
    (tmp_path / "many.s").write_text("".join(f".section .s{number}\n.byte 0\n" for number in range(70_000)))
    subprocess.run(["as", "many.s", "-o", "many.o"], cwd=tmp_path, check=True)
    content = (tmp_path / "many.o").read_bytes()
    with pytest.raises(TooLarge, match="more than 65536 are not read"):
        _ = ElfFile(in_memory(content)).sections
    elf = ElfFile(in_memory(content), most_sections=1 << 17)
    assert len(elf.sections) > 70_000
    index = elf.section(".s69999")
    assert index is not None
    assert (elf.header.section_count, elf.sections[index].size) == (0, 1)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not an ELF file"),
        (b"\x7fELF\x02\x01", "header cannot be read"),
        (b"\x7fELF\x01\x01" + bytes(58), "not a 64-bit"),
        (b"\x7fELF\x02\x02" + bytes(58), "big-endian"),
    ],
)
def test_what_is_not_read(content: bytes, problem: str) -> None:
    with pytest.raises(ElfError, match=problem):
        ElfFile(in_memory(content))


def test_what_is_damaged_costs_what_depends_on_it(library: bytes) -> None:
    # given sections that are nowhere
    elf = ElfFile(in_memory(with_header(library, shoff=1 << 62)))
    assert elf.segments
    with pytest.raises(ElfError, match="table of sections lies outside the file"):
        _ = elf.sections
    # given segments that are nowhere
    elf = ElfFile(in_memory(with_header(library, phoff=1 << 62)))
    assert elf.section(".text") is not None
    with pytest.raises(ElfError, match="table of segments lies outside the file"):
        _ = elf.segments
    # given names that are more than any linker makes
    elf = ElfFile(in_memory(with_section(library, ".shstrtab", size=1 << 40)))
    assert elf.sections
    with pytest.raises(TooLarge, match="names claim"):
        _ = elf.indices


def test_no_offset_leads_out_of_an_open_file(library: bytes, tmp_path: Path) -> None:
    (tmp_path / "l.so").write_bytes(library)
    with (tmp_path / "l.so").open("rb") as file:
        for read in (in_file(file.fileno()), in_stream(file), in_memory(library)):
            for offset in (len(library), 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
                assert read(offset, 100) == b""
            assert read(len(library) - 3, 100) == library[-3:]


def test_symbols_that_share_a_long_name_are_not_written_out(tmp_path: Path) -> None:
    # given 20,000 symbols, all of which are named by one text of a megabyte
    source = "".join(f".globl s{number}\ns{number}: .byte 0\n" for number in range(20_000))
    (tmp_path / "a.s").write_text(source + f".globl {'x' * 1_000_000}\n")
    subprocess.run(["as", "a.s", "-o", "a.o"], cwd=tmp_path, check=True)
    content = bytearray((tmp_path / "a.o").read_bytes())
    elf = ElfFile(in_memory(bytes(content)))
    symbols, names = (elf.sections[elf.indices[name]] for name in (".symtab", ".strtab"))
    at = content.index(b"x" * 1_000_000) - names.offset
    for place in range(symbols.offset, symbols.offset + symbols.size, 24):
        struct.pack_into("<I", content, place, at)
    with pytest.raises(TooLarge):
        list(ElfFile(in_memory(bytes(content))).named_symbols(".symtab"))


def test_random_damage_gives_one_kind_of_error(library: bytes) -> None:
    chance, outcomes = random.Random(5), set()
    for _ in range(400):
        content = bytearray(library[: chance.choice([len(library), chance.randrange(len(library))])])
        for _ in range(chance.randrange(1, 9)):
            near = chance.choice([64, 64 + 56 * 12, len(content)])
            if content:
                content[chance.randrange(min(len(content), near))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        try:
            elf = ElfFile(in_memory(content))
            for name in elf.indices:
                list(elf.notes_of(name))
                list(elf.named_symbols(name))
            elf.exported(b"exported")
            outcomes.add("read")
        except ElfError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
