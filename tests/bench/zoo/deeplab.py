"""DeepLab v3 over MobileNet: a class for every pixel.

mctl export deeplab.py --dim batch=1:4 --dim h=64:160:32@image:2 --dim w=64:160:32@image:3
"""

import torch
from torch import nn
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(image)["out"]


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"image": torch.randn(3, 3, 96, 96)}
