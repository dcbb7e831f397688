"""Damages good ELF files and DWARF, and has them named: nothing may crash, hang, fill the memory or be silent.

For each file: the parent gets an answer within 5 s, no child grows beyond 1 GB, and where nothing is named a problem is
told. What fails is kept, and named with how to try it again.

    .venv/bin/python tests/fuzz/fuzz_binaries.py [--seconds 600] [--seed N] [FILE...]

Files that are given are tried as they are.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from elftools.elf.elffile import ELFFile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from iaprof.symbols.names.names import LONGEST_NAME, Symbolized
from iaprof.symbols.symbolizers.binaries import Binaries, BinaryError, Facts

SEEDS = Path(__file__).parent / "seeds"
LONGEST_S = 5.0
MOST_BYTES = 1 << 30
INTERESTING = [0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0x100, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
INTERESTING += [1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@dataclass(frozen=True)
class Seed:
    """A good file, and where its parts stand."""

    name: str
    content: bytes
    headers: tuple[tuple[int, int], ...]  # offset and size of the ELF header and of each section's and segment's
    parts: tuple[tuple[int, int], ...]  # of each section


def read_seeds() -> list[Seed]:
    seeds = []
    for path in sorted(SEEDS.iterdir()):
        with path.open("rb") as file:
            elf = ELFFile(file)
            headers = [(0, 64)]
            headers += [(elf["e_shoff"] + 64 * index, 64) for index in range(elf.num_sections())]
            headers += [(elf["e_phoff"] + 56 * index, 56) for index in range(elf.num_segments())]
            parts = [
                (section["sh_offset"], section["sh_size"])
                for section in elf.iter_sections()
                if section["sh_type"] != "SHT_NOBITS" and section["sh_size"]
            ]
        seeds.append(Seed(path.name, path.read_bytes(), tuple(headers), tuple(parts)))
    return seeds


def damaged(seed: Seed, chance: random.Random) -> bytes:
    """A seed with one to eight things wrong."""
    content = bytearray(seed.content)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        kind = chance.randrange(10)
        start, size = chance.choice(seed.headers if kind < 4 else seed.parts)
        at = min(start + chance.randrange(size), len(content) - 1)
        if kind < 3:  # a field of a header
            width = chance.choice((1, 2, 4, 8))
            at = start + chance.randrange(0, size, width)
            value = chance.choice((*INTERESTING, len(content), chance.randrange(1 << 64)))
            content[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
        elif kind < 6:
            content[at] ^= 1 << chance.randrange(8)
        elif kind == 6:
            width = chance.choice((1, 2, 4, 8))
            content[at : at + width] = (chance.choice(INTERESTING) % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 7:  # numbers without an end
            count = chance.randrange(1, 64)
            content[at : at + count] = bytes([chance.choice((0, 0x7F, 0x80, 0xFF))]) * count
        elif kind == 8:  # a part of another section
            other, length = chance.choice(seed.parts)
            count = min(chance.randrange(1, 200), length)
            content[at : at + count] = content[other : other + count]
        elif chance.random() < 0.2:
            del content[at:]
            break
    return bytes(content)


def tried(binaries: Binaries, content: bytes, apart: bytes | None, chance: random.Random) -> str:
    """Has a file named; what became of it. Raises AssertionError where a promise was broken."""
    file, debug = (None if each is None else written(each) for each in (content, apart))
    assert file is not None
    offsets = np.unique(np.array([chance.randrange(len(content) + 100) for _ in range(40)] or [0], np.uint64))
    begin = time.monotonic()
    try:
        named = binaries.name(file, offsets, debug, everything=chance.random() < 0.3)
        took = time.monotonic() - begin
        try:
            assert isinstance(binaries.facts(file), Facts)
        except BinaryError as error:
            assert str(error)
    finally:
        for each in (file, debug):
            if each is not None:
                os.close(each)
    assert took < LONGEST_S, f"it took {took:.1f} s"
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    assert peak < MOST_BYTES, f"a child took {peak >> 20} MiB"
    check(named)
    return "damaged" if named.problem else "named"


def check(named: Symbolized) -> None:
    names = named.names
    assert len(names) or named.problem, "nothing is named, and no problem told"
    assert all(len(text) <= LONGEST_NAME for text in names.strings)
    for row in range(len(names)):
        frames = names.frames(row)
        assert frames
        assert all(frame.function for frame in frames)


def written(content: bytes) -> int:
    file = os.memfd_create("fuzz")
    os.write(file, content)
    return file


def fuzz(seconds: float, number: int, failures: Path) -> Counter[str]:
    """Damages files for so long; keeps those that fail, and counts what became of all."""
    seeds, counts = read_seeds(), Counter[str]()
    apart = next(seed for seed in seeds if seed.name == "apart.debug")
    chance = random.Random(number)
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name, Binaries(Path(name)) as binaries:
        while time.monotonic() < end:
            seed = chance.choice(seeds)
            content = damaged(seed, chance)
            debug = damaged(apart, chance) if seed.name in ("stripped.so", "symbols.so") else None
            try:
                counts[tried(binaries, content, debug, chance)] += 1
            except Exception as error:  # noqa: BLE001 (whatever it is, it should not have happened)
                counts["failed"] += 1
                path = failures / f"{seed.name}-{number}-{sum(counts.values())}"
                path.write_bytes(content)
                if debug is not None:
                    path.with_suffix(".debug").write_bytes(debug)
                print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("files", nargs="*", type=Path)
    arguments = parser.parse_args()
    if arguments.files:
        with Binaries() as binaries:
            for path in arguments.files:
                print(path, tried(binaries, path.read_bytes(), None, random.Random(arguments.seed)))
        return
    failures = Path(tempfile.mkdtemp(prefix="iaprof-fuzz-"))
    workers = len(os.sched_getaffinity(0))
    print(f"{workers} processes for {arguments.seconds:g} s, --seed {arguments.seed}; what fails is kept in {failures}")
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        asked = [(arguments.seconds, arguments.seed + number, failures) for number in range(workers)]
        counts = sum(pool.starmap(fuzz, asked), Counter[str]())
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()))
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
