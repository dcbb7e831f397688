# SPDX-License-Identifier: Apache-2.0
"""Computes with pyopencl: its own kernels and those that pyopencl writes; runs in Python of scripts/test-programs."""

import numpy as np
import pyopencl
import pyopencl.array
from pyopencl.elementwise import ElementwiseKernel
from pyopencl.scan import GenericScanKernel

SOURCE = """
kernel void twice(global float *a) { a[get_global_id(0)] *= 2; }
kernel void a_name_that_is_longer_than_the_sixty_three_bytes_that_some_columns_have(global float *a) { a[0] = 1; }
"""


def main() -> None:
    context = pyopencl.Context(pyopencl.get_platforms()[0].get_devices())
    queue = pyopencl.CommandQueue(context)
    numbers = pyopencl.array.to_device(queue, np.arange(1000, dtype=np.float32))
    for kernel in pyopencl.Program(context, SOURCE).build(["-g"]).all_kernels():
        for _ in range(10):
            kernel(queue, numbers.shape, None, numbers.data)
    ElementwiseKernel(context, "float *x, float y", "x[i] = x[i] * y", "scale_by")(numbers, np.float32(2))
    numbers = numbers + numbers
    for reduction in (pyopencl.array.sum, pyopencl.array.max):
        reduction(numbers).get()
    pyopencl.array.dot(numbers, numbers).get()
    scan = GenericScanKernel(
        context,
        np.int32,
        arguments="__global int *a",
        input_expr="a[i]",
        scan_expr="a + b",
        neutral="0",
        output_statement="a[i] = item;",
    )
    scan(pyopencl.array.zeros(queue, 1000, dtype=np.int32))
    queue.finish()


main()
