"""ViT: patches of an image, a class token.

mctl export vit.py --dim batch=1:16
"""

import torch
from torch import nn
from transformers import ViTConfig, ViTModel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = ViTConfig(
            image_size=64,
            patch_size=16,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
        )
        self.inner = ViTModel(config)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(pixel_values=image).last_hidden_state[:, 0]


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"image": torch.randn(3, 3, 64, 64)}
