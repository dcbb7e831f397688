# SPDX-License-Identifier: Apache-2.0
"""Trains a small network with PyTorch, on the CPU: SECONDS [WORKERS of the DataLoader]."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inside = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.inside(self.norm(x))


class Net(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return busy(gradient) * 2


def busy(gradient):
    for _ in range(20):
        gradient = gradient * 1.0
    return gradient


def train(net, loader, optimizer, seconds):
    loss_of = nn.CrossEntropyLoss()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(Doubled.apply(net(images)), labels)
            loss.backward()
            optimizer.step()


def main():
    torch.manual_seed(1)
    torch.set_num_threads(2)
    data = TensorDataset(torch.randn(2048, 64), torch.randint(0, 10, (2048,)))
    net = Net()
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=workers)
    train(net, loader, torch.optim.AdamW(net.parameters()), float(sys.argv[1]))


if __name__ == "__main__":
    main()
