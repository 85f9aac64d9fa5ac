"""YOLOS: boxes and classes from tokens, as DETR's heads give them.

mctl export detr_head.py --dim batch=1:8
"""

import torch
from torch import nn
from transformers import YolosConfig, YolosForObjectDetection


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = YolosConfig(
            image_size=[64, 96], patch_size=16, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=128, num_detection_tokens=10, num_labels=7,
        )  # fmt: skip
        self.inner = YolosForObjectDetection(config)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.inner(pixel_values=image)
        return {"scores": made.logits.softmax(-1), "boxes": made.pred_boxes}


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"image": torch.randn(3, 3, 64, 96)}
