# SPDX-License-Identifier: Apache-2.0
"""Calls functions that Numba compiles in different ways: SECONDS."""

import sys
import time

import numba
import numpy as np


@numba.njit
def smooth(a, rounds):
    for _ in range(rounds):
        for i in range(1, len(a) - 1):
            a[i] = (a[i - 1] + a[i] + a[i + 1]) / 3
    return a.sum()


@numba.njit(parallel=True)
def spread(a):
    total = 0.0
    for i in numba.prange(len(a)):
        total += np.sqrt(a[i]) * np.sin(a[i])
    return total


@numba.jit(forceobj=True)
def as_objects(words):
    total = 0
    for word in words:
        total += len(str(word))
    return total


@numba.vectorize(["float64(float64)"])
def folded(x):
    y = x
    for _ in range(50):
        y = y * 0.99 + 0.01
    return y


def step(numbers):
    smooth(numbers, 20)
    spread(numbers)
    folded(numbers)
    as_objects(["a" * 10] * 1000)


def main():
    numbers = np.random.default_rng(1).random(20_000)
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:
        step(numbers)


main()
