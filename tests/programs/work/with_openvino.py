# SPDX-License-Identifier: Apache-2.0
"""Compiles a small network for OpenVINO's GPU plugin and runs it 20 times; runs in Python of scripts/test-programs."""

import numpy as np
import openvino
from openvino import opset13


def network() -> openvino.Model:
    image = opset13.parameter([1, 3, 32, 32], np.float32, name="image")
    weights = opset13.constant(np.ones((8, 3, 3, 3), np.float32))
    layer = opset13.relu(opset13.convolution(image, weights, [1, 1], [1, 1], [1, 1], [1, 1]))
    layer = opset13.reduce_mean(layer, opset13.constant(np.array([2, 3])), False)
    layer = opset13.matmul(layer, opset13.constant(np.ones((8, 4), np.float32)), False, False)
    return openvino.Model([opset13.softmax(layer, 1)], [image], "network")


def main() -> None:
    request = openvino.Core().compile_model(network(), "GPU").create_infer_request()
    for _ in range(20):
        request.infer({0: np.ones((1, 3, 32, 32), np.float32)})


main()
