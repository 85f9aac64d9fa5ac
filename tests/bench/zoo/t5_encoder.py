"""T5's encoder: relative positions in buckets, no bias anywhere.

mctl export t5_encoder.py --dim batch=1:16 --dim seq=2:64@input_ids:1,attention_mask:1
"""

import torch
from torch import nn
from transformers import T5Config, T5EncoderModel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = T5Config(vocab_size=300, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
        self.inner = T5EncoderModel(config)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 200, (3, 20))
    return {"input_ids": ids, "attention_mask": (torch.arange(20) < torch.tensor([[20], [7], [13]])).long()}
