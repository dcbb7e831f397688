# SPDX-License-Identifier: Apache-2.0
"""Launches a kernel of OpenCL through dpctl: ROUNDS."""

import sys

import dpctl
import dpctl.memory
import dpctl.program

SOURCE = "kernel void twice(global float *a) { a[get_global_id(0)] *= 2; }"


def build(queue):
    return dpctl.program.create_program_from_source(queue, SOURCE).get_sycl_kernel("twice")


def step(queue, kernel, memory):
    queue.submit(kernel, [memory], [256]).wait()


def main():
    queue = dpctl.SyclQueue()
    kernel = build(queue)
    memory = dpctl.memory.MemoryUSMDevice(1024, queue=queue)
    for _ in range(int(sys.argv[1])):
        step(queue, kernel, memory)


main()
