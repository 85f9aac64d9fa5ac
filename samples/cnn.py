"""A small residual network on images of any size: convolutions, batch norm with real statistics, a feature map.

mctl export samples/cnn.py --dim batch=1:8 --dim height=16:96@image:2 --dim width=16:96@image:3
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut; `stride` 2 halves height and width."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.norms[2](self.shortcut(x)))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.blocks(image)
        return {"logits": self.head(features.mean(dim=(2, 3))), "features": features}


def model() -> nn.Module:
    """Statistics as after training: a fresh batch norm has means of 0 and variances of 1, which would hide mistakes."""
    net = Cnn()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(std=0.2)
            norm.running_var.uniform_(0.5, 2)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    return net


def example_inputs() -> tuple[torch.Tensor]:
    return (torch.rand(2, 3, 32, 48),)
