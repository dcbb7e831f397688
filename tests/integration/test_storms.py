"""A program whose launches no rule fits for long: thousands of paths while its threads load and unload libraries."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from iaprof.formats.capture.reader import CaptureReader
from integration.recording import BARE, environment, iaprof
from standin import runtime
from standin.hardware import Hardware
from thorough import usually

pytestmark = [pytest.mark.bpf, pytest.mark.alone]  # it needs both CPUs

HERE = Path(__file__).resolve().parent
LAUNCHES, LIBRARIES, KERNEL = 60_000, 12, "multiply_basic"
MOST_SPOOL_BYTES = 1500 * LAUNCHES  # where a copy of each stack would take 64 KiB


def built(folder: Path, how: str) -> list[str | Path]:
    """The program's command: it loads libraries of different sizes, and keeps or unloads them."""
    programs = runtime.build()
    compiler = os.environ.get("CC", "cc")
    libraries = []
    for number in range(LIBRARIES):
        libraries.append(folder / f"library{number}.so")
        source = (
            f"int large{number}(int i) {{ switch (i) {{ "
            + "".join(f"case {case}: return i * {7 * case + number}; " for case in range(100 * number + 1))
            + "} return 0; }"
        )
        command: list[str | Path] = [compiler, "-O0", "-shared", "-fPIC", "-x", "c", "-", "-o", libraries[-1]]
        subprocess.run([*map(str, command)], input=source, text=True, check=True)
    program = folder / "storms"
    flags: list[str | Path] = [
        "-O2",
        "-Wall",
        "-Wextra",
        "-std=gnu11",
        "-fomit-frame-pointer",
        "-fno-optimize-sibling-calls",
        "-pthread",
    ]
    links: list[str | Path] = [programs.library, f"-Wl,-rpath,{programs.library.parent}"]
    include: list[str | Path] = [f"-I{runtime.SOURCES}"]
    words: list[str | Path] = [compiler, *flags, *include, HERE / "storms.c", "-o", program, *links]
    subprocess.run(words, check=True)
    return [program, str(LAUNCHES), how, *libraries]


@pytest.mark.parametrize(("how", "share"), usually([("keep", 0.999)], [("keep", 0.999), ("unload", 0.8)]))
def test_stacks_are_whole_while_libraries_come_and_go(tmp_path: Path, how: str, share: float) -> None:
    # given a program that loads a library each 0.1 s; if it unloads it, no rule is valid until the learner has looked
    command, capture = built(tmp_path, how), tmp_path / "cap.parquet"
    elf = str(runtime.debug_elf("bmg", "matmul"))
    with Hardware(tmp_path / "gpu", "bmg") as hardware:
        own = {"LAUNCHING_ELF": elf, "LAUNCHING_KERNEL": KERNEL}
        # when
        done = iaprof("record", "-o", capture, *BARE, "--", *command, env=environment(hardware) | own)
    assert done.code == 0, done.err
    # then so many stacks are whole
    header = CaptureReader(capture).header
    ends = header["stack_ends"]["launches"]
    assert ends["stacks"] >= LAUNCHES
    assert ends["whole"] + ends["guessed"] >= share * LAUNCHES, done.err
    # and few bytes were needed for that
    assert header["cost"]["spool_bytes"] < MOST_SPOOL_BYTES, header["cost"]
