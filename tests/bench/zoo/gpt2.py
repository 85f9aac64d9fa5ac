"""GPT-2 without a cache: logits of every token.

mctl export gpt2.py --dim batch=1:8 --dim seq=1:64@input_ids:1
"""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, use_cache=False).logits


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, 300, (3, 20))}
