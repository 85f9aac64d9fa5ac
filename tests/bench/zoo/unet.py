"""A U-Net as for diffusion: one step's noise, by image and time.

mctl export unet.py --dim batch=1:8 --dim h=16:64:8@image:2 --dim w=16:64:8@image:3
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.time, self.skip = nn.Linear(64, after), nn.Conv2d(before, after, 1)
        self.norms = nn.ModuleList([nn.GroupNorm(8, before), nn.GroupNorm(8, after)])

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.first(F.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        return self.second(F.silu(self.norms[1](y))) + self.skip(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down, self.middle = Block(16, 32), Block(32, 32)
        self.up = Block(64, 16)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        waves = time[:, None] * torch.exp(torch.arange(32) * (-math.log(10_000) / 32))
        known = torch.cat([waves.sin(), waves.cos()], 1)
        wide = self.down(self.into(image), known)
        small = self.middle(F.avg_pool2d(wide, 2), known)
        tokens = small.flatten(2).transpose(1, 2)
        seen = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        small = small + seen.transpose(1, 2).reshape(small.shape)
        large = F.interpolate(small, scale_factor=2.0, mode="nearest")
        return self.out(self.up(torch.cat([wide, large], 1), known))


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"image": torch.randn(2, 3, 32, 40), "time": torch.tensor([3.0, 500.0])}
