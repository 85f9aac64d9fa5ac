"""A small classifier: three linear layers and class probabilities.

mctl export samples/mlp.py --dim batch=1:64
"""

import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10), nn.Softmax(dim=-1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


model = Mlp


def example_inputs() -> tuple[torch.Tensor]:
    return (torch.randn(8, 128),)
