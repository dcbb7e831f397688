"""Makes up columns of records, right and damaged ones, and has report/join/records.c work on them under sanitizers.

join_driver.c makes them. What a sanitizer ends, or what was wrong, is told with the seed that makes it again.

    .venv/bin/python tests/fuzz/fuzz_join.py [--seconds 600] [--seed N]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "report/join/records.c"
SANITIZED = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SANITIZER = os.environ | {"UBSAN_OPTIONS": "print_stacktrace=1"}
_CASES = 20_000


def compiled(folder: Path) -> Path:
    """Compiles the driver."""
    driver = folder / "join_driver"
    sources = [SOURCE, Path(__file__).with_name("join_driver.c")]
    subprocess.run(["cc", *SANITIZED, *sources, "-o", driver], check=True)
    return driver


def run(driver: Path, seed: int, cases: int) -> tuple[int, int]:
    """Runs so many cases; returns how many calls did their work, and how many were refused.

    Raises:
        AssertionError: with what the driver or a sanitizer said.
    """
    done = subprocess.run([driver, str(seed), str(cases)], capture_output=True, text=True, env=SANITIZER)
    found = re.fullmatch(r"(\d+) calls did their work, (\d+) were refused\n", done.stdout)
    if done.returncode or found is None:
        raise AssertionError(f"cases {seed} to {seed + cases - 1}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return int(found[1]), int(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int(time.time()) * 1_000_000)
    arguments = parser.parse_args()
    end, seed, worked, refused = time.monotonic() + arguments.seconds, arguments.seed, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        driver = compiled(Path(folder))
        while time.monotonic() < end:
            try:
                found = run(driver, seed, _CASES)
            except AssertionError as error:
                sys.exit(str(error))
            worked, refused, seed = worked + found[0], refused + found[1], seed + _CASES
    print(f"{worked:,} calls did their work, {refused:,} were refused, from seed {arguments.seed} to {seed}")


if __name__ == "__main__":
    main()
