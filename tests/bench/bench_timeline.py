"""What `iaprof import` and `iaprof timeline` cost: CPU seconds of all processes, time and memory.

Makes traces of the AIU's runtime (ten files, with a compiler's log) and of PyTorch (one file). "at once" is `iaprof
timeline` of the traces themselves, which imports them. With --reference, IBM's AIU Trace Analyzer reads the same files,
by turns with iaprof; those of PyTorch with its profile for them, whose stages iaprof then runs, too: "its stages". A
small trace comes first, for Python to compile modules, as an installation does. Memory is the proportional shares (Pss)
of a command and all processes that it started, added up ten times a second.

    .venv/bin/python tests/bench/bench_timeline.py [EVENTS] [--times 3] [--of flex|torch]
    .venv/bin/python tests/bench/bench_timeline.py 100000 --reference FOLDER --python PYTHON3.12
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import IAPROF, Memory, machine, print_table, wait_for

FILES, KERNELS, BATCH, FEW = 10, 400, 1000, 1000
TORCH_PROFILE = Path("src/aiu_trace_analyzer/profiles/torch_minimal.json")  # in its repository
WINDOWS = (
    (" DmaI", 0, 10_000),
    (" Cmpt Prep", 10_000, 30_000),
    (" Cmpt Exec", 30_000, 80_000),
    (" DmaO", 80_000, 85_000),
)
HOST = ("ScheduleCompute", "PrepareDmas", "LaunchKernels")
Event = dict[str, Any]


@dataclass(frozen=True)
class Made:
    """Traces."""

    paths: list[Path]
    log: Path | None
    dialect: str

    @property
    def size(self) -> int:
        """Their bytes."""
        return sum(path.stat().st_size for path in self.paths)


def flex(folder: Path, events: int) -> Made:
    """Jobs of the AIU's runtime: operations of four device slices and a host slice each, on one rank."""
    paths = []
    for job in range(FILES):
        paths.append(folder / f"rank_0-of_1-job-{job}.json")
        _write(paths[-1], _job(job, events // FILES), "[", "]")
    log = folder / "compile.log"
    lines = "".join(f"mm_{each}-opCatBmm_fp16 {20_000 + each}\n" for each in range(KERNELS))
    log.write_text(f"~~~~ Ideal/Total Cycles ~~~~\n{lines}====== Perf Summary End ======\n")
    return Made(paths, log, "flex")


def _job(job: int, events: int) -> Iterator[Event]:
    chosen = random.Random(job)
    operations = max(events // 5, 1)
    begin = 1.7e12 + job * (operations * 100.0 + 1000)
    cycle = 1_000_000 + job * (operations * 100_000 + 1_000_000)
    where = {"pid": 0, "tid": 9}
    yield {"name": "AIU Roundtrip", "ph": "X", **where, "ts": begin, "dur": operations * 100.0 + 10}
    for number in range(operations):
        ts, first = begin + 5 + 100 * number, cycle + 100_000 * number
        counters = [(first + offset) % 2**32 for offset in (0, 10_000, 30_000, 80_000, 85_000)]
        args = {f"TS{place}": str(value) for place, value in enumerate(counters, 1)}
        args["Power"] = hex((first * 11) % 2**32)
        for suffix, low, high in WINDOWS:
            jitter = chosen.randrange(300)
            yield {"name": f"mm_{number % KERNELS}{suffix}", "ph": "X", "pid": 0, "tid": 71 + number % 4,
                   "ts": round(ts + (low - jitter) / 1000, 3), "dur": round((high - low + jitter) / 1000, 3),
                   "args": args}  # fmt: skip
        name = "Flex RoundTrip" if number % BATCH == 0 else f"{chosen.choice(HOST)} {number % 50}"
        yield {"name": name, "ph": "X", **where, "ts": round(ts + 1, 3), "dur": 60.5, "args": {"size": number % 4096}}


def torch(folder: Path, events: int) -> Made:
    """A trace of PyTorch's profiler: operators, each with its launch, its kernel and a flow between them."""
    path = folder / "trace.pt.trace.json"
    start = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "AIU"}]}
    start |= {"distributedInfo": {"rank": 0, "world_size": 1}}
    _write(path, _operators(events), json.dumps(start)[:-1] + ', "traceEvents": [', "]}")
    return Made([path], None, "torch")


def _operators(events: int) -> Iterator[Event]:
    chosen = random.Random(1)
    host, device = {"pid": 4000, "tid": 4000}, {"pid": 0, "tid": 7}
    for number in range(1, max(events // 5, 1) + 1):
        ts = 4824381735614.123 + 25.125 * number
        shapes = {"Input type": ["float", "float", ""], "Input Dims": [[chosen.randrange(64), 4096], [4096, 4096], []]}
        flow = {"id": number, "cat": "ac2g", "name": "ac2g"}
        kernel = {"External id": number, "device": 0, "stream": 7, "correlation": number, "grid": [52, 1, 1],
                  "block": [128, 1, 1], "blocks per SM": 0.481481, "registers per thread": 32}  # fmt: skip
        yield {"ph": "X", "cat": "cpu_op", "name": f"aten::op{chosen.randrange(100)}", **host, "ts": round(ts, 3),
               "dur": 20.5, "args": {"External id": number, **shapes}}  # fmt: skip
        yield {"ph": "X", "cat": "privateuse1_runtime", "name": "aiuLaunchSuperNode", **host, "ts": round(ts + 3, 3),
               "dur": 3.125, "args": {"External id": number, "cbid": 211, "correlation": number}}  # fmt: skip
        yield {"ph": "s", **flow, **host, "ts": round(ts + 3, 3)}
        yield {"ph": "X", "cat": "kernel", "name": f"kernel_{chosen.randrange(300)}", **device,
               "ts": round(ts + 9, 3), "dur": round(5 * chosen.random(), 3), "args": kernel}  # fmt: skip
        yield {"ph": "f", "bp": "e", **flow, **device, "ts": round(ts + 9, 3)}


def _write(path: Path, events: Iterator[Event], start: str, end: str) -> None:
    encode = json.JSONEncoder(separators=(",", ":")).encode
    with path.open("w") as file:
        for number, event in enumerate(events):
            file.write(f"{',' if number else start}\n{encode(event)}")
        file.write(f"\n{end}\n")


@dataclass(frozen=True)
class Cost:
    """What a command cost."""

    wall_s: float
    cpu_s: float  # of its children, too
    peak_bytes: int
    written: int  # bytes

    def row(self) -> list[str]:
        """Returns it as cells."""
        sizes = (f"{self.peak_bytes / 2**20:,.0f} MiB", f"{self.written / 1e6:,.0f} MB")
        return [f"{self.wall_s:.2f} s", f"{self.cpu_s:.2f} s", *sizes]


def measured(command: Sequence[str], output: Path, env: dict[str, str] | None = None) -> Cost:
    """Runs a command, which writes a file or into a folder."""
    begun = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | (env or {}),
    )
    memory = Memory(process.pid)
    memory.start()
    assert process.stderr is not None
    said = process.stderr.read().decode(errors="replace")
    ended = wait_for(process, begun)
    memory.stop()
    if ended.code:
        sys.exit(f"{' '.join(command[:5])} ... ended with {ended.code}:\n{said[-2000:]}")
    files = [each for each in output.rglob("*") if each.is_file()] if output.is_dir() else [output]
    peak = max(memory.most(), ended.peak_bytes)
    return Cost(ended.wall_s, ended.cpu_s, peak, sum(each.stat().st_size for each in files))


def ours(made: Made, folder: Path, memory_limit: str, profile: Path | None = None) -> dict[str, Cost]:
    """Runs iaprof; with a profile of the reference, also the stages that it names."""
    capture, output = folder / "run.parquet", folder / "out"
    shutil.rmtree(output, ignore_errors=True)
    log = ["-c", str(made.log)] if made.log else []
    costs = {"import": measured([*IAPROF, "import", *map(str, made.paths), "-fqo", str(capture)], capture)}
    options = ["-qfo", str(output), *log, "--memory-limit", memory_limit]
    costs["timeline -o"] = measured([*IAPROF, "timeline", str(capture), *options], output)
    first, second = costs.values()
    both = max(first.peak_bytes, second.peak_bytes)
    written = first.written + second.written
    costs["both"] = Cost(first.wall_s + second.wall_s, first.cpu_s + second.cpu_s, both, written)
    at_once = [*IAPROF, "timeline", *map(str, made.paths), *options]
    costs["at once"] = measured(at_once, output)
    if profile is not None:
        costs["its stages"] = measured([*at_once, "-P", str(profile)], output)
    return costs


def theirs(made: Made, folder: Path, reference: Path, python: str) -> Cost:
    """Runs the reference."""
    output = folder / "reference"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    log = ["-c", str(made.log)] if made.log else ["-P", TORCH_PROFILE.name]
    command = [python, "-m", "acelyzer.acelyzer", "-i", ",".join(map(str, made.paths)), "-o", str(output / "t.json")]
    return measured([*command, *log], output, {"PYTHONPATH": str(reference / "src")})


def median(costs: Sequence[Cost]) -> Cost:
    """The median of each of the figures."""
    wall, cpu = (statistics.median(getattr(each, name) for each in costs) for name in ("wall_s", "cpu_s"))
    return Cost(wall, cpu, max(each.peak_bytes for each in costs), costs[-1].written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", nargs="?", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--of", choices=("flex", "torch"), help="only these traces")
    parser.add_argument("--reference", type=Path, help="the folder of the AIU Trace Analyzer's repository")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs it")
    parser.add_argument("--memory-limit", default="2G", help="of iaprof timeline")
    parser.add_argument("--folder", type=Path, help="where files are made, and kept")
    arguments = parser.parse_args()
    print(machine())
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    makers: dict[str, Callable[[Path, int], Made]] = {"flex": flex, "torch": torch}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        for name, make in makers.items():
            if arguments.of not in (None, name):
                continue
            folder = Path(temporary) / name
            folder.mkdir()
            ours(make(folder, FEW), folder, arguments.memory_limit)
            made = make(folder, arguments.events)
            profile = arguments.reference / TORCH_PROFILE if arguments.reference and not made.log else None
            costs: dict[str, list[Cost]] = {}
            for _ in range(arguments.times):
                for part, cost in ours(made, folder, arguments.memory_limit, profile).items():
                    costs.setdefault(part, []).append(cost)
                if arguments.reference:
                    cost = theirs(made, folder, arguments.reference.resolve(), arguments.python)
                    costs.setdefault("the reference", []).append(cost)
            medians = {part: median(each) for part, each in costs.items()}
            title = f"{name}: {arguments.events:,} events, {len(made.paths)} files, {made.size / 1e6:,.0f} MB"
            rows = [[part, *cost.row()] for part, cost in medians.items()]
            print_table(title, ["", "time", "CPU", "memory", "written"], rows)
            if theirs_took := medians.pop("the reference", None):
                for part, cost in [*medians.items()][2:]:  # those that read the traces and write all
                    time_, cpu = theirs_took.wall_s / cost.wall_s, theirs_took.cpu_s / cost.cpu_s
                    print(f"  the reference takes {time_:.1f} times the time of {part!r}, {cpu:.1f} times its CPU")
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
