"""Runs a kernel of taichi's ROUNDS times on its Vulkan backend: with_taichi.py ROUNDS."""

import os
import sys

import taichi as ti

ti.init(arch=ti.vulkan, offline_cache=False)
field = ti.field(ti.f32, shape=4096)


@ti.kernel  # type: ignore[untyped-decorator]
def paint(t: ti.f32):  # type: ignore[no-untyped-def]
    for i in field:
        s = 0.0
        for k in range(64):
            s += ti.sin(s + t * k + field[i])
        field[i] = s


for number in range(int(sys.argv[1])):
    paint(number * 0.1)
ti.sync()
sys.stdout.flush()
os._exit(0)  # no GPU computes: what would be waited for at the end may never come
