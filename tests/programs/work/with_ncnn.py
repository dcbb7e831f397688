"""Runs a net of two convolutions ROUNDS times by ncnn, on the first Vulkan device: with_ncnn.py ROUNDS."""

import os
import sys
import tempfile
from pathlib import Path

import ncnn
import numpy as np

CHANNELS, WEIGHTS = (16, 8), (3 * 16 * 9, 16 * 8 * 9)
LAYERS = f"""7767517
3 3
Input       input  0 1       image 0=64 1=64 2=3
Convolution first  1 1 image inner 0={CHANNELS[0]} 1=3 4=1 5=1 6={WEIGHTS[0]}
Convolution second 1 1 inner last  0={CHANNELS[1]} 1=3 4=1 5=1 6={WEIGHTS[1]}
"""

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "net.param").write_text(LAYERS)
    many = sum(1 + weights + bias for weights, bias in zip(WEIGHTS, CHANNELS, strict=True))  # 1: their type
    (folder / "net.bin").write_bytes(np.zeros(many, "f4").tobytes())
    net = ncnn.Net()
    net.opt.use_vulkan_compute = True
    assert net.load_param(str(folder / "net.param")) == 0
    assert net.load_model(str(folder / "net.bin")) == 0


def infer() -> None:
    extractor = net.create_extractor()
    extractor.input("image", ncnn.Mat(np.ones((3, 64, 64), "f4")))
    code, _ = extractor.extract("last")
    assert code == 0


for _ in range(int(sys.argv[1])):
    infer()
assert ncnn.get_gpu_count() == 1
os._exit(0)  # no GPU computes: what would be waited for at the end may never come
