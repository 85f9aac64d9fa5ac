"""MobileNet v3.

mctl export mobilenet.py --dim batch=1:16
"""

import torch
from torch import nn
from torchvision.models import mobilenet_v3_small


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mobilenet_v3_small(num_classes=10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(image)


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"image": torch.randn(3, 3, 64, 64)}
