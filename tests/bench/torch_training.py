"""Trains a small transformer: torch_training.py BRIDGE ELF KERNEL STEPS prints launches, seconds and CPU seconds."""
# mypy: ignore-errors

import ctypes
import sys
import time

import torch
from torch import nn

WIDTH, HEADS, LAYERS, WORDS = 128, 4, 6, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.rest = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.rest(self.behind(x))


def main() -> None:
    bridge = ctypes.CDLL(sys.argv[1])
    bridge.bridge_launches.restype = ctypes.c_long
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, WORDS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, WORDS, (8, 64))
    assert bridge.bridge_start(sys.argv[2].encode(), sys.argv[3].encode()) == 0
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(int(sys.argv[4])):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    print(bridge.bridge_launches(), time.perf_counter() - begin, time.process_time() - cpu, flush=True)


main()
