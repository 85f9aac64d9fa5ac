"""CLIP: how well texts and images fit.

mctl export clip.py --dim texts=1:8@input_ids:0,attention_mask:0 --dim seq=2:32@input_ids:1,attention_mask:1 \
    --dim images=1:8@image:0 --batch-dim none
"""

import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        text = {
            "vocab_size": 300,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "eos_token_id": 299,
        }
        vision = {
            "image_size": 64,
            "patch_size": 16,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        self.inner = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, pixel_values=image).logits_per_image


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 290, (3, 12))
    ids[:, -1] = 299
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image": torch.randn(4, 3, 64, 64)}
