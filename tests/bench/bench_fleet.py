"""How long many captures take to report, and how much memory: 100, 1,000 and 10,000 of 10,000 stall records each.

The captures are made here (made_fleets.py): five programs on 40 hosts. The first pass makes a page of captures whose
profiles are not kept yet; the second one makes it again; the third asks another question.

    .venv/bin/python tests/bench/bench_fleet.py [--captures 100,1000,10000] [--records 10000] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.made_fleets import write_fleet
from bench.measuring import IAPROF, Ended, machine, print_table, scaled, wait_for

MAKERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captures", default="100,1000,10000", help="how many")
    parser.add_argument("--records", type=int, default=10_000, help="stall records of each")
    parser.add_argument("--folder", type=Path, help="make the captures there, if they are not, and leave them")
    arguments = parser.parse_args()
    print(machine())
    rows = []
    with made(arguments.folder) as folder:
        before = 0
        for number in map(int, arguments.captures.split(",")):
            make(folder, range(before, number), arguments.records)
            before = number
            rows += measure(folder, number)
    heads = ["captures", "pass", "takes", "CPU", "captures/s", "largest process", "profiles", "output"]
    print_table(f"iaprof report and top of captures of {arguments.records:,} records", heads, rows)


@contextlib.contextmanager
def made(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-", dir="/var/tmp") as name:
        yield Path(name)


def make(folder: Path, captures: range, records: int) -> None:
    """Writes the captures that are not there yet, in processes of their own."""
    context = multiprocessing.get_context("spawn")
    shares = [captures[maker::MAKERS] for maker in range(MAKERS)]
    makers = [context.Process(target=write_fleet, args=(folder / "captures", share, records)) for share in shares]
    for process in makers:
        process.start()
    for process in makers:
        process.join()
        if process.exitcode != 0:
            sys.exit("the captures could not be made")


def measure(folder: Path, number: int) -> list[list[str]]:
    cache, page = folder / f"profiles-{number}", folder / "page.html"
    captures = folder / "captures"
    report: list[str | Path] = ["report", captures, f"--cache={cache}", "-f", "-o", page]
    rows = []
    for name, words in (
        ("first", report),
        ("second", report),
        ("other question", ["top", captures, f"--cache={cache}", "--group-by=host", "-n", "5"]),
    ):
        ended, largest = watched([*IAPROF, *words], folder / "errors")
        if ended.code != 0:
            sys.exit(f"iaprof ended with {ended.code}: {(folder / 'errors').read_text()}")
        kept = sum(path.stat().st_size for path in cache.rglob("*.parquet"))
        output = scaled(page.stat().st_size) if words is report else ""
        pace = number / ended.wall_s
        spent = [f"{ended.wall_s:.1f} s", f"{ended.cpu_s:.1f} s", f"{pace:,.0f}"]
        rows.append([f"{number:,}", name, *spent, scaled(largest), scaled(kept), output])
        print(*rows[-1], file=sys.stderr, flush=True)  # the table comes at the end, hours later on a busy machine
    return rows


def watched(command: list[str | Path], errors: Path) -> tuple[Ended, int]:
    """Runs a command; returns what it used, and the most memory of any of its processes, which are watched."""
    started = time.monotonic()
    with errors.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file)
    stopped, seen = threading.Event(), [0]

    def watch() -> None:
        while not stopped.wait(0.1):
            seen.append(max(map(_peak, _family(process.pid)), default=0))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    ended = wait_for(process, started)
    stopped.set()
    watcher.join()
    return ended, max(*seen, ended.peak_bytes)


def _family(pid: int) -> list[int]:
    try:
        children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    except OSError:
        return []
    return [pid, *(member for child in children for member in _family(child))]


def _peak(pid: int) -> int:
    """The most memory that a process had so far, bytes."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024 if "VmHWM:" in text else 0


if __name__ == "__main__":
    main()
