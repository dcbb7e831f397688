# SPDX-License-Identifier: Apache-2.0
"""Calls a function under torch.compile, on the CPU: SECONDS."""

import sys
import time

import torch


def shrink(x):
    return torch.sin(x) * 0.5 + torch.cos(x) * 0.5


@torch.compile
def step(x):
    for _ in range(4):
        x = shrink(x)
    return x.sum()


def main():
    x = torch.randn(1000)
    step(x)
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:
        step(x)


main()
