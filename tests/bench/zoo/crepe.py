"""CREPE: tall convolutions over frames of sound, the pitch in bins.

mctl export crepe.py --dim batch=1:64
"""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths, heights = (1, 64, 16, 16, 16, 32, 64), (512, 64, 64, 64, 64, 64)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, (height, 1), (4 if at == 0 else 1, 1))
            for at, (before, after, height) in enumerate(zip(widths, widths[1:], heights, strict=False))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width, eps=0.001) for width in widths[1:])
        self.head = nn.Linear(256, 360)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        x = frames[:, None, :, None]
        for at, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = F.pad(x, (0, 0, 254, 254) if at == 0 else (0, 0, 31, 32))
            x = F.max_pool2d(norm(F.relu(convolution(x))), (2, 1), (2, 1))
        return self.head(x.permute(0, 2, 1, 3).flatten(1)).sigmoid()


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"frames": torch.randn(3, 1024)}
