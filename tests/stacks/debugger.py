"""The stacks of a program as gdb sees them at each call of probe_me (probe.S), or at instructions of its libraries.

program = build(folder, "stacks.cpp", "-O2")
for stop in stops([program, 2], folder):
    stop.pcs

words, settings = under_gdb(command, folder / "stops", {library: [0x1234]})   # for somebody else to run
stops = list(read_stops(folder / "stops"))
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from waiting import until

HERE = Path(__file__).resolve().parent
LONGEST_S = 600.0  # until gdb has stopped a program hundreds of times


@dataclass(frozen=True)
class Stop:
    """One call."""

    pid: int
    tid: int
    number: int  # the argument
    pcs: list[int]  # the innermost first, the return address 0 of some threads' first frame left out
    registers: dict[int, int] = field(default_factory=dict)  # by their numbers in DWARF
    maps: list[list[str]] = field(default_factory=list)  # lines of /proc/PID/maps
    pages: dict[int, bytes] = field(default_factory=dict)  # by address

    @property
    def places(self) -> list[tuple[Path, int]]:
        """File, and offset in it, of each pc that lies in a file; of a stop with `memory`."""
        found = []
        for pc in self.pcs:
            for span, _, offset, _, _, *path in self.maps:
                start, end = (int(number, 16) for number in span.split("-"))
                if start <= pc < end and path and path[0].startswith("/"):
                    found.append((Path(path[0].rstrip("\n")), pc - start + int(offset, 16)))
        return found


def build(folder: Path, source: str, *options: str | Path, compiler: str = "") -> Path:
    """Compile a program with probe_me in it; `options` may be further sources."""
    program = folder / Path(source).stem
    compiler = compiler or ("g++" if source.endswith("cpp") else "gcc")
    command = [compiler, *options, HERE / source, HERE / "probe.S", "-pthread"]
    subprocess.run([*map(str, command), "-o", str(program)], check=True)
    return program


def library(folder: Path, source: str, name: str, *options: str) -> Path:
    """Compile a library without probe_me."""
    path = folder / name
    subprocess.run(["gcc", "-O2", "-fPIC", "-shared", *options, HERE / source, "-o", path], check=True)
    return path


def offset_of(path: Path, function: str) -> int:
    """Where a function is in a file."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        tables = [section for section in elf.iter_sections() if isinstance(section, SymbolTableSection)]
        symbols = [symbol for table in tables for symbol in table.get_symbol_by_name(function) or ()]
        (offset,) = elf.address_offsets(symbols[0]["st_value"])
    return int(offset)


def stops(
    command: Sequence[str | Path | int],
    folder: Path,
    memory: bool = False,
    before_the_end: Callable[[], object] | None = None,
    places: Mapping[Path, Sequence[int]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Stop]:
    """Run it under gdb to its end; gives each stop, with `memory` also what its stack can be walked with.

    `before_the_end` is called when the program has done all, and is still there. `places`: see under_gdb.
    """
    output, hold = folder / "stops", folder / "hold"
    words, settings = under_gdb(command, output, places)
    environment = os.environ | dict(environment or {}) | settings | ({"MEMORY": "1"} if memory else {})
    if before_the_end is not None:
        hold.touch()
        hold.with_suffix(".reached").unlink(missing_ok=True)
        environment["HOLD"] = str(hold)
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as gdb:
        if before_the_end is not None:
            until(lambda: hold.with_suffix(".reached").exists() or gdb.poll() is not None, longest_s=LONGEST_S)
            before_the_end()
            hold.unlink()
    assert gdb.returncode == 0
    yield from read_stops(output)


def under_gdb(
    command: Sequence[str | Path | int], output: Path, places: Mapping[Path, Sequence[int]] | None = None
) -> tuple[list[str], dict[str, str]]:
    """What to execute, and with which settings in its environment, so that gdb runs a command and writes `output`.

    Args:
        command: a program and its arguments.
        output: for read_stops.
        places: where to stop instead of at probe_me: offsets of instructions, in bytes, by the file that has them.
    """
    words = ["gdb", "-q", "-batch", "-nx", "-x", str(HERE / "gdb_stops.py"), "--args", *map(str, command)]
    settings = {"STOPS": str(output)}
    if places is not None:
        settings["AT"] = json.dumps({str(path.resolve()): list(offsets) for path, offsets in places.items()})
    return words, settings


def read_stops(output: Path) -> Iterator[Stop]:
    """What gdb wrote."""
    with output.open("rb") as file:
        while True:
            try:
                told = pickle.load(file)
            except EOFError:
                return
            while told["pcs"] and told["pcs"][-1] == 0:
                told["pcs"].pop()
            yield Stop(**told)
