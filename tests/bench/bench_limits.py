"""Time limits that tests name, which hold on a machine that does nothing else.

`make test` asks of these tests only that they end; here each runs by itself, and has to keep its limits: hostile files
are given up soon, nobody waits for a process that hangs, a page is drawn while one looks.

    sudo .venv/bin/python tests/bench/bench_limits.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import machine, needs_root, print_table
from limits import MEASURED

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files or tests, instead of all")
    tests = parser.parse_args().tests
    needs_root("recording")
    print(machine())
    with tempfile.NamedTemporaryFile() as measured:
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "timed", *tests]
        done = subprocess.run(words, cwd=ROOT, env=os.environ | {MEASURED: measured.name}, check=False)
        lines = [json.loads(line) for line in Path(measured.name).read_text().splitlines()]
    rows = [[line["test"].split("/")[-1], f"{line['took_s']:.3f} s", f"{line['limit_s']:g} s"] for line in lines]
    print_table("Limits of tests", ["test", "took", "limit"], rows)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
