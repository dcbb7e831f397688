"""Damaged captures and spools through `iaprof report` and `recover`, for a while: never a traceback, never a crash.

    sudo .venv/bin/python tests/soak/soak_captures.py [SECONDS] [--seed N] [--keep FOLDER]

The whole files come from one recording on the stand-in's hardware. Some are damaged as files, byte by byte, others in
what they say: a capture's rows and header, a spool's frames. Each command runs in a process of its own with limits of
time and memory. A failed case leaves its file in the folder of `--keep` and ends the script with 1.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import random
import re
import resource
import select
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow as pa

import iaprof.record.capture.finish
import iaprof.report.profile  # noqa: F401 - with the one before: imported here once, and not by each command
from bench.measuring import Recorder, machine, needs_root, print_table, scaled
from iaprof.cli.main import main as iaprof_command
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.formats.writers.registry import WRITERS
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from soak.mutation import chance, mutate, odd_number
from standin import runtime
from standin.hardware import Hardware

LONGEST_S = 60.0
MEMORY_BYTES = 6 << 30  # of address space, pyarrow's reservations included
MUCH_MEMORY = 1 << 30  # resident; more is told
SLOW_S = 10.0
MOST_ROWS_CHANGED = 6
WITH_MODULES = 0.2  # of the cases; naming GPU instructions takes more time than all the rest, and has a soak of its own


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int  # exit code, or minus the signal
    said: str
    took_s: float
    peak_bytes: int

    @property
    def failure(self) -> str:
        """Why that is not as it should be; empty when it is."""
        if "Traceback" in self.said:
            return "a traceback"
        if self.status not in (0, 1):
            return f"it took longer than {LONGEST_S:g} s" if self.status == -signal.SIGKILL else f"ended {self.status}"
        if self.status == 1 and (self.said.count("iaprof: ") < 1 or len(self.said) > 4000):
            return "no sentence that says why"
        return ""


@dataclass(frozen=True)
class Originals:
    """What is damaged."""

    capture: bytes
    spool: bytes
    header: dict[str, Any]
    rows: dict[str, list[dict[str, Any]]]
    frames: list[Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, nargs="?", default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "iaprof-soak")
    arguments = parser.parse_args()
    needs_root("recording what is then damaged")
    print(machine(), flush=True)
    said: collections.Counter[str] = collections.Counter()
    failures = cases = 0
    slowest, largest = (0.0, 0), (0, 0)
    with tempfile.TemporaryDirectory(prefix="iaprof-soak-") as name:
        folder = Path(name)
        whole = record(folder)
        light = without_modules(whole, folder)
        end = time.monotonic() + arguments.seconds
        while time.monotonic() < end:
            rng = chance(arguments.seed, cases)
            what, file = damaged(whole if rng.random() < WITH_MODULES else light, rng, folder)
            for words in commands(file, rng):
                outcome = run(words, folder)
                said[f"{words[0]}, {what}: {kind(outcome)}"] += 1
                slowest = max(slowest, (outcome.took_s, cases))
                largest = max(largest, (outcome.peak_bytes, cases))
                odd = outcome.took_s > SLOW_S or outcome.peak_bytes > MUCH_MEMORY
                if outcome.failure or odd:
                    failures += bool(outcome.failure)
                    arguments.keep.mkdir(exist_ok=True)
                    kept = arguments.keep / f"{arguments.seed}-{cases}-{file.name}"
                    kept.write_bytes(file.read_bytes())
                    why = outcome.failure or f"{outcome.took_s:.1f} s, {scaled(outcome.peak_bytes)}"
                    print(f"{kept} ({what}), iaprof {words[0]}: {why}\n{outcome.said[-3000:]}", flush=True)
                if outcome.status != 0:
                    break
            cases += 1
    rows = [[kind_, f"{count:,}"] for kind_, count in said.most_common(24)]
    print_table(f"{cases:,} damaged files, seed {arguments.seed}", ["command, file: what came of it", "times"], rows)
    print(f"\n  slowest: {slowest[0]:.2f} s (case {slowest[1]}); most memory: {scaled(largest[0])} (case {largest[1]})")
    print(f"  failures: {failures}")
    return 1 if failures else 0


def record(folder: Path) -> Originals:
    """One second of the stand-in's hardware, and a spool as a killed recorder leaves it."""
    elfs = [runtime.debug_elf("bmg", "matmul"), runtime.debug_elf("bmg", "attention")]
    capture = folder / "whole.parquet"
    spool = folder / "whole.parquet.spool"
    with Hardware(folder / "gpu") as hardware:
        for stops in (True, False):
            with Recorder(hardware, capture) as recorder:
                words = runtime.command(elfs, "--seconds", 0.7, "--threads", 2, "--rate", 200)
                env = os.environ | {"STANDIN_DIR": str(hardware.folder)}
                with open(os.devnull, "wb") as nowhere:
                    pid = os.posix_spawn(
                        words[0], words, env, file_actions=[(os.POSIX_SPAWN_DUP2, nowhere.fileno(), 1)]
                    )
                os.waitpid(pid, 0)
                time.sleep(0.2)
                if stops:
                    recorder.stop()
    spool_bytes = spool.read_bytes()
    reader = CaptureReader(capture)
    rows = {kind: reader.table(kind).to_pylist() for kind in KINDS}
    spool_reader = SpoolReader(spool)
    frames = list(spool_reader.frames())
    spool_reader.close()
    return Originals(capture.read_bytes(), spool_bytes, reader.header, rows, frames)


def without_modules(whole: Originals, folder: Path) -> Originals:
    """The same, but for the debug ELFs."""
    rows = whole.rows | {"kernel": []}
    frames = [frame for frame in whole.frames if frame.kind != FrameKind.KERNEL]
    capture, spool = folder / "light.parquet", folder / "light.spool"
    with capture.open("wb") as file:
        writer = CaptureWriter(file)
        for name, kind_rows in rows.items():
            writer.write(name, pa.array(kind_rows, KINDS[name]))
        writer.close(whole.header)
    written = Spool(spool)
    for frame in frames:
        places = {"time": frame.time, "begin": frame.begin, "source": frame.source, "shape": frame.shape}
        written.write(frame.kind, frame.payload, **places)
    written.close()
    return Originals(capture.read_bytes(), spool.read_bytes(), whole.header, rows, frames)


def damaged(originals: Originals, rng: random.Random, folder: Path) -> tuple[str, Path]:
    """Makes one damaged file."""
    capture, spool = folder / "case.parquet", folder / "case.spool"
    for path in (capture, spool):
        path.unlink(missing_ok=True)
    which = rng.randrange(4)
    if which == 0:
        capture.write_bytes(mutate(originals.capture, rng, [originals.spool]))
        return "bytes of a capture", capture
    if which == 1:
        spool.write_bytes(mutate(originals.spool, rng, [originals.capture]))
        return "bytes of a spool", spool
    if which == 2:
        write_changed_capture(originals, rng, capture)
        return "rows of a capture", capture
    write_changed_spool(originals, rng, spool)
    return "frames of a spool", spool


def write_changed_capture(originals: Originals, rng: random.Random, path: Path) -> None:
    """A sound Parquet file that says other things."""
    header = change(originals.header, rng) if rng.random() < 0.5 else originals.header
    with path.open("wb") as file:
        writer = CaptureWriter(file)
        for kind_ in rng.sample(sorted(KINDS), len(KINDS)):
            rows = [dict(row) for row in originals.rows[kind_]]
            if rng.random() < 0.1:
                rows = rows[: rng.randint(0, 2)]
            for _ in range(rng.randint(0, MOST_ROWS_CHANGED)):
                if rows:
                    row = rng.choice(rows)
                    field = KINDS[kind_].field(rng.randrange(KINDS[kind_].num_fields))
                    row[field.name] = other_value(field.type, row[field.name], rng)
            with contextlib.suppress(pa.ArrowException, OverflowError):
                writer.write(kind_, pa.array(rows, KINDS[kind_]))
        writer.close(header if isinstance(header, dict) else originals.header)


def other_value(type_: Any, value: Any, rng: random.Random) -> Any:
    """Another value of a column's type."""
    if rng.random() < 0.03:
        return None
    if pa.types.is_integer(type_):
        return odd_number(rng) & ((1 << type_.bit_width) - 1)
    if pa.types.is_list(type_):
        values = list(value or [])
        if rng.random() < 0.3:
            return values[: rng.randint(0, len(values))] * rng.randint(0, 3)
        for _ in range(rng.randint(1, 50)):
            if values:
                values[rng.randrange(len(values))] = odd_number(rng)
        return values
    if pa.types.is_string(type_):
        return rng.choice(
            ("", "\0", "a;b c\n\x1b[2J", "../../etc/passwd", "/proc/self/mem", "/dev/zero", "\u202e" * 300)
        )
    if pa.types.is_binary(type_):
        return mutate(value or b"\x7fELF", rng)
    return float(odd_number(rng)) if pa.types.is_floating(type_) else value


def change(value: Any, rng: random.Random) -> Any:
    """JSON of which one thing is different."""
    if rng.random() < 0.15 or not isinstance(value, dict | list) or not value:
        strange: list[Any] = [None, True, -1, odd_number(rng), 1e308, "", "\x1b[2J", [], {}, [[]], "xe3p", "pvc"]
        return rng.choice(strange)
    if isinstance(value, list):
        index = rng.randrange(len(value))
        return [change(item, rng) if number == index else item for number, item in enumerate(value)]
    key = rng.choice(sorted(value))
    if rng.random() < 0.1:
        return {name: item for name, item in value.items() if name != key}
    return {name: change(item, rng) if name == key else item for name, item in value.items()}


def write_changed_spool(originals: Originals, rng: random.Random, path: Path) -> None:
    """A spool whose frames have sound checksums and are wrong."""
    frames = list(originals.frames)
    for _ in range(rng.randint(0, 3)):
        where = rng.randrange(len(frames))
        match rng.randrange(3):
            case 0:
                del frames[where]
            case 1:
                frames.insert(where, rng.choice(frames))
            case _:
                frames.insert(rng.randrange(len(frames)), frames.pop(where))
    chosen = {rng.randrange(len(frames)) for _ in range(rng.randint(1, 5))}
    spool = Spool(path)
    for number, frame in enumerate(frames):
        kind_, payload, time_, begin, source, shape = (
            *(frame.kind, frame.payload, frame.time, frame.begin, frame.source, frame.shape),
        )
        if number in chosen:
            match rng.randrange(6):
                case 0:
                    kind_ = rng.choice(list(FrameKind))
                case 1:
                    time_, begin = odd_number(rng), odd_number(rng)
                case 2:
                    source = odd_number(rng) & 0xFFFF
                case 3:
                    shape = odd_number(rng) & 0xFFFF_FFFF
                case _:
                    payload = mutate(payload, rng) if payload else rng.randbytes(40)
        spool.write(kind_, payload, time=time_, begin=begin, source=source, shape=shape)
    spool.close()


def commands(file: Path, rng: random.Random) -> list[list[str]]:
    """What is done with it."""
    format_ = rng.choice(sorted(WRITERS))
    if file.suffix == ".spool":
        saved = str(file.with_suffix(".saved"))
        recover = ["recover", "--force", "-o", saved, str(file)]
        return [recover, ["report", "--force", f"--format={format_}", "-o", saved + ".txt", saved]]
    return [["report", "--force", f"--format={format_}", "-o", str(file) + ".txt", str(file)]]


def run(words: list[str], folder: Path) -> Outcome:
    """The command in a fork of this process, which has imported what takes long; within limits."""
    errors = folder / "errors"
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_command(words, errors)
    # A process's descriptor is readable when it has ended.
    with contextlib.closing(os.fdopen(os.pidfd_open(child), "rb", buffering=0)) as ended:
        if not select.select([ended], [], [], LONGEST_S)[0]:
            os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    said = errors.read_text(errors="backslashreplace")
    return Outcome(os.waitstatus_to_exitcode(status), said, time.monotonic() - began, usage.ru_maxrss * 1024)


def _be_command(words: list[str], errors: Path) -> NoReturn:
    status = 70
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        fd = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, 2)
        sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", buffering=0), write_through=True)
        sys.argv = ["iaprof", *words]
        try:
            iaprof_command()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:  # noqa: BLE001 - as the interpreter does at its end
            import traceback

            traceback.print_exc()
            status = 1
    finally:
        os._exit(status)


def kind(outcome: Outcome) -> str:
    """What was said, without names and numbers."""
    if outcome.failure:
        return f"FAILED, {outcome.failure}"
    if outcome.status == 0:
        return "done with a warning" if "warning" in outcome.said else "done"
    line = re.sub(r"/\S+", "FILE", outcome.said.splitlines()[-1])
    return re.sub(r"\d+|'.*?'", "#", line)[:70]


if __name__ == "__main__":
    sys.exit(main())
