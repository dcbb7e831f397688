"""Records programs that use Python's frameworks, and compares frames with the calls that the programs tell of.

A program runs twice: once with sys.setprofile, which tells which function calls which from which line, and once
recorded. Each pair of a caller and a callee in the recording is looked for among these calls. Left out are Python's own
import machinery, threads' first functions and what ends the interpreter, as nobody is told of calls there.

    sudo .venv/bin/python tests/pythons/try_frameworks.py [--keep FOLDER] torch=PYTHON numba=PYTHON jax=PYTHON dpnp ...

PYTHON is that of an environment with the framework. Those that launch kernels (dpnp, dpnp-opencl, dpctl, openvino,
pyopencl) have none: they come with `make test-programs`, and run on Intel's real driver without a GPU.
docs/frameworks.md tells what came of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import IAPROF, machine, needs_root, print_table
from iaprof.formats.capture.reader import CaptureReader
from programs import programs
from standin.hardware import Hardware

TESTS = Path(__file__).resolve().parents[1]
PROGRAMS, WORK = TESTS / "pythons" / "programs", TESTS / "programs" / "work"
TELLING = PROGRAMS / "telling_calls.py"
HZ, SECONDS, ROUNDS, LONGEST_S = 199, "6", "30", 200
ON_CPU = {
    "torch": (PROGRAMS / "train_torch.py", SECONDS),
    "torch-compile": (PROGRAMS / "compile_torch.py", SECONDS),
    "numba": (PROGRAMS / "compute_numba.py", SECONDS),
    "jax": (PROGRAMS / "compute_jax.py", SECONDS),
}
LAUNCHING: dict[str, tuple[dict[str, str], tuple[Path | str, ...]]] = {
    "dpnp": (programs.LEVEL_ZERO_V2, (PROGRAMS / "compute_dpnp.py", ROUNDS)),
    "dpnp-opencl": (programs.OPENCL, (PROGRAMS / "compute_dpnp.py", ROUNDS)),
    "dpctl": (programs.OPENCL, (PROGRAMS / "compute_dpctl.py", ROUNDS)),
    "openvino": ({}, (WORK / "with_openvino.py",)),
    "pyopencl": ({}, (WORK / "with_pyopencl.py",)),
}
_NOT_TOLD = ("importlib", "Thread._bootstrap", "_exitfunc")

Code = tuple[str, str, int]  # file, qualified name, first line
Pair = tuple[Code, Code, int]  # callee, caller, line of the call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME[=PYTHON]", help=", ".join((*ON_CPU, *LAUNCHING)))
    parser.add_argument("--keep", type=Path, help="a folder for the captures")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    rows = []
    with tempfile.TemporaryDirectory(prefix="iaprof-try-") as scratch:
        for word in arguments.names:
            name, _, python = word.partition("=")
            folder = (arguments.keep or Path(scratch)) / name
            folder.mkdir(parents=True, exist_ok=True)
            rows.append(tried(name, python, folder).row(name))
    heads = ["", "samples or launches", "whole stacks", "main thread", "with Python", "pairs", "not told", "no line"]
    print_table("Frames of Python", heads, rows)


def tried(name: str, python: str, folder: Path) -> Found:
    """Lets a program tell its calls, and records it."""
    words, environment = command(name, python, folder)
    at = next(number for number, word in enumerate(words) if word.endswith(".py"))
    telling = [*words[:at], str(TELLING), str(folder / "calls"), *words[at:]]
    settings = os.environ | environment | {"PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(telling, cwd=folder, env=settings, check=True, timeout=LONGEST_S)
    capture = folder / "cap.parquet"
    with Hardware(folder / "gpu", "bmg") as hardware:
        options = ("-f", "-q", "-o", str(capture), "--cpu-freq", str(HZ))
        recorded = [*IAPROF, "record", *options, "--", *words]
        subprocess.run(recorded, cwd=folder, env=settings | hardware.env(), check=True, timeout=LONGEST_S)
    script = words[at]
    return compared(CaptureReader(capture), "launch" if name in LAUNCHING else "cpu_sample", script, told(folder))


def command(name: str, python: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The words of a program, and what it needs in its environment."""
    if name in ON_CPU:
        return [python, *map(str, ON_CPU[name])], {}
    settings, words = LAUNCHING[name]
    prepared = programs.prepare(folder)
    script, *more = words
    run = prepared.python(str(script), settings, *more)  # an absolute path stays what it is
    return run.started(folder)[0], run.environment | {
        "PROGRAMS_PID": str(folder / "pid"),
        "PROGRAMS_LEDGER": str(folder / "ledger"),
    }


def told(folder: Path) -> set[Pair]:
    """The calls that the program told of."""
    lines = (line for path in folder.glob("calls.*") for line in path.open())
    return {(tuple(callee), tuple(caller), line) for callee, caller, line in map(json.loads, lines)}


@dataclass(frozen=True)
class Found:
    """What a recording has of one program's processes."""

    ended: Counter[str]  # samples or launches, by how their stacks end
    with_python: Counter[bool]  # those of the main thread
    pairs: Counter[Pair]
    told: set[Pair]
    without_line: int  # frames

    def row(self, name: str) -> list[str]:
        """Of the table; prints the pairs that nobody told of."""
        others = {pair: count for pair, count in self.pairs.items() if pair not in self.told and not is_excused(pair)}
        for (callee, caller, line), count in sorted(others.items()):
            print(f"  {name}: {count} times {callee[1]} in {callee[0]}, called by {caller[1]} in {caller[0]}:{line}")
        return [
            name,
            f"{self.ended.total():,}",
            f"{100 * self.ended['whole'] / max(self.ended.total(), 1):.1f} %",
            f"{self.with_python.total():,}",
            f"{self.with_python[True]:,}",
            f"{self.pairs.total():,}",
            f"{sum(others.values()):,}",
            f"{self.without_line:,}",
        ]


def is_excused(pair: Pair) -> bool:
    """Whether nobody is told of such calls."""
    callee, caller, _ = pair
    texts = (*callee[:2], *caller[:2])
    return any(word in text for word in _NOT_TOLD for text in texts)


def compared(reader: CaptureReader, kind: str, script: str, calls: set[Pair]) -> Found:
    """Takes the frames of all processes that ran a script from a capture."""
    codes = {
        row["id"]: (row["file"], row["name"], row["first_line"]) for row in reader.table("python_code").to_pylist()
    }
    stacks = {row["id"]: row for row in reader.table("stack").to_pylist()}
    frames = {id_: list(_frames(row, codes)) for id_, row in stacks.items()}
    rows: list[dict[str, Any]] = reader.table(kind, ("pid", "tid", "stack")).to_pylist()
    pids = {row["pid"] for row in rows if any(code[0] == script for code, _ in frames.get(row["stack"], []))}
    found = Found(Counter(), Counter(), Counter(), calls, 0)
    without_line = 0
    for row in (row for row in rows if row["pid"] in pids):
        stack, own = stacks.get(row["stack"]), frames.get(row["stack"], [])
        found.ended[stack["ended"] if stack is not None else "none"] += 1
        if row["tid"] == row["pid"]:
            found.with_python[bool(own)] += 1
        found.pairs.update((callee, caller, line) for (callee, _), (caller, line) in pairwise(own))
        without_line += sum(not line for _, line in own)
    return Found(found.ended, found.with_python, found.pairs, calls, without_line)


def _frames(stack: dict[str, Any], codes: dict[int, Code]) -> Iterator[tuple[Code, int]]:
    """Code object and line of each frame of Python, the innermost first."""
    for frame in stack["python"] or []:
        yield codes.get(frame["code"], ("", "", 0)), frame["line"]


if __name__ == "__main__":
    main()
