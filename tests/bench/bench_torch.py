"""What recording costs a program that trains with PyTorch, whose operators launch from the first moment on.

Needs a Python with PyTorch, also for the CPU only, with its headers. Each operator launches a kernel of the stand-in.
By turns, the program runs without a recorder and with one; the CPU time that it takes gives what a launch costs.

    sudo .venv/bin/python tests/bench/bench_torch.py PYTHON [--pairs 5] [--steps 20]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import machine, needs_root, print_table
from iaprof.formats.capture.reader import CaptureReader
from standin import runtime
from standin.hardware import Hardware

HERE = Path(__file__).resolve().parent
KERNEL, LEAST_WHOLE, MOST_ADDED_US = "multiply_basic", 0.999, 3.0


def bridge(python: str, folder: Path) -> Path:
    """Compiles torch_bridge.cpp for this PyTorch."""
    asked = "import torch.utils.cpp_extension as e; print(*e.include_paths(), *e.library_paths(), sep='\\n')"
    *includes, libraries = subprocess.run(
        [python, "-c", asked], capture_output=True, text=True, check=True
    ).stdout.split()
    linked, library = runtime.build().library, folder / "libtorch_bridge.so"
    words = ["c++", "-O2", "-std=c++20", "-fPIC", "-shared", HERE / "torch_bridge.cpp", "-o", library]
    words += [f"-I{folder}" for folder in (*includes, runtime.SOURCES)]
    words += [
        linked,
        f"-Wl,-rpath,{linked.parent}",
        f"-L{libraries}",
        "-lc10",
        "-ltorch_cpu",
        f"-Wl,-rpath,{libraries}",
    ]
    subprocess.run([*map(str, words)], check=True)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", metavar="PYTHON", nargs="?", help="a Python that has PyTorch")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.python is None:
        print("left out: name a Python that has PyTorch")
        return
    needs_root("recording")
    print(machine())
    rows, added, worst = [], [], 1.0
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-") as name, Hardware(Path(name) / "gpu") as hardware:
        folder = Path(name)
        told = [bridge(arguments.python, folder), runtime.debug_elf("bmg", "matmul"), KERNEL, arguments.steps]
        command = [arguments.python, str(HERE / "torch_training.py"), *map(str, told)]
        plain = {name: value for name, value in os.environ.items() if name not in hardware.env()}
        for _ in range(arguments.pairs):
            launches, _, alone, _ = trained(command, plain)
            capture = folder / "cap.parquet"
            words = [sys.executable, "-m", "iaprof", "record", "-f", "-o", str(capture), "--cpu-freq", "0", "--"]
            without = ["env", *(f"--unset={each}" for each in hardware.env())]
            _, _, recorded, told_at_end = trained([*words, *without, *command], os.environ | hardware.env())
            header = CaptureReader(capture).header
            whole, cost = header["stack_ends"]["launches"]["whole"] / launches, header["cost"]
            seconds = (header["end_ns"] - header["command_pid"][1]) / 1e9
            added.append(1e6 * (recorded - alone) / launches)
            worst = min(worst, whole)
            if whole < LEAST_WHOLE:
                print(told_at_end, file=sys.stderr)
            rows.append(
                [
                    f"{launches:,.0f}", f"{whole:.3%}", f"{added[-1]:.1f}", f"{cost['probe_ns'] / launches / 1e3:.1f}",
                    f"{cost['cpu_s']:.2f}", f"{cost['cpu_s'] / seconds:.1%}", f"{cost['learn_cpu_s']:.2f}",
                    f"{cost['finish_cpu_s']:.1f}",
                    f"{cost['spool_bytes'] / 1e6:.0f}", f"{cost['finish_peak_bytes'] / 1e6:.0f}",
                ]
            )  # fmt: skip
    heads = [
        "launches",
        "whole",
        "us added",
        "us in BPF",
        "recorder s",
        "of a core",
        "learner s",
        "finishing s",
        "spool MB",
        "peak MB",
    ]
    print_table("CPU time that a launch takes longer, and the recorder's own", heads, rows)
    median = statistics.median(added)
    print(f"\n  median of what is added: {median:.1f} us a launch")
    if worst < LEAST_WHOLE or median > MOST_ADDED_US:
        sys.exit(
            f"less than {LEAST_WHOLE:.1%} of the stacks are whole, or a launch takes {MOST_ADDED_US} us longer or more"
        )


def trained(command: list[str], environment: dict[str, str]) -> tuple[float, float, float, str]:
    """Runs the program; gives launches, seconds, CPU seconds, and what it and the recorder say."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    launches, seconds, cpu = map(float, done.stdout.split())
    return launches, seconds, cpu, done.stderr


if __name__ == "__main__":
    main()
