"""Names of addresses in ELF files: whether they are right, their sources, and what hostile files cost."""

from __future__ import annotations

import lzma
import multiprocessing
import os
import resource
import stat
import struct
import subprocess
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import generated_cpp
from bench.symbolizer import MEANT, SAME, difference, differences, llvm_symbolizer
from fuzz import fuzz_binaries, make_seeds
from iaprof.formats.file_names import as_text
from iaprof.sandbox.parent import AnswerError
from iaprof.symbols.files import cache as cache_module
from iaprof.symbols.files.cache import Cache, default_folder, key_of
from iaprof.symbols.names.names import LONGEST_NAME, Frame, Symbolized, is_shortened
from iaprof.symbols.symbolizers import binaries as binaries_module
from iaprof.symbols.symbolizers.binaries import Binaries, BinaryError
from limits import Within
from thorough import thorough
from unit.elf_patching import bounds_of, header_of, objcopy, with_header, with_section
from waiting import until

SEEDS = {path.name: path.read_bytes() for path in make_seeds.SEEDS.iterdir()}
GOOD = SEEDS["dwarf5.so"]


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Binaries]:
    with Binaries(tmp_path_factory.mktemp("cache") / "shared") as made:
        yield made


@pytest.fixture
def caching(tmp_path: Path) -> Iterator[Binaries]:
    """Binaries with a cache folder of their own."""
    with Binaries(tmp_path / "cache") as made:
        yield made


def opened(content: bytes) -> int:
    file = os.memfd_create("test")
    os.write(file, content)
    return file


def code(content: bytes) -> np.ndarray:
    """The offsets of all bytes of .text."""
    offset, size = bounds_of(content, ".text")
    return np.arange(offset, offset + size, dtype=np.uint64)


def symbolize(
    binaries: Binaries, content: bytes, *, debug: bytes | None = None, everything: bool = False
) -> Symbolized:
    """Names all offsets that are code in GOOD."""
    file = opened(content)
    apart = None if debug is None else opened(debug)
    try:
        return binaries.name(file, code(GOOD), apart, everything)
    finally:
        os.close(file)
        if apart is not None:
            os.close(apart)


def functions(result: Symbolized) -> set[str]:
    names = result.names
    return {names.frames(row)[0].function for row in range(len(names))}


def facts(binaries: Binaries, content: bytes) -> binaries_module.Facts:
    file = opened(content)
    try:
        return binaries.facts(file)
    finally:
        os.close(file)


# --- right names


def test_functions_inline_chains_and_lines_equal_those_of_llvm_symbolizer(tmp_path: Path, binaries: Binaries) -> None:
    """For generated C++ all differences are intended ones; bench_symbols.py does the same with 190 MB."""
    program = generated_cpp.build(tmp_path, units=1, types=1)
    content = program.read_bytes()
    offset, size = bounds_of(content, ".text")
    (address,) = struct.unpack_from("<Q", content, header_of(content, ".text") + 16)
    places = np.unique(np.random.default_rng(0).integers(0, size, 500)).astype(np.uint64)
    with program.open("rb") as file:
        names = binaries.name(file.fileno(), places + offset).names

    ours = [names.frames(row) if row >= 0 else () for row in names.find(places + np.uint64(offset)).tolist()]
    theirs = llvm_symbolizer(program, (places + address).tolist())

    assert [chains for chains in zip(ours, theirs, strict=True) if difference(*chains) not in MEANT] == []
    assert differences(ours, theirs)[SAME] > 0.8 * len(places)
    assert max(len(chain) for chain in ours) > 5


@pytest.mark.parametrize("name", ["dwarf4.so", "dwarf5.so", "compressed.so"])
def test_debug_information_names_inlined_functions_with_lines(name: str, binaries: Binaries) -> None:
    content = SEEDS[name]
    file = opened(content)
    result = binaries.name(file, code(content))
    os.close(file)
    source = make_seeds.SOURCE.splitlines()
    multiplied = source.index("            sum += cells[i] * other.cells[i];") + 1
    called = next(number for number, line in enumerate(source, 1) if "row.dot(row)" in line)

    chains = [result.names.frames(row) for row in range(len(result.names))]

    inlined = ["_ZL5localRKN6shapes3RowIlLi8EEE", "_ZNK6shapes3RowIlLi8EE3dotERKS1_"]
    inner = [chain for chain in chains if [frame.function for frame in chain] == inlined]
    assert {chain[0].line for chain in inner} == {called}
    assert multiplied in {chain[1].line for chain in inner}
    assert all(os.path.basename(frame.file) == "shapes.cpp" and frame.file[0] == "/" for frame in inner[0])
    assert (Frame("bare"),) in chains, "assembly, from the symbol table"
    assert (result.source, result.problem) == ("debug information and symbol table", "")


@pytest.mark.parametrize(
    ("name", "source", "local"),
    [
        ("symbols.so", "symbol table", True),
        ("debugdata.so", "symbol table", True),
        ("stripped.so", "dynamic symbols", False),
    ],
)
def test_without_debug_information_symbols_name_functions(
    name: str, source: str, local: bool, binaries: Binaries
) -> None:
    result = symbolize(binaries, SEEDS[name])
    assert (result.source, result.problem) == (source, "")
    assert "enter" in functions(result)
    assert ("_ZL5localRKN6shapes3RowIlLi8EEE" in functions(result)) is local


def test_a_separate_debug_file_names_the_stripped_one(binaries: Binaries) -> None:
    whole, apart = symbolize(binaries, GOOD), symbolize(binaries, SEEDS["stripped.so"], debug=SEEDS["apart.debug"])
    rows = range(len(whole.names))
    assert [apart.names.frames(row) for row in rows] == [whole.names.frames(row) for row in rows]
    assert apart.source == whole.source


def test_a_debug_file_of_another_build_is_not_used(binaries: Binaries) -> None:
    result = symbolize(binaries, SEEDS["stripped.so"], debug=SEEDS["dwarf4.so"])
    assert "another build" in result.problem
    assert result.source == "dynamic symbols"


def test_everything_covers_each_function_once_beside_the_exact_addresses(binaries: Binaries) -> None:
    file = opened(GOOD)
    places = code(GOOD)
    few = binaries.name(file, places[::17], everything=True).names
    every = binaries.name(file, places).names
    os.close(file)
    assert (few.addresses[1:] >= few.addresses[:-1] + few.sizes[:-1]).all(), "no two ranges overlap"
    functions = set()
    for place in places:
        (row,), (exact,) = few.find(np.array([place])).tolist(), every.find(np.array([place])).tolist()
        assert (row >= 0) == (exact >= 0)
        if row >= 0:
            assert few.frames(row)[0].function == every.frames(exact)[0].function
            functions.add(few.frames(row)[0].function)
    assert functions == {"_ZL5localRKN6shapes3RowIlLi8EEE", "bare", "enter"}


def test_an_address_outside_all_segments_has_no_name(binaries: Binaries) -> None:
    file = opened(GOOD)
    result = binaries.name(file, np.array([1 << 40, (1 << 64) - 1], np.uint64))
    assert len(result.names) == 0
    assert result.problem
    assert len(binaries.name(file, np.empty(0, np.uint64)).names) == 0
    os.close(file)


@pytest.mark.parametrize("across_units", [False, True])
def test_reading_debug_information_in_parts_gives_the_same_names(
    across_units: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two units are shared among children with the same result; if one refers to the other, one child reads both."""
    source = make_seeds.SOURCE
    (tmp_path / "one.cpp").write_text(source)
    for word in ("enter", "local", "bare", "shapes"):
        source = source.replace(word, f"{word}2")
    (tmp_path / "two.cpp").write_text(source)
    program = tmp_path / "both.so"
    flags = [*make_seeds.FLAGS, *(["-flto"] if across_units else [])]
    subprocess.run(["g++", *flags, "one.cpp", "two.cpp", "-o", program], cwd=tmp_path, check=True)
    content = program.read_bytes()
    chains = []
    for part_bytes in (1 << 30, bounds_of(content, ".debug_info")[1] // 3):
        monkeypatch.setattr(binaries_module, "_PART_BYTES", part_bytes)
        with Binaries(tmp_path / str(part_bytes)) as binaries, program.open("rb") as file:
            names = binaries.name(file.fileno(), code(content)).names
        chains.append([names.frames(row) for row in range(len(names))])
    sizes = [path.stat().st_size for path in (tmp_path / str(part_bytes)).iterdir()]
    assert len(sizes) == 4
    assert len([size for size in sizes if size]) == (1 if across_units else 2)
    assert chains[0] == chains[1]
    inlined = {frames[1].function for frames in chains[0] if len(frames) > 1}
    assert inlined >= {"_ZNK6shapes3RowIlLi8EE3dotERKS1_", "_ZNK7shapes23RowIlLi8EE3dotERKS1_"}


@pytest.mark.parametrize("version", [4, 5])
def test_source_files_whose_names_are_not_utf_8(version: int, tmp_path: Path, binaries: Binaries) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    sources = [folder / os.fsdecode(name) for name in (b"one\xff.cpp", b"two\xe4\xf6.cpp", "drei\u00e4.cpp".encode())]
    for number, source in enumerate(sources):
        source.write_text(f'extern "C" int function{number}(int x) {{ return x * {number}; }}')
    program = tmp_path / "a.so"
    subprocess.run(["g++", *make_seeds.FLAGS, f"-gdwarf-{version}", *sources, "-o", program], check=True)
    with program.open("rb") as file:
        names = binaries.name(file.fileno(), code(program.read_bytes())).names
    files = {frame.file for row in range(len(names)) for frame in names.frames(row)}
    assert files == {as_text(os.fsencode(source)) for source in sources}
    # and an archive keeps them as text
    assert {"\ufffd" in file for file in files} == {False}


# --- facts


def test_facts_of_good_files(binaries: Binaries) -> None:
    notes = subprocess.run(
        ["readelf", "-n", make_seeds.SEEDS / "dwarf5.so"], capture_output=True, text=True, check=True
    )
    build_id = facts(binaries, GOOD).build_id
    assert build_id is not None
    assert f"Build ID: {build_id.hex()}" in notes.stdout
    link = facts(binaries, SEEDS["symbols.so"]).debuglink
    assert link == ("apart.debug", zlib.crc32(SEEDS["apart.debug"]))
    by_name = {name: facts(binaries, content) for name, content in SEEDS.items()}
    with_debug_info = {"dwarf4.so", "dwarf5.so", "compressed.so", "apart.debug"}
    assert {name for name, own in by_name.items() if own.has_debug_info} == with_debug_info
    assert {name for name, own in by_name.items() if not own.has_symbols} == {"stripped.so"}
    assert by_name["dwarf5.so"].frame_pointers is False, "-O2 omits them"


def test_a_debug_link_must_be_a_plain_file_name(binaries: Binaries) -> None:
    content = SEEDS["symbols.so"]
    at, _ = bounds_of(content, ".gnu_debuglink")
    for name in (b"../../x.deb", b"/etc/passwd", b"\0apart.debu", b"\xff\xffart.debug"):
        assert facts(binaries, content[:at] + name + content[at + len(name) :]).debuglink is None


def test_only_regular_files_are_read(binaries: Binaries) -> None:
    reading, writing = os.pipe()
    for file in (reading, os.open("/dev/zero", os.O_RDONLY), os.open("/", os.O_RDONLY)):
        with pytest.raises(BinaryError, match="not a regular file"):
            binaries.facts(file)
        os.close(file)
    os.close(writing)


# --- hostile files

BROKEN = {
    "empty": (b"", "not an ELF file"),
    "text": (b"#!/bin/sh\n" * 100, "not an ELF file"),
    "cut off in its header": (GOOD[:40], "its header cannot be read"),
    "cut off in its segments": (GOOD[:100], "outside the file"),
    "32-bit": (with_header(GOOD, ident=b"\x7fELF\x01\x01\x01".ljust(16, b"\0")), "not a 64-bit"),
    "big-endian": (with_header(GOOD, ident=b"\x7fELF\x02\x02\x01".ljust(16, b"\0")), "big-endian"),
    "for another machine": (with_header(GOOD, machine=183), r"another processor \(EM_AARCH64\)"),
    "sections nowhere": (with_header(GOOD, shoff=1 << 62), "outside the file"),
    "65,535 sections": (with_header(GOOD, shnum=65535), "outside the file"),
    "endless sections": (with_header(with_section(GOOD, "", size=1 << 60), shnum=0), f"claims {1 << 60} sections"),
    "65,534 segments": (with_header(GOOD, phnum=65534), "outside the file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_elf_files_give_a_problem(name: str, binaries: Binaries) -> None:
    content, problem = BROKEN[name]
    with pytest.raises(BinaryError, match=problem):
        facts(binaries, content)
    result = symbolize(binaries, content)
    assert len(result.names) == 0
    assert result.problem


# Each file keeps at least the names of its dynamic symbols.
DAMAGED = {
    "symbols linked to themselves": (with_section(GOOD, ".symtab", link=2), ""),
    "symbols linked nowhere": (with_section(GOOD, ".symtab", link=4000), "symbol table is damaged"),
    "symbols of an absurd size": (with_section(GOOD, ".symtab", size=1 << 50), "more than"),
    "symbols outside the file": (with_section(GOOD, ".symtab", offset=1 << 40), "outside the file"),
    "names of an absurd size": (with_section(GOOD, ".strtab", size=1 << 63), "more than"),
    "debug information of an absurd size": (with_section(GOOD, ".debug_info", size=1 << 40), "unread"),
    "debug information nowhere": (with_section(GOOD, ".debug_info", offset=1 << 62), "unread"),
    "debug information that is none": (with_section(GOOD, ".debug_abbrev", offset=0), "unread"),
    "a bomb of debug information": (with_section(GOOD, ".debug_info", flags=0x800), "unread"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_costs_only_the_names_that_depend_on_it(name: str, binaries: Binaries) -> None:
    content, problem = DAMAGED[name]
    result = symbolize(binaries, content)
    assert "enter" in functions(result)
    assert problem in result.problem


def test_an_xz_bomb_is_not_unpacked(tmp_path: Path, binaries: Binaries) -> None:
    packer = lzma.LZMACompressor(preset=0)
    (tmp_path / "bomb.xz").write_bytes(b"".join([*(packer.compress(bytes(1 << 24)) for _ in range(5)), packer.flush()]))
    content = objcopy(tmp_path, SEEDS["stripped.so"], f"--add-section=.gnu_debugdata={tmp_path / 'bomb.xz'}")

    result = symbolize(binaries, content)

    assert "unpacks to more than 64 MiB" in result.problem
    assert "enter" in functions(result)


@pytest.mark.parametrize("claimed", [1 << 62, 1 << 32, 256 << 20])
def test_a_compressed_section_that_claims_gigabytes_is_not_unpacked(claimed: int, binaries: Binaries) -> None:
    content = bytearray(SEEDS["compressed.so"])
    struct.pack_into("<Q", content, bounds_of(bytes(content), ".debug_str")[0] + 8, claimed)

    result = symbolize(binaries, bytes(content))

    assert "claims to unpack" in result.problem
    assert "enter" in functions(result)


def test_a_deflate_bomb_stays_within_the_memory(tmp_path: Path, binaries: Binaries, within: Within) -> None:
    """A quarter of a MB that unpacks to 256 MB may be read; the children stay below 1 GB."""
    packer = zlib.compressobj(1)
    packed = b"".join([*(packer.compress(bytes(1 << 24)) for _ in range(16)), packer.flush()])
    (tmp_path / "bomb").write_bytes(struct.pack("<IIQQ", 1, 0, 16 << 24, 1) + packed)
    content = objcopy(tmp_path, GOOD, f"--update-section=.debug_str={tmp_path / 'bomb'}")
    with within(5):
        result = symbolize(binaries, with_section(content, ".debug_str", flags=0x800))

        assert "enter" in functions(result)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1 << 20


def test_long_names_are_cut(tmp_path: Path, binaries: Binaries) -> None:
    (tmp_path / "long.s").write_text(
        f".globl {'x' * 3_000_000}\n.type {'x' * 3_000_000}, @function\n{'x' * 3_000_000}: ret\n"
    )
    subprocess.run(["gcc", "-shared", "-nostdlib", "long.s", "-o", "long.so"], cwd=tmp_path, check=True)
    content = (tmp_path / "long.so").read_bytes()
    file = opened(content)
    result = binaries.name(file, code(content), everything=True)
    os.close(file)
    (name,) = functions(result)
    assert is_shortened(name)
    assert (name[:16_000], len(name)) == ("x" * 16_000, LONGEST_NAME)


def test_long_names_stay_distinct(tmp_path: Path, binaries: Binaries) -> None:
    """Of 10,000 bytes, as templates have them, all are kept; of longer ones a hash tells what was cut."""
    names = [f"{'x' * length}{last}" for length in (10_000, 40_000) for last in "ab"]
    source = "".join(f".globl {name}\n.type {name}, @function\n{name}: ret\n.size {name}, 1\n" for name in names)
    (tmp_path / "long.s").write_text(source)
    subprocess.run(["gcc", "-shared", "-nostdlib", "long.s", "-o", "long.so"], cwd=tmp_path, check=True)
    content = (tmp_path / "long.so").read_bytes()
    file = opened(content)
    found = functions(binaries.name(file, code(content), everything=True))
    os.close(file)
    assert set(names[:2]) < found
    assert len(found) == 4
    assert sum(map(is_shortened, found)) == 2


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_file_that_shrinks_while_it_is_read_loses_only_its_names(
    size: int, tmp_path: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a file is truncated after its facts were read, its reader dies or finds it damaged; the next file is fine."""
    path = tmp_path / "library"
    path.write_bytes(GOOD)
    make = binaries_module._make

    def shrink(*arguments: Any) -> int | str:
        os.truncate(path, size)
        return make(*arguments)

    monkeypatch.setattr(binaries_module, "_make", shrink)
    with path.open("rb") as file:
        result = binaries.name(file.fileno(), code(GOOD))
    assert result.problem
    assert result.source != "debug information"
    monkeypatch.undo()
    assert symbolize(binaries, GOOD).problem == ""


def test_with_a_damaged_table_symbols_still_name_functions(binaries: Binaries, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a cached table is cut off, symbols still name functions."""
    assert symbolize(binaries, GOOD).problem == ""
    monkeypatch.setattr(Cache, "find", lambda *_: [opened(b"SYMC" + bytes(100))])
    result = symbolize(binaries, GOOD)
    assert "damaged" in result.problem
    assert result.source == "symbol table"


def test_symbols_name_functions_in_time_if_debug_information_takes_too_long(
    binaries: Binaries, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    """If the library that reads debug information hangs, names from symbols still come in time."""
    monkeypatch.setattr(binaries_module, "_SECONDS", 2.5)
    monkeypatch.setattr(binaries_module, "_make", lambda source, files, part, end: _asleep(end))
    with within(2.5):
        result = symbolize(binaries, GOOD)
    assert result.source == "symbol table"
    assert "unread" in result.problem


def _asleep(end: float) -> str:
    time.sleep(max(end - time.monotonic(), 0))
    return "it took too long"


@thorough
def test_random_damage_for_five_seconds(tmp_path: Path) -> None:
    """Random damage breaks no promise; fuzz_binaries.py does the same for ten minutes."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # it measures the memory of its process's children
        counts = pool.apply(fuzz_binaries.fuzz, (5, 1, tmp_path))
    assert counts["damaged"] and counts["named"]
    assert not counts["failed"]


# --- the cache


def test_tables_of_debug_information_are_cached(
    caching: Binaries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "library"
    path.write_bytes(GOOD)
    with path.open("rb") as file:
        first = caching.name(file.fileno(), code(GOOD))
        monkeypatch.setattr(binaries_module, "_make", None)
        again = caching.name(file.fileno(), code(GOOD))
    assert [again.names.frames(row) for row in range(len(again.names))] == [
        first.names.frames(row) for row in range(len(first.names))
    ]
    (cached,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(cached.stat().st_mode) == 0o600


def test_a_forged_build_id_does_not_get_another_files_names(caching: Binaries, tmp_path: Path) -> None:
    """Of two files with one build-id, each gets names from its own content."""
    mine, forged = tmp_path / "mine", tmp_path / "forged"
    mine.write_bytes(GOOD)
    forged.write_bytes(GOOD.replace(b"shapes", b"forged"))
    for path, word in ((forged, "forged"), (mine, "shapes"), (forged, "forged")):
        with path.open("rb") as file:
            result = caching.name(file.fileno(), code(GOOD))
        assert {name for name in functions(result) if "local" in name} == {f"_ZL5localRKN6{word}3RowIlLi8EEE"}
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_file_that_was_changed_in_place_gets_another_key(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(GOOD)
    before = path.stat()
    until(lambda: time.clock_gettime_ns(5) > before.st_ctime_ns)  # CLOCK_REALTIME_COARSE, which stamps changes
    with path.open("r+b") as file:
        file.write(GOOD)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert key_of(b"x", path.stat()) != key_of(b"x", before), "a user can set mtime, but not ctime"


def test_a_damaged_cached_table_is_made_again(caching: Binaries, tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(GOOD)
    with path.open("rb") as file:
        caching.name(file.fileno(), code(GOOD))
        (cached,) = (tmp_path / "cache").iterdir()
        cached.write_bytes(cached.read_bytes()[:200])
        assert "damaged" in caching.name(file.fileno(), code(GOOD)).problem
        assert caching.name(file.fileno(), code(GOOD)).problem == ""


def test_a_cache_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with Binaries(folder) as binaries:
        assert symbolize(binaries, GOOD).problem == ""
    assert list(folder.iterdir()) == []
    os.symlink(folder, tmp_path / "link")
    folder.chmod(0o700)
    with Binaries(tmp_path / "link") as binaries:
        assert symbolize(binaries, GOOD).problem == ""
    assert list(folder.iterdir()) == []


@pytest.mark.root
def test_root_makes_no_folders_in_the_homes_of_others(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    with Binaries(home / ".cache/iaprof/symbols") as binaries:
        assert symbolize(binaries, GOOD).problem == ""
    assert list(home.iterdir()) == []


@pytest.mark.root
def test_root_follows_no_links_to_a_cache_folder(tmp_path: Path) -> None:
    # given a HOME, kept by sudo, whose owner has replaced the cache folders by links
    (tmp_path / "system" / "symbols").mkdir(parents=True, mode=0o755)
    (tmp_path / "empty").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "iaprof").symlink_to(tmp_path / "system")
    (tmp_path / "home" / "other").symlink_to(tmp_path / "empty")
    file = Cache.new_file()
    os.write(file, b"names")
    # when
    Cache(tmp_path / "home" / "iaprof" / "symbols").keep("key", [file])
    Cache(tmp_path / "home" / "other" / "symbols").keep("key", [file])
    os.close(file)
    # then
    assert list((tmp_path / "system" / "symbols").iterdir()) == list((tmp_path / "empty").iterdir()) == []


def test_the_least_recently_used_tables_are_deleted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    monkeypatch.setattr(cache_module, "MOST_BYTES", 4000)
    for number in range(5):
        file = opened(bytes(900))
        cache.keep(f"key{number}", [file])
        os.close(file)
        os.utime(tmp_path / f"key{number}.0of1", (number, number))
    cached = sorted(path.name for path in tmp_path.iterdir())
    assert cached == [f"key{number}.0of1" for number in range(1, 5)]
    large = opened(bytes(1001))
    cache.keep("large", [large])
    os.close(large)
    assert cache.find("large", 1) is None, "one file must not push out all others"


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == Path("/home/me/.cache/iaprof/symbols")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert default_folder() == Path("/var/cache/me/iaprof/symbols")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "")
    assert default_folder() is None


# --- answers of a child that an attacker has taken over


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {"rows": 1},
        {"rows": 1 << 60, "frames": 0, "strings": 1, "string_bytes": 0, "sources": [], "problems": []},
        {"rows": 1, "frames": 1, "strings": 1, "string_bytes": 0, "sources": [], "problems": []},
        {"rows": 0, "frames": 0, "strings": 2, "string_bytes": 0, "sources": [], "problems": []},
        {"rows": 0, "frames": 0, "strings": 1, "string_bytes": 0, "sources": [1], "problems": []},
        {"rows": 0, "frames": 0, "strings": 1, "string_bytes": 0, "sources": [], "problems": [["x"]]},
        {"rows": True, "frames": 0, "strings": 1, "string_bytes": 0, "sources": [], "problems": []},
        {"rows": 0, "frames": 0, "strings": 1, "string_bytes": 0, "sources": ["hearsay"], "problems": []},
    ],
)
def test_an_invalid_answer_with_names_is_a_problem(
    answer: object, binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = binaries._sandbox.call
    monkeypatch.setattr(
        binaries._sandbox,
        "call",
        lambda operation, *rest, **more: answer if operation == "name" else call(operation, *rest, **more),
    )
    result = symbolize(binaries, GOOD)
    assert len(result.names) == 0
    assert result.problem.endswith("the reader process answered nonsense")


@pytest.mark.parametrize("column", range(6))
@pytest.mark.parametrize("value", [-1, 2, 1 << 62])
def test_columns_out_of_bounds_are_refused(column: int, value: int) -> None:
    """In an answer with one row, one frame and two strings, any number out of bounds is refused."""
    columns = [4096, 1, 1, 1, 0, 7]
    good = {"rows": 1, "frames": 1, "strings": 2, "string_bytes": 2, "sources": [], "problems": []}
    file = opened(struct.pack("<6q", *columns) + b"\0f")
    names, _, _ = binaries_module._checked_names(good, file)
    os.close(file)
    assert names.frames(0) == (Frame("f", "", 7),)
    if (column, value) in {(0, 2), (1, 2), (5, 2)}:
        return
    columns[column] = value
    file = opened(struct.pack("<6q", *columns) + b"\0f")
    with pytest.raises(AnswerError):
        binaries_module._checked_names(good, file)
    os.close(file)


@pytest.mark.parametrize(
    "change",
    [
        {"build_id": "xyz"},
        {"build_id": 5},
        {"debuglink": ["../x", 1]},
        {"debuglink": ["x", 1 << 40]},
        {"debuglink": ["", 1]},
        {"debuglink": "x"},
        {"has_symbols": 1},
        {"debug_bytes": -1},
        {"debug_bytes": 1.5},
    ],
)
def test_invalid_facts_are_refused(change: dict[str, object]) -> None:
    good = {
        "build_id": "00ff",
        "debuglink": ["x.debug", 1],
        "has_debug_info": True,
        "has_symbols": False,
        "has_code": True,
        "frame_pointers": None,
        "debug_bytes": 100,
        "second_file": False,
        "is_split": False,
    }
    assert binaries_module._checked_facts(good)[0].debuglink == ("x.debug", 1)
    with pytest.raises(AnswerError):
        binaries_module._checked_facts(good | change)
