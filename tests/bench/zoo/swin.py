"""Swin tiny: attention in windows that move.

mctl export swin.py --dim batch=1:4
"""

import torch
from torch import nn
from torchvision.models import swin_t


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = swin_t(num_classes=10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(image)


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"image": torch.randn(3, 3, 64, 64)}
