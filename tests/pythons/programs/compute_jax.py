# SPDX-License-Identifier: Apache-2.0
"""Calls functions under jax.jit, with a callback among them, and operators by themselves, on the CPU: SECONDS."""

import sys
import time

import jax
import jax.numpy as jnp


def predict(params, x):
    for weights, bias in params:
        x = jnp.tanh(x @ weights + bias)
    return x


def loss(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


@jax.jit
def update(params, x, y):
    gradients = jax.grad(loss)(params, x, y)
    return [(w - 0.01 * dw, b - 0.01 * db) for (w, b), (dw, db) in zip(params, gradients, strict=True)]


def host(x):
    for _ in range(1000):
        x = x + 0.0
    return x


@jax.jit
def with_callback(x):
    return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2


def eager(x):
    return jnp.sum(jnp.sin(x) + jnp.cos(x))


def main():
    key = jax.random.PRNGKey(0)
    sizes = [(64, 128), (128, 128), (128, 8)]
    params = [(jax.random.normal(key, size) * 0.1, jnp.zeros(size[1])) for size in sizes]
    x, y = jnp.ones((256, 64)), jnp.zeros((256, 8))
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:
        for _ in range(20):
            params = update(params, x, y)
        eager(x)
        with_callback(x).block_until_ready()


main()
