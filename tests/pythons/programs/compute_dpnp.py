# SPDX-License-Identifier: Apache-2.0
"""Computes with dpnp on the device that ONEAPI_DEVICE_SELECTOR leaves: ROUNDS."""

import sys

import dpnp


def normalized(matrix):
    return (matrix - dpnp.mean(matrix, axis=0)) / (dpnp.std(matrix, axis=0) + 1)


def step(matrix, weights):
    hidden = dpnp.tanh(normalized(matrix) @ weights)
    return dpnp.sum(hidden * hidden)


def main():
    matrix, weights = (dpnp.ones((64, 64), dtype=dpnp.float32) for _ in range(2))
    for _ in range(int(sys.argv[1])):
        step(matrix, weights)
        dpnp.sort(dpnp.arange(1000, dtype=dpnp.float32))


main()
