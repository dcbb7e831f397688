# SPDX-License-Identifier: Apache-2.0
"""A program that is recorded while gdb stops at each of its launches, one instruction behind iaprof's probe.

Both see the same launches of one process, so their stacks can be compared one by one, address by address.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from iaprof.bpf.driver_layout import Action, find_layout
from iaprof.bpf.probes.library_file import LibraryFile
from programs.programs import Programs, Run
from programs.recording import Recording, record
from stacks.debugger import Stop, read_stops, under_gdb

LONGEST_INSTRUCTION = 15  # bytes


def record_under_gdb(programs: Programs, run: Run, folder: Path) -> tuple[Recording, list[Stop]]:
    """Records a program in `folder`; gives what gdb saw, too: a stop per launch, as if it were where the probe is."""
    places = {driver: behind_probes(driver) for driver in programs.drivers}
    words, settings = under_gdb(run.words, folder / "stops", {file: list(each) for file, each in places.items()})
    recording = record(programs, replace(run, words=words).with_settings(**settings), folder)
    lengths = {
        (str(file.resolve()), behind): length for file, each in places.items() for behind, length in each.items()
    }
    return recording, [
        replace(stop, pcs=[stop.pcs[0] - lengths[recording.place(stop.pcs[0])], *stop.pcs[1:]])
        for stop in read_stops(folder / "stops")
    ]


def behind_probes(driver: Path, actions: Collection[Action] = (Action.LAUNCH, Action.LAUNCH_MANY)) -> dict[int, int]:
    """Where in a driver the instructions end at which iaprof sees launches: offsets in the file, and their lengths."""
    with driver.open("rb") as file:
        library = LibraryFile(file)
        layout = find_layout(library.build_id())
        assert layout is not None
        entries = [entry for entry in layout.entries if entry.action in actions]
        lengths = {library.offset(each.address, executable=True): length_of(driver, each.address) for each in entries}
    return {offset + length: length for offset, length in lengths.items()}


def length_of(file: Path, address: int) -> int:
    """Bytes of the instruction at a virtual address of a file, as objdump says."""
    until = address + 2 * LONGEST_INSTRUCTION
    words = ["objdump", "-d", "--insn-width=15", f"--start-address={address}", f"--stop-address={until}", str(file)]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    first, second, *_ = (int(line.split(":")[0], 16) for line in lines if line.startswith(" "))
    assert first == address
    return second - first
