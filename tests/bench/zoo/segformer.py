"""Segformer: attention at several sizes, a mask for every class.

mctl export segformer.py --dim batch=1:4 --dim h=64:160:32@image:2 --dim w=64:160:32@image:3
"""

import torch
from torch import nn
from transformers import SegformerConfig, SegformerForSemanticSegmentation


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = SegformerConfig(
            hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 3, 4],
            decoder_hidden_size=32, num_labels=5,
        )  # fmt: skip
        self.inner = SegformerForSemanticSegmentation(config)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(pixel_values=image).logits


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"image": torch.randn(3, 3, 96, 128)}
