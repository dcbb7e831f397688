"""Naming 20,000 addresses of a C++ program of 190 MB with full debug information: how long, how much memory, how right.

The program is made of generated source (generated_cpp.py) and kept; making it takes some ten minutes of CPU. The
addresses are spread evenly over its code. Times include the start of the children; the first one is without a cache.
Memory is the largest resident set among the children, of which the mapped file is a part.

3,000 of the addresses are named by llvm-symbolizer (Debian's package llvm), too; symbolizer.py says which differences
are meant, and why.

    .venv/bin/python tests/bench/bench_symbols.py [--folder ~/.cache/iaprof-bench] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from elftools.elf.elffile import ELFFile
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import generated_cpp
from bench.measuring import machine, print_table
from bench.symbolizer import MEANT, difference, differences, llvm_symbolizer
from iaprof.symbols.names.names import Symbolized
from iaprof.symbols.symbolizers.binaries import Binaries

ADDRESSES, COMPARED = 20_000, 3_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/iaprof-bench", help="keeps the program")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured; the median counts")
    arguments = parser.parse_args()
    print(machine())
    program = generated_cpp.build(arguments.folder)
    file = os.open(program, os.O_RDONLY)
    offsets, addresses = places(program, ADDRESSES)
    first, later = [], []
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-") as name:
        for number in range(arguments.rounds):
            cache = Path(name) / str(number)
            first.append(timed(file, offsets, cache))
            later.append(timed(file, offsets, cache))
        with Binaries(cache) as binaries:
            named = binaries.name(file, offsets)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    rows = [
        ("first", f"{statistics.median(first):.2f} s", f"{max(first):.2f} s"),
        ("later", f"{statistics.median(later):.2f} s", f"{max(later):.2f} s"),
    ]
    size = program.stat().st_size / 1e6
    print_table(f"{len(offsets)} addresses of {size:.0f} MB, {arguments.rounds} rounds", ["", "median", "worst"], rows)
    print(f"largest child: {memory >> 10} MiB; {len(named.names)} named from {named.source}; {named.problem}")
    compare(program, offsets, addresses, named)


def places(program: Path, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Distinct places in .text: offsets in the file, and their addresses."""
    with program.open("rb") as file:
        text = ELFFile(file).get_section_by_name(".text")
    assert text is not None
    within = np.unique(np.random.default_rng(0).integers(0, text["sh_size"], 2 * count)).astype(np.uint64)
    within = np.sort(np.random.default_rng(1).permutation(within)[:count])
    return within + text["sh_offset"], within + text["sh_addr"]


def timed(file: int, offsets: NDArray[np.uint64], cache: Path) -> float:
    begin = time.perf_counter()
    with Binaries(cache) as binaries:
        binaries.name(file, offsets)
    return time.perf_counter() - begin


def compare(program: Path, offsets: NDArray[np.uint64], addresses: NDArray[np.uint64], named: Symbolized) -> None:
    chosen = np.sort(np.random.default_rng(2).permutation(len(offsets))[:COMPARED])
    ours = [named.names.frames(row) if row >= 0 else () for row in named.names.find(offsets[chosen]).tolist()]
    theirs = llvm_symbolizer(program, addresses[chosen].tolist())
    kinds = differences(ours, theirs)
    print("compared with llvm-symbolizer:", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    for address, one, other in zip(addresses[chosen].tolist(), ours, theirs, strict=True):
        if difference(one, other) not in MEANT:
            print(f"{address:#x}\n  ours   {one}\n  theirs {other}")


if __name__ == "__main__":
    main()
