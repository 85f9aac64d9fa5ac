"""EfficientNet B0.

mctl export efficientnet.py --dim batch=1:8
"""

import torch
from torch import nn
from torchvision.models import efficientnet_b0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = efficientnet_b0(num_classes=10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(image)


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"image": torch.randn(3, 3, 64, 64)}
