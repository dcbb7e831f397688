# SPDX-License-Identifier: Apache-2.0
"""Computes with dpnp (SYCL) on the one GPU that ONEAPI_DEVICE_SELECTOR leaves; runs in Python of scripts/test-programs.

Nothing is really computed there, so only calls are here that end whatever the numbers are.
With an argument, all is done twice: after the first time it makes ARGUMENT.ready and waits for ARGUMENT.
"""

import sys
import time
from pathlib import Path

import dpnp


def element_wise() -> None:
    numbers = dpnp.arange(1000, dtype=dpnp.float32)
    dpnp.sin(numbers + numbers)
    dpnp.less(numbers, 3)


def reductions() -> None:
    matrix = dpnp.ones((64, 64), dtype=dpnp.float32)
    dpnp.sum(matrix, axis=0)
    dpnp.sum(matrix)
    dpnp.argmax(matrix, axis=1)


def libraries() -> None:
    """Those of oneMKL: BLAS, which makes its kernels itself."""
    matrix = dpnp.ones((64, 64), dtype=dpnp.float32)
    for _ in range(10):
        matrix @ matrix


def sorting() -> None:
    dpnp.sort(dpnp.arange(1000, dtype=dpnp.float32))


def everything() -> None:
    element_wise()
    reductions()
    libraries()
    sorting()


def main() -> None:
    everything()
    if len(sys.argv) > 1:
        go = Path(sys.argv[1])
        Path(f"{go}.ready").touch()
        while not go.exists():
            time.sleep(0.01)
        everything()


main()
