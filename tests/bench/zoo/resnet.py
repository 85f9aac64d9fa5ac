"""ResNet 18 over images of any size.

mctl export resnet.py --dim batch=1:8 --dim h=64:160:32@image:2 --dim w=64:160:32@image:3
"""

import torch
from torch import nn
from torchvision.models import resnet18


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = resnet18(num_classes=10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(image)


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"image": torch.randn(3, 3, 96, 96)}
