"""One step of GPT-2 with the cache as inputs and outputs.

mctl export gpt2_cache.py --dim batch=1:8 --dim past=1:63@keys:3,values:3
"""

import torch
from torch import nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=4))

    def forward(self, input_ids: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """`keys` and `values` are [batch, layers, heads, past, width]."""
        cache = DynamicCache()
        for layer in range(2):
            cache.update(keys[:, layer], values[:, layer], layer)
        made = self.inner(input_ids=input_ids, past_key_values=cache, use_cache=True)
        layers = made.past_key_values.layers
        return {
            "logits": made.logits,
            "keys": torch.stack([layer.keys for layer in layers], 1),
            "values": torch.stack([layer.values for layer in layers], 1),
        }


model = Model


def example_inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 300, (3, 1))
    return {"input_ids": ids, "keys": torch.randn(3, 2, 4, 9, 16), "values": torch.randn(3, 2, 4, 9, 16)}
