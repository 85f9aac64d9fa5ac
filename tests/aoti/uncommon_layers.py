"""Layers that torch's compiler fixes to the example's size, or does not compile, and outputs that parity has to judge
with care: integers made from floats, a size that is a fraction.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Uncommon(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sigma = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "average": F.adaptive_avg_pool2d(x.exp(), 3),
            "largest": F.adaptive_max_pool2d(x, (2, 3)),
            "gated": F.glu(x, 2),
            "bell": torch.exp(-x / (2 * self.sigma**2)),
            "wider": F.interpolate(x, scale_factor=1.5, mode="nearest"),
            "pixels": (x * 640 / 3).round().to(torch.int32),
        }


model = Uncommon
example_inputs = {"x": torch.randn(2, 3, 10, 14)}
